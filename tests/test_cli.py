"""The command line, in front of a stand-in for the model (`fake_llm.py`), and once with the real
one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

import fake_llm
from quickbeam.cli import train
from quickbeam.cli.app import app
from quickbeam.cli.common import loading_progress, save, statistics_text
from quickbeam.cli.demo import EXAMPLES
from quickbeam.config import LLMOptions
from quickbeam.engine.result import Completion, SourceCount, Statistics
from quickbeam.errors import QuickbeamError
from quickbeam.grammar.spec import Grammar
from quickbeam.methods import METHODS
from quickbeam.models import builtin
from quickbeam.params import SamplingParams
from quickbeam.train.held_out import HeldOutMetrics
from quickbeam.train.recipes import Plan
from quickbeam.train.trainer import Report
from scripts import cli


@pytest.fixture
def run(faked, monkeypatch, tmp_path):
    """`folder`, `other` and `small` pass for models."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "other", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"max_position_embeddings": 512}')
    return faked


def refused(result, code, *words):
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_generate_streams_text_and_then_statistics(run):
    result = run("generate", "hello")
    assert (result.exit_code, result.stdout) == (0, "one two\n")
    assert result.stderr == "[auto] 2 tokens, 2.0 tokens/s, 1.00 tokens a step\n"
    (kind, (model, method, options), _), asked = fake_llm.CALLS
    assert (kind, model, method) == ("load", None, "auto")
    assert options.pop("progress") is not None
    assert options == {name: getattr(LLMOptions(), name) for name in options}
    assert (
        options.keys() | {"model", "method", "progress"} == LLMOptions.__dataclass_fields__.keys()
    )
    assert asked == ("chat", [("user", "hello")], SamplingParams())
    assert run("generate", "-", "--raw", "--budget", "auto", input="two\nlines\n").exit_code == 0
    assert fake_llm.CALLS[-2][1][2]["budget"] == "auto"
    assert fake_llm.CALLS[-1][:2] == ("raw", "two\nlines")


def test_verbose_says_how_an_answer_was_made(run):
    lines = (
        "[auto] 2 tokens, 2.0 tokens/s, 1.00 tokens a step\n"
        "  1 steps, prefill 0.25 s\n"
        "  drafts accepted: ngram 3 of 8\n"
        "  not bit-identical to plain decoding, kernels: scripted\n"
    )
    assert run("generate", "hello", "--verbose").stderr == lines
    assert run("chat", "--verbose", input="hello\n").stderr.endswith(lines)
    completion = Completion("a", [1], "length", Statistics(1, 1, 0.5), method="ar", seed=7)
    text = statistics_text(completion, "k", verbose=True)
    assert text.startswith("[ar] 1 tokens (length), ") and ", seed 7\n" in text


def test_where_the_drafter_is_too_slow_it_says_what_was_done_instead():
    def said(calls, **drafted):
        sources = {name: SourceCount(count, 0) for name, count in drafted.items()}
        given = Statistics(9, steps=20, drafter_calls=calls, sources=sources)
        return statistics_text(Completion("a", [1], "stop", given), "k").splitlines()[1:]

    faster = "faster here than the drafter"
    assert said(1, drafter=3, ngram=5, last_logits=2, answers=0) == [
        f"  drafted from the text and last logits: {faster}"
    ]
    every = said(1, drafter=3, ngram=5, last_logits=2, answers=1)
    assert every == [f"  drafted from the text, last logits and earlier answers: {faster}"]
    assert max(map(len, every)) <= 90
    assert said(1, drafter=3) == said(0, drafter=0) == [f"  decoded without drafts: {faster}"]
    assert said(19, drafter=30, ngram=1) == said(0, ngram=5) == []


