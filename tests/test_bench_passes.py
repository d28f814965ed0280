"""`bench passes`: ways to run a pass side by side, where the time of a native one goes, llama.cpp.
`pytest tests/test_bench_passes.py`"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from quickbeam.bench import breakdown
from quickbeam.bench import passes as bench
from quickbeam.bench.breakdown import Bandwidth, break_down, measure_bandwidth
from quickbeam.bench.llama_cpp import llama_cpp
from quickbeam.bench.passes import Took, make_passes, measure, over_first_context, over_first_width
from quickbeam.cli.app import app
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.target.native import library

native = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
WORKING = """
class Llama:
    def __init__(self, model, n_ctx, n_threads, n_threads_batch, verbose):
        self.n_tokens, self.n_ctx = 0, n_ctx
    def n_vocab(self):
        return 10
    def eval(self, tokens):
        assert self.n_tokens + len(tokens) <= self.n_ctx and max(tokens) < 10
        self.n_tokens += len(tokens)
"""


def peer(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str = WORKING) -> Path:
    """Puts a stand-in for llama_cpp before the worker's eyes; gives a file to load."""
    (folder / "llama_cpp.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "model.gguf").touch()
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def attentive(toy_folder, tmp_path_factory) -> str:
    """The toy model with attention that counts."""
    folder = tmp_path_factory.mktemp("attentive")
    model = AutoModelForCausalLM.from_pretrained(toy_folder)
    torch.manual_seed(1)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy_folder).save_pretrained(folder)
    return str(folder)


def test_all_ways_give_the_same_logits_behind_every_context(attentive):
    made = make_passes(attentive, "float32", "cpu", [20, 9])
    # float32: no bit-identical ones
    assert list(made.ways) == ["transformers", "plain", "fast"] and not made.parts
    for context in (20, 9):  # a pass writes over what follows its context
        first = {name: run(4, context).logit for name, run in made.ways.items()}
        assert all(
            value == pytest.approx(first["transformers"], rel=1e-4) for value in first.values()
        )
    assert made.ways["plain"](4, 20).logit != made.ways["plain"](4, 9).logit


@native
def test_the_native_way_agrees_and_comes_apart(attentive):
    made = make_passes(attentive, "bfloat16", "cpu", [9, 20], ["plain", "native"])
    assert list(made.ways) == ["plain", "native"] and list(made.parts) == ["products", "attention"]
    for context in (20, 9):
        whole = made.ways["native"](4, context).logit
        assert whole == pytest.approx(made.ways["plain"](4, context).logit, rel=0.1, abs=0.1)
        for run in made.parts.values():
            assert run(8, context).milliseconds > 0
        assert made.ways["native"](4, context).logit == whole  # parts leave the whole alone
    hidden, inner, vocab = 32, 64, 272  # 257 rounded up to blocks of 16
    assert made.weight_bytes == 2 * (
        2 * (hidden * (32 + 16 + 16) + hidden * 32 + 3 * hidden * inner) + hidden * vocab
    )


