"""The table of methods: for each, what grows its trees, its sources and its budget.

Importing it takes no torch: a method's module is imported when the method is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from quickbeam.errors import InvalidInput
from quickbeam.options import FREQUENCY, FULL, ROUTER, SHORTENED

if TYPE_CHECKING:
    from quickbeam.drafters.base import Drafter
    from quickbeam.methods.base import Method

# the sources of candidates
DRAFTER, NGRAM, LAST_LOGITS, ANSWERS = "drafter", "ngram", "last_logits", "answers"


@dataclass(frozen=True)
class Preset:
    """What `--method` names.

    - `maker`: module and name of what makes the `Method` from its sources.
    - `sources`: names of the sources that propose tokens.
    - `budget`: the most nodes of a draft tree, the root included; 0 leaves it to the measured cost
      model.
    - `summary`: one line about the method.
    - `vocab`: what the drafter scores, one of `VOCABS` or `SHORTENED`.
    - `without`: the method that is used instead where there is no drafter.
    """

    maker: str
    sources: tuple[str, ...]
    budget: int
    summary: str
    vocab: str = FULL
    without: str | None = None


def _drafted(maker: str, summary: str, budget: int = 16, vocab: str = FULL) -> Preset:
    """Return the preset of a method that a drafter's answers decide alone."""
    return Preset(maker, (DRAFTER,), budget, summary, vocab)


METHODS: dict[str, Preset] = {
    "ar": Preset("base.NoDraft", (), 1, "plain decoding, one token a step: the reference"),
    "pld": Preset(
        "prompt_lookup.PromptLookup",
        (NGRAM,),
        0,
        "prompt lookup: the continuation of the longest n-gram seen before",
    ),
    "logitspec": Preset(
        "logitspec.LogitSpec",
        (NGRAM, LAST_LOGITS, ANSWERS),
        0,
        "LogitSpec: the last logits guess the token after next, n-grams continue both",
    ),
    "dyspec": _drafted(
        "dyspec.DySpec",
        "DySpec: a tree grown from a drafter, always where a token is most likely to be reached",
    ),
    "dyspec-printed": _drafted(
        "dyspec.printed",
        "DySpec as printed: assumes that acceptance probability equals draft probability",
    ),
    "dyspec-threshold": _drafted(
        "dyspec.Threshold",
        "DySpec with one call of the drafter a layer: all places above a threshold",
    ),
    # 5 drafted tokens, as is usual. Each costs a call of the drafter, and at an acceptance rate of
    # 0.6 the fifth is reached only 1 time in 10.
    "chain": _drafted(
        "specinfer.chain",
        "speculative decoding as first published: one chain of 5 tokens from a drafter",
        budget=6,
    ),
    "specinfer": _drafted("specinfer.SpecInfer", "SpecInfer: three branches from a drafter"),
    "sequoia": _drafted(
        "sequoia.Sequoia", "Sequoia: the best tree of a fixed shape, filled from a drafter"
    ),
    "eagle2": _drafted(
        "eagle2.Eagle2",
        "EAGLE-2: the drafter's likeliest tokens layer by layer, then "
        "the likeliest paths of all layers",
    ),
    "ddtree": _drafted(
        "ddtree.DDTree",
        "DDTree: the likeliest paths by the marginals of a block drafter, one of each depth",
    ),
    "pctree": _drafted(
        "pctree.pctree",
        "PCTree: four children a parent from a block drafter that knows the parent, then the "
        "likeliest paths",
    ),
    "frspec": _drafted(
        "dyspec.DySpec",
        "FR-Spec: DySpec's tree, the drafter scoring only the most frequent tokens",
        vocab=FREQUENCY,
    ),
    "dynaspec": _drafted(
        "dynaspec.dynaspec",
        "DynaSpec: DySpec's tree, the drafter scoring only frequent tokens, the context's, and "
        "clusters that a router picks",
        vocab=ROUTER,
    ),
    "auto": Preset(
        "auto.Auto",
        (DRAFTER, NGRAM, LAST_LOGITS, ANSWERS),
        0,
        "one tree of n-grams, last logits and drafted tokens, each added only if it pays; "
        "LogitSpec where there is no drafter",
        SHORTENED,
        without="logitspec",
    ),
}


def preset(method: str) -> Preset:
    """Return the preset of a method. Raises `InvalidInput` for an unknown name and lists the known
    ones."""
    if method not in METHODS:
        raise InvalidInput(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    return METHODS[method]


def stand_in(method: str, drafter: bool) -> str:
    """Return the name of the method to use: `method`, or without a `drafter` the one that stands
    in.

    Without a drafter, raises `InvalidInput` for an unknown method, and for one that needs a
    drafter.
    """
    if drafter:
        return method
    chosen = preset(method)
    if chosen.without is None and DRAFTER in chosen.sources:
        raise InvalidInput(
            f"method {method!r} drafts with a model: name a smaller model, or a feature drafter, "
            "with --drafter (in Python: drafter=…)"
        )
    return chosen.without or method


def make_method(name: str, drafter: Drafter | None = None) -> Method:
    """Return a new method of this name over new sources; `drafter` is the source "drafter".

    Raises `InvalidInput` for an unknown name, and if a drafter is needed and not given.
    """
    from quickbeam.drafters.last_logits import LastLogits
    from quickbeam.drafters.ngram import Answers, Ngram

    chosen = preset(name)
    if DRAFTER in chosen.sources and drafter is None:
        raise InvalidInput(f"method {name!r} drafts with a model: name one with --drafter")
    sources = {DRAFTER: drafter, NGRAM: Ngram(), LAST_LOGITS: LastLogits(), ANSWERS: Answers()}
    module, maker = chosen.maker.split(".")
    make = getattr(import_module(f"quickbeam.methods.{module}"), maker)
    method: Method = make(*(sources[source] for source in chosen.sources))
    return method
