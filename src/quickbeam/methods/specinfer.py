"""Branches side by side: the chain of plain speculative decoding, and SpecInfer's tree."""

from __future__ import annotations

from quickbeam.drafters.base import Context, Drafter
from quickbeam.methods.base import Method, Proposal, ProposalSteps
from quickbeam.methods.children import add_child, ask
from quickbeam.tree import TokenTree


class SpecInfer(Method):
    """`branches` that part at the root. Every call of the drafter adds a token to each of them.

    Calls are made until the budget is used up. One branch is plain speculative decoding
    (2211.17192, 2302.01318). Several are SpecInfer (2305.09781), in the form that DySpec and
    Sequoia compare with. First tokens are drawn without replacement, so that no two branches are
    the same. Nodes come layer by layer.
    """

    def __init__(self, drafter: Drafter, branches: int = 3) -> None:
        self.drafter = drafter
        self.sources = (drafter,)
        self.branches = branches

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        tree = TokenTree(context.ids[-1])
        tips = [0]
        width = self.branches  # children of each tip: all branches part at the root
        for _ in range(max_depth):
            free = budget - len(tree)
            tips = tips[:free]
            width = min(width, free)
            if not tips:
                break
            answer = yield from ask(context, tree, tips, width)
            nodes = [
                add_child(tree, tip, children, self.drafter)
                for tip, children in zip(tips, answer, strict=True)
                for _ in range(width)
            ]
            tips = [node for node in nodes if node is not None]
            width = 1
        return Proposal(tree)


def chain(drafter: Drafter) -> SpecInfer:
    """Return plain speculative decoding: one branch."""
    return SpecInfer(drafter, 1)
