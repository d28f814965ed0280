"""`quickbeam bench drafting`, on small vocabularies.

pytest tests/test_bench_drafting.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from typer.testing import CliRunner

from quickbeam.bench.drafting import SURE, MadeUp, measure
from quickbeam.cli.app import app
from quickbeam.draft.base import Context, DraftRequest
from quickbeam.noise import Noise
from quickbeam.tree import TokenTree
from quickbeam.trees import DRAFTED


def laws_of(
    drafter: MadeUp,
    tree: TokenTree,
    nodes: Sequence[int],
    temperature: float = 0.0,
    noise: Noise | None = None,
) -> torch.Tensor:
    context = Context([tree.token[0]], torch.zeros(1), temperature, noise=noise)
    (laws,) = drafter.answer([DraftRequest(context, tree, nodes)])
    return laws.dense()


def test_made_up_laws_are_as_sure_as_a_drafters_and_sharper_when_cold() -> None:
    tree = TokenTree(3)
    nodes = [tree.add(0, token, "drafter") for token in range(200)]
    tops = {}
    drafter = MadeUp(1000)
    for temperature in (0.0, 1.0, 0.6):
        laws = laws_of(drafter, tree, [0, *nodes], temperature)
        assert (
            laws.shape == (201, 1000)
            and torch.allclose(laws.sum(-1), torch.ones(201))
            and bool((laws.amin(-1) > 0).all())
        )
        assert len({tuple(law.tolist()) for law in laws}) > 30
        tops[temperature] = float(laws.amax(-1).mean())
    assert tops[0.0] == tops[1.0] == pytest.approx(SURE, abs=0.08) and tops[0.6] > tops[1.0] + 0.1
    coupled = laws_of(drafter, tree, [0, *nodes], 0.6, Noise(0, 0, 1000))
    assert torch.equal(coupled, laws_of(drafter, tree, [0, *nodes], 1.0)), (
        "the noise takes care of the temperature"
    )


def test_coupled_trees_see_noise_and_others_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Context] = []
    answer = MadeUp.answer
    monkeypatch.setattr(
        MadeUp,
        "answer",
        lambda self, requests: (
            seen.extend(one.context for one in requests),
            answer(self, requests),
        )[1],
    )
    for coupling in ("coupled", "residual"):
        seen.clear()
        measure(50, [4], [0.0, 0.6], 2, coupling=coupling)
        assert {context.noise is None for context in seen if context.temperature == 0} == {True}
        sampled = [context for context in seen if context.temperature > 0]
        if coupling == "residual":
            assert all(context.draws for context in sampled)
        else:
            # each step has other places, and other noise
            assert {len(context.ids) for context in sampled} == {1, 3, 5, 7}
            assert all(context.noise is not None for context in sampled) and not any(
                one.draws for one in sampled
            )


def test_the_drafters_own_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pick, clock = MadeUp._pick, [0.0]

    def look(seconds: float = 0.001) -> float:
        clock[0] += seconds
        return clock[0]

    def slow(request: DraftRequest, node: int) -> int:
        look(1.0)
        return pick(request, node)

    # a millisecond between any two looks at it
    monkeypatch.setattr("quickbeam.bench.drafting.perf_counter", look)
    monkeypatch.setattr(MadeUp, "_pick", staticmethod(slow))
    found = measure(50, [2, 6], [0.0], 1)
    assert [(one.policy, one.budget) for one in found] == [
        (name, budget) for name in DRAFTED for budget in (2, 6)
    ]
    for one in found:
        assert (
            one.calls >= 1
            and 1 <= one.nodes <= one.budget
            and one.milliseconds == pytest.approx(one.calls + 1)
        )
    assert [one.calls for one in found if one.policy == "drafted-chain"] == [1, 5]


def test_command_prints_a_table_or_json() -> None:
    arguments = ["bench", "drafting", "--vocab", "300", "--budgets", "4,8", "--repeats", "2"]
    shown = CliRunner().invoke(app, arguments)
    assert (
        shown.exit_code == 0 and "vocabulary of 300" in shown.stdout and "8 nodes" in shown.stdout
    )
    assert all(shown.stdout.count(f" {name} ") == 2 for name in DRAFTED)
    record = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (
        record["vocab"] == 300
        and not record["cold"]
        and record["coupling"] == "coupled"
        and len(record["drafting"]) == 4 * len(DRAFTED)
    )
    assert {one["temperature"] for one in record["drafting"]} == {0.0, 0.6}
    drawn = CliRunner().invoke(app, [*arguments, "--json", "--coupling", "residual"])
    assert json.loads(drawn.stdout)["coupling"] == "residual"


def test_cold_calls_read_much_before_they_give_the_same_laws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quickbeam.bench.drafting.SWEEP", 10)
    shown = CliRunner().invoke(
        app, ["bench", "drafting", "--vocab", "300", "--budgets", "4", "--repeats", "1", "--cold"]
    )
    assert shown.exit_code == 0 and "cold caches" in shown.stdout
    warm, cold = MadeUp(300), MadeUp(300, cold=True)
    tree, swept = TokenTree(3), []
    monkeypatch.setattr(torch.Tensor, "sum", lambda self, *_: swept.append(len(self)))
    assert torch.equal(laws_of(warm, tree, [0]), laws_of(cold, tree, [0])) and swept == [10]


@pytest.mark.parametrize(
    "options",
    [["--budgets", "1"], ["--budgets", "4.5"], ["--budgets", "many"], ["--temperatures", "-1"]],
)
def test_numbers_that_make_no_sense_are_named(options: list[str]) -> None:
    refused = CliRunner().invoke(app, ["bench", "drafting", *options])
    assert (
        refused.exit_code == 2
        and options[0] in refused.output
        and "Traceback" not in refused.output
    )
