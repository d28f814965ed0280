"""Recurrent layers by PyTorch's operators: nodes give what their paths do, up to rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from answers import answer
from cases import few
from models import VOCAB, random_tree, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram
from quickbeam.engine.engine import Engine
from quickbeam.errors import InvalidInput
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.hf_recurrent import TorchStates
from quickbeam.models.opening import make_model
from quickbeam.models.torch import TorchModel
from quickbeam.params import SamplingParams
from test_families import CONFIGS
from test_recurrent import IDS, KINDS, PAGE, of_path, read

every_kind = pytest.mark.parametrize("kind", few(KINDS, ["lfm2", "qwen3_5"]))
FAMILIES = [
    *("bamba", "falcon_h1", "granite_hybrid", "granite_hybrid-moe", "lfm2_moe", "qwen3_5-moe"),
    "qwen3_next",
]


def made(kind, **options):
    model = make_model(tiny("", torch.float32, config=KINDS[kind]), native=False, **options)
    assert isinstance(model, TorchModel) and model.pool.state_pages
    return model


def error(model):
    """The largest relative error of the logits of random trees against those of their paths."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    texts = [IDS[:PAGE], IDS[7:8], IDS[20 : 18 + 2 * PAGE]]
    caches = [read(model, text, cuts) for text, cuts in zip(texts, [(5, 50), (), ()], strict=True)]
    for _ in range(3):
        trees = [random_tree(generator, 7) for _ in texts]
        model.forward(
            Batch([Draft(cache, tree.first(3)) for cache, tree in zip(caches, trees, strict=True)])
        )
        parts = [Draft(caches[0], trees[0], 3), *map(Draft, caches[1:], trees[1:])]
        for part, text, got in zip(parts, texts, model.forward(Batch([*parts])), strict=True):
            for row, node in enumerate(range(part.base, len(part.tree))):
                path = [part.tree.token[i] for i in part.tree.path(node)]
                right = of_path(model, [*text, *path])
                worst = max(worst, float((got.logits[row] - right).abs().max() / right.abs().max()))
        for cache, text, tree in zip(caches, texts, trees, strict=True):
            path = max(map(tree.path, range(len(tree))), key=len)
            cache.commit(path)
            text += [tree.token[node] for node in path]
    for cache in caches:
        cache.release()
    assert model.pool.used == 0
    return worst


@every_kind
def test_nodes_follow_their_paths(kind):
    assert error(made(kind)) < 1e-4


BEHIND, COMMIT = TorchStates.behind, TorchStates.commit
MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "the state of the committed tokens": (
        "behind",
        lambda self, layer, node: BEHIND(self, layer, min(node, 0)),
    ),
    "the state of the root": (
        "commit",
        lambda self, path, length: COMMIT(
            self, path if isinstance(path, range) else path[:1], length
        ),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, monkeypatch):
    model = made("lfm2")
    monkeypatch.setattr(TorchStates, *MISTAKES[mistake])
    assert error(model) > 1e-2


@every_kind
def test_answers_are_those_of_transformers(kind):
    plain = tiny("", torch.float32, config=KINDS[kind])
    prompts, model = [IDS[:100], IDS[40:43]], made(kind, chunk=PAGE)
    settings = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    right = [
        plain.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    drafter = LMDrafter(tiny("", torch.float32, seed=1, config=KINDS[kind]), VOCAB)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for policy in (NoDraft(), Auto(drafter, Ngram(), LastLogits())):
        engine = Engine(model)
        for prompt, said in zip(prompts, right, strict=True):
            assert answer(model, policy, params, prompt, engine=engine).output.token_ids == said
        # the state behind the first whole page was kept
        again = answer(model, policy, params, prompts[0], engine=engine)
        assert again.statistics.cached_tokens == PAGE and again.output.token_ids == right[0]
        assert engine.prefixes is not None
        engine.prefixes.clear()
        assert model.pool.used == 0


def test_states_belong_to_their_sequences():
    model = made("lfm2")
    cache, way = read(model, IDS[:70]), [5, 6, 7]
    fork = cache.fork()
    model.forward(Batch([Chain(fork, way)]))
    fork.commit(range(len(way)))
    for one, ids in ((fork, [*IDS[:70], *way]), (cache, IDS[:70])):
        (passed,) = model.forward(Batch([Chain(one, [4])]))
        assert torch.allclose(passed.logits[0], of_path(model, [*ids, 4]), rtol=1e-4, atol=1e-5)
    cache.commit(range(1))
    model.forward(Batch([Chain(cache, IDS[:5])]))
    with pytest.raises(ValueError, match="commit all of them"):
        cache.commit(range(3))
    with pytest.raises(ValueError, match="only to 0"):
        cache.truncate(3)
    cache.truncate(0)
    (passed,) = model.forward(Batch([Chain(cache, IDS[:3])]))
    assert torch.allclose(passed.logits[0], of_path(model, IDS[:3]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", few(FAMILIES, ["granite_hybrid-moe", "qwen3_next"]))
def test_families_give_the_logits_of_transformers(family):
    """`TorchModel` compares them, in chunks and trees, and refuses others."""
    model = make_model(tiny("", torch.float32, config=CONFIGS[family]), native=False)
    assert model.pool.state_pages


def test_what_transformers_runs_in_two_ways_is_refused():
    model = tiny("", torch.float32, config=CONFIGS["nemotron_h"])
    with pytest.raises(InvalidInput, match=r"time steps have a limit.*only the native kernels"):
        make_model(model, native=False)
