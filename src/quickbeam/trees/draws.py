"""The children that a drafter's distribution gives a node, in order, without replacement. Knows
nothing of trees.

A *drawn* child i comes from the distribution with the tokens of earlier children struck out,
renormalised: a uniform number for each, laid on the running sum of what is left; or the distinct
tokens of independent draws, in the order they first appear, which have the same distribution. (So
have the largest of Gumbel-perturbed log-probabilities, but they take a random number for every
token of the vocabulary: several times the cost of the running sum.) A *deterministic* child i is
the i-th most probable token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate

import torch

from quickbeam.draft.base import Laws
from quickbeam.trees.wide import Row, Stream, distinct, peaks

ROUND = 16  # draws that are prepared at once
TOP = 4  # of a law's likeliest tokens that its peaks are told by


class Draws:
    """The children that one node may get, in order. A slot is the place of the i-th, whose token
    may not be known yet.

    With P the probability that the node is reached, slot i is worth `P * worth(i)`, and its token,
    once drawn, is reached with `P * probability`. That is DySpec's rule (Alg. 1) in closed form:
    with v the worth of slot i and `d = chance(i)`, the sibling's slot is worth `v * (1 - d)` and
    the child's first slot `v * d`.

    `tokens` and their `probabilities`: deterministic proposals, the most probable first; where
    tokens are drawn, there are none yet. `stream`: the draws, each with its probability, repeats to
    be left out; `law` makes the `[vocab]` distribution that they are from, and `generator` more of
    them. `tops`: gives its largest probabilities, largest first. `forced`: the one token is all
    that a grammar allows.
    """

    def __init__(
        self,
        tokens: Sequence[int] = (),
        probabilities: Sequence[float] = (),
        stream: Stream | None = None,
        law: Callable[[], torch.Tensor] | None = None,
        generator: torch.Generator | None = None,
        tops: Callable[[], list[float]] = list,
        forced: bool = False,
    ) -> None:
        self.forced = forced
        self._tokens, self._probabilities = list(tokens), list(probabilities)
        self._stream: Stream = stream or iter(())
        self._make_law, self._generator, self._tops = law, generator, tops
        self._left: list[float] = []  # before each draw and after the last, once asked for

    @cached_property
    def law(self) -> torch.Tensor | None:
        """`[vocab]`: what the tokens are drawn from, as `TokenTree.law` wants it; `None` for
        deterministic proposals."""
        return None if self._make_law is None else self._make_law()

    def worth(self, i: int) -> float:
        """The probability that slot i is reached once the node is; 0 where there is none.

        A draw's slot is reached when all earlier ones are rejected, whatever its own token:
        choosing slots by it keeps sampling exact. A deterministic child counts with its token's
        probability. Draws 0 to i - 1 must have been asked for.
        """
        if self._generator is not None:
            if len(self._left) <= len(self._tokens):
                self._left = self._mass_left(len(self._tokens))
            return self._left[i]
        return self._probabilities[i] if i < len(self._tokens) else 0.0

    def peak(self, i: int) -> float:
        """The largest probability that the token of draw i may have under its own law: that of the
        likeliest token not drawn before, as far as the `TOP` likeliest tell. Draws 0 to i - 1 must
        have been asked for."""
        left, drawn, tops = self.worth(i), self._probabilities[:i], self._tops()
        largest = next((value for value in tops if value not in drawn), min(tops, default=0.0))
        return min(1.0, largest / left) if left > 0 else 1.0

    def draw(self, i: int) -> tuple[int, float] | None:
        """The i-th token and its probability before anything is struck out, or `None` where the
        distribution gives no further token."""
        while i >= len(self._tokens):
            if not (self._find() or (self._renew() and self._find())):
                return None
        return self._tokens[i], self._probabilities[i]

    def chance(self, i: int) -> float:
        """d: the probability of token i under its own law, with the earlier ones struck out and
        renormalised."""
        left = self._mass_left(i)[-1]
        return min(1.0, self._probabilities[i] / left) if left > 0 else 1.0

    def _find(self) -> bool:
        """Take the next token of the stream that was not drawn before."""
        for token, probability in self._stream:
            if probability > 0 and token not in self._tokens:
                self._tokens.append(token)
                self._probabilities.append(probability)
                return True
        return False

    def _renew(self) -> bool:
        """More draws, from what is left of the distribution."""
        if self._generator is None or self.law is None:
            return False
        rest = self.law.clone()
        rest[self._tokens] = 0.0
        (self._stream,) = distinct(rest[None], ROUND, self._generator)
        return True

    def _mass_left(self, count: int) -> list[float]:
        """How much of the distribution is not drawn yet, before each of the first `count` draws and
        after them."""
        return list(
            accumulate(self._probabilities[:count], lambda left, p: max(0.0, left - p), initial=1.0)
        )


def drawn(laws: Laws, generator: torch.Generator) -> list[Draws]:
    """Draws from each law; more are made when asked for. A forced token is a deterministic
    child."""
    tops = cache(lambda: peaks(laws.values, TOP))  # by those who want them
    streams = laws.named(distinct(laws.values, ROUND, generator))
    found = [
        Draws(
            stream=stream,
            law=partial(laws.dense, i),
            generator=generator,
            tops=lambda i=i: tops()[i],  # type: ignore[misc]
        )
        for i, stream in enumerate(streams)
    ]
    for i, token in laws.forced.items():
        found[i] = Draws([token], [1.0], forced=True)
    return found


def ranked(rows: Sequence[Row], forced: Collection[int] = ()) -> list[Draws]:
    """The likeliest tokens of each law as deterministic children, the likeliest first; of those
    rows that are `forced`, the only one."""
    return [Draws(*row, forced=i in forced) for i, row in enumerate(rows)]
