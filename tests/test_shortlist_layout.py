"""The order of the vocabulary, the router, and the folder that keeps them."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cases import examples, refuses
from quickbeam.drafters.shortlist.layout import ABSENT, FREQUENT, Layout
from quickbeam.drafters.shortlist.router import EPS, Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Artefact

VOCAB = 40


def shuffled(size, seed=0):
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def some_router(clusters):
    torch.manual_seed(3)
    return Router(RouterConfig(hidden_size=6, embed_size=4, width=8, clusters=clusters))


@pytest.fixture
def artefact():
    layout = Layout(shuffled(VOCAB), 10, 7, VOCAB)
    return Artefact(layout, shuffled(VOCAB, 1), some_router(layout.clusters))


def cluster_of(layout, cluster):
    return layout.scored(torch.tensor([cluster]))[layout.frequent :]


@examples(100, derandomize=True)
@given(st.integers(1, 50), st.data(), st.integers(1, 20))
def test_every_token_of_the_order_is_frequent_or_in_one_cluster(vocab, data, size):
    order = shuffled(vocab)[: data.draw(st.integers(0, vocab))]
    layout = Layout(order, data.draw(st.integers(0, len(order))), size, vocab)
    parts = [cluster_of(layout, cluster) for cluster in range(layout.clusters)]
    parts.insert(0, layout.scored(torch.empty(0, dtype=torch.int64)))
    assert torch.equal(torch.cat(parts), order)
    assert all(len(part) == size for part in parts[1:-1])
    assert all(1 <= len(part) <= size for part in parts[1:])
    at = {int(token): cluster for cluster, part in enumerate(parts, FREQUENT) for token in part}
    assert layout.cluster_of.tolist() == [at.get(token, ABSENT) for token in range(vocab)]


def test_an_impossible_layout_is_refused():
    for order, frequent, size, vocab, says in (
        (torch.tensor([1, 2, 1]), 1, 2, 4, "token 1 more than once"),
        (torch.tensor([1, 4]), 1, 2, 4, "token 4: must be ids from 0 to 3"),
        (torch.tensor([-1, 2]), 1, 2, 4, "token -1"),
        (torch.tensor([1, 2], dtype=torch.int32), 1, 2, 4, "int64"),
        (torch.tensor([[1, 2]]), 1, 2, 4, "int64"),
        (torch.tensor([1, 2]), 3, 2, 4, "3 frequent ones"),
        (torch.tensor([1, 2]), -1, 2, 4, "-1 frequent ones"),
        (torch.tensor([1, 2]), 1, 0, 4, "clusters of 0"),
    ):
        refuses(says, Layout, order, frequent, size, vocab)
    ranking = shuffled(VOCAB)
    layout = Layout.by_frequency(ranking, 6, VOCAB)
    assert (layout.order.tolist(), layout.frequent, layout.clusters) == (ranking[:6].tolist(), 6, 0)
    assert Layout.by_frequency(ranking, 999, VOCAB).frequent == VOCAB
    assert Layout.nothing(VOCAB).cluster_of.tolist() == [ABSENT] * VOCAB
    refuses("clusters of 0", Layout.by_frequency, ranking, 0, VOCAB)


def test_a_router_scores_clusters_from_two_normed_inputs():
    router, (hidden, embedded) = some_router(5), (torch.randn(2, 3, 6), torch.randn(2, 3, 4))
    normed = [x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() for x in (hidden, embedded)]
    up = torch.cat(normed, -1) @ router.up.weight.T + router.up.bias
    expected = (up * torch.sigmoid(up)) @ router.down.weight.T + router.down.bias
    torch.testing.assert_close(router(hidden, embedded), expected)
    torch.testing.assert_close(router(100 * hidden, embedded / 7), expected, rtol=1e-4, atol=1e-4)
    assert router.bfloat16()(hidden.bfloat16(), embedded.bfloat16()).dtype is torch.float32


@pytest.mark.parametrize("routed", [True, False])
def test_an_artefact_comes_back_as_it_was_saved(artefact, tmp_path, routed):
    folder = tmp_path / "new" / "folder"
    assert not Artefact.exists(folder)
    before = artefact if routed else Artefact(artefact.layout, artefact.ranking)
    before.save(folder)
    assert Artefact.exists(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["shortlist.json", "shortlist.safetensors"]
    state = torch.get_rng_state()
    after = Artefact.load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(after.layout.order, before.layout.order)
    assert torch.equal(after.ranking, before.ranking)
    for field in ("frequent", "size", "vocab", "clusters"):
        assert getattr(after.layout, field) == getattr(before.layout, field)
    if not routed:
        assert after.router is None
        return
    assert after.router is not None and before.router is not None
    assert after.router.config == before.router.config and not after.router.training
    for name, tensor in before.router.state_dict().items():
        stored = after.router.state_dict()[name]
        assert stored.dtype is torch.float32 and torch.equal(stored, tensor.bfloat16().float())


@pytest.mark.parametrize("name", ["shortlist.json", "shortlist.safetensors"])
def test_a_missing_or_broken_file_is_named(artefact, tmp_path, name):
    artefact.save(tmp_path)
    (tmp_path / name).write_bytes(b'{"frequent": 1')
    refuses("holds no whole shortlist", Artefact.load, tmp_path)
    (tmp_path / name).unlink()
    assert not Artefact.exists(tmp_path)
    refuses(name, Artefact.load, tmp_path)


def test_fields_that_do_not_fit_are_refused(artefact, tmp_path):
    artefact.save(tmp_path)
    path = tmp_path / "shortlist.json"
    record = json.loads(path.read_text())
    for change, says in (
        ({"frequent": None}, "holds no whole shortlist.*NoneType"),
        ({"frequent": 99}, "99 frequent ones"),
        ({"vocab": 30}, "must be ids from 0 to 29"),
        ({"vocab": 41}, "41 tokens, .* a ranking of 40"),
        ({"size": 8}, "4 clusters .* a router of 5"),
        ({"router": {"width": 8}}, "holds no whole shortlist"),
        ({"router": 3}, "holds no whole shortlist"),
        ({"router": dict(hidden_size=6, embed_size=4, width=9, clusters=5)}, "size mismatch"),
    ):
        path.write_text(json.dumps(record | change))
        refuses(says, Artefact.load, tmp_path)
    path.write_text("[1]")
    refuses("holds no whole shortlist", Artefact.load, tmp_path)


def test_tensors_that_do_not_fit_are_refused(artefact, tmp_path):
    artefact.save(tmp_path)
    path = tmp_path / "shortlist.safetensors"
    whole = load_file(path)
    repeats = whole["order"].clone()
    repeats[0] = repeats[1]
    for name, tensor, says in [
        ("order", repeats, "order names token .* more than once"),
        ("ranking", whole["ranking"][:-1].clone(), "a ranking of 39"),
        ("router.up.bias", torch.zeros(3), "size mismatch for up.bias"),
        ("order", None, "holds no whole shortlist.*order"),
        ("router.down.weight", None, "down.weight"),
    ]:
        changed = whole | {name: tensor}
        save_file({key: value for key, value in changed.items() if value is not None}, path)
        refuses(says, Artefact.load, tmp_path)


def test_a_save_that_fails_leaves_the_last_one(artefact, tmp_path, monkeypatch):
    artefact.save(tmp_path)

    def full_disk(tensors, path):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("quickbeam.drafters.folder.save_file", full_disk)
    other = Artefact(Layout.by_frequency(artefact.ranking, 3, VOCAB), artefact.ranking)
    refuses("no space", other.save, tmp_path, error=OSError)
    assert torch.equal(Artefact.load(tmp_path).layout.order, artefact.layout.order)


def test_a_small_shortlist_cuts_the_frequent_block_and_keeps_the_clusters():
    layout = Layout(torch.randperm(40, generator=torch.Generator().manual_seed(0)), 12, 5, 40)
    assert layout.within(17)[0] is layout and layout.within(400)[0] is layout
    small, chosen = layout.within(9)
    assert chosen == 1
    assert (small.frequent, small.size, small.clusters) == (4, 5, layout.clusters)
    assert torch.equal(small.order[:4], layout.order[:4])
    for i in range(layout.clusters):
        assert torch.equal(cluster_of(small, i), cluster_of(layout, i))
    assert small.cluster_of[layout.order[4:12]].eq(ABSENT).all()
    assert layout.within(5)[0].frequent == 0
    refuses("at least 5, a cluster's", layout.within, 4)
