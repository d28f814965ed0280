"""Trains a router, and measures what it finds.

A router predicts which clusters of the vocabulary a row of the drafter needs, before the drafter's
layer has run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.shortlist.native import Router, RouterConfig
from quickbeam.errors import QuickbeamError
from quickbeam.train.places import Places

CHUNK = 1024  # places at once
LEAST_MASS = 0.02  # a place with less mass for the router to find is not trained on


@dataclass(frozen=True)
class RouterRecipe:
    """How a router is trained: AdamW, with a rate that falls from `lr` to zero as a cosine.

    `residual`: it learns to find only what is neither in the list nor in the context, otherwise all
    that is not in the list (the paper's, without the context beside it). `width`: of the router's
    hidden layer. `batch`: places of a step.
    """

    residual: bool = True
    width: int = 256
    epochs: int = 4
    seed: int = 0
    lr: float = 1e-3
    batch: int = 512


def train_router(
    network: EagleHead, places: Places, cluster_of: torch.Tensor, recipe: RouterRecipe
) -> Router:
    """Train a router over clusters and return it.

    `cluster_of`: `[vocab]` int64, the cluster of each token, negative for tokens that are always
    scored. The loss is the cross-entropy of the softmax over clusters with the target's mass on
    each of them, `LIKELY` tokens counted. A place weighs as much as its mass.

    Raises `QuickbeamError` for a loss that is not finite.
    """
    size, clusters = places.hidden.shape[1], int(cluster_of.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        router = Router(RouterConfig(size, size, recipe.width, clusters))
    cluster = cluster_of[places.likely.long()]
    mass = places.mass * (cluster >= 0)
    if recipe.residual:
        mass = mass * ~places.in_context
    total = mass.sum(1)
    useful = (~(total <= LEAST_MASS)).nonzero()[:, 0]  # NaN stays, and ends the training
    steps = max(1, recipe.epochs * -(-len(useful) // recipe.batch))
    optimizer = torch.optim.AdamW(router.parameters(), lr=recipe.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(recipe.seed)
    for epoch in range(recipe.epochs):
        order = useful[torch.randperm(len(useful), generator=generator)]
        for rows in torch.split(order, recipe.batch):
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
