"""Branches side by side: the chain of plain speculative decoding, and SpecInfer's tree."""

from __future__ import annotations

from quickbeam.drafters.base import Context, Drafter
from quickbeam.errors import InvalidInput
from quickbeam.methods.base import Grown, Growth
from quickbeam.methods.drafted import DraftedPolicy
from quickbeam.tree import TokenTree


class Branches(DraftedPolicy):
    """`count` branches that part at the root and grow by a token each with every call of the
    drafter.

    They grow until the budget is used up. One branch is plain speculative decoding (2211.17192,
    2302.01318). Several are SpecInfer (2305.09781), in the form that DySpec and Sequoia compare
    with. First tokens are drawn without replacement, so that no two branches are the same. Nodes
    come layer by layer.

    Raises `InvalidInput` for a count below 1.
    """

    def __init__(self, drafter: Drafter, count: int) -> None:
        if count < 1:
            raise InvalidInput(f"count={count}: must be at least 1 branch")
        super().__init__(drafter)
        self.count = count

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        tree = TokenTree(context.ids[-1])
        tips, width = [0], self.count
        for _ in range(max_depth):
            free = budget - len(tree)
            tips, width = tips[:free], min(width, free)
            if not tips:
                break
            found = yield from self.ask(context, tree, tips, width)
            nodes = [
                self.add(tree, tip, draws, i)
                for tip, draws in zip(tips, found, strict=True)
                for i in range(width)
            ]
            tips, width = [node for node in nodes if node is not None], 1
        return Grown(tree)
