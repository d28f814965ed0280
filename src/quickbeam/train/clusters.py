"""The order of a vocabulary for a shortlisted head.

Frequent tokens come first, then clusters of equal size. The tokens of a cluster have similar rows
of the head.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.errors import InvalidInput

ITERATIONS = 20  # of k-means
SAMPLE = 256  # rows per cluster that k-means looks at
# See `make_layout`. Clusters that k-means finds in a head are far from equal in size, and the first
# balanced assignment tears them apart.
ROUNDS = 20
CHUNK = 8192  # rows of a product


def ranking(counts: torch.Tensor) -> torch.Tensor:
    """Return the token ids by falling count, ties by id.

    `counts` `[vocab]` gives `[vocab]` int64 on the CPU.
    """
    return counts.argsort(descending=True, stable=True).cpu()


def make_layout(
    weight: torch.Tensor,
    counts: torch.Tensor,
    frequent: int,
    size: int,
    seed: int,
    rounds: int = ROUNDS,
) -> Layout:
    """Return a layout of frequent tokens and balanced clusters.

    The `frequent` tokens of the highest counts come first. The rest is in clusters of `size` tokens
    whose rows of the head point the same way (DynaSpec, 2510.13847: spherical k-means). The last
    cluster is what is left over.

    `weight` `[vocab, d]`: the head. `counts` `[vocab]`. The same seed gives the same layout on the
    same machine. `rounds`: how often at most the centroids of the balanced clusters are computed
    and tokens are assigned anew to those, balanced again.

    Raises `InvalidInput` for sizes that leave nothing to cluster, and if faiss is missing.
    """
    vocab = len(weight)
    if not 1 <= frequent < vocab:
        raise InvalidInput(
            f"--listed {frequent}: must be 1 to {vocab - 1}, as the vocabulary has {vocab} tokens"
        )
    if size < 1:
        raise InvalidInput(f"--size {size}: must be at least 1")
    ranked = ranking(counts)
    rest = ranked[frequent:].sort().values
    cluster = partition(weight, rest, size, seed, rounds)
    return Layout(
        torch.cat([ranked[:frequent], rest[cluster.argsort(stable=True)]]), frequent, size, vocab
    )


def partition(
    weight: torch.Tensor, tokens: torch.Tensor, size: int, seed: int, rounds: int = ROUNDS
) -> torch.Tensor:
    """Return the cluster of each of `tokens` `[n]`, `[n]` int64.

    Clusters have `size` tokens, the last one what is left over. It takes `4 * n / size` bytes of
    memory per token, and the rows that k-means looks at in float32.
    """
    count = -(-len(tokens) // size)
    if count == 1:
        return torch.zeros(len(tokens), dtype=torch.int64)
    centroids = _kmeans(weight, tokens, count, seed)
    cluster = balance(similarity(weight, tokens, centroids), size)
    for _ in range(rounds):
        centroids.zero_()
        for part in torch.split(torch.arange(len(tokens)), CHUNK):
            centroids.index_add_(0, cluster[part], directions(weight, tokens[part]))
        before, cluster = (
            cluster,
            balance(similarity(weight, tokens, F.normalize(centroids, dim=1)), size),
        )
        if torch.equal(before, cluster):
            break
    return cluster


def directions(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the head's rows of `tokens`, scaled to length 1: `[n, d]` float32 on the CPU."""
    return F.normalize(weight[tokens.to(weight.device)].float().cpu(), dim=1)


def similarity(weight: torch.Tensor, tokens: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return the cosines of the tokens' rows and the centroids, `[n, clusters]` float32.

    The column that is the best one of the fewest rows changes places with the last one, because the
    last cluster may be a short one.
    """
    scores = torch.empty(len(tokens), len(centroids))
    for part in torch.split(torch.arange(len(tokens)), CHUNK):
        scores[part[0] : part[-1] + 1] = directions(weight, tokens[part]) @ centroids.T
    least = int(torch.bincount(scores.argmax(1), minlength=len(centroids)).argmin())
    last = scores[:, -1].clone()
    scores[:, -1] = scores[:, least]
    scores[:, least] = last
    return scores


def balance(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Return a cluster for every row of `scores` `[n, clusters]`, `[n]` int64.

    Clusters have `size` rows, the last one what is left over. `scores` is overwritten.

    The assignment goes in rounds. Every row without a cluster asks for the best cluster that has
    room. A cluster that is asked by more rows than it has room for takes those that would lose the
    most with their next best cluster. The others ask again. A round fills a cluster or is the last,
    so there are at most as many rounds as clusters.
    """
    n, count = scores.shape
    room = torch.full((count,), size)
    room[-1] = n - (count - 1) * size
    place = torch.full((n,), -1)
    left = torch.arange(n)
    while len(left):
        best, gain = _wishes(scores, left)
        order = gain.argsort(descending=True, stable=True)
        order = order[best[order].argsort(stable=True)]
        rows, best = left[order], best[order]  # by cluster, those with most to lose first
        asked = torch.bincount(best, minlength=count)
        taken = torch.arange(len(rows)) - (asked.cumsum(0) - asked)[best] < room[best]
        place[rows[taken]] = best[taken]
        left = rows[~taken].sort().values
        scores[:, asked >= room] = float("-inf")
        room -= torch.minimum(asked, room)
    return place


def _wishes(scores: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best column of each of `rows`, and by how much it is better than the next best."""
    if scores.shape[1] == 1:
        return torch.zeros_like(rows), torch.zeros(len(rows))
    found = [scores[part].topk(2, 1) for part in torch.split(rows, CHUNK)]
    values = torch.cat([part.values for part in found])
    return torch.cat([part.indices[:, 0] for part in found]), values[:, 0] - values[:, 1]


def _kmeans(weight: torch.Tensor, tokens: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Return centroids of length 1, `[count, d]`."""
    drawn = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))[
        : count * SAMPLE
    ]
    rows = directions(weight, tokens[drawn])
    kmeans = _faiss().Kmeans(
        rows.shape[1], count, niter=ITERATIONS, spherical=True, seed=seed, min_points_per_centroid=1
    )
    kmeans.train(rows.numpy())
    return torch.from_numpy(kmeans.centroids).clone()


def _faiss() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its bindings raise one at import
            import faiss
    except ImportError as error:
        raise InvalidInput(
            f"clusters need faiss ({error}): pip install 'quickbeam[train]'"
        ) from error
    return faiss
