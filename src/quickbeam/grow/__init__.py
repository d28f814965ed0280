"""Tree policies, and how they are made from the names that presets and the command line use."""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.draft.logits import LastLogits
from quickbeam.draft.retrieval import Ngram
from quickbeam.errors import InvalidInput
from quickbeam.grow.base import NoDraft, TreePolicy
from quickbeam.grow.chain import Chain
from quickbeam.grow.logitspec import LogitSpec

TREES: dict[str, tuple[str, ...]] = {"none": (), "chain": ("ngram",), "logitspec": ("ngram", "last_logits")}  # the sources each can use
SOURCES = ("ngram", "last_logits")


def make_policy(preset_sources: Sequence[str], tree: str) -> TreePolicy:
    """The policy of this name over new sources of these names; its `sources` are what the engine resets and extends.

    Raises `InvalidInput` for an unknown tree or source, for a source that the tree can't use, and for a tree left without one.
    """
    if tree not in TREES:
        raise InvalidInput(f"unknown tree {tree!r}; known: {', '.join(TREES)}")
    usable = TREES[tree]
    for name in preset_sources:
        if name not in SOURCES:
            raise InvalidInput(f"unknown source {name!r}; known: {', '.join(SOURCES)}")
        if name not in usable:
            raise InvalidInput(f"tree {tree!r} can't use source {name!r}; give it {' or '.join(usable) or 'no sources'}")
    if usable and not preset_sources:
        raise InvalidInput(f"tree {tree!r} needs a source; give it {' or '.join(usable)}")

    ngram = Ngram() if "ngram" in preset_sources else None
    last_logits = LastLogits() if "last_logits" in preset_sources else None
    if tree == "chain" and ngram is not None:
        return Chain(ngram)
    if tree == "logitspec":
        return LogitSpec(ngram, last_logits)
    return NoDraft()
