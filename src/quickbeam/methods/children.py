"""The children that a drafter's distribution gives a node, in order, without replacement.

**Drawn** (residual rule). Child i is drawn without the tokens of earlier ones, renormalised.

**Deterministic** (coupled sampling, `noise.py`). Let q be a drafter's distribution at temperature
1, and l its logits. For an answer at temperature 0, q(x) estimates how likely token x is the
target's best. That is exact if the target's logits are l plus independent Gumbel numbers of scale
1, since the argmax of that sum is distributed as q. At temperature T the target emits the argmax of
logits / T + g, where g is the noise of the position. With the same error in the logits, this is the
argmax of l + T * g + a Gumbel number. It is token x with probability

    q(x) * exp(T * g(x)) / sum over y of q(y) * exp(T * g(y)).

So one rule serves every temperature: the children are the likeliest tokens of q, perturbed by the
noise and normalised. At temperature 0 that is q itself.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch

from quickbeam.drafters.base import GRAMMAR, Context, Drafter, DraftProbs, DraftRequest
from quickbeam.drafters.largest import largest
from quickbeam.models.native.library import Kernels
from quickbeam.noise import Array, NoisePosition, Row
from quickbeam.params import SamplingParams
from quickbeam.sampling import draw
from quickbeam.tree import TokenTree

ROUNDING = 1 - 1e-6  # a factor for bounds, so that float32 can't round them up
NEGLIGIBLE = 1e-5  # share of the likeliest token's probability below which tokens don't count
# factor for the filters' bound on the drafter's distribution, as the target's may differ
MARGIN = 0.5


class DrawnChildren:
    """Draws from row `row` of `distributions`, without replacement.

    - `left`: the mass that is not drawn yet. If a draw is accepted with its probability, this is
      the probability that all earlier draws are rejected, so that the next slot is reached once the
      node is. It does not depend on the next token, so slots may be chosen by it.
    - `probs`: the distribution `[vocab]` that the tokens are drawn from, as in `TokenTree.probs`.
    """

    forced = False

    def __init__(self, distributions: DraftProbs, row: int, generator: torch.Generator) -> None:
        self.left = 1.0
        self.probs = distributions.dense(row)
        self._generator = generator
        self._tokens = distributions.tokens
        self._remaining = distributions.values[row].clone()

    @property
    def peak(self) -> float:
        """The largest probability that the next token may have, earlier ones removed."""
        if self.left <= 0:
            return 1.0
        return min(1.0, float(self._remaining.max()) / self.left)

    def draw(self) -> tuple[int, float] | None:
        """Return the next token and its probability in the whole distribution.

        Returns None if nothing is left.
        """
        if not self._remaining.any():
            return None
        column = draw(self._remaining, self._generator)
        probability = float(self._remaining[column])
        self._remaining[column] = 0.0
        self.left = max(0.0, self.left - probability)
        token = column if self._tokens is None else int(self._tokens[column])
        return token, probability


class RankedChildren:
    """Deterministic proposals: tokens with their probabilities, the likeliest first.

    `left` is the probability of the next one, 0 if there is none. `forced`: a grammar allows only
    this one token, so nothing is learned from it.
    """

    probs = None
    peak = 1.0

    def __init__(self, row: Row, forced: bool = False) -> None:
        self.forced = forced
        # the likeliest last, so that `draw` can pop it
        self._children = list(zip(*row, strict=True))[::-1]

    @property
    def left(self) -> float:
        return self._children[-1][1] if self._children else 0.0

    def draw(self) -> tuple[int, float] | None:
        """Return the next token and its probability, or None if there is none."""
        return self._children.pop() if self._children else None


Children = DrawnChildren | RankedChildren


def ask(
    context: Context,
    tree: TokenTree,
    nodes: Sequence[int],
    count: int,
    min_probs: Sequence[float] | None = None,
) -> Generator[DraftRequest, DraftProbs | None, list[Children]]:
    """Ask a drafter once, and return the children that each of `nodes` may get.

    Where the residual rule samples children (`Context.samples_children`) they are draws. Otherwise
    they are the `count` likeliest tokens given the noise of their positions.

    `min_probs`: for each node, the probability down to which its tokens are wanted.
    """
    distributions = yield DraftRequest(context, tree, nodes)
    assert distributions is not None
    forced = distributions.forced
    if context.samples_children:
        return [
            RankedChildren(([forced[i]], [1.0]), forced=True)
            if i in forced
            else DrawnChildren(distributions, i, context.generator)
            for i in range(len(nodes))
        ]
    depths = [tree.depth[node] for node in nodes]
    rows = likeliest_children(context, distributions, depths, count, min_probs)
    return [RankedChildren(row, i in forced) for i, row in enumerate(rows)]


def add_child(tree: TokenTree, node: int, children: Children, drafter: Drafter) -> int | None:
    """Add the next of `children` below `node` and return its node; None if there is none."""
    child = children.draw()
    if child is None:
        return None
    token, probability = child
    source = GRAMMAR if children.forced else drafter.name
    value = tree.value[node] * probability
    return tree.add(node, token, source, value, children.probs, probability)


def likeliest_children(
    context: Context,
    distributions: DraftProbs,
    depths: Sequence[int],
    count: int,
    min_probs: Sequence[float] | None = None,
) -> list[Row]:
    """Return the `count` likeliest children after nodes of these depths, the likeliest first.

    They are chosen by `distributions`, and by the noise of their positions where there is any.
    `min_probs`: of each node, what a child's probability must exceed. A forced token has
    probability 1.
    """
    min_probs = min_probs or [0.0] * len(distributions.values)
    if context.noise is None:
        rows = largest_children(distributions, count, min_probs, context.kernels)
    else:
        values = distributions.values.cpu()
        tokens = None if distributions.tokens is None else distributions.tokens.cpu()
        unlikely = [0.0] * len(values)
        if context.filters is not None:
            unlikely = [MARGIN * ruled_out_below(q, context.filters) for q in values.numpy()]
        noise_positions = [
            NoisePosition(len(context.ids) + depth, least, least_after)
            for depth, least, least_after in zip(depths, unlikely, min_probs, strict=True)
        ]
        rows = context.noise.perturb(values, tokens, noise_positions, context.temperature, count)
    for i, token in distributions.forced.items():
        rows[i] = [token], [1.0]
    return rows


def largest_children(
    distributions: DraftProbs,
    count: int,
    min_probs: Sequence[float],
    kernels: Kernels | None = None,
) -> list[Row]:
    """Return the `count` likeliest tokens of each row with more than its `min_probs`.

    They are those on the host (`DraftProbs.likeliest`), where these are enough. `kernels`: see
    `largest`.
    """
    listed = distributions.likeliest
    if not listed or count > min(len(tokens) for tokens, _ in listed):
        return largest(distributions.values, count, min_probs, distributions.tokens, kernels)
    rows = list[Row]()
    for (tokens, values), least in zip(listed, min_probs, strict=True):
        kept = sum(value > least for value in values[:count])
        rows.append((tokens[:kept], values[:kept]))
    return rows


def ruled_out_below(q: Array, filters: SamplingParams) -> float:
    """Return about how likely the least likely token is that the filters leave of `q` `[vocab]`.

    By `q`, at temperature 1. Tokens below `NEGLIGIBLE` times the likeliest one's don't count.
    """
    likely = q[q > NEGLIGIBLE * q.max()].astype(np.float64)
    likely = np.sort(likely)[::-1]
    if not len(likely):
        return 0.0
    likely = likely[: filters.top_k or None]
    tempered = (likely / likely[0]) ** (1 / max(filters.temperature, 1e-3))
    before = tempered.cumsum() - tempered
    kept = (before < filters.top_p * tempered.sum()) & (tempered >= filters.min_p)
    return float(likely[kept][-1])
