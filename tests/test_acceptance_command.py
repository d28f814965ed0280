"""`quickbeam bench acceptance` and what it measures of toy models: pytest
tests/test_acceptance_command.py."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quickbeam.bench import acceptance_report
from quickbeam.bench.acceptance import Results, Tally, measure, summarise
from quickbeam.bench.questions import Question
from quickbeam.cli.app import app
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.presets import PRESETS

# Through a model


@pytest.fixture(scope="module")
def drafter_folder(toy_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The toy with its weights disturbed: often right, and often not."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("drafter")
    model = AutoModelForCausalLM.from_pretrained(toy_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(toy_folder) / name).exists():
            shutil.copy(Path(toy_folder) / name, folder / name)
    return str(folder)


def asked(
    llm: LLM,
    temperatures: Sequence[float],
    texts: Sequence[str] = ("abc abc", "hello"),
    coupling: str = "coupled",
    max_tokens: int = 24,
) -> Results:
    request = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, coupling=coupling)
    params = [replace(request, temperature=temperature) for temperature in temperatures]
    results = Results({temperature: Tally() for temperature in temperatures})
    for _ in measure(
        llm, [Question(i, "x", (text, "more")) for i, text in enumerate(texts)], params, results
    ):
        pass
    return results


@pytest.mark.parametrize("coupling", ["coupled", "residual"])
@pytest.mark.parametrize(
    "method",
    [
        name
        for name, preset in PRESETS.items()
        if "drafter" in preset.sources and preset.vocab == "full"
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(
    toy_folder: str, method: str, coupling: str
) -> None:
    results = asked(
        LLM(toy_folder, method, dtype="float32", drafter=toy_folder), [0.0, 1.0], coupling=coupling
    )
    assert results.complete and results.prompts == 2
    for temperature, tally in results.tallies.items():
        summary = summarise(temperature, tally, 10)
        assert summary.tokens == 46 and (summary.mean_accepted_tokens or 0) > 1.5
        # EAGLE-2 does not draw: where it may not look at the noise either, its proposals need not
        # be right.
        if method != "eagle2" or temperature == 0 or coupling == "coupled":
            assert summary.first_acceptance == 1 and summary.tried == summary.accepted


def test_agreement_is_counted_at_every_token_of_plain_answers(
    toy_folder: str, drafter_folder: str
) -> None:
    texts = ("abc abc", "hello")
    assert (
        asked(LLM(toy_folder, "chain", dtype="float32", drafter=toy_folder), [0.0]).agreement.share
        == 1
    )
    llm = LLM(toy_folder, "dyspec", dtype="float32", drafter=drafter_folder)
    found, drafter = (
        asked(llm, [1.0, 0.0], texts).agreement,
        LLM(drafter_folder, "ar", dtype="float32"),
    )
    agreed = 0
    for text in texts:  # a plain reference: the drafter alone, after every prefix
        messages, params = (
            [{"role": "user", "content": text}],
            SamplingParams(max_tokens=24, ignore_eos=True),
        )
        prompt, answer = (
            llm.encode_chat(messages),
            llm.chat(messages, params, method="ar").token_ids,
        )
        for i in range(1, 24):
            agreed += (
                drafter.generate([*prompt, *answer[:i]], SamplingParams(max_tokens=1)).token_ids
                == answer[i : i + 1]
            )
    assert (found.count, found.agreed) == (46, {"x": agreed}) and 0 < agreed < 46
    assert asked(llm, [1.0], texts).agreement.share is None


@pytest.mark.parametrize("coupling", ["coupled", "residual"])
def test_a_temperatures_figures_do_not_depend_on_another(
    toy_folder: str, drafter_folder: str, coupling: str
) -> None:
    llm, other = (
        LLM(toy_folder, "dyspec", dtype="float32", drafter=drafter_folder) for _ in range(2)
    )
    both, alone = asked(llm, [0.0, 1.0], coupling=coupling), asked(other, [1.0], coupling=coupling)
    assert both.tallies[1.0] == alone.tallies[1.0]
    # coupled trees go on learning; the answers are the same all the same
    again = asked(llm, [1.0], coupling=coupling).tallies[1.0]
    assert again.tokens == alone.tallies[1.0].tokens and (
        coupling == "coupled" or again == alone.tallies[1.0]
    )
    summary = summarise(0.0, both.tallies[0.0], 10)
    assert 0 < summary.accepted < summary.tried and summary.by_depth[0].count <= summary.steps


def test_every_question_has_a_seed_of_its_own(toy_folder: str, drafter_folder: str) -> None:
    once, twice = (
        asked(
            LLM(toy_folder, "dyspec", dtype="float32", drafter=drafter_folder),
            [1.0],
            ["abc"] * count,
        )
        .tallies[1.0]
        .tried
        for count in (1, 2)
    )
    assert twice[: len(once)] == once != twice[len(once) :]


def test_a_prompt_that_does_not_fit_is_left_out(
    toy_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(toy_folder, "chain", dtype="float32", drafter=toy_folder)
    results = asked(llm, [0.0, 1.0], ["a", "b" * 600, "c"])
    assert results.prompts == 2 and results.complete and "question 1 is left out" in caplog.text
    assert [(skipped.question_id, "context" in skipped.reason) for skipped in results.skipped] == [
        (1, True)
    ]
    assert "prompts left out: 1; the first: a prompt of" in acceptance_report.footer(results)[-1]


# The command


@pytest.fixture
def run(toy_folder: str, drafter_folder: str, tmp_path: Path):
    """Runs the command on three questions."""
    texts = ("abc abc", "hello there", "one two one two")
    lines = [
        json.dumps({"question_id": i, "category": "ab"[i % 2], "turns": [text]})
        for i, text in enumerate(texts)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    given = [
        "--questions",
        str(tmp_path / "q.jsonl"),
        "--model",
        toy_folder,
        "--drafter",
        drafter_folder,
        "--dtype",
        "float32",
    ]
    return lambda *options: CliRunner().invoke(
        app, ["bench", "acceptance", *given, "--max-tokens", "20", *map(str, options)]
    )


def test_command_prints_tables_and_writes_everything(run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(
        "--temperatures",
        "0,1",
        "--limit",
        2,
        "--bins",
        5,
        "--json",
        tmp_path / "out.json",
        "--plot",
        tmp_path / "out.png",
    )
    assert result.exit_code == 0, result.stderr
    for words in (
        "temperature 0",
        "temperature 1",
        "0.80 to 1.00",
        "calibration gap 0.",
        "correlation",
        "MAT ",
        "prompts: 2;",
    ):
        assert words in result.stdout
    assert (
        result.stdout.count("first children accepted: 0.") == 2
        and result.stdout.count("by depth 1: 0.") == 3
    )
    share = json.loads((tmp_path / "out.json").read_text())["agreement"]["share"]
    assert f"likeliest is the model's: {share:.3f} of 38; a 0." in " ".join(result.stdout.split())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "out.png"
    ).stat().st_size > 5000
    content = json.loads((tmp_path / "out.json").read_text())
    assert {
        "environment",
        "model",
        "settings",
        "prompts",
        "complete",
        "temperatures",
        "by_depth",
        "agreement",
        "skipped",
    } == set(content)
    assert (
        content["prompts"] == 2
        and content["complete"] is True
        and content["environment"]["dtype"] == "float32"
    )
    settings = content["settings"]
    assert (
        settings["method"],
        settings["temperatures"],
        settings["bins"],
        settings["max_tokens"],
    ) == ("dyspec", [0.0, 1.0], 5, 20)
    greedy, sampled = content["temperatures"]
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 1.0)
    for one in (greedy, sampled):
        assert (
            sum(place["count"] for place in one["bins"]) == one["tried"] and len(one["bins"]) == 5
        )
        assert sum(place["accepted"] for place in one["bins"]) == one["accepted"] > 0
        assert (
            len(one["by_depth"]) == 8
            and 0 <= one["calibration_gap"] <= 1 <= one["mean_accepted_tokens"]
        )
        assert all(
            place["interval"][0] <= place["acceptance"] <= place["interval"][1]
            for place in one["bins"]
            if place["count"]
        )
    for depth in range(8):
        assert (
            content["by_depth"][depth]["count"]
            == greedy["by_depth"][depth]["count"] + sampled["by_depth"][depth]["count"]
        )


def test_a_seed_repeats_the_figures(run, tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert (
            run(
                "--temperatures",
                "1",
                "--method",
                "specinfer",
                "--budget",
                8,
                "--seed",
                seed,
                "--json",
                tmp_path / name,
            ).exit_code
            == 0
        )
        found.append(json.loads((tmp_path / name).read_text())["temperatures"])
    assert found[0] == found[1] != found[2]


def test_the_coupling_is_the_one_asked_for(run, tmp_path: Path) -> None:
    found = []
    for given in ((), ("--coupling", "coupled"), ("--coupling", "residual")):
        assert run("--temperatures", "0,1", *given, "--json", tmp_path / "out").exit_code == 0
        found.append(json.loads((tmp_path / "out").read_text()))
    assert [one["settings"]["coupling"] for one in found] == ["coupled", "coupled", "residual"]
    greedy, sampled = zip(*(one["temperatures"] for one in found), strict=True)
    assert greedy[0] == greedy[1] == greedy[2] and sampled[0] == sampled[1] != sampled[2]


def test_ctrl_c_shows_what_was_done(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, inner = [], LLM.chat_stream

    def interrupted(self, *args, observer, **kwargs):
        calls.append(1)

        def watch(step: StepRecord) -> None:
            observer(step)
            if len(calls) == 3:
                raise KeyboardInterrupt

        return inner(self, *args, observer=watch, **kwargs)

    monkeypatch.setattr(LLM, "chat_stream", interrupted)
    result = run("--temperatures", "0,1", "--json", tmp_path / "out.json")
    assert result.exit_code == 130 and "prompts: 1;" in result.stdout and len(calls) == 3
    content = json.loads((tmp_path / "out.json").read_text())
    assert (
        content["prompts"] == 1
        and content["complete"] is False
        and len(content["temperatures"]) == 2
    )


def test_a_failure_shows_what_was_done(run, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = LLM.chat_stream

    def broken(self, messages, params, **kwargs):
        if params.temperature > 0:
            raise QuickbeamError("NaN logits")
        return inner(self, messages, params, **kwargs)

    monkeypatch.setattr(LLM, "chat_stream", broken)
    result = run("--temperatures", "0,1")
    assert (
        result.exit_code == 1
        and "error: NaN logits" in result.stderr
        and "temperature 0" in result.stdout
    )


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_full_disk_is_told_after_the_tables(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quickbeam.cli.acceptance.save", full)
    monkeypatch.setattr(acceptance_report, "plot", full)
    result = run("--temperatures", "0", "--limit", 1, option, tmp_path / "out.png")
    assert result.exit_code == 1 and "temperature 0" in result.stdout
    assert f"{option} " in result.stderr and "No space left on device" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "ar"), "drafts without a model"),
        (("--method", "pld"), "drafts without a model"),
        (("--method", "logitspec"), "use dyspec, "),
        (("--method", "hf-assisted"), "unknown method 'hf-assisted'"),
        (("--method", "dyspec,chain"), "unknown method 'dyspec,chain'"),
        (("--temperatures", ""), "--temperatures ''"),
        (("--temperatures", "0,warm"), "comma-separated"),
        (("--temperatures", "0,-1"), "temperature=-1.0"),
        (("--temperatures", "nan"), "temperature=nan"),
        (("--temperatures", "1,0,1.0"), "twice"),
        (("--budget", "1"), "drafts nothing"),
        (("--budget", "many"), "--budget 'many'"),
        (("--bins", "0"), "--bins"),
        (("--max-tokens", "2"), "--max-tokens"),
        (("--questions", "/none.jsonl"), "no such file"),
        (("--json", "/none/out.json"), "does not exist"),
        (("--plot", "/none/out.gif"), "must end in"),
    ],
)
def test_bad_input_is_refused_before_loading(
    run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "quickbeam.llm", None)
    result = run(*options)
    assert (result.exit_code, result.stdout) == (2, "") and words in result.stderr


def test_a_missing_drafter_is_told_as_bench_tells_it(toy_folder: str) -> None:
    commands = (["bench", "acceptance"], ["bench", "--methods", "dyspec"])
    said = [CliRunner().invoke(app, [*words, "--model", toy_folder]) for words in commands]
    assert [result.exit_code for result in said] == [2, 2]
    assert said[0].stderr == said[1].stderr and "--drafter ID_OR_PATH" in said[0].stderr


def test_prompts_that_all_fail_are_bad_input(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, *args, **kwargs):
        raise InvalidInput("too long")

    monkeypatch.setattr(LLM, "chat_stream", refuse)
    result = run()
    assert (
        result.exit_code == 2
        and ("no prompt could be answered; the first: too long") in result.stderr
    )
