"""The table of methods: for each, what proposes its trees, its sources and its budget.

What each method does is in `docs/guides/methods.md`.

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
from quickbeam.hub import check_hub, check_source, drafter_of

if TYPE_CHECKING:
    from quickbeam.drafters.base import Drafter
    from quickbeam.methods.base import Method

# the sources of candidates
DRAFTER, NGRAM, LAST_LOGITS, ANSWERS = "drafter", "ngram", "last_logits", "answers"
RECYCLING = "recycling"


@dataclass(frozen=True)
class Preset:
    """What `--method` names.

    - `maker`: module and name of what makes the `Method` from its sources.
    - `sources`: names of the sources that propose tokens.
    - `budget`: the most nodes of a draft tree, the root included; 0: by the measured cost model.
    - `vocab`: what the drafter scores, one of `VOCABS` or `SHORTENED`.
    - `without`: the method that is used instead where there is no drafter.
    """

    maker: str
    sources: tuple[str, ...]
    budget: int = 0
    vocab: str = FULL
    without: str | None = None


METHODS = {
    "ar": Preset("base.NoDraft", (), 1),
    "pld": Preset("prompt_lookup.PromptLookup", (NGRAM,)),
    "logitspec": Preset("logitspec.LogitSpec", (NGRAM, LAST_LOGITS, ANSWERS)),
    "recycling": Preset("auto.Auto", (RECYCLING, NGRAM, LAST_LOGITS, ANSWERS)),
    "dyspec": Preset("dyspec.DySpec", (DRAFTER,), 16),
    "dyspec-printed": Preset("dyspec.printed", (DRAFTER,), 16),
    "dyspec-threshold": Preset("dyspec.Threshold", (DRAFTER,), 16),
    # 5 drafted tokens, as in other engines. Each costs a call of the drafter, and at an acceptance
    # rate of 0.6 the fifth is reached only 1 time in 10.
    "chain": Preset("specinfer.chain", (DRAFTER,), 6),
    "specinfer": Preset("specinfer.SpecInfer", (DRAFTER,), 16),
    "sequoia": Preset("sequoia.Sequoia", (DRAFTER,), 16),
    "eagle2": Preset("eagle2.Eagle2", (DRAFTER,), 16),
    "ddtree": Preset("ddtree.DDTree", (DRAFTER,), 16),
    "pctree": Preset("pctree.pctree", (DRAFTER,), 16),
    "frspec": Preset("dyspec.DySpec", (DRAFTER,), 16, FREQUENCY),
    "dynaspec": Preset("dynaspec.dynaspec", (DRAFTER,), 16, ROUTER),
    "auto": Preset(
        "auto.Auto", (DRAFTER, NGRAM, LAST_LOGITS, ANSWERS), 0, SHORTENED, without="recycling"
    ),
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


def stand_in(method: str, drafter: bool) -> str:
    """Return the method to use: `method`, or without a `drafter` the one that stands in.

    Without one, raises `InvalidInput` for an unknown method, and for one that needs a drafter.
    """
    if drafter:
        return method
    needed = preset(method)
    if needed.without is None and DRAFTER in needed.sources:
        raise InvalidInput(
            f"method {method!r} drafts with a model: name a smaller model, or a feature or block "
            "drafter, with --drafter (in Python: drafter=…)"
        )
    return needed.without or method


def make_method(name: str, drafter: Drafter | None = None) -> Method:
    """Return a new method of this name over new sources.

    Raises as `stand_in` does.
    """
    from quickbeam.drafters.last_logits import LastLogits
    from quickbeam.drafters.ngram import Answers, Ngram
    from quickbeam.drafters.recycling import TokenRecycling

    method_preset = preset(stand_in(name, drafter is not None))
    sources = {
        DRAFTER: drafter,
        NGRAM: Ngram(),
        LAST_LOGITS: LastLogits(),
        ANSWERS: Answers(),
        RECYCLING: TokenRecycling(),  # what it learns is the method's, as its rates are
    }
    module, maker = method_preset.maker.split(".")
    make = getattr(import_module(f"quickbeam.methods.{module}"), maker)
    method: Method = make(*(sources[source] for source in method_preset.sources))
    return method


def check_options(options: LLMOptions) -> None:
    """Raise `InvalidInput` for options of a model that can't be used together.

    It looks at names and files alone, before PyTorch is imported or anything is loaded.
    """
    has_drafter = (options.drafter or drafter_of(options.source)) is not None
    method = stand_in(options.method, has_drafter)
    check_vocab(options.vocab or preset(method).vocab)
    names = [options.source, None if options.drafter is None else fspath(options.drafter)]
    for name in names:
        if name is not None:
            check_source(name)
    for name in names:
        if name is not None and options.revision is None:
            check_hub(name)


def max_nodes(budget: Budget | None, method: str) -> int | None:
    """Return the most nodes of a tree of `method`; None: by the measured budget.

    `budget`: what is asked for; None takes the method's own. Raises `InvalidInput`.
    """
    budget = parse_budget(budget)
    method_preset = preset(method)
    if budget is None or not method_preset.sources:
        return method_preset.budget or None
    return None if budget == "auto" else budget
