"""The children that a drafter's distribution gives a node, in order, without replacement.

This module knows nothing of trees.

A *drawn* child i comes from the distribution without the tokens of earlier children, renormalised.
There are two ways to draw it. One takes a uniform number for each child and finds its place on the
running sum of what is left. The other takes the distinct tokens of independent draws, in the order
in which they first appear. Both have the same distribution. (So have the largest Gumbel-perturbed
log-probabilities. But they take a random number for every token of the vocabulary, several times
the cost of the running sum.)

A *deterministic* child i is the i-th most probable token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate

import torch

from quickbeam.drafters.base import DraftProbs
from quickbeam.methods.wide import Row, Stream, distinct, peaks

ROUND = 16  # how many draws are prepared at once
TOP = 4  # how many of a distribution's likeliest tokens `Draws.peak` looks at


class Draws:
    """The children that one node may get, in order.

    A slot is the place of the i-th child, whose token may not be known yet. Let P be the
    probability that the node is reached. Slot i is worth `P * worth(i)`. Its token, once drawn, is
    reached with `P * probability`. That is DySpec's rule (Alg. 1) in closed form: if slot i is
    worth v and `d = chance(i)`, then the sibling's slot is worth `v * (1 - d)` and the child's
    first slot `v * d`.

    - `tokens` and their `probabilities`: deterministic proposals, the most probable first. They are
      empty at first if tokens are drawn.
    - `stream`: the draws, each with its probability; repeats in it are skipped.
    - `probs`: makes the distribution `[vocab]` that the draws are from.
    - `generator`: gives further draws.
    - `tops`: returns the largest probabilities of the distribution, largest first.
    - `forced`: whether a grammar allows only this one token.
    """

    def __init__(
        self,
        tokens: Sequence[int] = (),
        probabilities: Sequence[float] = (),
        stream: Stream | None = None,
        probs: Callable[[], torch.Tensor] | None = None,
        generator: torch.Generator | None = None,
        tops: Callable[[], list[float]] = list,
        forced: bool = False,
    ) -> None:
        self.forced = forced
        self._tokens, self._probabilities = list(tokens), list(probabilities)
        self._stream: Stream = stream or iter(())
        self._make_probs, self._generator, self._tops = probs, generator, tops
        # the mass left before each draw and after the last one, computed when asked for
        self._left: list[float] = []

    @cached_property
    def probs(self) -> torch.Tensor | None:
        """The distribution `[vocab]` that the tokens are drawn from, as `TokenTree.probs` holds it.

        `None` for deterministic proposals.
        """
        return None if self._make_probs is None else self._make_probs()

    def worth(self, i: int) -> float:
        """Return the probability that slot i is reached once the node is; 0 if there is no such
        slot.

        A draw's slot is reached when all earlier draws are rejected, whatever its own token is.
        Slots may be chosen by this number, and sampling stays exact. A deterministic proposal
        counts with its token's probability. Draws 0 to i - 1 must have been asked for.
        """
        if self._generator is not None:
            if len(self._left) <= len(self._tokens):
                self._left = self._mass_left(len(self._tokens))
            return self._left[i]
        return self._probabilities[i] if i < len(self._tokens) else 0.0

    def peak(self, i: int) -> float:
        """Return the largest probability that the token of draw i may have once earlier draws are
        removed.

        It is the probability of the likeliest token not drawn before, as far as the `TOP` likeliest
        tokens show. Draws 0 to i - 1 must have been asked for.
        """
        left, drawn, tops = self.worth(i), self._probabilities[:i], self._tops()
        largest = next((value for value in tops if value not in drawn), min(tops, default=0.0))
        return min(1.0, largest / left) if left > 0 else 1.0

    def draw(self, i: int) -> tuple[int, float] | None:
        """Return the i-th token and its probability before any earlier token is removed.

        Returns `None` if the distribution gives no further token.
        """
        while i >= len(self._tokens):
            if not (self._find() or (self._renew() and self._find())):
                return None
        return self._tokens[i], self._probabilities[i]

    def chance(self, i: int) -> float:
        """Return d, the probability of token i in the distribution without the earlier ones,
        renormalised."""
        left = self._mass_left(i)[-1]
        return min(1.0, self._probabilities[i] / left) if left > 0 else 1.0

    def _find(self) -> bool:
        """Take the next token of the stream that was not drawn before. Returns whether there is
        one."""
        for token, probability in self._stream:
            if probability > 0 and token not in self._tokens:
                self._tokens.append(token)
                self._probabilities.append(probability)
                return True
        return False

    def _renew(self) -> bool:
        """Prepare further draws from what is left of the distribution. Returns whether tokens are
        drawn."""
        if self._generator is None or self.probs is None:
            return False
        rest = self.probs.clone()
        rest[self._tokens] = 0.0
        (self._stream,) = distinct(rest[None], ROUND, self._generator)
        return True

    def _mass_left(self, count: int) -> list[float]:
        """Return the mass that is not drawn yet, before each of the first `count` draws and after
        them."""
        return list(
            accumulate(self._probabilities[:count], lambda left, p: max(0.0, left - p), initial=1.0)
        )


def drawn(distributions: DraftProbs, generator: torch.Generator) -> list[Draws]:
    """Return draws from each distribution; more are made when asked for.

    A forced token is a deterministic proposal.
    """
    tops = cache(lambda: peaks(distributions.values, TOP))  # computed once, when first wanted
    streams = distributions.named(distinct(distributions.values, ROUND, generator))
    found = [
        Draws(
            stream=stream,
            probs=partial(distributions.dense, i),
            generator=generator,
            tops=lambda i=i: tops()[i],  # type: ignore[misc]
        )
        for i, stream in enumerate(streams)
    ]
    for i, token in distributions.forced.items():
        found[i] = Draws([token], [1.0], forced=True)
    return found


def ranked(rows: Sequence[Row], forced: Collection[int] = ()) -> list[Draws]:
    """Return the likeliest tokens of each distribution as deterministic proposals, the likeliest
    first.

    A row in `forced` holds only its forced token.
    """
    return [Draws(*row, forced=i in forced) for i, row in enumerate(rows)]
