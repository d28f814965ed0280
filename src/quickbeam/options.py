"""The options that a single call may set, and the setting that an answer is made with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

from quickbeam.errors import InvalidInput
from quickbeam.params import COUPLED, SamplingParams


class Options(TypedDict, total=False):
    """The options that a call may set for itself; `LLM` explains them."""

    budget: int | None
    vocab: str | None
    shortlist: int | None


class Setting(NamedTuple):
    """All that an answer's drafts depend on, apart from the budget.

    Acceptance rates and costs are learned separately for each setting.

    - `method`, `vocab`, `shortlist`: as in `LLM`.
    - `temperature_class`: a class of temperatures, from 0 to 4. It is negative where children are
      drawn
      (`coupling="residual"`).
    - `constrained`: whether a grammar constrains the answer.
    """

    method: str
    vocab: str
    shortlist: int | None
    temperature_class: int = 0
    constrained: bool = False


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for an unknown option."""
    for option in options.keys() - Options.__annotations__.keys():
        sampling = option in SamplingParams.__dataclass_fields__
        what = (
            f"give it in SamplingParams({option}=…)"
            if sampling
            else f"known: {', '.join(Options.__annotations__)}"
        )
        raise InvalidInput(f"unknown option '{option}'; {what}")


def temperature_class(params: SamplingParams) -> int:
    """Return the class of temperatures that `Setting.temperature_class` holds."""
    found = min(math.ceil(params.temperature / 0.4), 4)
    return found if params.coupling == COUPLED else -found
