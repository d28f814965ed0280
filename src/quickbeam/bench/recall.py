"""The ways to choose a part of the vocabulary that `bench recall` compares.

At each place of a text (`train/places.py`) the wanted token is the target's likeliest one. A way to
choose finds it where the part of the vocabulary that it chooses holds that token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.draft.eagle_model import EagleHead
from quickbeam.shortlist.artefact import Artefact
from quickbeam.train.places import FLOATS, Places
from quickbeam.train.wanted import (
    Clusters,
    Found,
    Scores,
    Teaching,
    halved,
    label_features,
    of_router,
    roots,
    routed,
    routed_by_chance,
    score,
    teach,
)

OFTEN = 4  # by probability, a place gets at most so many times the mean number of clusters
BLOCKS = 40  # parts of the held-out text that standard errors are taken over
PRIOR = 30.0  # the weight of what is known of all tokens, against the counts of one token


class Line(NamedTuple):
    """What a way to choose finds, where it scores `rows` rows of the head."""

    name: str
    rows: int
    found: Found


class Foretold(NamedTuple):
    """How well it is foretold whether the drafter's likeliest scored token is the wanted one.

    `drafted` is the share of places at which it is. The others are log losses in nats a place, of
    logistic regressions that are fitted on one half of the places and measured on the other.
    `probability`: from the drafter's probability and the depth. `mass`: also from the mass that the
    router gives to clusters that are not scored. `known`: also from whether the wanted token is
    scored, which no router can know. `gain` and `bound` are `probability` less each of the two, and
    come with standard errors over parts of the text.
    """

    name: str
    rows: int
    drafted: float
    probability: float
    mass: float
    known: float
    gain: tuple[float, float]
    bound: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Trial:
    """What all ways to choose share.

    - `network`: the feature drafter.
    - `head`: the target's head `[vocab, d]`.
    - `artefact`: the drafter's shortlist. Its `ranking` `[vocab]` has the tokens by falling
      frequency.
    - `train`, `held`: the places to learn from, and the held-out ones.
    - `listed`: how many frequent tokens are always scored, beside clusters.
    - `sizes`: the numbers of rows of the head to choose.
    """

    network: EagleHead
    head: torch.Tensor
    artefact: Artefact
    train: Places
    held: Places
    listed: int
    sizes: Sequence[int]

    @property
    def rank(self) -> torch.Tensor:
        """The position `[vocab]` of each token in the ranking."""
        return places_in(self.artefact.ranking)

    def line(self, name: str, rows: int, scored: torch.Tensor) -> Line:
        return Line(name, rows, score(self.held, scored, self.rank[self.held.wanted] < rows))

    def lists(self) -> Iterator[Line]:
        """Yield two fixed lists, at each size.

        One holds the most frequent tokens. The other holds those that are wanted most often where
        the context lacks them (`lacking`).
        """
        for name, ranking in (
            ("frequency", self.artefact.ranking),
            ("frequency of what the context lacks", lacking(self)),
        ):
            at = places_in(ranking)[self.held.wanted]
            yield from (self.line(name, rows, at < rows) for rows in self.sizes)

    def shipped(self) -> Iterator[Line]:
        """Yield the clusters of the drafter's own router, where it has one, at each size.

        The router is asked once per tree, for the root's call.
        """
        layout, router = self.artefact.layout, self.artefact.router
        if router is None:
            return
        scores, asked = of_router(self.network, router, self.held), roots(self.held)
        for rows in self.sizes:
            if rows > layout.size:
                part = layout.within(rows)
                clusters = Clusters(part.cluster_of.clamp(min=-1), part.size)
                found = routed(
                    self.held, clusters, scores, (rows - part.frequent) // part.size, asked
                )
                yield self.line(
                    "router that is there", rows, found | (part.cluster_of[self.held.wanted] == -1)
                )

    def routed(
        self, name: str, clusters: Clusters, scores: Scores, own: bool = True, chance: bool = False
    ) -> Iterator[Line]:
        """Yield clusters beside the list of frequent tokens, at each size.

        With `own` each place is scored by itself, otherwise it takes the scores of its tree's root.
        With `chance` a place gets all clusters above a probability that is the same for all places
        (`routed_by_chance`), otherwise each place gets the same number of clusters.
        """
        asked, always = None if own else roots(self.held), self.rank[self.held.wanted] < self.listed
        for rows in self.sizes:
            if (count := (rows - self.listed) // clusters.size) > 0:
                if chance:
                    cap = min(OFTEN * count, clusters.count)
                    found = routed_by_chance(self.held, clusters, scores, count, cap, asked)
                else:
                    found = routed(self.held, clusters, scores, count, asked)
                yield self.line(name, rows, found | always)

    @torch.no_grad()
    def foretold(self, name: str, clusters: Clusters, scores: Scores) -> Iterator[Foretold]:
        """Yield what the router's mass tells of a draft's acceptance, at each size.

        The router's last class must be the mass that it needn't find (`Teaching.rest`). Of the
        context, those tokens are scored that are among the target's likeliest at the place.
        """
        held, head = self.held, self.head.float()
        listed = self.rank < self.listed
        for rows in self.sizes:
            if (count := (rows - self.listed) // clusters.size) <= 0:
                continue
            probability, missed = torch.empty(2, len(held.tokens))
            right, there = torch.empty(2, len(held.tokens), dtype=torch.bool)
            for part in torch.split(
                torch.arange(len(held.tokens)), max(1, FLOATS // len(self.head))
            ):
                law = scores(part).softmax(-1)[:, : clusters.count]
                chosen = torch.zeros(len(part), clusters.count, dtype=torch.bool)
                chosen.scatter_(1, law.topk(count).indices, True)
                scored = chosen[:, clusters.of.clamp(min=0)] & (clusters.of >= 0) | listed
                likely = held.likely[part].long()
                scored.scatter_(1, likely, scored.gather(1, likely) | held.near[part])
                logits = (held.feature[part].float() @ head.T).masked_fill_(~scored, -math.inf)
                best = logits.softmax(-1).max(-1)
                wanted = held.wanted[part]
                probability[part], right[part] = best.values, best.indices == wanted
                missed[part] = law.masked_fill_(chosen, 0).sum(1)
                there[part] = scored.gather(1, wanted[:, None])[:, 0]
            log = torch.stack([probability.logit(1e-6), probability.log(), held.depth.float()], 1)
            more = torch.stack([missed.clamp(min=1e-4).log(), torch.log1p(-missed)], 1)
            plain, mass, known = (
                crossed(torch.cat([log, *columns], 1), right)
                for columns in ((), (more,), (there.float()[:, None],))
            )
            yield Foretold(
                name,
                rows,
                float(right.float().mean()),
                float(plain.mean()),
                float(mass.mean()),
                float(known.mean()),
                over_blocks(plain - mass),
                over_blocks(plain - known),
            )

    def run(self, names: Sequence[str]) -> Iterator[Line | Foretold]:
        """Yield all ways, or those whose name begins with one of `names`.

        In `names`, "lists" stands for `lists` and `shipped`, and "tokens" for `tokens`. Ways whose
        router also gives the mass that it needn't find are followed by what that mass foretells.
        """
        rest = self.artefact.ranking[self.listed :].sort().values
        vocab, head = len(self.head), self.head.float()
        orders = dict[str, torch.Tensor]()
        if not names or "lists" in names:
            yield from self.lists()
            yield from self.shipped()
        plain, residual, chance = Teaching(residual=False), Teaching(), Teaching(rest=True)
        ways = [
            ("wanted", 16, residual),
            ("wanted", 64, residual),
            ("head", 16, residual),
            ("head", 512, plain),
            ("head", 512, residual),
        ]
        ways += [("wanted", size, residual) for size in (512, 32, 8)]
        ways += [("wanted", 64, chance), ("wanted", 16, chance)]
        for by, size, how in ways:
            labels = "what the context lacks" if how.residual else "all"
            name = f"{size} a cluster by {by}, {labels}{', rest' if how.rest else ''}"
            if names and not any(name.startswith(one) for one in names):
                continue
            if by not in orders:
                features = (
                    head if by == "head" else label_features(self.network, self.head, self.train)
                )
                orders[by] = rest[halved(features[rest])]
            clusters = Clusters.cut(orders[by], size, vocab)
            scores = of_router(
                self.network, teach(self.network, self.train, clusters, how), self.held
            )
            yield from self.routed(name + ", root", clusters, scores, own=False)
            yield from self.routed(name, clusters, scores)
            if how.rest:
                yield from self.routed(name + ", by probability", clusters, scores, chance=True)
                yield from self.foretold(name, clusters, scores)
        if not names or "tokens" in names:
            yield from self.tokens(rest)

    def tokens(self, rest: torch.Tensor) -> Iterator[Line]:
        """Yield scorers of single tokens, of low rank.

        Some score from the state that the drafter's head reads (SpecVocab). Another one is taught
        to score from the router's inputs.
        """
        clusters, rows = Clusters.cut(rest, 1, len(self.head)), self.head[rest].float()
        ranks = [rank for rank in (32, 64, 128) if rank <= rows.shape[1]]
        for rank in ranks:
            u, s, v = torch.svd_lowrank(rows, rank, niter=3)
            after = partial(self._product, up=v, down=u * s)
            yield from self.routed(
                f"single tokens, rank {rank} of the head, after the layer", clusters, after
            )
        rank = ranks[:2][-1]
        u, s, _ = torch.svd_lowrank(rows, rank, niter=3)
        router = teach(
            self.network, self.train, clusters, Teaching(width=rank, epochs=2), u * s.sqrt() / 10
        )
        before = of_router(self.network, router, self.held)
        yield from self.routed(
            f"single tokens, rank {rank}, taught, before the layer", clusters, before
        )

    def _product(self, places: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return self.held.feature[places].float() @ up @ down.T


def crossed(features: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return log losses `[n]` in nats of logistic regressions from `features` `[n, f]` to `right`.

    Each half of the places is foretold by a regression that is fitted on the other half.
    """
    x = features.double()
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-9)
    x, y = torch.cat([x, torch.ones(len(x), 1)], 1), right.double()
    losses, half = torch.empty_like(y), len(y) // 2
    for fitted, told in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        weight = torch.zeros(x.shape[1], dtype=torch.float64)
        for _ in range(25):  # Newton's steps; the ridge keeps them finite
            p = (x[fitted] @ weight).sigmoid()
            gradient = x[fitted].T @ (p - y[fitted]) + 1e-3 * weight
            hessian = (x[fitted].T * (p * (1 - p))) @ x[fitted]
            weight -= torch.linalg.solve(hessian + 1e-3 * torch.eye(len(weight)), gradient)
        losses[told] = F.binary_cross_entropy_with_logits(
            x[told] @ weight, y[told], reduction="none"
        )
    return losses


