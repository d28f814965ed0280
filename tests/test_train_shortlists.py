"""The commands that make a drafter's shortlist: clusters and router.

pytest tests/test_train_shortlists.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quickbeam.cli.app import app
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.shortlist.artefact import Artefact
from quickbeam.drafters.shortlist.router import RouterConfig
from quickbeam.errors import InvalidInput
from quickbeam.train import router as training
from quickbeam.train import shortlists
from quickbeam.train.labels import Labeller, Rows
from quickbeam.train.router import RouterRecipe
from quickbeam.train.shards import Conversation, ShardWriter


@pytest.mark.parametrize(("vocab", "frequent"), [(49152, 4096), (262144, 22016), (257, 21), (8, 1)])
def test_a_twelfth_is_frequent(vocab: int, frequent: int) -> None:
    assert shortlists.default_frequent(vocab) == frequent


@pytest.fixture(scope="module")
def made(toy_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter's folder with clusters."""
    folder = tmp_path_factory.mktemp("drafter")
    (folder / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(60))
    )
    given = "--only drafter --tokens 1500 --length 64 --slots 8 --epochs 1 --batch 256"
    given += " --loss-vocab 128 --depths 1"
    run(folder, toy_folder, "--prompts", str(folder / "prompts.jsonl"), *given.split())
    shortlists.ClusterTraining(toy_folder, folder, 33, 16).run()
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "drafter"))


def run(folder: Path, model: str, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["train", "--out", str(folder), "--model", model, *arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


HEADS = ("--only", "shortlist", "--clusters", "heads")


def test_the_command_makes_a_shortlist(toy_folder: str, folder: Path) -> None:
    given = "--listed 33 --size 16 --rows 400 --router-epochs 3 --depths 2 --width 32"
    said = run(folder, toy_folder, *HEADS, *given.split())
    assert "the 33 frequent tokens are" in said and "14 clusters of 16" in said
    assert "needs at most" in said and "epoch 3 of 3" in said
    assert "held-out recall at depth 2" in said
    artefact = Artefact.load(folder)
    assert artefact.layout.frequent == 33 and artefact.layout.size == 16
    assert artefact.router is not None and artefact.router.config == RouterConfig(32, 32, 32, 14)
    record = json.loads((folder / "router.json").read_text())
    assert (
        record["rows"] == 400
        and record["held_out"]["choices"] == [0, 1, 2, 4, 8]
        and len(record["held_out"]["recall"]) == 2
    )
    card = (folder / "ROUTER.md").read_text()
    assert (
        f"quickbeam train --only shortlist --clusters heads --model {toy_folder} --rows 400 "
        "--router-epochs 3 --width 32 --depths 2"
    ) in card
    assert (
        "14 clusters of 16 tokens" in card
        and (f"| 2 | {record['held_out']['recall'][1][0]:.4f} |") in card
    )
    assert not list(folder.glob("*.part"))

    # a router over clusters that were there before goes
    shortlists.ClusterTraining(toy_folder, folder, size=32).run()
    assert Artefact.load(folder).router is None and Artefact.load(folder).layout.frequent == 21
    assert not (folder / "ROUTER.md").exists() and not (folder / "router.json").exists()


def test_nothing_held_out_is_trained_on(
    toy_folder: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[list[int], float]] = []
    plain = shortlists.collect

    def watched(net: Any, shards: Any, chosen: Any, labeller: Labeller, *rest: Any) -> Rows:
        taken.append((list(chosen), labeller.mix))
        return plain(net, shards, chosen, labeller, *rest)

    monkeypatch.setattr(shortlists, "collect", watched)
    stage = shortlists.RouterTraining(toy_folder, folder, RouterRecipe(rows=100, epochs=1))
    stage.run(lambda done: None, lambda epoch: None)
    (held, plainly), (train, mixed) = taken
    assert (plainly, mixed) == (0.0, 0.3) and held and not set(held) & set(train)
    assert sorted(held + train) == list(range(len(stage.shards)))
    texts = [stage.shards[i].tokens for i in train]
    assert (
        stage.counts().tolist()
        == torch.bincount(torch.cat(texts).long(), minlength=len(stage.head)).tolist()
    )


def test_an_interrupted_training_keeps_the_best_so_far(toy_folder: str, folder: Path) -> None:
    stage = shortlists.RouterTraining(toy_folder, folder, RouterRecipe(rows=200, epochs=50))

    def stop(epoch: training.Epoch) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage.run(lambda done: None, stop)
    assert Artefact.load(folder).router is not None
    assert "of 50 epochs" in (folder / "ROUTER.md").read_text()


def test_bad_input_to_the_commands(
    toy_folder: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: str) -> str:
        return run(folder, toy_folder, *HEADS, *arguments, code=2)

    assert "--listed 257" in told("--listed", "257")
    assert "fewer --rows" in told("--rows", str(10**12))
    config = json.loads((folder / "config.json").read_text())

    def configured(**changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | changes))

    configured(vocab_size=300)
    assert "give the --model that it was trained for" in told()
    configured()
    for shard in (folder / "text").glob("*.safetensors"):
        shard.unlink()
    writer = ShardWriter(folder / "text")
    writer.add(
        Conversation(
            torch.arange(9).int(),
            torch.ones(9, dtype=torch.bool),
            torch.zeros(9, 8).bfloat16(),
            0.0,
        )
    )
    writer.flush()
    assert "the text holds hidden states of 8" in told()
    monkeypatch.setattr(shortlists, "load_model", None)  # what follows is refused without the model
    network = EagleHead(
        EagleConfig(32, 64, 4, 2, 8, tuple(config["layers"]), 32, 257, draft_vocab_size=40)
    )
    network.save(folder)
    assert "a fixed shortlist" in told()
    (folder / "model.safetensors").unlink()
    assert "not a drafter" in told()
    with pytest.raises(InvalidInput, match="no clusters"):
        shortlists.RouterTraining(toy_folder, folder / "text", RouterRecipe())
    shutil.rmtree(folder / "text")
    assert "no text" in told()


@pytest.mark.parametrize(("vocab", "size"), [(151936, 512), (32768, 512), (257, 4), (8, 1)])
def test_small_vocabularies_have_small_clusters(vocab: int, size: int) -> None:
    assert shortlists.default_size(vocab) == size
