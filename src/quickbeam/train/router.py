"""Makes clusters of a vocabulary, and trains and measures a router over them.

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
from quickbeam.drafters.shortlist.router import Router, RouterConfig, normed
from quickbeam.errors import QuickbeamError
from quickbeam.train.places import Places

ROUNDS = 4  # of 2-means
FEATURES = 192  # width of a token's features, in `pifa`
LABELS = 8  # likeliest tokens of a place that `pifa` counts
SEEN_MASS = 0.05  # a token with less mass in all places has its features predicted from its row
RIDGE = 0.1  # of the linear map that predicts them, for a mean square of 1 a column
CHUNK = 1024  # places at once
LEAST_MASS = 0.02  # a place with less mass for the router to find is not trained on


def ranking(counts: torch.Tensor) -> torch.Tensor:
    """Return the token ids by falling count, ties by id.

    `counts` `[vocab]` gives `[vocab]` int64 on the CPU.
    """
    return counts.argsort(descending=True, stable=True).cpu()


@torch.no_grad()
def halve(features: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices of the rows of `features` `[n, d]`, neighbours alike: `[n]`.

    Rows are halved by balanced spherical 2-means again and again (Parabel, XR-Transformer), down to
    parts of `size` rows; the last one may have fewer. So the result can be cut into clusters of
    `size`. On the same machine it is the same.
    """
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(features.float(), dim=1)
    clusters = list[torch.Tensor]()
    stack = [torch.arange(len(x))]
    while stack:
        part = stack.pop()
        if len(part) <= size:
            clusters.append(part)
            continue
        rows = x[part]
        first = size  # rows of the first half: clusters of `size`, a power of 2 of them
        while 2 * first < len(part):
            first *= 2
        centres = rows[torch.randperm(len(part), generator=generator)[:2]]
        for _ in range(ROUNDS):
            preference = rows @ (centres[0] - centres[1])
            order = preference.argsort(descending=True, stable=True)
            sums = torch.stack([rows[order[:first]].sum(0), rows[order[first:]].sum(0)])
            centres = F.normalize(sums, dim=1)
        stack += [part[order[first:]], part[order[:first]]]
    return torch.cat(clusters)


@torch.no_grad()
def pifa(network: EagleHead, head: torch.Tensor, places: Places) -> torch.Tensor:
    """Return features of each token from the places that it follows, `[vocab, FEATURES]`.

    They are the mean of the router's inputs over these places (positive instance feature
    aggregation), weighted by mass and projected at random. Tokens that follow almost nowhere get
    what a linear map predicts from their row of the head. The map is fitted to the other tokens.
    """
    total = torch.zeros(len(head), FEATURES)
    total_mass = torch.zeros(len(head))
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(2 * head.shape[1], FEATURES, generator=generator) / FEATURES**0.5
    for indices in torch.split(torch.arange(len(places.tokens)), CHUNK):
        part = places.take(indices)
        inputs = normed(part.hidden, network.embedding(part.tokens.long()))
        x = F.normalize(inputs, dim=1) @ projection
        for label in range(LABELS):
            tokens = part.likely[:, label].long()
            mass = part.mass[:, label]
            total.index_add_(0, tokens, x * mass[:, None])
            total_mass.index_add_(0, tokens, mass)
    features = F.normalize(total, dim=1)
    rows = F.normalize(head.float(), dim=1)
    seen = total_mass > SEEN_MASS
    a = rows[seen]
    width = a.shape[1]
    ridge = RIDGE * len(a) / width * torch.eye(width)
    linear_map = torch.linalg.solve(a.T @ a + ridge, a.T @ features[seen])
    features[~seen] = F.normalize(rows[~seen] @ linear_map, dim=1)
    return features


def head_rows(network: EagleHead, head: torch.Tensor, places: Places) -> torch.Tensor:
    """Return DynaSpec's features of each token, `[vocab, d]`: its row of the head."""
    return head.float()


CLUSTERINGS: dict[str, Callable[[EagleHead, torch.Tensor, Places], torch.Tensor]] = {
    "pifa": pifa,
    "kmeans": head_rows,
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
    - `residual`: the router learns to find only what is neither in the list nor in the context.
      Otherwise it learns all that is not in the list, as in the paper, which has no context.
    - `width`: units of the hidden layer. `batch`: places of a step of AdamW. The rate falls from
      `lr` to zero as a cosine.

    The loss is the cross-entropy of the softmax over clusters with the target's mass on each of
    them, `LIKELY` tokens counted. A place weighs as much as its mass.

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
        shuffled = useful[torch.randperm(len(useful), generator=generator)]
        for rows in torch.split(shuffled, batch):
            log_probs = _scores(network, router, places.take(rows)).log_softmax(-1)
            weighted = log_probs.gather(1, cluster[rows].clamp(min=0)) * mass[rows]
            loss = -weighted.sum() / total[rows].sum()
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
        needed = scores.gather(1, cluster[rows][:, None])
        hit[rows] = (scores > needed).sum(1) < count
    return hit


def recall(places: Places, scored: torch.Tensor) -> float:
    """Return the share of places at which the target's likeliest token is scored or in the context.

    `scored` `[n]` bool: whether the tokens to score include it, by some way to choose them.
    """
    if not len(scored):
        return 0.0
    return float((scored | places.in_context[:, 0]).float().mean())


def _scores(network: EagleHead, router: Router, places: Places) -> torch.Tensor:
    with torch.no_grad():
        embedded = network.embedding(places.tokens.long())
    return router(places.hidden, embedded)  # type: ignore[no-any-return]
