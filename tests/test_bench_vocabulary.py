"""What shortlists keep and save, as tables, JSON and a plot; the latency of heads alone.

pytest tests/test_bench_vocabulary.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from features import WIDE
from quickbeam.bench.base import Answer
from quickbeam.bench.heads import measure
from quickbeam.bench.questions import Question
from quickbeam.bench.run import Trial
from quickbeam.bench.vocabulary import items, points
from quickbeam.cli.app import app
from quickbeam.draft.base import DEPTHS, HeadUse
from quickbeam.draft.eagle_model import EagleHead
from quickbeam.presets import FULL
from test_vocabulary import artefact


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drafter")
    torch.manual_seed(5)
    EagleHead(replace(WIDE, layers=(1, 2, 3), vocab_size=257)).save(folder, torch.float32)
    artefact(257, 32, frequent=10, cluster=4).save(folder)
    return str(folder)


def trial(number: int, answers: dict[str, tuple[int, int, list[int], list[int]]]) -> Trial:
    """Answers by name: tokens, steps, and of the tokens wanted and scored that only a router finds,
    those of the first depths."""
    made = {}
    for name, (decoded, steps, rare, held) in answers.items():
        pad = [0] * (DEPTHS - len(rare))
        head = HeadUse(
            steps, 100 * steps, 0.001 * steps, decoded, decoded - 1, rare + pad, held + pad
        )
        made[name] = Answer([1], "", decoded, steps, 1.0, 0.5, 0.5, 2 * steps, 0.4, head)
    return Trial(Question(number, "writing", ["?"]), 0, made)


def test_figures_are_shares_of_the_full_vocabularys_with_errors_over_questions() -> None:
    asked = items("dyspec", None, ["frequency", "router"], [100])
    numbers = [
        {"full": (30, 10), "frequency@100": (30, 12), "router@100": (30, 11)},
        {"full": (40, 20), "frequency@100": (40, 21), "router@100": (40, 21)},
    ]
    numbers += [{"full": (33, 11), "frequency@100": (33, 11), "router@100": (33, 12)}]
    trials = [
        trial(i, {name: (*pair, [2, 1], [1, 0]) for name, pair in one.items()})
        for i, one in enumerate(numbers)
    ]
    full, frequency, router = points(trials, asked, 1000)
    assert (full.kept, full.kept_error, full.gap, full.head_ratio, full.speedup) == (
        1.0,
        0.0,
        None,
        1.0,
        1.0,
    )
    assert (frequency.asked, frequency.scored, frequency.share, frequency.mat) == (
        100,
        100,
        0.1,
        103 / 44,
    )
    assert (frequency.kept, frequency.gap) == (
        pytest.approx(41 / 44),
        None,
    ) and router.gap == pytest.approx(0.0)
    assert (
        router.rare,
        router.rare_recall,
        router.rare_by_depth[:3],
        router.rare_held_by_depth[:3],
    ) == (9, 1 / 3, [6, 3, 0], [3, 0, 0])

    def kept(chosen: list[int], name: str) -> float:
        steps = [sum(numbers[i][one][1] for i in chosen) for one in (FULL, name)]
        return steps[0] / steps[1]

    whole = [0, 1, 2]  # the jackknife, to which the delta method is close
    for one, of in (
        (frequency, lambda c: kept(c, "frequency@100")),
        (router, lambda c: kept(c, "router@100")),
    ):
        left = [of([i for i in whole if i != out]) for out in whole]
        middle = sum(left) / 3
        assert one.kept_error == pytest.approx(
            sqrt(2 / 3 * sum((x - middle) ** 2 for x in left)), rel=0.25
        )
    left = [
        kept([i for i in whole if i != out], "router@100")
        - kept([i for i in whole if i != out], "frequency@100")
        for out in whole
    ]
    assert router.gap_error == pytest.approx(
        sqrt(2 / 3 * sum((x - sum(left) / 3) ** 2 for x in left)), rel=0.25
    )
    assert points(trials[:1], asked, 1000)[1].kept_error is None


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
    found = {(one["vocab"], one["asked"]): one for one in record["points"]}
    sized = ("frequency", "frequency+context", "clusters", "router")
    assert set(found) == {("full", None), ("context", None)} | {
        (vocab, size) for vocab in sized for size in (51, 154)
    }
    assert (
        found["full", None]["scored"] == 257
        and found["frequency", 51]["scored"] == 51
        and found["full", None]["kept"] == 1
    )
    assert 10 < found["clusters", 51]["scored"] < found["clusters", 154]["scored"] < 257
    for alone, both in (("clusters", "router"), ("frequency", "frequency+context")):
        assert found[both, 51]["scored"] > found[alone, 51]["scored"]  # those of the context
        assert found[both, 51]["rare"] < found[alone, 51]["rare"]
    assert found["frequency", 51]["rare_recall"] == 0 < found["clusters", 154]["rare_recall"]
    assert {
        "vocab",
        "asked",
        "scored",
        "share",
        "mat",
        "kept",
        "recall",
        "head_ms",
        "speedup",
    } < set(found["router", 51])
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
def test_bad_input_is_refused(
    toy_folder: str, drafter: str, options: list[str], words: str
) -> None:
    result = CliRunner().invoke(
        app, ["bench", "vocabulary", "--model", toy_folder, "--drafter", drafter, *options]
    )
    assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output


def test_heads_are_timed_at_every_size() -> None:
    found = measure(
        24_576, 16, [1, 3], [0.06, 0.25], torch.bfloat16, torch.device("cpu"), repeats=2
    )
    assert [(one.rows, one.share) for one in found] == [(1, 0.06), (1, 0.25), (3, 0.06), (3, 0.25)]
    assert [one.tokens for one in found] == [1472, 6144, 1472, 6144]
    for one in found:
        assert min(one.full_ms, one.drafter_ms, one.head_ms, one.router_ms) > 0
        assert one.ratio == (one.head_ms + one.router_ms) / one.full_ms > one.listed


def test_heads_command() -> None:
    arguments = [
        "bench",
        "heads",
        "--shapes",
        "2048x16",
        "--rows",
        "2",
        "--shares",
        "50",
        "--repeats",
        "1",
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and "2048x16" in shown.stdout
    record = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [(one["vocab"], one["d"], one["rows"]) for one in record["heads"]] == [(2048, 16, 2)]
    for options in (
        ["--shapes", "2048"],
        ["--shapes", "10x10"],
        ["--rows", "0"],
        ["--rows", "1.5,4"],
        ["--shares", "200"],
    ):
        refused = CliRunner().invoke(app, ["bench", "heads", *options])
        assert refused.exit_code == 2 and options[0] in refused.stderr
