"""N-grams of text that a model wrote itself: their probabilities, their file, drafts from them."""

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from cases import refuses
from quickbeam import LLM, SamplingParams, hub
from quickbeam.config import LLMOptions
from quickbeam.drafters.base import Context
from quickbeam.drafters.candidates import Candidate
from quickbeam.drafters.ngram import Ngram
from quickbeam.drafters.ngram_table import KEPT, LEAST, ORDER, NgramTable, context_key
from quickbeam.errors import QuickbeamError
from quickbeam.hub import TABLE
from quickbeam.llm import try_drafter
from quickbeam.methods.auto import Auto
from quickbeam.train.target import open_target
from scripts import cli
from test_recycling import learn, logits, tree_of_auto
from test_train_feature import command

VOCAB = 50


def texts(tokens, count=12, seed=0):
    """Texts in which some tokens follow others more often, of `tokens` different ones."""
    choose = random.Random(seed)
    made = []
    for _ in range(count):
        text = [choose.randrange(tokens)]
        for _ in range(choose.randrange(40)):
            likely = (text[-1] * 3 + len(text) % 2) % tokens
            text.append(likely if choose.random() < 0.5 else choose.randrange(tokens))
        made.append(text)
    return made


def followed(all_texts, context):
    """How often which tokens followed a context."""
    return Counter(
        text[end]
        for text in all_texts
        for end in range(len(context), len(text))
        if text[end - len(context) : end] == context
    )


def witten_bell(all_texts, context, token):
    """The probability by the formula, counted anew for each context.

    A context that is always preceded by its first token is looked up without it.
    """
    while len(context) > 1 and followed(all_texts, context) == followed(all_texts, context[1:]):
        context = context[1:]
    counts = followed(all_texts, context)
    shorter = witten_bell(all_texts, context[1:], token) if len(context) > 1 else 0.0
    different = len(counts)
    return (counts[token] + different * shorter) / (counts.total() + different)


def test_probabilities_are_those_of_the_formula():
    """With as many tokens as are kept after a context, none is left out but unlikely ones."""
    made = texts(KEPT)
    table = NgramTable.of(made, KEPT)
    assert table.text == sum(map(len, made))
    contexts = {
        tuple(text[end - n : end])
        for text in made
        for n in (1, 2, 3)
        for end in range(n, len(text))
    }
    longest = Counter()
    for context in map(list, sorted(contexts)):
        found = table.after(context)
        longest[found.known] += 1
        known = dict(zip(found.tokens.tolist(), found.probs.tolist(), strict=True))
        assert list(known.values()) == sorted(known.values(), reverse=True)
        for token in range(KEPT):
            expected = witten_bell(made, context, token)
            if expected > LEAST + 1e-6:
                assert known[token] == pytest.approx(expected, abs=LEAST), (context, token)
    assert set(longest) == {1, 2, 3}


def test_the_longest_known_context_counts():
    table = NgramTable.of([[1, 2, 3, 4], [9, 2, 3, 5], [9, 2, 3, 5], [7, 3, 6]], VOCAB)

    def best(*ids):
        found = table.after(ids)
        return found and (int(found.tokens[0]), found.known)

    assert best(9, 2, 3) == (5, 3) and best(1, 2, 3) == (4, 3)
    assert best(8, 2, 3) == best(2, 3) == (5, 2)
    assert best(7, 3) == (6, 2) and best(8, 3) == best(3) == (5, 1)
    assert best(8) is None and best() is None
    table = NgramTable.of([[1, 2, 3], [1, 2, 4]], VOCAB)
    assert best(1, 2) == (3, 1), "what stands before 2 is always the same"
    assert NgramTable.of([], VOCAB).after([1]) is None
    keys = {context_key(ids) for ids in ([0], [0, 0], [0, 0, 0], [1], [0, 1], [1, 0])}
    assert len(keys) == 6


def test_of_equally_likely_tokens_the_smaller_one_comes_first():
    """Whichever came first, also where the shorter context has only one of them."""
    made = [[5, 9], [5, 2], [5, 7], [5, 7]]
    assert NgramTable.of(made, VOCAB).after([5]).tokens.tolist() == [7, 2, 9]
    assert NgramTable.of([], VOCAB).after([5]) is None
    assert NgramTable.of([[], [5]], VOCAB).text == 1


