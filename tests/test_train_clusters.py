"""The order of a vocabulary for a shortlist: frequent tokens, then balanced clusters.

pytest tests/test_train_clusters.py
"""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from quickbeam.drafters.shortlist.layout import FREQUENT
from quickbeam.errors import InvalidInput
from quickbeam.train import clusters

VOCAB, D, FREQUENT_ONES, SIZE = 300, 12, 40, 32


def vocabulary(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A head `[vocab, d]` and counts, many of them tied."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, D, generator=generator), torch.randint(
        0, 20, (VOCAB,), generator=generator
    )


def planted(groups: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows around `groups` directions that are far apart, of any length, in random order; and the
    group of each."""
    generator = torch.Generator().manual_seed(seed)
    group = (torch.arange(groups * size) % groups)[
        torch.randperm(groups * size, generator=generator)
    ]
    centres = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q[:groups]
    rows = centres[group] + 0.1 * torch.randn(len(group), D, generator=generator)
    return rows * (0.1 + 5 * torch.rand(len(group), 1, generator=generator)), group


def test_a_layout_holds_every_token_once_the_frequent_ones_first_and_clusters_of_one_size() -> None:
    weight, counts = vocabulary()
    layout = clusters.make_layout(weight, counts, FREQUENT_ONES, SIZE, seed=0)
    assert sorted(layout.order.tolist()) == list(range(VOCAB))
    expected = sorted(range(VOCAB), key=lambda token: (-int(counts[token]), token))
    assert (
        layout.order[:FREQUENT_ONES].tolist() == expected[:FREQUENT_ONES]
        and clusters.ranking(counts).tolist() == expected
    )
    sizes = [len(layout.tokens(i)) for i in range(layout.clusters)]
    assert sizes == [SIZE] * (len(sizes) - 1) + [(VOCAB - FREQUENT_ONES) % SIZE]
    assert all((layout.cluster_of[layout.tokens(i)] == i).all() for i in range(layout.clusters))
    assert (layout.cluster_of == FREQUENT).sum() == FREQUENT_ONES


def test_rows_that_point_the_same_way_land_together() -> None:
    rows, group = planted(6, SIZE)
    found = clusters.partition(rows, torch.arange(len(rows)), SIZE, seed=0)
    assert all(len(group[found == i].unique()) == 1 for i in range(6))
    layout = clusters.make_layout(
        torch.cat([rows, torch.randn(5, D)]), torch.arange(len(rows) + 5), 5, SIZE, seed=0
    )
    assert all(len(group[layout.tokens(i)].unique()) == 1 for i in range(6))


def test_a_layout_is_repeatable_by_its_seed() -> None:
    weight, counts = vocabulary()
    first, again, other = (
        clusters.make_layout(weight, counts, FREQUENT_ONES, SIZE, seed).order for seed in (3, 3, 4)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_small_products_give_the_same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, counts = vocabulary()
    whole = clusters.make_layout(weight, counts, FREQUENT_ONES, SIZE, seed=0)
    monkeypatch.setattr(clusters, "CHUNK", 7)
    assert torch.equal(
        whole.order, clusters.make_layout(weight, counts, FREQUENT_ONES, SIZE, seed=0).order
    )


def test_rounds_make_clusters_tighter() -> None:
    """Where the clusters that k-means finds are far from equal, as those of a real head are."""
    weight, _ = vocabulary()
    # half of them around one direction
    weight[: VOCAB // 2] = weight[0] + 0.4 * weight[: VOCAB // 2]
    tokens = torch.arange(VOCAB)

    def tightness(rounds: int) -> float:
        cluster = clusters.partition(weight, tokens, SIZE, 0, rounds)
        rows = clusters.directions(weight, tokens)
        means = torch.zeros(int(cluster.max()) + 1, D).index_add_(0, cluster, rows)
        return float((rows * torch.nn.functional.normalize(means, dim=1)[cluster]).sum(1).mean())

    assert tightness(10) > tightness(0) + 0.01


def test_every_row_gets_the_cluster_that_it_likes_where_there_is_room() -> None:
    scores = torch.eye(4).repeat(3, 1)
    assert clusters.balance(scores.clone(), 3).tolist() == scores.argmax(1).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_between_two_clusters_the_assignment_is_the_best_there_is(seed: int) -> None:
    scores = torch.rand(9, 2, generator=torch.Generator().manual_seed(seed))
    chosen = clusters.balance(scores.clone(), 5)
    assert torch.bincount(chosen).tolist() == [5, 4]
    ways = (
        [0 if i in first else 1 for i in range(9)] for first in itertools.combinations(range(9), 5)
    )
    best = max(float(scores.gather(1, torch.tensor(way)[:, None]).sum()) for way in ways)
    assert float(scores.gather(1, chosen[:, None]).sum()) == pytest.approx(best)


def test_many_equal_rows_are_dealt_out() -> None:
    """An unused tail of a vocabulary: rows of zeros and copies of one row, none of which occurs."""
    weight, counts = vocabulary()
    weight[100:200], counts[100:200] = 0.0, 0
    weight[200:], counts[200:] = weight[0], 0
    layout = clusters.make_layout(weight, counts, FREQUENT_ONES, SIZE, seed=0)
    assert sorted(layout.order.tolist()) == list(range(VOCAB))
    assert set(layout.order[:FREQUENT_ONES].tolist()) <= set(range(100))


def test_one_cluster_is_enough_for_what_fits_it() -> None:
    weight, counts = vocabulary()
    layout = clusters.make_layout(weight, counts, VOCAB - 5, SIZE, seed=0)
    assert layout.clusters == 1 and len(layout.tokens(0)) == 5


@pytest.mark.parametrize(
    ("frequent", "size", "said"),
    [(0, 8, "--listed 0"), (VOCAB, 8, f"1 to {VOCAB - 1}"), (8, 0, "--size 0")],
)
def test_sizes_that_leave_nothing_are_refused(frequent: int, size: int, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        clusters.make_layout(*vocabulary(), frequent, size, seed=0)


def test_a_missing_faiss_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InvalidInput, match=r"pip install 'quickbeam\[train\]'"):
        clusters.make_layout(*vocabulary(), FREQUENT_ONES, SIZE, seed=0)
