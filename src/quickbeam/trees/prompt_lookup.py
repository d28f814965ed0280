"""Prompt lookup: one chain, the continuation of the longest suffix match."""

from __future__ import annotations

from collections.abc import Iterable

from quickbeam.draft.base import Context
from quickbeam.draft.ngram import Ngram, NgramIndex
from quickbeam.tree import TokenTree
from quickbeam.trees.base import Undrafted


def graft(
    tree: TokenTree, node: int, tokens: Iterable[int], source: str, budget: int, max_depth: int
) -> int:
    """Lay tokens below `node` as a path and return its last node.

    Nodes that hold the same tokens already are shared, whoever proposed them; the path ends early
    where the budget or the depth does.
    """
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            if len(tree) >= budget or tree.depth[node] >= max_depth:
                break
            child = tree.add(node, token, source)
        node = child
    return node


def promise(context: Context) -> int:
    """For how many tokens the text has been repeating itself at its end, as a
    `TreePolicy.situation`: none, 1, 2, 4 or 8 and more."""
    index: NgramIndex | None = context.states.get(Ngram.name)
    match = index.match(context.ids[-index.max_n :]) if index else None
    return min(index.extent(match).bit_length(), 4) if index and match else 0


class PromptLookup(Undrafted):
    """What followed the newest earlier occurrence of the longest n-gram that ends in the root,
    `length` tokens at most.

    10 tokens is what prompt lookup drafts elsewhere too (transformers' `num_output_tokens`). Nodes
    carry no value.
    """

    def __init__(self, ngram: Ngram, length: int = 10) -> None:
        self.sources = (ngram,)
        self.length = length

    def situation(self, context: Context) -> int:
        return promise(context)

    def tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        tree, index = TokenTree(context.ids[-1]), context.states[Ngram.name]
        if budget < 2:
            return tree
        match = index.match(context.ids[-index.max_n :])
        wanted = min(self.length, budget - 1, max_depth)
        if match and wanted > 0:
            graft(
                tree,
                0,
                context.within((), index.continuation(match, wanted)),
                Ngram.name,
                budget,
                max_depth,
            )
        return tree
