"""transformers' own ways to decode, as methods of the benchmark, on a random model: pytest
tests/test_bench_peers.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fake_runner import measured
from quickbeam.bench.methods import load_runners, parse_methods
from quickbeam.bench.questions import Question
from quickbeam.bench.summary import summaries
from quickbeam.cli.app import app
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams


@pytest.fixture(scope="module")
def toy(toy_folder):
    from quickbeam.bench.peers import Loaded

    return Loaded(toy_folder, "float32", "cpu")


def greedy(model, ids: list[int], count: int, stops: list[int]) -> list[int]:
    tokens: list[int] = []
    with torch.inference_mode():
        while len(tokens) < count and not (tokens and tokens[-1] in stops):
            tokens.append(int(model(torch.tensor([ids + tokens])).logits[0, -1].argmax()))
    return tokens


MESSAGES = [{"role": "user", "content": "one two three one two three one two"}]


def test_hf_is_plain_greedy_decoding_and_counts_its_passes(toy):
    from quickbeam.bench.peers import Peer

    peer = Peer("hf", toy)
    ids = peer.encode(MESSAGES)
    assert toy.tokenizer.decode(ids) == "user: one two three one two three one two\n> "
    answer = peer.answer(ids, SamplingParams(max_tokens=24))
    assert answer.token_ids == greedy(toy.model, ids, 24, peer.stops) and len(answer.token_ids) > 2
    assert (
        answer.decoded == answer.steps == len(answer.token_ids) - 1
        and answer.seconds > 0
        and answer.draft_seconds is None
    )
    assert answer.text == toy.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert toy.model.generation_config.repetition_penalty == 1.7 and not toy.model._forward_hooks, (
        "the shared model is left as it was"
    )
    best = peer.last_logits([*ids, *answer.token_ids[:5]]).argmax()
    assert int(best) == answer.token_ids[5]


def test_hf_pld_and_assisted_give_the_same_tokens_in_fewer_passes(toy, toy_folder):
    from quickbeam.bench.peers import Loaded, Peer

    params = SamplingParams(max_tokens=48)
    plain, lookup, assisted = (
        Peer("hf", toy),
        Peer("hf-pld", toy),
        Peer("hf-assisted", toy, Loaded(toy_folder, "float32", "cpu")),
    )
    ids = plain.encode(MESSAGES)
    expected = plain.answer(ids, params)
    for peer in (lookup, assisted):
        answer = peer.answer(ids, params)
        assert answer.token_ids == expected.token_ids
        assert answer.steps < expected.steps / 2
        assert answer.steps < answer.decoded <= len(answer.token_ids) - 1, (
            "what the pass over the prompt emitted is not counted"
        )


def test_an_answer_ends_with_the_models_own_stop_id(toy):
    from quickbeam.bench.peers import Peer

    peer = Peer("hf", toy)
    ids = peer.encode(MESSAGES)
    free = peer.answer(ids, SamplingParams(max_tokens=24)).token_ids
    stop = free[4]
    peer.stops = [stop]
    assert peer.answer(ids, SamplingParams(max_tokens=24)).token_ids == free[: free.index(stop) + 1]


def test_sampled_peers_repeat_with_a_seed(toy):
    from quickbeam.bench.peers import Peer

    peer = Peer("hf", toy)
    ids = peer.encode(MESSAGES)
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3)
    first = peer.answer(ids, params).token_ids
    assert (
        first
        == peer.answer(ids, params).token_ids
        != peer.answer(ids, replace(params, seed=4)).token_ids
    )


def test_peers_run_through_the_harness(toy_folder, tmp_path):
    items = parse_methods("hf,hf-pld,hf-assisted", drafter=toy_folder)
    runners, name = load_runners(items, toy_folder, "float32", "cpu", toy_folder)
    assert name == toy_folder and runners["hf"].loaded is runners["hf-pld"].loaded
    results = measured(
        runners,
        [Question(1, "x", ("one two one two", "three"))],
        SamplingParams(max_tokens=12),
        all_turns=True,
    )
    assert len(results.trials) == 2 and [
        summary.identical for summary in summaries(results).values()
    ] == [2, 2, 2]


def test_sampled_peers_are_not_compared(toy_folder):
    runners, _ = load_runners(parse_methods("ar,pld,hf"), toy_folder, "float32", "cpu")
    results = measured(
        runners,
        [Question(1, "x", ("one two one two",))],
        SamplingParams(max_tokens=12, temperature=1.0, seed=2),
    )
    assert [summary.identical for summary in summaries(results).values()] == [
        1,
        1,
        None,
    ] and not results.differences


def test_a_model_that_transformers_cannot_load_is_bad_input(tmp_path):
    from quickbeam.bench.peers import Loaded

    with pytest.raises(InvalidInput, match=r"config\.json"):
        Loaded(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize("method", ["hf", "hf-pld", "hf-assisted"])
def test_generate_answers_with_a_peer(toy_folder, method):
    drafter = ["--drafter", toy_folder] if method == "hf-assisted" else []
    common = [
        "abc abc",
        "--model",
        toy_folder,
        "--max-tokens",
        "12",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--json",
    ]
    told = {}
    for name, more in ((method, drafter), ("ar", [])):
        result = CliRunner().invoke(app, ["generate", *common, "--method", name, *more])
        assert result.exit_code == 0, result.output
        told[name] = json.loads(result.stdout.strip().splitlines()[-1])
    assert (
        told[method]["token_ids"] == told["ar"]["token_ids"]
        and told[method]["text"] == told["ar"]["text"]
    )
    assert (
        told[method]["finish_reason"] == told["ar"]["finish_reason"]
        and told[method]["method"] == method
    )
    shown = CliRunner().invoke(
        app, ["generate", *common[:-1], "--raw", "--method", method, *drafter]
    )
    assert (
        shown.exit_code == 0
        and f"[{method}] 12 tokens" in shown.stderr
        and "seed" not in shown.stderr
    )
    sampled = CliRunner().invoke(
        app,
        [
            "generate",
            *common[:-1],
            "--temperature",
            "1",
            "--seed",
            "7",
            "--method",
            method,
            *drafter,
        ],
    )
    assert sampled.exit_code == 0 and "seed 7" in sampled.stderr


@pytest.mark.parametrize(
    "option",
    [
        ["--budget", "4"],
        ["--vocab", "router"],
        ["--exact"],
        ["--stop", "x"],
        ["--logprobs", "2", "--json"],
        ["--coupling", "coupled"],
        ["--coupling", "residual"],
    ],
)
def test_generate_refuses_what_a_peer_is_not_told(toy_folder, option):
    result = CliRunner().invoke(
        app, ["generate", "abc", "--model", toy_folder, "--method", "hf", *option]
    )
    assert result.exit_code == 2 and option[0] in result.output and "leave it out" in result.output


def test_generate_wants_an_assistant():
    result = CliRunner().invoke(app, ["generate", "abc", "--method", "hf-assisted"])
    assert result.exit_code == 2 and "--drafter ID_OR_PATH" in " ".join(result.output.split())
