"""The benchmark's methods, harness, figures, tables and command. Runners with set answers and
timings stand in for models."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from typer.testing import CliRunner

from cases import FULL, raising, refuses
from quickbeam.bench import methods, peers, report
from quickbeam.bench.methods import MethodItem, Question, load_questions, parse_methods
from quickbeam.bench.peers import Peer
from quickbeam.bench.report import by_category, summaries, tables
from quickbeam.bench.run import begin, run
from quickbeam.bench.throughput import Run, TimedRequest
from quickbeam.bench.throughput import tables as throughput_tables
from quickbeam.cli import bench as command
from quickbeam.cli import common
from quickbeam.engine.result import Completion, Statistics
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.methods import METHODS
from quickbeam.params import SamplingParams

PARAMS = SamplingParams(max_tokens=8)
CALLS: list[tuple[str, str]] = []  # of all runners: their names, and what they were asked
SAMPLED = SamplingParams(max_tokens=8, temperature=0.6, seed=5)
MESSAGES = [{"role": "user", "content": "one two three one two three one two"}]


class FakeRunner:
    """Answers every prompt alike; ids are characters. `figures`: further fields of statistics."""

    device = "cpu"

    def __init__(self, name, tokens=range(1, 6), steps=4, seconds=2.0, split=(0.5, 1.0), **figures):
        self.name, self.fails = name, {}
        self.item = MethodItem(name, name if name in (*methods.PEERS, "ar") else "pld")
        times = dict(zip(("draft_seconds", "verify_seconds"), split, strict=True)) | figures
        statistics = Statistics(len(tokens), steps, seconds, **times)
        self.reply = Completion(f"answer of {name}", list(tokens), "length", statistics)
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []

    def encode(self, messages):
        return [ord(character) for character in messages[-1]["content"]]

    def answer(self, ids, params):
        text = "".join(map(chr, ids))
        CALLS.append((self.name, text))
        self.prompts.append(list(ids))
        self.seeds.append(params.seed)
        if text in self.fails:
            raise self.fails[text]
        return self.reply

    def last_logits(self, ids):
        self.prompts.append(list(ids))
        logits = torch.zeros(10)
        logits[3], logits[7] = 2.0, 2.0 + len(ids) / 8
        return logits


def questions_of(*categories):
    return [Question(i, category, (f"q{i}",)) for i, category in enumerate(categories)]


def started(runners, params=PARAMS):
    return begin([runner.item for runner in runners.values()], params)


def measured(runners, questions, params=PARAMS):
    results = started(runners, params)
    list(run(questions, runners, results))
    return results


def two_methods():
    """The second has the same tokens in half the steps and a quarter of the time."""
    fast = FakeRunner("fast", steps=2, seconds=0.5, split=(0.1, 0.3))
    return {"ar": FakeRunner("ar"), "fast": fast}


def test_methods_take_budgets_and_switches_of_their_own():
    text = "ar, pld,logitspec:64,logitspec:auto,hf,dyspec:8"
    items = parse_methods(text, 32)
    assert [one.name for one in items] == text.replace(" ", "").split(",")
    assert [one.budget for one in items] == [None, 32, 64, 0, None, 8]
    assert items[3] == MethodItem("logitspec:auto", "logitspec", 0)
    text, more = "pld,dyspec,dynaspec:8@999,frspec@7+context", {"vocab": "router", "shortlist": 50}
    assert parse_methods(text, drafter="x", **more) == [
        MethodItem("pld", "pld"),
        MethodItem("dyspec", "dyspec", **more),
        MethodItem("dynaspec:8@999", "dynaspec", 8, "router", 999),
        MethodItem("frspec@7+context", "frspec", vocab="context", shortlist=7),
    ]
    both = parse_methods("frspec@7+frequency+context,dynaspec+clusters+context", drafter="x")
    assert [item.vocab for item in both] == ["frequency+context", "router"]


def test_bad_methods_are_refused():
    for text, says in (
        ("ar,lgitspec", "unknown method 'lgitspec'; known: ar, "),
        (" , ", "names no method"),
        ("ar,pld,ar", "'ar' is given twice"),
        ("hf:4", "hf grows no draft tree"),
        ("hf+full", "hf has no drafter"),
        ("dyspec+fats", "unknown vocabulary 'fats' of the drafter; known: full"),
        ("pld:0", r"must be NAME\[:BUDGET\]"),
        ("dyspec@many", r"must be NAME\[:BUDGET\]\[@SHORTLIST\]"),
        ("dyspec@99", "a shortlist of 99 tokens, where the drafter scores its full vocabulary"),
        ("pld:many", "or a budget of auto"),
    ):
        refuses(says, parse_methods, text, model="another/model")
    for name, preset in METHODS.items():
        if preset.uses_drafter and not preset.without:
            words = f"method '{name}' drafts with a model"
            refuses(words, parse_methods, name, model="another/model")


def test_methods_take_turns_at_going_first_and_are_asked_alike():
    """First turns alone, the same ids, and a seed of each prompt's own."""
    CALLS.clear()
    runners = {name: FakeRunner(name) for name in ("b", "ar", "c")}
    questions = [Question(i, "x", (f"q{i}", "and?")) for i in range(4)]
    results = measured(runners, questions, SamplingParams(max_tokens=4, temperature=1.0, seed=5))
    order = [name for name, _ in CALLS]
    assert order == ["b", "ar", "c", "ar", "c", "b", "c", "b", "ar", "b", "ar", "c"]
    assert [text for _, text in CALLS] == [f"q{i}" for i in range(4) for _ in range(3)]
    for runner in runners.values():
        assert runner.prompts == [[ord("q"), ord(f"{i}")] for i in range(4)]
        assert runner.seeds == [5, 6, 7, 8]
    assert results.reference == "ar" and len(results.trials) == 4 and results.differences == []
    assert summaries(results)["c"]["identical"] == 4


