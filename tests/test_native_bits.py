"""Bit-identity of the native kernels: what a row gives depends on what it sees alone. On every
instruction set that the machine runs."""

import random

import pytest
import torch

import reference
from cases import few, spread
from features import random_tree
from kernels import SETS, best_set, dependent_rows, every_set, linear, load, number, read
from models import CONFIGS, VOCAB, tiny
from quickbeam.models.native import library
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.quantised import Packed
from quickbeam.models.opening import open_model
from quickbeam.tree import TokenTree
from target import Target

pytestmark = pytest.mark.usefixtures("threads")
WIDEST = 128
MANY = [pytest.param(wide, (1, 100, 200), 80, marks=pytest.mark.long) for wide in (False, True)]


def product(kernels, inputs, outputs, epilogue):
    """`[n, inputs]` bfloat16 to `[n, outputs]` float32."""
    gated = epilogue == library.GATED
    weights = [number(outputs, inputs, seed=i) for i in range(1, 2 + gated)]
    bias = number(outputs * (1 + gated), like=torch.float32, seed=3)
    packed = Packed(kernels, weights, bias, gated=gated)
    return lambda x: linear(kernels, packed, x, epilogue)


@every_set
@pytest.mark.parametrize("epilogue", [library.STORE, library.GATED])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    # the last: more than is kept of the rows at once where they are widened
    [(34, 40), (64, 100), (96, 16), (160, 217), (5002, 17)],
)
def test_rows_of_a_product_do_not_depend_on_others(isa, inputs, outputs, epilogue):
    run = product(load(isa), inputs, outputs, epilogue)
    assert dependent_rows(run, number(WIDEST, inputs)) == 0


@best_set
def test_a_product_that_depends_on_other_rows_is_seen(isa):
    right, every = product(load(isa), 64, 40, library.STORE), number(WIDEST, 64)

    def touched(x):
        return right(x) + 2.0**-20 * x.float().sum(0).mean() * (len(x) > 16)

    for wrong in (touched, lambda x: right(x.roll(1, 0))):
        assert dependent_rows(wrong, every) > 1000


def text(n, seed=0):
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_at_a_time(target, prompt, tokens):
    """`[len(tokens), vocab]` logits after each of `tokens`, verified alone."""
    target.reset()
    target.prefill(prompt)
    rows = []
    for token in tokens:
        tree = TokenTree(token)
        rows.append(target.verify(tree)[0].clone())
        target.commit(tree, [0])
    return torch.stack(rows)


def rows_that_differ(target, prompt, tokens, expected, seed):
    """Verify `tokens` in trees with random siblings and nephews; count rows with other bits."""
    generator = torch.Generator().manual_seed(seed)

    def below(high):
        return int(torch.randint(high, (1,), generator=generator))

    target.reset()
    target.prefill(prompt)
    done = wrong = 0
    while done < len(tokens):
        tree, path = TokenTree(tokens[done]), [0]
        deepest, most = min(below(14), len(tokens) - done - 1), below(40)
        for token in tokens[done + 1 : done + 1 + deepest]:
            parent = path[-1]
            for _ in range(below(4) if len(tree) < most else 0):
                other = below(VOCAB)
                if other != token and tree.child(parent, other) is None:
                    tree.add(tree.add(parent, other, "noise"), below(VOCAB), "noise")
            path.append(tree.add(parent, token, "text"))
        logits = target.verify(tree)
        wrong += int((logits[path] != expected[done : done + len(path)]).any(1).sum())
        target.commit(tree, path)
        done += len(path)
    return wrong


def wrong_rows(target, ids, begin, seeds=1):
    """Rows of random trees behind the first tokens with other bits than one token at a time."""
    prompt, tokens = ids[:begin], ids[begin:]
    expected = one_at_a_time(target, prompt, tokens)
    return sum(rows_that_differ(target, prompt, tokens, expected, seed) for seed in range(seeds))


