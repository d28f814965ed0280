"""What shortlists keep and save, as tables, JSON and a plot; the latency of heads alone.

pytest tests/test_bench_vocabulary.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from features import WIDE
from quickbeam.bench.heads import measure
from quickbeam.bench.methods import MethodItem
from quickbeam.bench.summary import Summary
from quickbeam.bench.vocabulary import FULL, items, kept
from quickbeam.cli.app import app
from quickbeam.draft.eagle_model import EagleHead
from test_vocabulary import artefact


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drafter")
    torch.manual_seed(5)
    EagleHead(replace(WIDE, layers=(1, 2, 3), vocab_size=257)).save(folder, torch.float32)
    artefact(257, 32, frequent=10, cluster=4).save(folder)
    return str(folder)


def summary(mat: float, head: float, calls: float, rate: float, tokens: float, recall: float | None) -> Summary:
    return Summary(1, 10, 1.0, rate, 1.0, mat, 1, 1.0, 1.0, 1.0, calls, 1.0, head, tokens, recall)


def test_figures_are_shares_of_the_full_vocabularys() -> None:
    rows = {FULL: summary(2.5, 8.0, 4.0, 50.0, 1000.0, None), "router@100": summary(2.4, 3.0, 5.0, 60.0, 120.0, 0.9)}
    asked = [MethodItem(FULL, "dyspec", None, FULL), MethodItem("router@100", "dyspec", None, "router", 100)]
    full, short = kept(rows, asked, 1000)
    assert (full.mat_kept, full.head_ratio, full.speedup, full.share, full.recall) == (1.0, 1.0, 1.0, 1.0, None)
    assert (short.asked, short.share, short.mat, short.recall) == (100, 0.12, 2.4, 0.9)
    assert (short.mat_kept, short.head_ms, short.head_ratio, short.speedup) == pytest.approx((0.96, 0.6, 0.3, 1.2))


def test_every_size_is_asked_of_every_vocabulary_but_the_context() -> None:
    asked = items("dyspec", 8, ["frequency", "context", "router"], [10, 20])
    assert [(item.name, item.vocab, item.shortlist) for item in asked] == [
        ("full", "full", None),
        ("frequency@10", "frequency", 10),
        ("frequency@20", "frequency", 20),
        ("context", "context", None),
        ("router@10", "router", 10),
        ("router@20", "router", 20),
    ]
    assert {(item.method, item.budget) for item in asked} == {("dyspec", 8)}


def test_command_tells_what_is_kept(toy_folder: str, drafter: str, tmp_path: Path) -> None:
    arguments = [
        "bench",
        "vocabulary",
        "--model",
        toy_folder,
        "--drafter",
        drafter,
        "--limit",
        "2",
        "--max-tokens",
        "12",
        "--overlap",
        "thread",
    ]
    files = ["--json", str(tmp_path / "v.json"), "--plot", str(tmp_path / "v.png")]
    result = CliRunner().invoke(app, [*arguments, "--shares", "20,60", *files])
    assert result.exit_code == 0, result.output
    assert "kept, by category" in result.stdout and "all questions, 257 tokens" in result.stdout
    record = json.loads((tmp_path / "v.json").read_text())
    found = {(one["vocab"], one["asked"]): one for one in record["overall"]}
    assert set(found) == {("full", None), ("context", None)} | {(v, s) for v in ("frequency", "clusters", "router") for s in (51, 154)}
    assert found["full", None]["tokens"] == 257 and found["frequency", 51]["tokens"] == 51 and found["full", None]["mat_kept"] == 1
    assert 10 < found["clusters", 51]["tokens"] < found["clusters", 154]["tokens"] < 257
    assert found["router", 51]["tokens"] > found["clusters", 51]["tokens"]  # those of the context
    assert all(row["identical"] == row["prompts"] for row in record["methods"].values())
    assert record["settings"]["overlap"] == "thread" and (tmp_path / "v.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vocabs", "half"], "--vocabs 'half': must be of frequency"),
        (["--vocabs", "full"], "must be of frequency"),
        (["--shares", "0"], "--shares '0'"),
        (["--shares", "few"], "--shares 'few'"),
        (["--method", "pld"], "pld has no drafter"),
        (["--overlap", "often"], "unknown overlap 'often'"),
        (["--overlap", "stream", "--device", "cpu"], "needs CUDA"),
        (["--shares", "1", "--vocabs", "router"], "must be at least 4, a cluster's"),
    ],
)
def test_bad_input_is_refused(toy_folder: str, drafter: str, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "vocabulary", "--model", toy_folder, "--drafter", drafter, *options])
    assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output


def test_heads_are_timed_at_every_size() -> None:
    found = measure(24_576, 16, [1, 3], [0.06, 0.25], torch.bfloat16, torch.device("cpu"), repeats=2)
    assert [(one.rows, one.share) for one in found] == [(1, 0.06), (1, 0.25), (3, 0.06), (3, 0.25)]
    assert [one.tokens for one in found] == [1536, 6144, 1536, 6144]
    for one in found:
        assert min(one.full_ms, one.head_ms, one.router_ms) > 0 and one.ratio == (one.head_ms + one.router_ms) / one.full_ms


def test_heads_command() -> None:
    arguments = ["bench", "heads", "--shapes", "2048x16", "--rows", "2", "--shares", "50", "--repeats", "1"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and "2048x16" in shown.stdout
    record = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [(one["vocab"], one["d"], one["rows"]) for one in record["heads"]] == [(2048, 16, 2)]
    for options in (["--shapes", "2048"], ["--shapes", "10x10"], ["--rows", "0"], ["--shares", "200"]):
        assert CliRunner().invoke(app, ["bench", "heads", *options]).exit_code == 2