def test_outputs_that_the_seed_alone_does_not_decide_are_not_compared():
    for params, identical, note in (
        (SamplingParams(max_tokens=8), [1, 0, 0], ""),
        (SAMPLED, [1, 0, None], "hf: not compared"),
        (replace(SAMPLED, coupling="residual"), [None] * 3, "no outputs are compared"),
        (replace(SAMPLED, seed=None), [None] * 3, "without --seed"),
        (replace(SAMPLED, seed=None, temperature=0.0, coupling="residual"), [1, 0, 0], ""),
    ):
        answers = {"ar": (1, 2), "fast": (1, 3), "hf": (7,)}
        runners = {name: FakeRunner(name, tokens) for name, tokens in answers.items()}
        results = measured(runners, questions_of("x"), params)
        assert [one["identical"] for one in summaries(results).values()] == identical
        assert len(results.differences) == identical.count(0)
        lines = [line for line in report.footer(results) if "compared" in line]
        assert len(lines) == bool(note) and all(note in line for line in lines)


def test_methods_of_a_model_give_the_seeds_tokens_where_they_are_coupled(toy_folder):
    items = parse_methods("ar,pld,logitspec:8,dyspec:8,specinfer:8", drafter=toy_folder)
    given = {"model": toy_folder, "dtype": "float32", "device": "cpu", "drafter": toy_folder}
    runners, *_ = methods.load_runners(items, given)
    (llm,) = {runner.llm for runner in runners.values()}  # they share one load
    assert llm.method_store.drafter is not None  # loaded before anything is timed
    texts = ("abc abc", "one two one two", "q")
    questions = [Question(i, "x", (text,)) for i, text in enumerate(texts)]
    for temperature, coupling in product((0.0, 0.6, 1.0), ("coupled", "residual")):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=4, coupling=coupling)
        results = begin(items, params)
        list(run(questions, runners, results))
        compared = not temperature or coupling == "coupled"
        identical = [one["identical"] for one in summaries(results).values()]
        assert identical == [3 if compared else None] * 5 and results.differences == []
        pairs = [[one.answers[own].token_ids for own in runners] for one in results.trials]
        assert any(ids[0] != ids[-1] for ids in pairs) == (not compared)


def test_refused_prompt_is_left_out_for_all_methods(caplog):
    runners = two_methods()
    runners["fast"].fails = {"q1": InvalidInput("prompt too long")}
    results = measured(runners, questions_of("x", "x", "x"))
    assert [trial.question.question_id for trial in results.trials] == [0, 2] and results.complete
    assert results.skipped == [{"question_id": 1, "reason": "prompt too long"}]
    assert "question 1" in caplog.text
    assert "prompts left out: 1; the first: prompt too long" in "\n".join(report.footer(results))