def test_every_option_arrives(run):
    sampling = """--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1
        --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3
        --stop END --stop . --stop-token-id 3
        --stop-token-id 4 --ignore-eos --logprobs 2 --seed 5 --min-tokens 1 --bad-word no
        --include-stop-str-in-output --no-skip-special-tokens --coupling residual"""
    loading = """--model folder --method dyspec --budget 12 --drafter small --vocab router
        --shortlist 99 --dtype float32 --device cpu --revision v1 --kv-memory 1GB
        --weights int4 --draft-weights int8 --memory 3GB --memory-of-answers 1MB --keep k
        --learn --max-running 3 --no-share-prefixes --max-pixels 9000"""
    given = ("--system", "Be brief.", "--json", *sampling.split(), *loading.split())
    result = run("generate", "hello", *given)
    assert result.exit_code == 0, result.stderr
    (_, (model, method, options), _), (_, messages, params) = fake_llm.CALLS
    assert (model, method) == ("folder", "dyspec")
    assert options.pop("progress") is not None
    expected = {"drafter": "small", "vocab": "router", "shortlist": 99, "budget": 12}
    expected |= {"dtype": "float32", "device": "cpu", "revision": "v1"}
    expected |= {"weights": "int4", "draft_weights": "int8", "memory": "3GB", "kv_memory": "1GB"}
    expected |= {"memory_of_answers": "1MB", "keep": "k", "kept_prefixes": "1GB", "learn": True}
    expected |= {"max_running": 3, "share_prefixes": False, "max_pixels": 9000}
    assert options == expected
    assert messages == [("system", "Be brief."), ("user", "hello")]
    expected = dict(max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=5)
    expected |= dict(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
    expected |= dict(stop=("END", "."), stop_token_ids=(3, 4))
    expected |= dict(ignore_eos=True, logprobs=2, min_tokens=1, bad_words=("no",))
    expected |= dict(include_stop_str_in_output=True, skip_special_tokens=False)
    assert params == SamplingParams(**expected, coupling="residual")


def test_a_grammar_arrives(run, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}', encoding="utf-8-sig")
    lark.write_text('start: "a"', encoding="utf-8-sig")
    for arguments, grammar in (
        (["--json-schema", '{"type": "integer"}'], Grammar.json_schema({"type": "integer"})),
        (["--json-schema", str(schema)], Grammar.json_schema({"type": "integer"})),
        (["--json-object"], Grammar.json_object()),
        (["--regex", "a+"], Grammar.regex("a+")),
        (["--lark", str(lark)], Grammar.lark('start: "a"')),
        ([], None),
    ):
        assert run("generate", "hello", *arguments).exit_code == 0
        assert fake_llm.CALLS[-1][2].grammar == grammar


def test_json_is_the_completion_and_ctrl_c_and_errors_keep_what_was_produced(run):
    result = run("generate", "hello", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    record = json.loads(result.stdout)
    expected = {"text": "one two", "finish_reason": "stop", "model": "fake", "method": "auto"}
    expected |= {"sources": {"ngram": {"drafted": 8, "accepted": 3}}, "kernels": "scripted"}
    assert {name: record[name] for name in expected} == expected
    result = run("generate", "interrupt")
    assert (result.exit_code, result.stdout) == (130, "one two(held)\n")
    assert "(interrupted)" in result.stderr
    result = run("generate", "interrupt", "--json")
    assert (result.exit_code, result.stderr) == (130, "")
    assert json.loads(result.stdout)["finish_reason"] == "interrupted"
    result = run("generate", "dead end")
    assert (result.exit_code, result.stdout) == (2, "one two\n")
    assert result.stderr == f"error: {fake_llm.DEAD_END}\n"
    result = run("generate", "dead end", "--json")
    assert (result.exit_code, result.stderr) == (2, f"error: {fake_llm.DEAD_END}\n")
    record = json.loads(result.stdout)
    assert (record["text"], record["finish_reason"]) == ("one two", "error")


BAD = {
    "generate hi --method lgitspec": ["unknown method 'lgitspec'", *METHODS],
    "generate hi --temperature -1": ["--temperature -1.0", "a number between 0 and"],
    "generate hi --dtype int8": ["--dtype", "bfloat16", "float32"],
    "generate hi --budget few": ["--budget 'few'", "auto"],
    "generate hi --raw --system x": ["--system", "--raw"],
    "generate hi --logprobs 2": ["--logprobs", "--json"],
    "generate hi --regex a --json-object": ["--json-object and --regex", "one"],
    "generate hi --json-schema {nope": ["json_schema", "not JSON"],
    "generate hi --json-schema missing.json": ["--json-schema missing.json", "No such file"],
    "generate hi --lark .": ["--lark .", "directory"],
    "generate \udcff": ["not UTF-8"],
    "generate": ["PROMPT"],
    "generate hi --nonsense": ["--nonsense"],
    "gnerate": ["gnerate"],
    "pull nope": ["unknown built-in model 'nope'", "smollm2-135m"],
    "generate hi --method pld --drafter small": ["--drafter small", "'pld' drafts without"],
    "chat --min-p 2": ["--min-p 2.0"],
    "chat --method dyspec --model other": ["method 'dyspec' drafts with a model", "--drafter"],
    "generate hi --model folder/config.json": ["is a file", ".gguf", "folder"],
    "bench --model ./nope": ["no such model folder or file: ./nope"],
    "demo --svg nowhere/demo.svg": ["--svg"],
    "generate hi --drafter nope.gguf": ["no such model folder or file: nope"],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_code_2(run, line):
    refused(run(*line.split()), 2, *BAD[line])


WORDS = {
    "generate hi --max-tokens 0": "--max-tokens 0: must be an integer of at least 1",
    "generate hi --max-running 0": "--max-running 0: must be an integer of at least 1",
    "serve --replicas 0": "--replicas 0: must be an integer of at least 1",
    "generate hi --max-tokens 4 --min-tokens 9": "--min-tokens 9: must be an integer between 0 and "
    "--max-tokens 4",
    "generate hi --top-p 0": "--top-p 0.0: must be",
    "generate hi --stop-token-id -3": "--stop-token-id (-3,): must be",
    "generate hi --logprobs 1000 --json": "--logprobs 1000: must be",
    "generate hi --budget few": "--budget 'few': must be",
    "generate hi --keep nowhere/a": "--keep 'nowhere/a': there is no folder nowhere",
    "generate hi --weights int3": "Invalid value for '--weights': 'int3' is not one of",
    "generate hi --model=": "--model '': must be a folder, a .gguf file",
    "generate hi --drafter=": "--drafter '': must be a folder, a .gguf file",
    "generate hi --dtype float16 --memory much": "--memory 'much': must be a size of memory",
    "generate hi --kv-memory 2XB": "--kv-memory '2XB': must be a size of memory",
    "generate hi --memory-of-answers x": "--memory-of-answers 'x': must be a size of memory",
    "serve --port 70000": "--port 70000: must be",
    "serve --max-body 2XB": "--max-body '2XB': must be a size of memory",
    "serve --max-waiting 0": "--max-waiting 0: must be",
    "bench --max-tokens 1": "--max-tokens 1: must be",
}


@pytest.mark.parametrize("line", WORDS)
def test_errors_speak_of_options_and_not_of_fields(monkeypatch, line):
    result = cli(*line.split())
    refused(result, 2, WORDS[line])
    assert not re.search(r"\w=|[a-z]_[a-z]", result.stderr)


CLOSE = {
    "generate hi --method lgitspec": "logitspec",
    "generate hi --method Auto": "auto",
    "bench --methods ar,dynspec": "dynaspec",
    "bench throughput --methods hfpld": "hf-pld",
    "generate hi --method dyspec --vocab ruoter": "router",
    "pull smollm": "smollm2-135m",
    "genrate hi": "generate",
}


@pytest.mark.parametrize("line", CLOSE)
def test_the_closest_name_is_suggested(run, line):
    refused(run(*line.split()), 2, f"id you mean '{CLOSE[line]}'?")


def test_no_name_is_suggested_where_none_is_close(run):
    assert "did you mean" not in run("generate", "hi", "--method", "medusa").stderr


def test_bad_input_and_failures_are_one_line(run, monkeypatch):
    refused(run("generate", "-", input=b"\xff\xfe"), 2, "not UTF-8")
    for empty in (run("generate", "-", input=""), run("generate", "")):
        refused(empty, 2, "prompt is empty")
    refused(run("generate", "too long"), 2, "longer than the context, with --max-tokens 9")
    refused(run("generate", "fail"), 1, "the logits are not finite")
    refused(run("generate", "disk"), 1, "No space left on device: /somewhere")
    refused(run("generate", "crash"), 1, "ZeroDivisionError: division by zero", "QUICKBEAM_DEBUG=1")
    monkeypatch.setenv("QUICKBEAM_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["generate", "crash"], catch_exceptions=False)


def commands(command, path=()):
    """Every command of the command line, with the words that name it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))
every_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def test_there_is_help_without_a_command(run):
    shown = run()
    assert shown.exit_code == 0 and shown.stdout == run("--help").stdout != ""
    assert len(COMMANDS) == 12


@every_command
def test_help_fits_80_columns_and_nothing_is_cut(run, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*path, "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "..." not in shown.replace("[ARGS]...", "")
    for name, below in getattr(COMMANDS[path], "commands", {}).items():
        summary = " ".join(below.help.split()).partition(". ")[0].rstrip(".")
        assert f"  {name:8}  {summary}." in shown


# words that point to another option, which a reader may not have seen
POINTING = ("The same", "Of ", "Them", "They", "It ", "That ", "This ", "These ", "Those ")


@every_command
def test_every_option_has_a_text_that_can_be_read_alone(path):
    for option in COMMANDS[path].params:
        text = " ".join((option.help or "").split())
        assert option.name == "help" or text.endswith((".", "].")), option.name
        assert not text.startswith(POINTING), (option.name, text)
        assert not re.search(r"\b(them|that is)\.? ?(Default|$)", text), (option.name, text)
        assert not re.search(r"`?[a-z]+_[a-z]+`", text), (option.name, text)


@every_command
def test_what_most_people_use_comes_first_and_the_rest_in_groups(run, path):
    options = [one for one in COMMANDS[path].params if one.param_type_name == "option"]
    headings = [getattr(one, "rich_help_panel", None) or "Options" for one in options]
    shown = [line.strip(":") for line in run(*path, "--help").stdout.splitlines() if line[:1] > " "]
    assert [one for one in shown if one in headings] == list(dict.fromkeys(["Options", *headings]))
    if len(options) > 12:
        assert 5 <= headings.count("Options") <= 12
        assert max(headings.count(one) for one in headings) <= 16


def test_chat_remembers_until_reset(run):
    typed = "first\n\nsecond\n/reset\nthird\n/help\n/what\n/exit\nnever\n"
    result = run("chat", "--system", "Be kind.", input=typed)
    assert (result.exit_code, result.stdout) == (0, "one two\n" * 3)
    assert fake_llm.CALLS[-1][2].max_tokens == 512  # the command's own default
    assert result.stderr.startswith("the default, method auto\n/reset forgets")
    assert max(map(len, result.stderr.splitlines())) <= 80
    assert result.stderr.count("tokens a step") == 3
    assert "unknown command /what; /help lists what there is\n" in result.stderr
    opening = ("system", "Be kind.")
    assert [messages for kind, messages, _ in fake_llm.CALLS if kind == "chat"] == [
        [opening, ("user", "first")],
        [opening, ("user", "first"), ("assistant", "one two"), ("user", "second")],
        [opening, ("user", "third")],
    ]


def test_chat_goes_on_after_ctrl_c_and_after_a_context_that_is_full(run):
    result = run("chat", input="interrupt\ninterrupt at once\ntoo long\nlast\n")
    assert (result.exit_code, result.stdout) == (0, "one two(held)\n\none two\n")
    says = "error: the prompt is longer than the context, with --max-tokens 9; /reset starts over"
    assert says in result.stderr
    kept = [("user", "interrupt"), ("assistant", "one two(held)"), ("user", "last")]
    assert fake_llm.CALLS[-1][1] == kept


def test_demo_sets_both_answers_side_by_side(run):
    result = run("demo", "--method", "pld")
    assert result.exit_code == 0
    assert result.stdout.count("the same tokens, 1.00 times as fast") == 2
    assert result.stdout.count(" pld ") == 2 and result.stdout.count(" ar ") == 2
    assert "ar: plain decoding, one token a step" in result.stdout
    assert "MAT: mean accepted tokens a step" in result.stdout
    answered = [call[1][0][1] for call in fake_llm.CALLS if call[0] == "chat"]
    first, second = EXAMPLES.values()
    assert answered == [first] * 2 + [first] * 4 + [second] * 4  # the first 2 warm up


def test_pull_prints_the_folder_and_lists_what_there_is(run, monkeypatch, tmp_path):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    assert "not pulled" in run("pull", "--list").stdout
    # a path is never broken, however narrow the terminal
    assert f"  {tmp_path / 'smollm2-135m'}\n" in run("pull", "--list").stdout
    (tmp_path / "smollm2-135m").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "smollm2-135m" / file).touch()
    assert run("pull").stdout == f"{tmp_path / 'smollm2-135m'}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, None])
def test_a_real_ctrl_c_and_a_reader_that_leaves(sent):
    command = [sys.executable, fake_llm.__file__, "generate", "endless"]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        begun = process.stdout.read(20)
        if sent is None:
            process.stdout.close()
            errors = process.stderr.read()
            assert (process.wait(timeout=120), errors) == (1, "")
            return
        process.send_signal(sent)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert begun == "one two more more mo" and rest.endswith("\n")
    assert errors.startswith("[auto]") and "(interrupted)" in errors


def test_ctrl_c_while_the_command_line_is_imported():
    code = (
        "import sys, types; app = sys.modules['quickbeam.cli.app'] = types.ModuleType('app')\n"
        "def broken_off(name): raise KeyboardInterrupt\n"
        "app.__getattr__ = broken_off\n"
        "from quickbeam.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")


def test_without_a_terminal_what_happens_once_is_a_line(run, capsys, monkeypatch):
    with loading_progress(None) as report:
        for stage in ("loading smollm2-135m", "downloading it (9 MB, once)", "converting it, once"):
            report(stage, None)
            report(stage, 0.5)
    assert capsys.readouterr().err == "downloading it (9 MB, once)\nconverting it, once\n"
    with loading_progress("folder", "some/drafter"):
        pass
    assert capsys.readouterr().err == "downloading some/drafter from the Hugging Face hub\n"
    for name in (None, "folder", "mtp"):
        with loading_progress(name):
            pass
    assert capsys.readouterr().err == ""

    def pull(name, progress):
        progress(f"downloading {name} (93 MB, once)", None)
        return Path("there")

    monkeypatch.setattr(builtin, "pull", pull)
    assert run("pull").stderr == "downloading smollm2-135m (93 MB, once)\n"


@pytest.mark.parametrize(("mat", "gains"), [(1.0, False), (1.99, False), (2.5, True)])
def test_training_says_where_the_drafter_gains_less_than_its_table(capsys, mat, gains):
    held = HeldOutMetrics([0.412] * 12, [0.1] * 12, mat, 1.0)
    report = Report(9, 1234, 0.001, 12.3456, 99.9, 5.0, held)

    def run(trained, until):
        trained(report)
        return held

    stage = SimpleNamespace(plan=Plan(None, Path("out"), tokens=2000), run=run)
    train.train_drafter(stage, 1)
    said = capsys.readouterr().err
    assert max(map(len, said.splitlines())) <= 90
    assert "0.1%: loss 12.346, agreement 0.41" in said and "0.41 …" in said
    assert ("gains less than the table" in said) != gains
    assert gains or ("--tokens (now 2,000)" in said and "--epochs (now 4)" in said)


def test_warnings_of_loading_are_shown(run, capsys):
    with loading_progress("folder", None):
        print("can't be kept", file=sys.stderr)
    assert capsys.readouterr().err == "can't be kept\n"


EARLY = {
    "generate hi --model ./nope": "no such model folder",
    "generate hi --method eagle3": "unknown method 'eagle3'",
    "generate hi --method dyspec --model tiny": "'dyspec' drafts with",
    "generate hi --model some/model": "HF_HUB_OFFLINE",
    "chat --model ./nope": "no such model folder",
    "serve --method eagle3": "unknown method 'eagle3'",
    "bench --methods eagle3": "unknown method 'eagle3'",
    "bench throughput --methods eagle3": "unknown method 'eagle3'",
    "train --out x --model ./nope": "no such model folder",
    "bench throughput --help": "",
}


def test_help_and_errors_do_not_wait_for_torch(tmp_path):
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    (tiny / "config.json").write_text('{"max_position_embeddings": 512}')
    code = (
        "import sys, quickbeam; assert 'typer' not in sys.modules\n"
        "from quickbeam.cli.app import app\n"
        f"for line in {list(EARLY)!r}:\n"
        "    try: app(line.split())\n"
        "    except SystemExit: print('', file=sys.stderr)\n"
        "    assert not {'torch', 'transformers', 'scipy'} & set(sys.modules), line"
    )
    how = {"capture_output": True, "text": True, "cwd": tmp_path}
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=offline, **how)
    assert done.returncode == 0 and "--concurrency" in done.stdout, done.stderr
    for words, line in zip(EARLY.values(), done.stderr.split("\n\n")[: len(EARLY)], strict=True):
        assert words in line and "\n" not in line.strip()


@pytest.mark.slow
def test_the_real_thing(smollm2):
    arguments = ["generate", "-", "--max-tokens", "24", "--json", "--method"]
    prompt = "Repeat: one two three, one two three."
    command = [sys.executable, "-m", "quickbeam", *arguments, "logitspec"]
    how = {"input": prompt, "capture_output": True, "text": True, "timeout": 300}
    # first, as what is packed or compiled once has a line on stderr
    plain = json.loads(CliRunner().invoke(app, [*arguments, "ar"], input=prompt).stdout)
    done = subprocess.run(command, **how)
    assert (done.returncode, done.stderr) == (0, "")
    fast = json.loads(done.stdout)
    assert plain["text"] and plain["token_ids"] == fast["token_ids"]
    assert plain["mean_accepted_tokens"] == 1.0 <= fast["mean_accepted_tokens"]
    assert fast["steps"] <= plain["steps"]
    assert set(fast["sources"]) <= {"ngram", "last_logits", "answers"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_links_and_pipes_stay_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save("--json", tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "real").read_text())
    os.mkfifo(tmp_path / "pipe")
    read = list[str]()
    thread = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    thread.start()
    save("--json", tmp_path / "pipe", "told")
    thread.join()
    assert read == ["told"] and (tmp_path / "pipe").is_fifo()
    end, begin = os.pipe()
    save("--json", Path(f"/dev/fd/{begin}"), "told")
    assert os.read(end, 9) == b"told"
    replace = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(QuickbeamError, match="not written"):
        save("--json", tmp_path / "full", "told")
    assert not [*tmp_path.glob(".*")]