@native
def test_pytorchs_ways_go_without_the_native_kernels(toy_folder, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_KERNELS", "native")
    made: list[str] = []
    target = bench.Target
    monkeypatch.setattr(
        bench, "Target", lambda *a, **o: (made.append(library.describe()), target(*a, **o))[1]
    )
    make_passes(toy_folder, "bfloat16", "cpu", [9], ["fast", "native"])
    assert made == [
        "PyTorch's (QUICKBEAM_KERNELS=eager)",
        library.describe(),
    ] and library.describe().startswith("native")


def test_what_is_not_to_be_had_is_refused_where_it_is_asked_for(toy_folder):
    for way, words in (("exact", "bit-identical"), ("native", "float32 on cpu")):
        with pytest.raises(InvalidInput, match=words):
            make_passes(toy_folder, "float32", "cpu", [9], [way])
    with pytest.raises(
        InvalidInput, match=r"--context 500: the model's context is 512; give at most 384"
    ):
        make_passes(toy_folder, "float32", "cpu", [9, 500])


def test_a_wish_for_kernels_that_cannot_be_met_is_refused(toy_folder, monkeypatch):
    monkeypatch.setenv("QUICKBEAM_KERNELS", "nativ")
    with pytest.raises(InvalidInput, match="QUICKBEAM_KERNELS"):
        make_passes(toy_folder, "bfloat16", "cpu", [9])


def test_rounds_are_interleaved_and_the_median_counts():
    ran: list[tuple[str, int, int]] = []

    def way(name: str):
        def run(width: int, context: int) -> Took:
            ran.append((name, context, width))
            return Took(len(ran))

        return run

    figures = measure(
        {"a": way("a"), "b": way("b")}, [5, 3], [1, 2], repeats=1, singles={"c": way("c")}
    )
    once = [
        (name, context, width)
        for context in (5, 3)
        for width in (1, 2)
        for name in ("abc" if width == 1 else "ab")
    ]
    assert ran == once * 3
    assert figures["a"] == {5: {1: 21.0, 2: 24.0}, 3: {1: 26.0, 2: 29.0}} and figures["c"] == {
        5: {1: 23.0},
        3: {1: 28.0},
    }


def test_ratios_are_of_the_same_way():
    figures = {"a": {100: {8: 6.0, 1: 2.0}, 50: {8: 3.0, 1: 1.0}}}
    assert over_first_width(figures) == {"a": {100: {8: 3.0, 1: 1.0}, 50: {8: 3.0, 1: 1.0}}}
    assert over_first_context(figures) == {"a": {100: {8: 2.0, 1: 2.0}, 50: {8: 1.0, 1: 1.0}}}


def test_the_parts_of_a_pass_and_its_share_of_the_bandwidth():
    figures = {"native": {9: {1: 10.0}}, "products": {9: {1: 6.0}}, "attention": {9: {1: 3.0}}}
    one = break_down(figures, 100_000_000, Bandwidth(15.0, 20.0))[9][1]
    assert (one.products, one.attention, one.rest) == (6.0, 3.0, 1.0)
    assert (one.gigabytes_per_second, one.share) == (10.0, 0.5)


def test_bandwidth_is_measured_by_a_sum_and_by_a_product():
    found = measure_bandwidth(megabytes=4, repeats=2)
    assert (
        found.sum > 0
        and found.best == max(found)
        and (found.product > 0) == (library.kernels() is not None)
    )


def test_llama_cpp_answers_behind_each_context(tmp_path, monkeypatch):
    with llama_cpp(peer(tmp_path, monkeypatch), [300, 7]) as run:
        # the timed tokens are forgotten: 64 are room enough
        assert all(run(1, context).milliseconds >= 0 for context in [7, 300] * 40)


def test_llama_cpp_that_is_not_there_or_fails_says_so(tmp_path, monkeypatch):
    for arguments, words in (
        ((tmp_path / "none.gguf", [7]), "none.gguf: no such file"),
        (
            (peer(tmp_path, monkeypatch), [7], "/nonexistent"),
            "--llama-cpp-python /nonexistent: No such file",
        ),
        (
            (
                peer(
                    tmp_path,
                    monkeypatch,
                    "raise ModuleNotFoundError(\"No module named 'llama_cpp'\")",
                ),
                [7],
            ),
            "--llama-cpp-python",
        ),
    ):
        with pytest.raises(InvalidInput, match=words), llama_cpp(*arguments):
            pass
    broken = peer(tmp_path, monkeypatch, 'raise MemoryError("too large")')
    with (
        pytest.raises(QuickbeamError, match=r"llama\.cpp failed: MemoryError: too large"),
        llama_cpp(broken, [7]),
    ):
        pass


def command(*options: str):
    return CliRunner().invoke(
        app, ["bench", "passes", "--device", "cpu", "--repeats", "1", *options]
    )


def test_the_command_shows_todays_figures(toy_folder):
    shown = command(
        "--model", toy_folder, "--dtype", "float32", "--context", "20", "--widths", "1,2", "--json"
    )
    assert shown.exit_code == 0, shown.stderr
    record = json.loads(shown.stdout)
    assert (record["context"], record["dtype"]) == (20, "float32") and "native" not in record
    assert list(record["milliseconds"]) == ["transformers", "plain", "fast"] and list(
        record["milliseconds"]["fast"]
    ) == ["1", "2"]
    shown = command(
        "--model",
        toy_folder,
        "--dtype",
        "float32",
        "--context",
        "20",
        "--widths",
        "4",
        "--ways",
        "plain",
    )
    assert shown.exit_code == 0 and "plain" in shown.stdout and "brackets" not in shown.stdout


@native
def test_the_command_shows_where_the_time_goes(toy_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(breakdown, "measure_bandwidth", lambda: Bandwidth(10.0, 12.0))
    arguments = [
        "--model",
        toy_folder,
        "--context",
        "20,40",
        "--widths",
        "1,8",
        "--ways",
        "transformers,native",
    ]
    arguments += [
        "--llama-cpp",
        str(peer(tmp_path, monkeypatch)),
        "--llama-cpp-python",
        sys.executable,
    ]
    shown = command(*arguments, "--json")
    assert shown.exit_code == 0, shown.stderr
    record = json.loads(shown.stdout)
    assert record["context"] == 20 and record["milliseconds"] == {
        name: found["20"] for name, found in record["contexts"].items()
    }
    assert (
        record["over_first_width"]["native"]["40"]["1"]
        == record["over_first_context"]["native"]["20"]["8"]
        == 1.0
    )
    part = record["native"]["parts"]["40"]["8"]
    assert part["milliseconds"] == record["contexts"]["native"]["40"]["8"]
    assert part["rest"] == pytest.approx(
        part["milliseconds"] - part["products"] - part["attention"]
    )
    one = record["llama_cpp"]["contexts"]["40"]
    assert (
        record["llama_cpp"]["way"] == "native"
        and one["ours"] == record["contexts"]["native"]["40"]["1"]
    )
    assert record["environment"]["kernels"] == library.describe()
    shown = command(*arguments)
    assert shown.exit_code == 0, shown.stderr
    for words in ("attention", "native over llama.cpp", "each context over 20 tokens", "12.0 GB/s"):
        assert words in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--widths", widths], "--widths") for widths in ("0", "129", "1,x", "")]
    + [(["--context", contexts], "--context") for contexts in ("0", "100,", "many")]
    + [
        (
            ["--ways", "plain,quick"],
            "unknown way 'quick'; known: transformers, plain, fast, exact, native",
        )
    ],
)
def test_bad_input_is_refused(toy_folder, options, words):
    refused = command("--model", toy_folder, *options)
    assert (refused.exit_code, refused.stdout) == (2, "") and words in refused.stderr