def test_differences_carry_the_gap_after_what_both_agree_on():
    runners = two_methods()
    runners["late"] = FakeRunner("late", tokens=(1, 2, 9, 4))
    runners["short"] = FakeRunner("short", tokens=(1, 2))
    results = measured(runners, questions_of("x"))
    where = {"question_id": 0, "position": 2, "reference_token": 3, "gap": 4 / 8}
    late, short = results.differences
    assert late == {"method": "late", "token": 9, **where}
    assert short == {"method": "short", "token": None, **where}
    assert runners["ar"].prompts[1:] == [[ord("q"), ord("0"), 1, 2]] * 2, "prompt, shared tokens"
    assert [one["identical"] for one in summaries(results).values()] == [1, 1, 0, 0]
    assert "late: 1 of 1 outputs differ" in "\n".join(report.footer(results))


def test_statistics_are_ratios_of_sums():
    results = started({name: FakeRunner(name) for name in ("ar", "fast")})
    asked = [("x", 10, 5.0, 5, 2.0), ("y", 30, 10.0, 10, 3.0)]
    for i, (category, tokens, seconds, steps, fast_seconds) in enumerate(asked):
        ids, known = [1] * (tokens + 1), {"prefill_seconds": 0.25}
        ar = FakeRunner("ar", ids, tokens, seconds, (0.0, 1.0), **known)
        known |= {"drafter_calls": 3 * steps, "drafter_seconds": 0.25, "nodes": 4 * steps}
        known |= {"experts": 7.5 * steps}
        fast = FakeRunner("fast", ids, steps, fast_seconds, (0.5, 1.0), **known)
        list(run([Question(i, category, ("q",))], {"ar": ar, "fast": fast}, results))
    whole = summaries(results)
    assert whole["ar"]["speedup"] == whole["ar"]["mean_accepted_tokens"] == 1
    assert whole["ar"]["tokens_per_second"] == 40 / 15
    fast = whole["fast"]
    assert fast["speedup"] == pytest.approx(15 / 5), "the ratio of total decode times"
    assert (fast["mean_accepted_tokens"], fast["tokens_per_second"]) == (40 / 15, 40 / 5)
    assert fast["tokens_per_second_with_prompts"] == 42 / 5.5
    assert (fast["draft_ms"], fast["verify_ms"]) == pytest.approx((1000 / 15, 2000 / 15))
    assert fast["overhead_ms"] == pytest.approx(2000 / 15) and fast["nodes"] == 4
    assert fast["drafter_calls"] == 3 and fast["drafter_ms"] == pytest.approx(500 / 15)
    assert fast["prefill_ms"] == 250
    assert fast["experts"] == 7.5 and "7.50" in tables(results)[-1]
    parts = by_category(results)
    assert list(parts) == ["x", "y"] and parts["x"]["fast"]["speedup"] == 2.5
    assert parts["y"]["fast"]["speedup"] == pytest.approx(10 / 3)
    # the jackknife of two prompts: half the distance of what is left with each of them left out
    assert fast["speedup_error"] == pytest.approx((10 / 3 - 2.5) / 2)
    assert whole["ar"]["speedup_error"] is None and parts["x"]["fast"]["speedup_error"] is None


def test_speedup_is_per_token_and_what_decodes_nothing_has_no_figures():
    ar = FakeRunner("ar", tokens=range(11), seconds=10.0)  # 1 s a token
    other = FakeRunner("other", tokens=range(6), seconds=2.5)  # 0.5 s a token
    ended = FakeRunner("ended", tokens=(1,), steps=0, seconds=0.0, split=(0.0, 0.0))
    runners = {"ar": ar, "other": other, "ended": ended, "hf": FakeRunner("hf", split=(0.0, 0.0))}
    results = measured(runners, questions_of("x"))
    whole = summaries(results)
    assert whole["other"]["speedup"] == 2.0 and "experts" not in tables(results)[-1]
    names = ("tokens_per_second", "speedup", "mean_accepted_tokens", "draft_ms")
    assert [whole["ended"][name] for name in names] == [None] * 4
    assert [whole["hf"][name] for name in ("verify_ms", "overhead_ms")] == [None] * 2


def test_question_file_is_read_with_blank_lines_other_keys_and_odd_separators(tmp_path):
    file, turns = tmp_path / "q.jsonl", ["first\u2028line", "second"]
    first = {"question_id": "a", "category": "x", "turns": turns, "reference": [1]}
    second = '{"question_id": 2, "category": "y", "turns": ["t"]}\r'
    text = f"{json.dumps(first, ensure_ascii=False)}\n\n{second}"
    file.write_text(text, encoding="utf-8-sig", newline="")
    assert load_questions(file) == [Question("a", "x", tuple(turns)), Question(2, "y", ("t",))]