@every_set
@pytest.mark.parametrize(("wide", "begins", "count"), [(False, (52,), 26), *MANY])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_tree_gives_the_bits_of_one_token_at_a_time(isa, name, wide, begins, count, native):
    native(isa)
    target, ids = Target(tiny(name, torch.bfloat16, wide=wide)), text(280)
    assert target.store.pool.kernels.name == isa
    for begin in begins:  # the one of every run: across the end of a page
        assert wrong_rows(target, ids[: begin + count], begin, len(begins)) == 0


@every_set
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_in_float32_bits_are_the_paths_and_logits_transformers(isa, name, native):
    native(isa)
    model, ids = tiny(name), text(150)
    right = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].detach()
    target = Target(model)
    assert target.store.pool.kernels.name == isa and target.model.dtype is torch.float32
    assert (target.prefill(ids) - right).abs().max() < 5e-5 * right.abs().max()
    for begin in (1, 52, 124):
        assert wrong_rows(target, ids[: begin + 26], begin) == 0


@best_set
@pytest.mark.parametrize("name", ["llama", "gemma2-softcap-window"])
def test_trees_whose_paths_are_mixed_up_are_seen(isa, name, native, monkeypatch):
    native(isa)
    target, add = Target(tiny(name, torch.bfloat16)), RowList.add

    def mixed(self, table, tokens, positions, orders, prefix, paths, *rest):
        paths = [[path[1], path[0], *path[2:]] if len(path) > 2 else path for path in paths]
        add(self, table, tokens, positions, orders, prefix, paths, *rest)

    monkeypatch.setattr(RowList, "add", mixed)
    assert wrong_rows(target, text(100), 60, 2) > 5


@pytest.mark.parametrize(
    ("isa", "name"), spread(SETS, ["llama", "qwen3", "mistral-window", "gemma3-window", "gpt2"])
)
def test_prompts_in_chunks_and_kept_prefixes_give_the_same_bits(isa, name, native):
    native(isa)
    ids, results = text(150), []

    def kept(store):
        return [tensor for layer in range(len(store.pool.shapes)) for tensor in read(store, layer)]

    for chunk in (512, 64, 37, 5):
        target = Target(tiny(name, torch.bfloat16), chunk=chunk)
        target.model.set_aux_layers([1, 3])
        logits = target.prefill(ids)
        results.append([logits, target.take_hidden(), *kept(target.store)])
        for keep in (64, 101, 149):
            target.prefill([*ids[:keep], *text(9, keep)], keep)
            assert torch.equal(target.prefill(ids, keep), logits)
            assert all(map(torch.equal, results[-1][2:], kept(target.store)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@every_set
def test_a_model_does_not_depend_on_threads(isa, native, threads):
    native(isa)
    ids, results = text(100), []
    target = Target(tiny("llama", torch.bfloat16, wide=True))
    tree = random_tree(random.Random(0), ids[90], 40)
    for count in (1, 2, 3):
        threads(count)
        target.reset()
        results.append([target.prefill(ids[:90]), target.verify(tree), torch.tensor(target.best)])
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))
    assert torch.equal(results[0][2], reference.best(results[0][1]))


@pytest.mark.parametrize("name", ["llama", "gemma2-softcap-window"])
@pytest.mark.parametrize(
    ("isa", "length"),
    few([(isa, n) for isa in SETS for n in (1023, 1500, 2500, 4000)], [(SETS[0], 1500)]),
)
def test_long_contexts_give_the_same_bits(isa, length, name, native):
    native(isa)
    assert wrong_rows(Target(tiny(name, torch.bfloat16)), text(length + 16), length) == 0


@best_set
@pytest.mark.parametrize(
    ("begins", "count", "seeds"),
    [((374,), 20, 1), pytest.param((37, 748, 1100), 40, 3, marks=pytest.mark.long)],
)
def test_the_built_in_model_gives_the_same_bits(isa, smollm2, begins, count, seeds, native):
    native(isa)
    opened = open_model(str(smollm2), torch.bfloat16, torch.device("cpu"))
    target, tokenizer = Target(opened.model), opened.tokenizer
    ids = tokenizer("A small model answered slowly, so its friends drafted ahead of it. " * 100)
    ids = ids["input_ids"]
    for begin in begins:
        assert wrong_rows(target, ids[: begin + count], begin, seeds) == 0
