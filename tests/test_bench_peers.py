"""transformers' own ways to decode, as methods of the benchmark, on a random model."""

import json

import pytest
import torch
from typer.testing import CliRunner

from quickbeam.bench import peers
from quickbeam.bench.methods import load_runners, parse_methods
from quickbeam.bench.peers import Peer
from quickbeam.cli.app import app
from quickbeam.params import SamplingParams


@pytest.fixture(scope="module")
def toy(toy_folder):
    found = peers.load(toy_folder, "float32", "cpu")
    # a checkpoint's own taste, which must not change the probs compared
    found[0].generation_config.repetition_penalty = 1.7
    return found


def greedy(model, ids, count, stops):
    tokens: list[int] = []
    with torch.inference_mode():
        while len(tokens) < count and not (tokens and tokens[-1] in stops):
            tokens.append(int(model(torch.tensor([ids + tokens])).logits[0, -1].argmax()))
    return tokens


MESSAGES = [{"role": "user", "content": "one two three one two three one two"}]


def test_hf_is_plain_greedy_decoding_and_counts_its_passes(toy):
    peer = Peer(toy)
    ids = peer.encode(MESSAGES)
    assert peer.tokenizer.decode(ids) == "user: one two three one two three one two\n> "
    answer = peer.answer(ids, SamplingParams(max_tokens=24))
    assert answer.token_ids == greedy(peer.model, ids, 24, peer.stops) and len(answer.token_ids) > 2
    told = answer.statistics
    assert told.new_tokens - 1 == told.steps == len(answer.token_ids) - 1
    assert told.seconds > 0 and told.prefill_seconds > 0 and told.verify_seconds == 0
    assert answer.text == peer.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    kept = peer.model.generation_config.repetition_penalty
    assert kept == 1.7, "the shared model is left as it was"
    best = peer.last_logits([*ids, *answer.token_ids[:5]]).argmax()
    assert int(best) == answer.token_ids[5]


def test_hf_pld_gives_the_same_tokens_in_fewer_passes(toy):
    params = SamplingParams(max_tokens=48)
    plain, lookup = Peer(toy), Peer(toy, lookup=True)
    ids = plain.encode(MESSAGES)
    expected = plain.answer(ids, params)
    answer = lookup.answer(ids, params)
    assert answer.token_ids == expected.token_ids
    steps = answer.statistics.steps
    assert steps < expected.statistics.steps / 2
    assert steps < answer.statistics.new_tokens - 1 <= len(answer.token_ids) - 1, (
        "what the pass over the prompt emitted is not counted"
    )


def test_bench_raw_gives_text_as_it_is(toy_folder, tmp_path):
    items = parse_methods("ar,hf")
    messages = [{"role": "user", "content": "abc abc"}]
    for raw in (False, True):
        given = {"model": toy_folder, "dtype": "float32", "device": "cpu"}
        runners, *_ = load_runners(items, given, raw=raw)
        plain = runners["hf"].tokenizer("abc abc")["input_ids"]
        for runner in runners.values():
            assert (runner.encode(messages) == list(plain)) == raw
    out = tmp_path / "out.json"
    given = ["--model", toy_folder, "--methods", "ar,hf", "--limit", "1", "--max-tokens", "4"]
    done = CliRunner().invoke(app, ["bench", *given, "--raw", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["settings"]["raw"] is True


def test_bench_refuses_what_a_peer_would_ignore(toy_folder):
    given = ["--model", toy_folder, "--methods", "ar,hf", "--presence-penalty", "1"]
    done = CliRunner().invoke(app, ["bench", *given])
    assert done.exit_code == 2 and "--presence-penalty: hf takes no such option" in done.stderr
