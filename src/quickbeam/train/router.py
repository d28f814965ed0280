"""Clusters of a vocabulary, and a router over them: made, trained, and measured.

A router predicts which clusters a row of the drafter needs, before the drafter's layer has run.
Tokens of a cluster are alike: they have similar rows of the head (DynaSpec, 2510.13847: spherical
k-means), or follow in the same places (`CLUSTERINGS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.shortlist.native import Router, RouterConfig, normed
from quickbeam.errors import QuickbeamError
from quickbeam.train.places import Places

ROUNDS = 4  # of 2-means
FEATURES = 192  # width of a token's features, in `pifa`
LABELS = 8  # likeliest tokens of a place that `pifa` counts
SEEN = 0.05  # a token with less mass in all places has its features predicted from its row
CHUNK = 1024  # places at once
LEAST_MASS = 0.02  # a place with less mass for the router to find is not trained on


def ranking(counts: torch.Tensor) -> torch.Tensor:
    """Return the token ids by falling count, ties by id.

    `counts` `[vocab]` gives `[vocab]` int64 on the CPU.
    """
    return counts.argsort(descending=True, stable=True).cpu()


@torch.no_grad()
def halve(features: torch.Tensor, size: int) -> torch.Tensor:
    """Return an order of the rows of `features` `[n, d]` in which neighbours are alike: `[n]`.

    Rows are halved by balanced spherical 2-means again and again (Parabel, XR-Transformer), down to
    parts of `size` rows; the last one may have fewer. So the order can be cut into clusters of
    `size`. On the same machine the order is the same.
    """
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(features.float(), dim=1)
    done, left = list[torch.Tensor](), [torch.arange(len(x))]
    while left:
        part = left.pop()
        if len(part) <= size:
            done.append(part)
            continue
        rows, first = x[part], size
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
def pifa(network: EagleHead, head: torch.Tensor, places: Places) -> torch.Tensor:
    """Return features of each token from the places that it follows, `[vocab, FEATURES]`.

    They are the mean of the router's inputs over these places (positive instance feature
    aggregation), weighted by mass and projected at random. Tokens that follow almost nowhere get
    what a linear map predicts from their row of the head. The map is fitted to the other tokens.
    """
    total, weight = torch.zeros(len(head), FEATURES), torch.zeros(len(head))
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(2 * head.shape[1], FEATURES, generator=generator) / FEATURES**0.5
    for part in torch.split(torch.arange(len(places.tokens)), CHUNK):
        inputs = normed(places.hidden[part], network.embedding(places.tokens[part].long()))
        x = F.normalize(inputs, dim=1) @ projection
        tokens, mass = places.likely[part].long(), places.mass[part]
        for column in range(LABELS):
            total.index_add_(0, tokens[:, column], x * mass[:, column, None])
            weight.index_add_(0, tokens[:, column], mass[:, column])
    seen, rows = weight > SEEN, F.normalize(head.float(), dim=1)
    features = F.normalize(total, dim=1)
    a = rows[seen]
    ridge = 0.1 * len(a) / a.shape[1] * torch.eye(a.shape[1])
    features[~seen] = F.normalize(
        rows[~seen] @ torch.linalg.solve(a.T @ a + ridge, a.T @ features[seen]), dim=1
    )
    return features


CLUSTERINGS: dict[str, Callable[[EagleHead, torch.Tensor, Places], torch.Tensor]] = {
    "pifa": pifa,
    "kmeans": lambda network, head, places: head.float(),  # DynaSpec's: the rows of the head
}
"""By the name on the command line: the features that make tokens alike."""


def train_router(
    network: EagleHead,
    places: Places,
    cluster_of: torch.Tensor,
    residual: bool = True,
    *,
    width: int = 256,
    epochs: int = 4,
    seed: int = 0,
    lr: float = 1e-3,
    batch: int = 512,
) -> Router:
    """Train a router over clusters and return it.

    - `cluster_of`: `[vocab]` int64, the cluster of each token, negative for tokens that are always
      scored.
    - `residual`: it learns to find only what is neither in the list nor in the context, otherwise
      all that is not in the list (the paper's, without the context beside it).
    - `width`: of its hidden layer. `batch`: places of a step of AdamW. The rate falls from `lr` to
      zero as a cosine.

    The loss is the cross-entropy of the softmax over clusters with the target's mass on
    each of them, `LIKELY` tokens counted. A place weighs as much as its mass.

    Raises `QuickbeamError` for a loss that is not finite.
    """
    size, clusters = places.hidden.shape[1], int(cluster_of.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        router = Router(RouterConfig(size, size, width, clusters))
    cluster = cluster_of[places.likely.long()]
    mass = places.mass * (cluster >= 0)
    if residual:
        mass = mass * ~places.in_context
    total = mass.sum(1)
    useful = (~(total <= LEAST_MASS)).nonzero()[:, 0]  # NaN stays, and ends the training
    steps = max(1, epochs * -(-len(useful) // batch))
    optimizer = torch.optim.AdamW(router.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        order = useful[torch.randperm(len(useful), generator=generator)]
        for rows in torch.split(order, batch):
            log = _scores(network, router, places.take(rows)).log_softmax(-1)
            picked = log.gather(1, cluster[rows].clamp(min=0)) * mass[rows]
            loss = -picked.sum() / total[rows].sum()
            if not math.isfinite(float(loss.detach())):
                raise QuickbeamError(
                    f"the router's loss is {float(loss.detach())} in epoch {epoch + 1}: the text's "
                    "hidden states or the drafter are not finite"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return router.eval()


@torch.no_grad()
def routed(
    network: EagleHead, router: Router, places: Places, cluster_of: torch.Tensor, count: int
) -> torch.Tensor:
    """Return whether the target's likeliest token is in one of the `count` best clusters.

    `[n]` bool, False for tokens in no cluster.
    """
    hit = torch.zeros(len(places.tokens), dtype=torch.bool)
    cluster = cluster_of[places.target]
    for rows in torch.split((cluster >= 0).nonzero()[:, 0], CHUNK):
        scores = _scores(network, router, places.take(rows))
        own = scores.gather(1, cluster[rows][:, None])
        hit[rows] = (scores > own).sum(1) < count
    return hit


def recall(places: Places, scored: torch.Tensor) -> float:
    """Return the share of places at which the target's likeliest token is scored or in the context.

    `scored` `[n]` bool: whether a way to choose tokens has it.
    """
    known = scored | places.in_context[:, 0]
    return float(known.float().mean()) if len(known) else 0.0


def _scores(network: EagleHead, router: Router, places: Places) -> torch.Tensor:
    with torch.no_grad():
        embedded = network.embedding(places.tokens.long())
    return router(places.hidden, embedded)  # type: ignore[no-any-return]