def test_a_table_of_much_text_takes_little_memory():
    """Dictionaries of counts took 800 bytes a token."""
    tokens = 20_000
    text = np.random.default_rng(0).zipf(1.3, tokens) % 30_000
    tracemalloc.start()
    try:
        NgramTable.of(np.array_split(text, 50), 30_000)
        assert tracemalloc.get_traced_memory()[1] < 500 * tokens
    finally:
        tracemalloc.stop()


def test_a_table_is_read_as_it_was_written(tmp_path):
    made = texts(20)
    table = NgramTable.of(made, VOCAB)
    table.save(tmp_path)
    again = NgramTable.load(tmp_path, VOCAB)
    assert (again.vocab, again.text) == (VOCAB, table.text)
    for text in made:
        for end in range(len(text) + 1):
            one, other = (each.after(text[max(0, end - ORDER) : end]) for each in (table, again))
            assert (one is None) == (other is None)
            if one is not None:
                assert one.known == other.known
                assert np.array_equal(one.tokens, other.tokens)
                assert np.array_equal(one.probs, other.probs)
    refuses("a vocabulary of 50 tokens, and this model has 51", NgramTable.load, tmp_path, 51)


DAMAGE = {
    "another kind": lambda arrays, metadata: metadata.update(kind="answers"),
    "no size": lambda arrays, metadata: metadata.pop("vocab"),
    "floats": lambda arrays, metadata: arrays.update(keys=arrays["keys"].astype(np.float64)),
    "fewer starts": lambda arrays, metadata: arrays.update(starts=arrays["starts"][:-1]),
    "falling starts": lambda arrays, metadata: arrays["starts"].__setitem__(1, 2**30),
    "starts that overflow": lambda arrays, metadata: arrays["starts"].__setitem__(
        slice(1, 3), [2_000_000_000, -294_967_296]
    ),
    "too many tokens": lambda arrays, metadata: arrays.update(
        keys=arrays["keys"][:1], starts=arrays["starts"][[0, -1]]
    ),
    "fewer tokens": lambda arrays, metadata: arrays.update(tokens=arrays["tokens"][:-1]),
    "a token beyond": lambda arrays, metadata: arrays["tokens"].__setitem__(0, VOCAB),
    "nan": lambda arrays, metadata: arrays["probs"].__setitem__(0, np.nan),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_table_is_refused(tmp_path, how):
    NgramTable.of(texts(20), VOCAB).save(tmp_path)
    arrays = load_file(tmp_path / TABLE)
    metadata = {"kind": "quickbeam n-grams", "vocab": str(VOCAB), "text": "9"}
    DAMAGE[how](arrays, metadata)
    save_file(arrays, tmp_path / TABLE, metadata)
    refuses("is no table of n-grams", NgramTable.load, tmp_path, VOCAB)
    half = {name: torch.from_numpy(array).bfloat16() for name, array in arrays.items()}
    save_torch_file(half, tmp_path / TABLE, metadata)
    refuses("is no table of n-grams", NgramTable.load, tmp_path, VOCAB)
    (tmp_path / TABLE).write_bytes(b"\x10" * 20)
    refuses("is no table of n-grams", NgramTable.load, tmp_path, VOCAB)


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    NgramTable.of(texts(20), VOCAB).save(tmp_path)
    before = (tmp_path / TABLE).read_bytes()

    def full(*given):
        raise OSError("No space left on device")

    monkeypatch.setattr("quickbeam.drafters.ngram_table.os.replace", full)
    other = NgramTable.of(texts(20, seed=1), VOCAB)
    refuses("can't be written", other.save, tmp_path, error=QuickbeamError)
    assert (tmp_path / TABLE).read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def context(ids, table=None, **fields):
    return Context(list(ids), torch.zeros(VOCAB), table=table, **fields).begin([Ngram()])


def test_its_tokens_compete_in_the_tree_of_auto():
    table = NgramTable.of([[1, 2, 3, 4, 5]] * 4 + [[1, 2, 7]] * 2, VOCAB)
    tree = tree_of_auto(Auto(), context([1, 2], table))
    paths = {tuple(tree.tokens(node)): tree.source[node] for node in range(1, len(tree))}
    assert {(3,), (3, 4), (7,)} <= paths.keys()
    assert {paths[path] for path in ((3,), (3, 4), (7,))} == {"table"}
    assert "table" not in tree_of_auto(Auto(), context([1, 2])).source
    # where recycled tokens are the same, the larger rate counts, and each source learns its own
    method = Auto()
    learn(method.successors[-1], context([1, 2]), logits(3, 30))
    both = tree_of_auto(method, context([1, 2], table))
    assert both.value[both.children[0][3]] >= tree.value[tree.children[0][3]]
    assert {"table", "recycling"} <= set(both.source)
    assert sum(both.value[child] for child in both.children[0].values()) <= 1


@pytest.fixture(scope="module")
def made(toy_folder, prompts, tmp_path_factory):
    """A table that the command made, of the toy model's answers to some prompts."""
    out = tmp_path_factory.mktemp("made")
    arguments = command("--model", toy_folder, "--prompts", prompts, "--out", out)
    result = cli(*arguments, "--only", "text")
    assert result.exit_code == 0, result.output
    assert f"--drafter {out}" in result.output
    return out


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_drafts_and_a_wrong_table_costs_no_token(toy_folder, made, tmp_path, temperature):
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    table = NgramTable.load(made, 257)
    NgramTable.of([[(7 * i * i) % 257 for i in range(900)]], 257).save(tmp_path)
    rates = {}
    for folder in (made, tmp_path):
        with LLM(toy_folder, drafter=folder, memory_of_answers=0) as llm:
            assert llm.method == "recycling" and "its own text" in llm.describe()
            plain = llm.generate(["say 1", "say it"], params, method="ar")
            drafted = llm.generate(["say 1", "say it"], params, budget=8)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            alone = llm.generate("say it", replace(params), budget=8)
            assert alone.token_ids == plain[1].token_ids
            counts = alone.statistics.sources.get("table")
            rates[folder] = counts.accepted / max(1, counts.drafted) if counts else 0.0
    assert rates[made] > rates[tmp_path]
    assert table.text >= 1500


@pytest.mark.slow
def test_a_model_has_the_table_that_was_made_for_it(toy_folder, prompts, cache, tmp_path):
    arguments = command("--model", toy_folder, "--prompts", prompts, "--minutes", 1)
    assert hub.table_of(str(toy_folder), None) is None
    result = cli(*arguments, "--tokens", 1000, "--only", "text")
    assert result.exit_code == 0 and "to train on" not in result.output
    folder = hub.table_of(str(toy_folder), None)
    assert folder.parent == cache / "trained" and hub.drafter_of(str(toy_folder)) is None
    with LLM(toy_folder) as llm:
        assert llm.engine.table.text >= 1000
        assert "table" in llm.generate("say 1", SamplingParams(max_tokens=30)).statistics.sources
    refuses("no config.json", LLM, toy_folder, drafter=tmp_path)
    assert hub.drafter_for(str(toy_folder), str(folder)) is None
    refuses("drafts with a model", LLM, toy_folder, "dyspec", drafter=folder)


def test_methods_without_a_drafter_take_a_table(toy_folder, made):
    for method in ("recycling", "auto"):
        arguments = ["generate", "say 1", "--model", str(toy_folder), "--drafter", str(made)]
        result = cli(*arguments, "--method", method, "--raw", "--max-tokens", "20")
        assert result.exit_code == 0, result.output
    result = cli(*arguments, "--method", "recycling", "--drafter", str(toy_folder))
    assert result.exit_code == 2 and "drafts without a model" in result.output


def test_a_drafter_is_measured_against_the_table(toy_folder, made):
    loaded = open_target(str(toy_folder), torch.device("cpu")).loaded
    table = NgramTable.load(made, 257)
    seen = []

    def measure(llm):
        seen.append(llm.engine.table)
        return 1.0

    itself = Candidate(str(toy_folder), "a test")
    trial = try_drafter(itself, loaded, "toy", itself.name, LLMOptions(), table, measure=measure)
    assert seen == [table] and trial.gain == 1.0
