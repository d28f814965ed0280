"""Trains a router.

A router predicts which clusters of the vocabulary a row of the drafter needs, before the drafter's
layer has run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quickbeam.drafters.shortlist.layout import FREQUENT
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.train.labels import Rows

CHOICES = (0, 1, 2, 4, 8, 16, 32)  # numbers of clusters that reports are about
CHUNK = 4096  # rows of a pass without gradients

Embed = Callable[[torch.Tensor], torch.Tensor]
"""`[n]` token ids to `[n, embed_size]`."""


@dataclass(frozen=True)
class RouterRecipe:
    """How a router is trained.

    It learns from `rows` rows at `depths` draft depths, `epochs` times, in steps of `batch` rows.
    AdamW is used with `weight_decay` and a learning rate that falls from `lr` to zero as a cosine.
    `width`: of the router's hidden layer. `mix`: see `Labeller`.

    Raises `InvalidInput` for values out of range.
    """

    rows: int = 200_000
    epochs: int = 6
    width: int = 256
    lr: float = 1e-3
    batch: int = 512
    depths: int = 3
    mix: float = 0.3
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "epochs", "width", "batch", "depths"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"--{name} {getattr(self, name)}: must be at least 1")
        if not (0 <= self.mix <= 1 and self.lr > 0 and self.weight_decay >= 0):
            raise InvalidInput(
                f"mix {self.mix}, lr {self.lr}, weight decay {self.weight_decay}: "
                "want 0 to 1, above 0, at least 0"
            )

    def rate(self, done: float) -> float:
        """Return the learning rate if `done` (0 to 1) of the run is over."""
        return self.lr * (1 + math.cos(math.pi * done)) / 2


class RouterReport(NamedTuple):
    """Figures on held-out answers, by depth and then by number of clusters chosen.

    `choices`: the numbers of clusters; 0 is the frequent block alone. `recall`: how often the
    target's likeliest token is among the tokens scored. `covered`: the mean mass of the tokens
    scored in the target's distribution. `rows`: how many there are, by depth. `loss`: see
    `loss_of`, over all depths together.
    """

    choices: list[int]
    recall: list[list[float]]
    covered: list[list[float]]
    rows: list[int]
    loss: float


class Epoch(NamedTuple):
    """What one epoch gave.

    `loss`: the mean over the epoch. `held`: figures after it. `router`: a copy of the best router
    so far. `better`: whether that is this epoch's.
    """

    number: int
    loss: float
    held: RouterReport
    router: Router
    better: bool


def loss_of(logits: torch.Tensor, masses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss summed over rows, and the sum of the rows' weights.

    A row's loss is the cross-entropy, in nats, of softmax(`logits`) with the normalised `masses`,
    both `[n, clusters]`. Its weight is the sum of its masses.
    """
    return -(masses * logits.log_softmax(-1)).sum(), masses.sum()


def train_router(
    embed: Embed, rows: Rows, held: Rows, recipe: RouterRecipe, device: torch.device
) -> Iterator[Epoch]:
    """Train on `rows` and yield an `Epoch` after each epoch.

    The router that is kept is the one with the least loss on `held`, whose labels must be those of
    the target's distribution alone. Raises `QuickbeamError` for a loss that is not finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        clusters, embed_size = (
            rows.masses.shape[1],
            embed(rows.tokens[:1].long().to(device)).shape[1],
        )
        router = Router(RouterConfig(rows.hidden.shape[1], embed_size, recipe.width, clusters)).to(
            device
        )
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(
        router.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay
    )
    best, least = router, float("inf")
    steps = -(-len(rows.tokens) // recipe.batch)
    for epoch in range(recipe.epochs):
        router.train()
        total = weight = 0.0
        for i, part in enumerate(
            torch.split(torch.randperm(len(rows.tokens), generator=generator), recipe.batch)
        ):
            optimizer.param_groups[0]["lr"] = recipe.rate(
                (epoch * steps + i) / (recipe.epochs * steps)
            )
            chosen = rows.take(part)
            loss, mass = loss_of(
                _scores(router, embed, chosen, device), chosen.masses.to(device).float()
            )
            (loss / mass.clamp(min=1e-6)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total, weight = total + float(loss.detach()), weight + float(mass)
        found = evaluate(router, embed, held, recipe.depths, device)
        if not math.isfinite(total + found.loss):
            raise QuickbeamError(
                f"the router's loss is {total} in epoch {epoch + 1}: the text's hidden states or "
                "the drafter are not finite"
            )
        if better := found.loss < least:
            best, least = copy.deepcopy(router).eval(), found.loss
        yield Epoch(epoch + 1, total / max(weight, 1e-6), found, best, better)


@torch.no_grad()
def evaluate(
    router: Router, embed: Embed, rows: Rows, depths: int, device: torch.device
) -> RouterReport:
    """Measure what the router finds. `rows`: with labels of the target's distribution alone."""
    clusters = rows.masses.shape[1]
    choices = [k for k in CHOICES if k <= clusters]
    recall, covered = torch.zeros(depths, len(choices)), torch.zeros(depths, len(choices))
    count = torch.zeros(depths)
    loss = weight = 0.0
    router.eval()
    for part in torch.split(torch.arange(len(rows.tokens)), CHUNK):
        chosen = rows.take(part)
        scores, masses = _scores(router, embed, chosen, device).cpu(), chosen.masses.float()
        step, mass = loss_of(scores, masses)
        loss, weight = loss + float(step), weight + float(mass)
        order = scores.argsort(-1, descending=True)
        held = torch.cat([chosen.common[:, None], masses.gather(1, order)], 1).cumsum(1)[:, choices]
        # the place of the likeliest token's cluster, from 1
        rank = (order == chosen.best[:, None]).int().argmax(1) + 1
        known = chosen.best >= 0
        found = (chosen.best == FREQUENT)[:, None] | (
            known[:, None] & (rank[:, None] <= torch.tensor(choices))
        )
        depth = chosen.depth.long()
        recall.index_add_(0, depth, found.float())
        covered.index_add_(0, depth, held)
        count += torch.bincount(depth, minlength=depths)
    recall, covered = (total / count.clamp(min=1)[:, None] for total in (recall, covered))
    return RouterReport(
        choices, recall.tolist(), covered.tolist(), count.int().tolist(), loss / max(weight, 1e-6)
    )


def _scores(router: Router, embed: Embed, rows: Rows, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        embedded = embed(rows.tokens.to(device).long())
    return router(rows.hidden.to(device), embedded)  # type: ignore[no-any-return]
