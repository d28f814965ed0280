"""Hidden states of the certain tokens: those of a plain run of transformers, whatever was verified,
rejected and forgotten."""

import copy
import random

import pytest
import torch

from models import VOCAB, random_tree, tiny
from quickbeam.errors import InvalidInput
from quickbeam.models.opening import make_model
from quickbeam.models.target import Target
from quickbeam.tree import TokenTree

PREFIX = [5, 9, 13, 44, 2, 71, 9, 13, 60, 33, 8]
LAYOUTS = ("llama", "qwen3", "gemma3-window", "gpt2", "gpt-neox", "phi3", "mistral-window")


@torch.inference_mode()
def plain_states(model, ids, layers):
    """What `take_hidden` should give of `ids`, by transformers. Its last entry is taken after the
    final norm; what goes into that norm is the residual stream after all layers."""
    count, into = model.config.num_hidden_layers, []
    norm = next(
        getattr(model.base_model, name)
        for name in ("norm", "ln_f", "final_layer_norm")
        if hasattr(model.base_model, name)
    )
    handle = norm.register_forward_pre_hook(lambda module, args: into.append(args[0]))
    states = model(
        torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False
    ).hidden_states
    handle.remove()
    return torch.cat([(into[0] if i == count else states[min(i, count)])[0] for i in layers], -1)


def close(got, expected):
    assert got.shape == expected.shape
    scale = expected.abs().amax().clamp_(min=1)
    torch.testing.assert_close(got / scale, expected / scale, atol=1e-5, rtol=0)


def all_layers(model):
    """In an order of its own: the last one first."""
    count = model.config.num_hidden_layers
    return (count + 1, *range(1, count + 1))


class Walk:
    """Random operations on a target, and what it should hold after each."""

    def __init__(self, target, model, layers, seed):
        self.target, self.model, self.layers = target, model, layers
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.ids: list[int] = []
        self.taken = 0

    def check(self):
        assert (self.target.ids, self.target.taken) == (self.ids, self.taken)

    def take(self):
        got, new = self.target.take_hidden(), len(self.ids) - self.taken
        assert len(got) == new
        if new:
            close(got, plain_states(self.model, self.ids, self.layers)[self.taken :])
        self.taken = len(self.ids)

    def prompt(self):
        keep = self.random.randint(0, len(self.ids))
        self.ids = [
            *self.ids[:keep],
            *(self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 9))),
        ]
        self.target.prefill(self.ids, keep=keep)
        self.taken = keep

    def step(self):
        tree = random_tree(self.generator, self.random.choice([1, 2, 9, 17]))
        if self.random.random() < 0.5:
            self.target.verify(tree)
        else:
            self.in_parts(tree)
        path = tree.path(self.random.randrange(len(tree)))
        self.target.commit(tree, path)
        self.ids += [tree.token[node] for node in path]

    def in_parts(self, tree):
        part, base = TokenTree(tree.token[0]), 0
        for node in range(1, len(tree)):
            if self.random.random() < 0.4:
                self.target.verify(part, base)
                base = len(part)
            part.add(tree.parent[node], tree.token[node], "part")
        self.target.verify(part, base)

    def truncate(self):
        length = self.random.randint(1, len(self.ids))
        self.target.truncate(length)
        del self.ids[length:]
        self.taken = length

    def reset(self):
        self.target.reset()
        self.ids, self.taken = [], 0
        self.check()
        self.prompt()


@pytest.mark.parametrize("name", LAYOUTS)
def test_hidden_states_are_those_of_a_plain_run(name):
    model = tiny(name)
    layers = all_layers(model)
    target = Target(copy.deepcopy(model), chunk=4)
    target.model.watch(layers)
    for seed in range(3):
        walk = Walk(target, model, layers, seed)
        walk.reset()
        for _ in range(16):
            walk.random.choices(
                [walk.step, walk.take, walk.prompt, walk.truncate, walk.reset], [8, 4, 2, 2, 1]
            )[0]()
            walk.check()
        walk.take()


def test_a_prompt_is_given_in_order_and_once():
    model = tiny("llama")
    target = Target(copy.deepcopy(model), chunk=3)
    target.model.watch((2,))
    target.prefill(PREFIX)
    assert target.taken == 0
    close(target.take_hidden(), plain_states(model, PREFIX, (2,)))
    assert target.taken == len(PREFIX) and len(target.take_hidden()) == 0
    target.prefill(PREFIX, keep=len(PREFIX))  # the last token is computed again, for its logits
    assert target.taken == len(PREFIX) - 1
    close(target.take_hidden(), plain_states(model, PREFIX, (2,))[-1:])


@pytest.mark.parametrize("native", (False, True))
def test_watching_anew_ends_the_watch_before(native):
    model = tiny("gpt2")
    target = Target(make_model(copy.deepcopy(model), native=native))
    target.model.watch((1, 2))
    target.model.watch((2,))
    target.prefill(PREFIX)
    close(target.take_hidden(), plain_states(model, PREFIX, (2,)))


def test_the_mirror_of_a_lone_token_leaves_no_trace():
    model = tiny("llama")
    target = Target(copy.deepcopy(model))
    target.model._rows = 2  # as on machines whose kernels treat a single row differently
    target.model.watch((1, 4))
    target.prefill(PREFIX)
    tree = TokenTree(50)
    target.verify(tree)
    tree.add(0, 51, "x")
    target.verify(tree, base=1)
    target.commit(tree, [0, 1])
    close(target.take_hidden(), plain_states(model, [*PREFIX, 50, 51], (1, 4)))


@pytest.mark.parametrize("layers", [(1,), (4,), (2, 1, 4, 3)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_watching_changes_no_logits(name, layers):
    watched, other = (Target(tiny(name), chunk=4) for _ in range(2))
    watched.model.watch(layers)
    tree = random_tree(torch.Generator().manual_seed(1), 9)
    for _ in range(2):
        assert torch.equal(watched.prefill(PREFIX), other.prefill(PREFIX))
        assert torch.equal(watched.verify(tree), other.verify(tree))
        for target in (watched, other):
            target.commit(tree, tree.path(len(tree) - 1))
        assert torch.equal(watched.verify(tree), other.verify(tree))


def test_without_watching_nothing_is_kept():
    target = Target(tiny("llama"))
    target.prefill(PREFIX)
    target.verify(tree := TokenTree(3))
    target.commit(tree, [0])
    assert target.taken == len(PREFIX) + 1 and len(target.take_hidden()) == 0


@pytest.mark.parametrize("layers", [(), (0,), (1, 5), (-1,)])
def test_layers_that_are_not_there_are_refused(layers):
    target = Target(tiny("llama"))
    with pytest.raises(InvalidInput, match=r"the model has 1 to 3, and 4 for the final norm"):
        target.model.watch(layers)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-window"])
def test_embedding_and_head_are_the_models(name):
    model = tiny(name)
    target = Target(copy.deepcopy(model))
    states = plain_states(model, PREFIX, (model.config.num_hidden_layers + 1,))
    with torch.inference_mode():
        close(target.model.head(states), model(torch.tensor([PREFIX])).logits[0])
        close(
            target.model.embedding(torch.tensor(PREFIX)),
            model.get_input_embeddings()(torch.tensor(PREFIX)),
        )
