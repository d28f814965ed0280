"""What a call may name for itself, and what an answer is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

from quickbeam.errors import InvalidInput
from quickbeam.sampling import SamplingParams

CHOICE = 0x9E3779B97F4A7C15  # what sets the seeds of a request's further answers apart


class Options(TypedDict, total=False):
    """What a call may name for itself; see `LLM`."""

    budget: int | None
    vocab: str | None
    shortlist: int | None


class Setting(NamedTuple):
    """What an answer is made with, but for its budget."""

    method: str
    vocab: str
    shortlist: int | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for one that is not known."""
    for option in options.keys() - Options.__annotations__.keys():
        sampling = option in SamplingParams.__dataclass_fields__
        what = f"give it in SamplingParams({option}=…)" if sampling else f"known: {', '.join(Options.__annotations__)}"
        raise InvalidInput(f"unknown option '{option}'; {what}")


def choices(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of `params.n` answers: seeds of their own, the first one's as given."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else (params.seed + i * CHOICE) % 2**64 for i in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]
