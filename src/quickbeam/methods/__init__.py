"""The table of methods.

Importing it takes no torch: a method's module is imported when the method is made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from os import fspath
from typing import TYPE_CHECKING

from quickbeam.config import (
    FREQUENCY,
    FULL,
    ROUTER,
    SHORTENED,
    Budget,
    LLMOptions,
    check_vocab,
    parse_budget,
)
from quickbeam.errors import InvalidInput, did_you_mean
from quickbeam.hub import check_hub, check_source, drafter_for

if TYPE_CHECKING:
    from quickbeam.drafters.base import Drafter
    from quickbeam.methods.base import Method


@dataclass(frozen=True)
class Preset:
    """What `--method` names.

    - `maker`: module and name of what makes the `Method`. It is called with the drafter if
      `uses_drafter`, else without arguments.
    - `budget`: the most nodes of a draft tree, the root included; `auto`: by measured cost.
    - `uses_drafter`: whether it drafts with the model's drafter.
    - `vocab`: what the drafter scores, one of `VOCABS` or `SHORTENED`.
    - `without`: the method that is used instead where there is no drafter.
    """

    maker: str
    budget: Budget
    uses_drafter: bool = True
    vocab: str = FULL
    without: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether it drafts at all."""
        return self.budget != 1


# What each method does is in `docs/guides/methods.md`.
METHODS = {
    "ar": Preset("base.NoDraft", 1, uses_drafter=False),
    "pld": Preset("prompt_lookup.PromptLookup", "auto", uses_drafter=False),
    "logitspec": Preset("logitspec.LogitSpec", "auto", uses_drafter=False),
    "recycling": Preset("auto.Auto", "auto", uses_drafter=False),
    "dyspec": Preset("dyspec.DySpec", 16),
    "dyspec-printed": Preset("dyspec.printed", 16),
    "dyspec-threshold": Preset("dyspec.Threshold", 16),
    # 5 drafted tokens, as in other engines. Each costs a call of the drafter, and at an acceptance
    # rate of 0.6 the fifth is reached only 1 time in 10.
    "chain": Preset("specinfer.chain", 6),
    "specinfer": Preset("specinfer.SpecInfer", 16),
    "sequoia": Preset("sequoia.Sequoia", 16),
    "eagle2": Preset("eagle2.Eagle2", 16),
    "ddtree": Preset("ddtree.DDTree", 16),
    "pctree": Preset("pctree.pctree", 16),
    "frspec": Preset("dyspec.DySpec", 16, vocab=FREQUENCY),
    "dynaspec": Preset("dynaspec.dynaspec", 16, vocab=ROUTER),
    "auto": Preset("auto.Auto", "auto", vocab=SHORTENED, without="recycling"),
}


def check_method(method: str, names: Collection[str] = METHODS.keys()) -> None:
    """Raise `InvalidInput` for a name that is none of `names`."""
    if method not in names:
        hint = did_you_mean(method, names)
        raise InvalidInput(f"unknown method {method!r}; known: {', '.join(names)}{hint}")


def preset(method: str) -> Preset:
    """Return the preset of a method. Raises `InvalidInput` for an unknown name."""
    check_method(method)
    return METHODS[method]


def stand_in(method: str, has_drafter: bool) -> str:
    """Return the method to use: `method`, or the one that stands in for it without a drafter.

    Raises `InvalidInput` for an unknown method, and without a drafter for one that needs it.
    """
    named = preset(method)
    if has_drafter or not named.uses_drafter:
        return method
    if named.without is None:
        raise InvalidInput(
            f"method {method!r} drafts with a model: name a smaller model, or a feature or block "
            "drafter, with --drafter (in Python: drafter=…)"
        )
    return named.without


def make_method(name: str, drafter: Drafter | None = None) -> Method:
    """Return a new method of this name. It drafts with `drafter` if it uses one.

    Raises as `stand_in` does.
    """
    named = preset(stand_in(name, drafter is not None))
    module, maker = named.maker.split(".")
    make = getattr(import_module(f"quickbeam.methods.{module}"), maker)
    method: Method = make(drafter) if named.uses_drafter else make()
    return method


def check_options(options: LLMOptions) -> None:
    """Raise `InvalidInput` for options of a model that can't be used together.

    It looks at names and files alone, before PyTorch is imported or anything is loaded.
    """
    named = None if options.drafter is None else fspath(options.drafter)
    has_drafter = drafter_for(options.source, named) is not None
    method = stand_in(options.method, has_drafter)
    check_vocab(options.vocab or preset(method).vocab)
    names = [options.source, named]
    for name in names:
        if name is not None:
            check_source(name)
    for name in names:
        if name is not None and options.revision is None:
            check_hub(name)


def tree_budget(budget: Budget | None, method: str) -> Budget:
    """Return the most nodes of a tree of `method`; `auto`: by measured cost.

    `budget`: what is asked for; None takes the method's own. A method that drafts nothing has its
    own in any case. Raises `InvalidInput`.
    """
    budget = parse_budget(budget)
    named = preset(method)
    return budget if budget is not None and named.drafts else named.budget
