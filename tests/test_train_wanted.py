"""Places of text, clusters of tokens that are wanted in the same places, and their router.

pytest tests/test_train_wanted.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quickbeam.cli.app import app
from quickbeam.drafters.shortlist.artefact import Artefact
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import RouterConfig
from quickbeam.errors import InvalidInput
from quickbeam.train import places, wanted
from quickbeam.train.places import Places, collect_places
from quickbeam.train.wanted import (
    Clusters,
    Teaching,
    halved,
    label_features,
    of_router,
    roots,
    routed,
    score,
    teach,
)
from scripts import script
from test_train_router import HEAD, VOCAB, conversations, network, written
from test_train_shortlists import folder, made  # noqa: F401  (fixtures)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Places:
    shards = written(tmp_path_factory.mktemp("text"), conversations(40))
    return collect_places(network(), HEAD, shards, range(len(shards)), 2, 10**6, 0, True)


def test_places_are_those_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain walk over each conversation."""
    monkeypatch.setattr(places, "OFFERED", 2)
    text, net = conversations(5), network()
    shards = written(tmp_path, text)
    got = collect_places(net, HEAD, shards, range(5), 2, 10**6, 0, True)
    rows = {}
    for one in text:
        likely = (
            (one.hidden[:, -HEAD.shape[1] :] @ HEAD.T.bfloat16())
            .float()
            .argsort(dim=1, descending=True)
        )
        for at in range(len(one.tokens)):
            known = {*one.tokens[: at + 2].tolist(), *likely[at, :2].tolist()}
            for earlier in range(0, at + 1, places.STEP):
                if earlier + 1 < len(one.tokens) and one.answer[earlier + 1]:
                    known |= set(likely[earlier, :2].tolist())
            for depth in range(2):
                if at + 2 + depth < len(one.tokens) and one.answer[at + 2 + depth]:
                    wanted = int(likely[at + 1 + depth, 0])
                    rows[int(one.tokens[0]), len(one.tokens), at, depth] = (
                        int(one.tokens[at + 1 + depth]),
                        wanted,
                        wanted in known,
                    )
    assert len(got.tokens) == len(rows)
    told = zip(
        got.tokens.tolist(),
        got.depth.tolist(),
        got.wanted.tolist(),
        got.known.tolist(),
        strict=True,
    )
    expected = ((token, key[3], wanted, known) for key, (token, wanted, known) in rows.items())
    assert sorted(told) == sorted(expected) and 0.1 < float(got.known.float().mean()) < 0.95
    assert torch.allclose(got.mass.sum(1), torch.ones(len(got.tokens)), atol=0.1) and bool(
        (got.mass[:, 0] >= got.mass[:, 1]).all()
    )
    with torch.no_grad():
        assert (
            float(((got.feature.float() @ HEAD.T).argmax(1) == got.drafted).float().mean()) > 0.95
        )
    asked = roots(got)
    assert all(
        got.root[i] == got.root[int(r)] and (got.depth[int(r)] == 0 or int(r) == i)
        for i, r in enumerate(asked)
    )
    assert len(collect_places(net, HEAD, shards, range(5), 2, 7, 0, False).tokens) == 7


def test_neighbours_in_the_order_are_alike() -> None:
    torch.manual_seed(1)
    groups = torch.arange(90) % 3
    order = halved(torch.eye(8)[groups] + 0.01 * torch.randn(90, 8), least=5)
    assert torch.equal(order.sort().values, torch.arange(90))
    clusters = Clusters.cut(order + 7, 10, 100)
    assert clusters.count == 9 and torch.equal(
        torch.bincount(clusters.of.clamp(min=-1) + 1), torch.tensor([10] + [10] * 9)
    )
    pure = sum(len(groups[order[i : i + 10]].unique()) == 1 for i in range(0, 90, 10))
    assert pure >= 7


def test_a_router_finds_what_the_context_lacks(found: Places) -> None:
    net, rest = network(), torch.arange(5, VOCAB)
    features = label_features(net, HEAD, found)
    assert features.shape == (VOCAB, wanted.WIDE) and torch.allclose(
        features.norm(dim=1), torch.ones(VOCAB), atol=1e-4
    )
    clusters = Clusters.cut(rest[halved(features[rest], 4)], 4, VOCAB)
    how = Teaching(width=64, epochs=30, lr=5e-3, batch=64)
    lacked = (clusters.of[found.wanted] >= 0) & ~found.known
    shares = {}
    for name, teaching in (("taught", how), ("not", Teaching(width=64, epochs=1, lr=1e-9))):
        hit = routed(
            found, clusters, of_router(net, teach(net, found, clusters, teaching), found), 2
        )
        assert not bool(hit[clusters.of[found.wanted] < 0].any())
        shares[name] = float(hit[lacked].float().mean())
    assert shares["taught"] > shares["not"] + 0.2, shares
    everything = routed(
        found, clusters, of_router(net, teach(net, found, clusters, how), found), clusters.count
    )
    assert torch.equal(everything, clusters.of[found.wanted] >= 0)


def test_figures_are_shares_of_the_places() -> None:
    likely = torch.tensor([[1], [2], [3], [4]])
    near = torch.tensor([[True], [False], [False], [False]])
    empty = torch.empty(4)
    held = Places(
        empty, empty, empty, empty, likely, empty, near, empty, torch.tensor([1, 2, 0, 4])
    )
    got = score(
        held, torch.tensor([False, True, True, False]), torch.tensor([False, True, False, False])
    )
    assert got == pytest.approx((0.75, 0.5, 0.5, 0.5, 2 / 3))


