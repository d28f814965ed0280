"""The common part of all tree policies that grow from a drafter."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from quickbeam.drafters.base import GRAMMAR, Context, Drafter, DraftProbs, DraftRequest
from quickbeam.methods.base import TreePolicy
from quickbeam.methods.draws import Draws, drawn, ranked
from quickbeam.methods.perturbed import proposals
from quickbeam.tree import TokenTree


class DraftedPolicy(TreePolicy):
    """A tree policy that grows from one drafter.

    Its children are deterministic proposals: the drafter's likeliest tokens, given the noise of
    their places. With the residual rule (`SamplingParams.coupling`) they are drawn from the
    drafter's distributions instead, if the policy supports that (`draws`).
    """

    draws = True

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.sources = (drafter,)

    def situation(self, context: Context) -> int:
        return 3  # a drafter is right about 3 times in 4, whatever the text

    def ask(
        self,
        context: Context,
        tree: TokenTree,
        nodes: Sequence[int],
        count: int,
        least: Sequence[float] | None = None,
    ) -> Generator[DraftRequest, DraftProbs | None, list[Draws]]:
        """Return the children that each of `nodes` may get.

        If children are drawn, there are any number of draws. Otherwise these are the `count`
        likeliest tokens. `least`: for each node, the probability down to which its tokens are
        wanted.
        """
        distributions = yield DraftRequest(context, tree, nodes)
        assert distributions is not None
        if context.draws and self.draws:
            return drawn(distributions, context.generator)
        return ranked(
            proposals(context, distributions, [tree.depth[node] for node in nodes], count, least),
            distributions.forced,
        )

    def add(self, tree: TokenTree, node: int, draws: Draws, i: int) -> int | None:
        """Fill slot i of `node` and return the new node.

        Returns `None` if the distribution gives no further token.
        """
        draw = draws.draw(i)
        if draw is None:
            return None
        token, probability = draw
        source = GRAMMAR if draws.forced else self.drafter.name
        return tree.add(
            node, token, source, tree.value[node] * probability, draws.probs, probability
        )
