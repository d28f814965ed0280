"""Clusters of a vocabulary: an order of tokens in which neighbours are alike.

What is alike is a parameter, `CLUSTERINGS`: tokens with similar rows of the head (DynaSpec,
2510.13847: spherical k-means), or tokens that follow in the same places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.shortlist.native import normed
from quickbeam.train.places import Places

ROUNDS = 4  # of 2-means
FEATURES = 192  # width of a token's features, in `pifa`
LABELS = 8  # likeliest tokens of a place that `pifa` counts
LEAST_MASS = 0.05  # a token with less mass in all places has its features predicted from its row
CHUNK = 1024  # places at once


def ranking(counts: torch.Tensor) -> torch.Tensor:
    """Return the token ids by falling count, ties by id.

    `counts` `[vocab]` gives `[vocab]` int64 on the CPU.
    """
    return counts.argsort(descending=True, stable=True).cpu()


@torch.no_grad()
def halve(features: torch.Tensor, size: int, seed: int = 0) -> torch.Tensor:
    """Return an order of the rows of `features` `[n, d]` in which neighbours are alike: `[n]`.

    Rows are halved by balanced spherical 2-means again and again (Parabel, XR-Transformer), down to
    parts of `size` rows; the last one may have fewer. So the order can be cut into clusters of
    `size`. The same seed gives the same order on the same machine.
    """
    generator = torch.Generator().manual_seed(seed)
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
    seen, rows = weight > LEAST_MASS, F.normalize(head.float(), dim=1)
    features = F.normalize(total, dim=1)
    a = rows[seen]
    ridge = 0.1 * len(a) / a.shape[1] * torch.eye(a.shape[1])
    features[~seen] = F.normalize(
        rows[~seen] @ torch.linalg.solve(a.T @ a + ridge, a.T @ features[seen]), dim=1
    )
    return features


def head_rows(network: EagleHead, head: torch.Tensor, places: Places) -> torch.Tensor:
    """Return the rows of the head, `[vocab, d]` float32: DynaSpec's features of tokens."""
    return head.float()


CLUSTERINGS: dict[str, Callable[[EagleHead, torch.Tensor, Places], torch.Tensor]] = {
    "pifa": pifa,
    "kmeans": head_rows,
}
"""By the name on the command line: the features that make tokens alike."""