def test_ways_to_choose_are_held_against_each_other(
    toy_folder: str,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The script: `benchmarks/recall.py`."""
    out = tmp_path / "r.json"
    given = ["--drafter", str(folder), "--model", toy_folder, "--train", "300", "--held", "200"]
    given += ["--rows", "51,128", "--listed", "20", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["recall.py", *given])
    script("recall").main()
    ways = json.loads(out.read_text())["ways"]
    names = {one["name"] for one in ways}
    assert {"frequency", "16 a cluster, wanted", "16 a cluster, wanted, root"} < names
    for one in ways:
        assert one["alone"] <= one["recall"] <= 1 and one["rows"] in (51, 128)
        assert one["rare_recall"] == 0 or one["name"] != "frequency"
    monkeypatch.setattr(sys, "argv", ["recall.py", *given, "--drafter", str(tmp_path)])
    with pytest.raises(InvalidInput, match="no shortlist"):
        script("recall").main()


class Elsewhere(torch.nn.Embedding):
    """Stands for an embedding on a GPU: it refuses ids until it is moved."""

    def __init__(self, plain: torch.nn.Module) -> None:
        assert isinstance(plain, torch.nn.Embedding)
        super().__init__(*plain.weight.shape, _weight=plain.weight.detach())
        self.away = False

    def cpu(self) -> Elsewhere:
        self.away = False
        return super().cpu()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert not self.away, "ids of another device"
        return super().forward(ids)


class ElsewhereHead(torch.Tensor):
    """Stands for a head on a GPU: it goes with no tensor until it is moved."""

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return super().cpu().as_subclass(torch.Tensor)

    def float(self) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("a tensor of another device")


def test_what_follows_the_text_runs_where_the_places_are(
    toy_folder: str,
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = wanted.WantedTraining(
        toy_folder, folder, 6, 8, 200, Teaching(width=16, epochs=1), depths=1
    )
    embedding = Elsewhere(stage.network.embedding)
    stage.network._shared["embedding"] = embedding
    collect = wanted.collect_places

    def on_a_gpu(*arguments: Any) -> Places:
        taken = collect(*arguments)
        embedding.away = True
        stage.head = stage.head.as_subclass(ElsewhereHead)
        return taken

    def collected(chosen: list[int], *rest: Any) -> Places:
        stage.to_cpu()  # as if the text were there, too
        return once(chosen, *rest)

    once = stage._collect
    monkeypatch.setattr(wanted, "collect_places", on_a_gpu)
    monkeypatch.setattr(stage, "_collect", collected)
    stage.run(lambda told, done: None)
    assert Artefact.load(folder).router is not None


def test_a_shortlist_is_made_in_one_go(toy_folder: str, folder: Path) -> None:  # noqa: F811
    arguments = [
        "train",
        "--only",
        "shortlist",
        "--out",
        str(folder),
        "--model",
        toy_folder,
        "--listed",
        "6",
        "--size",
        "8",
        "--depths",
        "2",
    ]
    said = CliRunner().invoke(
        app, [*arguments, "--rows", "400", "--router-epochs", "3", "--width", "32"]
    )
    assert said.exit_code == 0 and "held-out recall of 64 rows" in said.output, said.output
    made_one = Artefact.load(folder)
    layout = made_one.layout
    assert (layout.frequent, layout.size, len(layout.order), made_one.deepest) == (6, 8, 257, 5)
    assert torch.equal(layout.order[:6], made_one.ranking[:6])
    assert made_one.router is not None and made_one.router.config == RouterConfig(32, 32, 32, 32)
    card = (folder / "ROUTER.md").read_text()
    assert (
        "quickbeam train --only shortlist --rows 400 --listed 6 --size 8 --depths 2 "
        "--router-epochs 3 --width 32"
    ) in " ".join(card.split())
    assert "| 64 | " in card and set(
        json.loads((folder / "router.json").read_text())["held_out"]
    ) >= {"64"}
    bad = (
        (["--size", "12"], "--size 12: must be a multiple of 8"),
        (["--listed", "257"], "--listed 257: must be 1 to 256"),
    )
    for options, words in bad:
        refused = CliRunner().invoke(app, [*arguments, *options])
        assert refused.exit_code == 2 and words in " ".join(refused.output.split()), refused.output


def test_the_list_may_be_that_of_a_drafter_with_more_text(
    toy_folder: str,
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    ranking = torch.randperm(257, generator=torch.Generator().manual_seed(3))
    other, wrong = tmp_path / "other", tmp_path / "wrong"
    for where, of in ((other, ranking), (wrong, torch.arange(100))):
        where.mkdir()
        Artefact(Layout(of, 4, 8, len(of)), of, None).save(where)
    settings = toy_folder, folder, 6, 8, 200, Teaching(width=16, epochs=1), 1
    wanted.WantedTraining(*settings, other).run(lambda told, done: None)
    found = Artefact.load(folder)
    assert torch.equal(found.ranking, ranking) and torch.equal(found.layout.order[:6], ranking[:6])
    assert "--list-of other" in (folder / "ROUTER.md").read_text()
    with pytest.raises(InvalidInput, match="its shortlist is of 100 tokens"):
        wanted.WantedTraining(*settings, wrong)