def over_blocks(values: torch.Tensor) -> tuple[float, float]:
    """Return the mean of `values` `[n]` and its standard error over `BLOCKS` parts in a row."""
    means = torch.stack([part.mean() for part in torch.tensor_split(values, BLOCKS)])
    return float(values.mean()), float(means.std() / BLOCKS**0.5)


def places_in(ranking: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(ranking).index_copy_(0, ranking, torch.arange(len(ranking)))


def lacking(trial: Trial) -> torch.Tensor:
    """Return the tokens `[vocab]` by how often they are wanted where the context lacks them.

    The most wanted come first. A token's count at the places of `trial.train` is added to what its
    position in the ranking lets one expect (Zipf's law).
    """
    train, vocab = trial.train, len(trial.head)
    tokens, mass = train.likely.long().flatten(), train.mass.float()
    wanted = torch.zeros(vocab).index_add_(0, tokens, mass.flatten())
    lacked = torch.zeros(vocab).index_add_(0, tokens, (mass * ~train.near).flatten())
    # 1 / 10 makes the shares of 50,000 tokens sum to about 1
    usual = len(train.tokens) / 10 / (trial.rank + 10.0)
    share = float(lacked.sum() / wanted.sum())
    rate = (lacked + PRIOR * share) / (wanted + PRIOR)
    return ((wanted + PRIOR * usual) * rate).argsort(descending=True, stable=True)