def test_unreadable_question_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"category": "caf\xe9"}')
    words = {"none.jsonl": "No such file", "empty.jsonl": "holds no questions", "": "read"}
    for name, says in {**words, "latin.jsonl": "not UTF-8 text"}.items():
        refuses(says, load_questions, tmp_path / name)
    whole = {"question_id": 1, "category": "c", "turns": ["t"]}
    wrong = [{"question_id": None}, {"category": " "}, {"turns": []}, {"turns": ["t", 3]}]
    file = tmp_path / "q.jsonl"
    for line in ("{", "[1]", *(json.dumps(whole | one) for one in wrong)):
        file.write_text(f"{json.dumps(whole)}\n\n{line}\n")
        refuses(r"q\.jsonl:3: .*must be a JSON object with question_id", load_questions, file)


def test_tables_show_figures_and_the_reference():
    runners = two_methods()
    runners["hf"] = FakeRunner("hf", seconds=8.0, split=(0.0, 0.0))
    results = measured(runners, questions_of("maths", "[/odd|]"))
    maths, odd, overall, steps = (one.splitlines() for one in report.tables(results))
    assert maths[0].split()[1] == "maths" and maths[2].split()[1] == "ar"
    assert maths[2].split()[3:8:2] == ["1.00", "2.00", "2.50"] and "1 of 1" in maths[2]
    assert odd[0].split()[1] == "[/odd/]", "a cell stays in its place"
    assert overall[0].split()[1] == "overall" and "fast" in overall[3]
    assert all(figure in overall[3] for figure in ("2.00", "8.00", "4.00 ", "2 of 2"))
    assert "50.00" in steps[3] and "150.0" in steps[3]
    assert "hf" in steps[4] and steps[4].count(" - ") == 6, "phases of a peer"
    for table in (maths, odd, overall, steps):
        assert len({len(line) for line in table}) == len({line.count("|") for line in table}) == 1
    assert "speed-up over ar" in report.footer(results)[0]


def test_tables_fit_90_columns_with_every_method():
    known = {"nodes": 512 * 9, "drafter_calls": 99, "experts": 64.0 * 9, "prefill_seconds": 12.3456}
    runners = {
        name: FakeRunner(name, range(999), 9, 9.99, (0.9, 0.99), **known) for name in methods.NAMES
    }
    results = measured(runners, questions_of("math_reasoning", *["summarization"] * 99))
    every = [*report.tables(results), *report.footer(results)]
    runs = [Run(load, name, seconds=1.0) for load in (1, 1024) for name in methods.METHODS]
    answered = TimedRequest([1], 0.0, None, 12.3456, 99.999, list(range(99)), 9, 99)
    for one in runs:
        one.answers, one.identical = [answered] * 100, 100
        one.decoding_seconds, one.decoding_tokens = 1.0, 9999
    every += [*throughput_tables(runs), command.WAITING]
    assert max(len(line) for text in every for line in text.splitlines()) <= 90


