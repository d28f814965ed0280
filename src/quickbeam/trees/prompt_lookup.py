"""Prompt lookup: one chain, the continuation of the longest suffix match."""

from __future__ import annotations

from collections.abc import Iterable

from quickbeam.draft.base import Context
from quickbeam.draft.ngram import Ngram
from quickbeam.tree import TokenTree
from quickbeam.trees.base import TreePolicy


def graft(tree: TokenTree, node: int, tokens: Iterable[int], source: str, budget: int, max_depth: int) -> int:
    """Lay tokens below `node` as a path and return its last node.

    Nodes that hold the same tokens already are shared, whoever proposed them; the path ends early where the budget or the depth does.
    """
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            if len(tree) >= budget or tree.depth[node] >= max_depth:
                break
            child = tree.add(node, token, source)
        node = child
    return node


def promise(ngram: Ngram | None, context: Context) -> int:
    """How long the text has been repeating itself at its end, as a `TreePolicy.situation`: not at all, 1, 2, 4 or 8 tokens and more."""
    match = ngram.match(context.ids[-ngram.max_n :]) if ngram else None
    return min(ngram.extent(match).bit_length(), 4) if ngram and match else 0


class Chain(TreePolicy):
    """What followed the newest earlier occurrence of the longest n-gram that ends in the root, `length` tokens at most.

    10 tokens is what prompt lookup drafts elsewhere too (transformers' `num_output_tokens`). Nodes carry no value.
    """

    def __init__(self, ngram: Ngram, length: int = 10) -> None:
        self.sources = (ngram,)
        self.ngram = ngram
        self.length = length

    def situation(self, context: Context) -> int:
        return promise(self.ngram, context)

    def grow(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        tree = TokenTree(context.ids[-1])
        match = self.ngram.match(context.ids[-self.ngram.max_n :])
        wanted = min(self.length, budget - 1, max_depth)
        if match and wanted > 0:
            graft(tree, 0, self.ngram.continuation(match, wanted), self.ngram.name, budget, max_depth)
        return tree
