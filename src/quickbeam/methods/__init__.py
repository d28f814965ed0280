"""Tree policies, made from the names that presets and the command line use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quickbeam.drafters.base import Drafter
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram
from quickbeam.errors import InvalidInput
from quickbeam.methods.acceptance import Printed
from quickbeam.methods.base import NoDraft, TreePolicy
from quickbeam.methods.drafted import DraftedPolicy
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.dyspec_threshold import Threshold
from quickbeam.methods.eagle2 import Eagle2
from quickbeam.methods.hybrid import Hybrid
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.methods.prompt_lookup import PromptLookup
from quickbeam.methods.sequoia import Sequoia
from quickbeam.methods.specinfer import Branches

DRAFTER = "drafter"  # the source that needs a drafter
SOURCES = ("ngram", "last_logits")  # the sources that need none
DRAFTED: dict[str, Callable[[Drafter], DraftedPolicy]] = {
    "greedy": DySpec,
    "greedy-printed": lambda drafter: DySpec(drafter, Printed()),
    "threshold": Threshold,
    "drafted-chain": lambda drafter: Branches(drafter, 1),
    "specinfer": lambda drafter: Branches(drafter, 3),
    "sequoia": Sequoia,
    "eagle2": Eagle2,
}
TREES: dict[str, tuple[str, ...]] = {  # the sources that each tree can use
    "none": (),
    "chain": ("ngram",),
    "logitspec": ("ngram", "last_logits"),
    **dict.fromkeys(DRAFTED, (DRAFTER,)),
    "merged": ("ngram", DRAFTER),
}


def make_policy(
    preset_sources: Sequence[str], tree: str, drafter: Drafter | None = None
) -> TreePolicy:
    """Return a new tree policy of the name `tree`, over new sources of the given names.

    Its `sources` are what a sequence begins with. `drafter` is the source that the name "drafter"
    stands for.

    Raises `InvalidInput` for an unknown tree or source, for a source that the tree can't use, for a
    tree that is left without a source, and if a drafter is needed and not given.
    """
    if tree not in TREES:
        raise InvalidInput(f"unknown tree {tree!r}; known: {', '.join(TREES)}")
    usable, known = TREES[tree], (*SOURCES, DRAFTER)
    for name in preset_sources:
        if name not in known:
            raise InvalidInput(f"unknown source {name!r}; known: {', '.join(known)}")
        if name not in usable:
            raise InvalidInput(
                f"tree {tree!r} can't use source {name!r}; give it "
                f"{' or '.join(usable) or 'no sources'}"
            )
    if usable and not preset_sources:
        raise InvalidInput(f"tree {tree!r} needs a source; give it {' or '.join(usable)}")

    ngram = Ngram() if "ngram" in preset_sources else None
    if DRAFTER in usable:
        if DRAFTER not in preset_sources:
            raise InvalidInput(f"tree {tree!r} needs the source {DRAFTER!r}")
        if drafter is None:
            raise InvalidInput(f"tree {tree!r} drafts with a model: name one with --drafter")
        return (
            DRAFTED[tree](drafter)
            if tree in DRAFTED
            else Hybrid(drafter, ngram)
            if ngram
            else DySpec(drafter)
        )
    last_logits = LastLogits() if "last_logits" in preset_sources else None
    if tree == "chain" and ngram is not None:
        return PromptLookup(ngram)
    if tree == "logitspec":
        return LogitSpec(ngram, last_logits)
    return NoDraft()