def test_save_leaves_the_old_file_where_the_new_one_fails(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    common.save("--json", path, {"a": float("nan")})
    refuses("JSON", common.save, "--json", path, {"a": object()}, error=TypeError)
    monkeypatch.setattr("pathlib.Path.replace", raising(FULL))
    refuses(r"--json .*No space left", common.save, "--json", path, {"a": 2}, error=QuickbeamError)
    assert json.loads(path.read_text()) == {"a": None}


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run `bench` on three questions with the given runners in place of loaded models."""
    asked = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"q{i}"]} for i in range(3)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, asked)))

    def call(runners, *options):
        loads = []
        load = lambda *_: loads.append(1) or (runners, "toy", None)  # noqa: E731
        monkeypatch.setattr(command, "load_runners", load)
        items = [runner.item for runner in runners.values()]
        if "--methods" not in options:
            monkeypatch.setattr(command, "parse_methods", lambda *_, **__: items)
        given = ["--questions", str(tmp_path / "q.jsonl"), *map(str, options)]
        result = CliRunner().invoke(command.commands, given)
        monkeypatch.undo()
        result.loads = len(loads)
        return result

    return call


def test_command_prints_tables_and_writes_everything(invoke, tmp_path):
    out = tmp_path / "out.json"
    result = invoke(two_methods(), "--json", out, "--limit", 2)
    assert result.exit_code == 0, result.output
    assert "overall" in result.stdout and "4.00" in result.stdout
    content = json.loads(out.read_text())
    assert content["model"] == "toy" and content["questions"] == 2
    assert content["methods"]["ar"]["prompts"] == 2
    known = {"python", "torch", "transformers", "quickbeam", "cpu", "cores", "threads", "device"}
    known |= {"dtype", "commit", "date", "command", "kernels"}
    assert known <= set(content["environment"]) and content["environment"]["device"] == "cpu"


def test_ctrl_c_keeps_what_was_done_and_nothing_done_is_bad_input(invoke, tmp_path):
    runners = two_methods()
    runners["fast"].fails = {"q2": KeyboardInterrupt()}
    result = invoke(runners, "--json", tmp_path / "out.json")
    assert result.exit_code == 130 and "prompts: 2;" in result.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["questions"] == 2 and content["complete"] is False
    runners = two_methods()
    runners["ar"].fails = {f"q{i}": InvalidInput("too long") for i in range(3)}
    result = invoke(runners)
    assert isinstance(result.exception, InvalidInput) and "too long" in str(result.exception)


def test_bad_input_is_refused_before_loading(invoke):
    for options, words in (
        ("--methods nope", "unknown method 'nope'"),
        ("--questions /none.jsonl", "/none.jsonl"),
        ("--json /none/out.json", "--json /none/out.json"),
        ("--temperature -1", "--temperature -1.0"),
        ("--budget x", "--budget 'x'"),
        ("--max-tokens 1", "--max-tokens"),
        ("--methods ar,hf --presence-penalty 1", "--presence-penalty: hf takes no such option"),
    ):
        result = invoke(two_methods(), *options.split())
        assert isinstance(result.exception, InvalidInput) and result.loads == 0
        assert words in str(result.exception)


@pytest.fixture(scope="module")
def toy(toy_folder):
    loaded = peers.load(toy_folder, "auto", "cpu")
    # a checkpoint's own taste, which must not change the probs compared
    loaded[0].generation_config.repetition_penalty = 1.7
    return loaded


def greedy(model, ids, count, stops):
    tokens: list[int] = []
    with torch.inference_mode():
        while len(tokens) < count and not (tokens and tokens[-1] in stops):
            tokens.append(int(model(torch.tensor([ids + tokens])).logits[0, -1].argmax()))
    return tokens


def test_hf_is_plain_greedy_decoding_and_counts_its_passes(toy):
    peer = Peer(toy)
    ids = peer.encode(MESSAGES)
    assert peer.tokenizer.decode(ids) == "user: one two three one two three one two\n> "
    answer = peer.answer(ids, SamplingParams(max_tokens=24))
    assert answer.token_ids == greedy(peer.model, ids, 24, peer.stops) and len(answer.token_ids) > 2
    counts = answer.statistics
    assert counts.new_tokens - 1 == counts.steps == len(answer.token_ids) - 1
    assert counts.seconds > 0 and counts.prefill_seconds > 0 and counts.verify_seconds == 0
    assert answer.text == peer.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    kept = peer.model.generation_config.repetition_penalty
    assert kept == 1.7, "the shared model is left as it was"
    assert int(peer.last_logits([*ids, *answer.token_ids[:5]]).argmax()) == answer.token_ids[5]


def test_hf_pld_gives_the_same_tokens_in_fewer_passes(toy):
    params = SamplingParams(max_tokens=48)
    plain, lookup = Peer(toy), Peer(toy, lookup=True)
    ids = plain.encode(MESSAGES)
    expected = plain.answer(ids, params)
    answer = lookup.answer(ids, params)
    assert answer.token_ids == expected.token_ids
    steps = answer.statistics.steps
    assert steps < expected.statistics.steps / 2
    # what the pass over the prompt emitted is not counted
    assert steps < answer.statistics.new_tokens - 1 <= len(answer.token_ids) - 1


def test_bench_raw_gives_text_as_it_is(toy_folder, tmp_path):
    items = parse_methods("ar,hf")
    messages = [{"role": "user", "content": "abc abc"}]
    for raw in (False, True):
        given = {"model": toy_folder, "dtype": "float32", "device": "cpu"}
        runners, *_ = methods.load_runners(items, given, raw=raw)
        plain = runners["hf"].tokenizer("abc abc")["input_ids"]
        for runner in runners.values():
            assert (runner.encode(messages) == list(plain)) == raw
    out = tmp_path / "out.json"
    given = ["--model", toy_folder, "--methods", "ar,hf", "--limit", "1", "--max-tokens", "4"]
    done = CliRunner().invoke(command.commands, [*given, "--raw", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["settings"]["raw"] is True
