"""A shortlist for what the context lacks.

Its clusters are tokens that are wanted in the same places, and a router is trained to find them.

Nothing is decoded. At each place (`places.py`) it is known which token is wanted, the target's
likeliest one, and whether the context holds it. A way to choose a part of the vocabulary is
measured by whether it would score that token. All ways are compared at the same number of rows of
the head, not counting the context's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam import hub
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.shortlist.artefact import Artefact
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.errors import InvalidInput
from quickbeam.train.clusters import ranking
from quickbeam.train.drafter import HELD_OUT, split
from quickbeam.train.places import Places, collect_places
from quickbeam.train.shortlists import CARD, FIGURES, HELD_ROWS, DrafterFolder, replace

CHUNK = 1024  # rows at once
LISTED_SHARE, MOST_LISTED = 48, 1024  # one token in so many is always scored, but at most these
DEEPEST = 5  # the largest depth at which the router is asked
SHARES = (0.01, 0.02, 0.03, 0.06, 0.125, 0.25)  # of the vocabulary, in reports
# tokens of the smallest clusters; rounds of 2-means; width of a token's features
LEAST, ROUNDS, WIDE = 8, 4, 192
TAUGHT = 8  # likeliest tokens of a place that the features of tokens are made from
LEAST_MASS = 0.02  # a row with less mass on what is to be found is not trained on


class Found(NamedTuple):
    """How often a way to choose tokens finds the wanted one, on held-out places.

    `recall`: the share of places at which the wanted token is scored or in the context. `alone`:
    the share at which it is scored. `rare`: the share of places at which the wanted token is
    neither in the list of the same size nor in the context. `rare_recall`: the recall at these.
    `right`: the recall at places where the drafter's likeliest token of the whole vocabulary is the
    wanted one.
    """

    recall: float
    alone: float
    rare: float
    rare_recall: float
    right: float


def score(held: Places, scored: torch.Tensor, listed: torch.Tensor) -> Found:
    """Return the figures of a way to choose tokens.

    `scored` `[n]` bool: whether it has the wanted token. `listed` `[n]` bool: whether the wanted
    token is among as many most frequent ones.
    """
    both, right, rare = scored | held.known, held.drafted == held.wanted, ~(listed | held.known)
    return Found(
        *(
            float(x.float().mean()) if len(x) else 0.0
            for x in (both, scored, rare, both[rare], both[right])
        )
    )


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of tokens.

    `of` `[vocab]` int64: the cluster of each token, -1 for those of the list. `size`: tokens per
    cluster; the last one may have fewer.
    """

    of: torch.Tensor
    size: int

    @property
    def count(self) -> int:
        return int(self.of.max()) + 1

    @staticmethod
    def cut(order: torch.Tensor, size: int, vocab: int) -> Clusters:
        """Cut an order of tokens into clusters of `size`. Neighbours in `order` are alike."""
        return Clusters(
            torch.full((vocab,), -1).index_copy_(0, order, torch.arange(len(order)) // size), size
        )


@torch.no_grad()
def halved(features: torch.Tensor, least: int = LEAST, seed: int = 0) -> torch.Tensor:
    """Return an order of the rows of `features` `[n, d]` in which neighbours are alike: `[n]`.

    Rows are halved by balanced spherical 2-means again and again (Parabel, XR-Transformer), down to
    parts of at most `least` rows. So the order can be cut into clusters of `least` rows times any
    power of two.
    """
    generator = torch.Generator().manual_seed(seed)
    x = F.normalize(features.float(), dim=1)
    done, left = list[torch.Tensor](), [torch.arange(len(x))]
    while left:
        part = left.pop()
        if len(part) <= least:
            done.append(part)
            continue
        rows, first = x[part], least
        while 2 * first < len(part):
            first *= 2
        pair = rows[torch.randperm(len(part), generator=generator)[:2]]
        for _ in range(ROUNDS):
            order = (rows @ (pair[0] - pair[1])).argsort(descending=True, stable=True)
            pair = F.normalize(
                torch.stack([rows[order[:first]].sum(0), rows[order[first:]].sum(0)]), dim=1
            )
        left += [part[order[first:]], part[order[:first]]]
    return torch.cat(done)


@torch.no_grad()
def label_features(network: EagleHead, head: torch.Tensor, places: Places) -> torch.Tensor:
    """Return features of each token, `[vocab, WIDE]` (PIFA).

    They are the mean of the router's inputs over the places where the token is wanted, weighted by
    mass and projected at random. Tokens that are wanted almost nowhere get what a linear map
    predicts from their row of the head. The map is fitted to the other tokens.
    """
    total, weight = torch.zeros(len(head), WIDE), torch.zeros(len(head))
    onto = (
        torch.randn(2 * head.shape[1], WIDE, generator=torch.Generator().manual_seed(0)) / WIDE**0.5
    )
    for rows in torch.split(torch.arange(len(places.tokens)), CHUNK):
        x = F.normalize(router_inputs(network, places.take(rows)), dim=1) @ onto
        tokens, mass = places.likely[rows].long(), places.mass[rows].float()
        for column in range(TAUGHT):
            total.index_add_(0, tokens[:, column], x * mass[:, column, None])
            weight.index_add_(0, tokens[:, column], mass[:, column])
    seen, rows_of = weight > 0.05, F.normalize(head.float(), dim=1)
    features = F.normalize(total, dim=1)
    a = rows_of[seen]
    fit = torch.linalg.solve(
        a.T @ a + 0.1 * len(a) / a.shape[1] * torch.eye(a.shape[1]), a.T @ features[seen]
    )
    features[~seen] = F.normalize(rows_of[~seen] @ fit, dim=1)
    return features


def router_inputs(network: EagleHead, places: Places) -> torch.Tensor:
    parts = places.hidden.float(), network.embed(places.tokens.long()).float()
    return torch.cat([F.rms_norm(part, (part.shape[-1],), eps=1e-6) for part in parts], -1)


@dataclass(frozen=True)
class Teaching:
    """How a router is trained.

    `residual`: it learns to find only what is neither in the list nor in the context, otherwise all
    that is not in the list. `rest`: what is not to be found is a class of its own, so that
    probabilities can be compared between places. `width`: of the router's hidden layer.
    """

    residual: bool = True
    rest: bool = False
    width: int = 256
    epochs: int = 4
    lr: float = 1e-3
    batch: int = 512


def teach(
    network: EagleHead,
    places: Places,
    clusters: Clusters,
    how: Teaching,
    start: torch.Tensor | None = None,
) -> Router:
    """Train a router over `clusters` as `how` says, and return it.

    The loss is that of `train_router`. With `rest`, a last class takes the mass that is not to be
    found. `start` `[clusters, width]`: the first weights of the router's last layer.
    """
    torch.manual_seed(0)
    size, count = places.hidden.shape[1], clusters.count
    router = Router(RouterConfig(size, size, how.width, count + how.rest))
    if start is not None:
        router.down.weight.data[:count].copy_(start)
    cluster = clusters.of[places.likely.long()]
    mass = places.mass.float() * (cluster >= 0)
    if how.residual:
        mass *= ~places.near
    total = mass.sum(1)
    useful = torch.arange(len(total)) if how.rest else (total > LEAST_MASS).nonzero()[:, 0]
    steps = how.epochs * -(-len(useful) // how.batch)
    optimizer = torch.optim.AdamW(router.parameters(), lr=how.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(how.epochs):
        for part in torch.split(
            useful[torch.randperm(len(useful), generator=generator)], how.batch
        ):
            rows = places.take(part)
            with torch.no_grad():
                embedded = network.embed(rows.tokens.long())
            log = router(rows.hidden, embedded).log_softmax(-1)
            loss = -(log.gather(1, cluster[part].clamp(min=0)) * mass[part]).sum()
            if how.rest:
                loss = loss - (log[:, -1] * (1 - total[part]).clamp(min=0)).sum()
            (loss / (len(part) if how.rest else total[part].sum())).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return router.eval()


Scores = Callable[[torch.Tensor], torch.Tensor]
"""Rows of the places to `[m, clusters]`."""


def of_router(network: EagleHead, router: Router, held: Places) -> Scores:
    @torch.no_grad()
    def scores(rows: torch.Tensor) -> torch.Tensor:
        part = held.take(rows)
        found: torch.Tensor = router(part.hidden, network.embed(part.tokens.long()))
        return found

    return scores


def roots(held: Places) -> torch.Tensor:
    """Return for each place the index of its tree's root, `[n]`.

    It is the place's own index if the root is not there.
    """
    where = {
        int(root): i
        for i, (root, depth) in enumerate(zip(held.root.tolist(), held.depth.tolist(), strict=True))
        if not depth
    }
    return torch.tensor([where.get(root, i) for i, root in enumerate(held.root.tolist())])


@torch.no_grad()
def routed(
    held: Places, clusters: Clusters, scores: Scores, count: int, asked: torch.Tensor | None = None
) -> torch.Tensor:
    """Return whether the wanted token is in one of the `count` best clusters, `[n]` bool.

    `asked`: for each place, the index of the place whose scores count. None takes its own.
    """
    found = torch.zeros(len(held.tokens), dtype=torch.bool)
    wanted = clusters.of[held.wanted]
    for rows in torch.split((wanted >= 0).nonzero()[:, 0], CHUNK):
        s = scores(rows if asked is None else asked[rows])
        own = s.gather(1, wanted[rows][:, None])
        found[rows] = (s[:, : clusters.count] > own).sum(1) < count
    return found


class WantedTraining(DrafterFolder):
    """Makes a drafter's shortlist in one go: frequent tokens, clusters and a router.

    `listed`: how many frequent tokens are always scored; None for one in `LISTED_SHARE`, at most
    `MOST_LISTED`. `size`: tokens per cluster, which are wanted in the same places. `rows`: places
    on which the router is trained to find what neither the list nor the context has. The router is
    asked at every depth up to `DEEPEST`. `ranked`: the folder of a drafter whose shortlist says
    which tokens are frequent; None counts this training's text. Raises `InvalidInput` for a
    `listed` or a `size` that is out of range, and for a shortlist of another vocabulary.
    """

    def __init__(
        self,
        model: str | None,
        out: Path,
        listed: int | None,
        size: int,
        rows: int,
        how: Teaching,
        depths: int,
        ranked: Path | None = None,
    ) -> None:
        super().__init__(model, out)
        vocab = len(self.head)
        if listed is None:
            listed = min(max(1, vocab // LISTED_SHARE), MOST_LISTED)
        self.listed, self.ranked = listed, ranked
        self.ranking = None if ranked is None else Artefact.load(ranked).ranking
        if self.ranking is not None and len(self.ranking) != vocab:
            raise InvalidInput(
                f"--list-of {ranked}: its shortlist is of {len(self.ranking)} tokens, "
                f"the vocabulary has {vocab}"
            )
        if not 1 <= self.listed < vocab:
            raise InvalidInput(
                f"--listed {self.listed}: must be 1 to {vocab - 1}, as the "
                f"vocabulary has {vocab} tokens"
            )
        if size < 1 or size % LEAST:
            raise InvalidInput(f"--size {size}: must be a multiple of {LEAST}")
        self.size, self.rows, self.how, self.depths = size, rows, how, depths

    def run(self, report: Callable[[str, float | None], None]) -> dict[int, tuple[Found, Found]]:
        """Write the artefact and its card.

        Returns, by number of rows of the head, what the list finds and what the router finds on
        held-out text.
        """
        train, held = split(self.shards)
        taught = self._collect(train, self.rows, False, partial(report, "places"))
        counted = self._collect(held, HELD_ROWS, True, partial(report, "held-out places"))
        self.to_cpu()
        report("clusters", None)
        ranked = ranking(self.counts()) if self.ranking is None else self.ranking
        order = ranked[self.listed :].sort().values
        order = order[halved(label_features(self.network, self.head, taught)[order])]
        clusters = Clusters.cut(order, self.size, len(self.head))
        report("router", None)
        router = teach(self.network, taught, clusters, self.how)
        layout = Layout(
            torch.cat([ranked[: self.listed], order]), self.listed, self.size, len(self.head)
        )
        Artefact(layout, ranked, router, DEEPEST).save(self.out)
        found, rank = (
            {},
            torch.empty_like(ranked).index_copy_(0, ranked, torch.arange(len(ranked)))[
                counted.wanted
            ],
        )
        scores = of_router(self.network, router, counted)
        for share in SHARES:
            rows = round(len(self.head) * share)
            if (count := (rows - self.listed) // self.size) > 0:
                chosen = routed(counted, clusters, scores, count) | (rank < self.listed)
                found[rows] = (
                    score(counted, rank < rows, rank < rows),
                    score(counted, chosen, rank < rows),
                )
        held_out = {
            rows: {"list": plain._asdict(), "router": one._asdict()}
            for rows, (plain, one) in found.items()
        }
        record = {
            "listed": self.listed,
            "size": self.size,
            "taught": len(taught.tokens),
            "held_out": held_out,
        }
        replace(self.out / FIGURES, json.dumps(record, indent=2) + "\n")
        replace(
            self.out / CARD,
            self.card(layout, router, len(taught.tokens), len(counted.tokens), found),
        )
        return found

    def _collect(
        self, chosen: list[int], count: int, drafted: bool, report: Callable[[float], None]
    ) -> Places:
        return collect_places(
            self.network, self.head, self.shards, chosen, self.depths, count, 0, drafted, report
        )

    def card(
        self,
        layout: Layout,
        router: Router,
        rows: int,
        held: int,
        found: dict[int, tuple[Found, Found]],
    ) -> str:
        """Return the card in Markdown: what the shortlist is, how it was made, what it finds."""
        parameters = sum(p.numel() for p in router.parameters()) / 1e6
        command = (
            f"quickbeam train --only shortlist --rows {self.rows} --listed {self.listed} "
            f"--size {self.size} --depths {self.depths}"
        )
        command += "" if self.ranked is None else f" --list-of {self.ranked.name}"
        lines = [
            f"| {rows:,} | {listed.recall:.4f} | {one.recall:.4f} | {listed.alone:.4f} | "
            f"{one.alone:.4f} | {one.rare_recall:.3f} |"
            for rows, (listed, one) in found.items()
        ]
        table = "\n".join(lines)
        return f"""# A shortlist for the drafter of {self.model or hub.DEFAULT}

{layout.frequent:,} frequent tokens of {layout.vocab:,}, which are always scored, and
{layout.clusters:,} clusters of {layout.size} tokens that are wanted in the same places; a router of
{parameters:.2f} M parameters, taught to find what neither the list nor the context has. Made with

    {command} --router-epochs {self.how.epochs} --width {self.how.width}

`--vocab clusters` and `--vocab router` ask it. Without them a drafter scores frequent tokens and
those of the context, and no router.

- **Data:** {rows:,} places of {self.shards.tokens:,} tokens of text that the model wrote itself, up
  to {self.depths} drafts ahead. One conversation in {HELD_OUT} was held out.

On {held:,} held-out places, how often the model's likeliest token is scored, by the number of rows
that list and clusters have together; "of rare": where it is neither among as many frequent tokens
nor in the context:

| rows | list + context | router + context | list | clusters | router, of rare |
| --- | --- | --- | --- | --- | --- |
{table}
"""
