"""A copy of the model as its drafter: it runs the model's own sequences and leaves nothing in
them."""

import functools
import random
from types import SimpleNamespace

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from answers import PROMPTS, answer, method_as_plain, request, run, same_as_plain
from cases import before, examples, few, refuses
from drafters import DRAFTED
from features import context_of, random_requests
from gguf_files import model_of, write
from models import VOCAB, tiny
from quickbeam import LLM
from quickbeam.drafters.base import DraftRequest
from quickbeam.drafters.loading import load_drafter
from quickbeam.drafters.self_draft import SelfDrafter, four_bit_copy
from quickbeam.engine.engine import Engine
from quickbeam.hub import SELF
from quickbeam.methods.base import NoDraft
from quickbeam.methods.dyspec import DySpec
from quickbeam.models.base import Batch, Chain
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.families import describe
from quickbeam.models.native import library
from quickbeam.models.opening import make_model, open_model
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree
from streaming import limits, on_disk, saved, stored

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

CPU = torch.device("cpu")
NAMES = few(
    ("llama", "mistral-window", "gpt2", "gemma2-softcap-window", "qwen3"), ["llama", "gpt2"]
)


@functools.cache
def pair(name, dtype=torch.bfloat16):
    """A model and its copy in 4 bits as a drafter."""
    target = make_model(tiny(name, dtype, seed=7), chunk=32)
    return target, SelfDrafter(four_bit_copy(target, ModelParameters(tiny(name, dtype, seed=7))))


@functools.cache
def twins(name):
    """A model, and a copy of the same bits on its pages."""
    target = make_model(tiny(name, torch.bfloat16, seed=7))
    source = tiny(name, torch.bfloat16, seed=7)
    copied = NativeModel(
        ModelParameters(source), describe(source), target.pool.kernels, pages=target.pool
    )
    return target, SelfDrafter(copied)


def begin(target, ids, temperature=1.0):
    """A context whose tokens but the last one the target has read."""
    context = context_of(ids, temperature)
    context.cache = target.pool.new()
    if len(ids) > 1:
        read(target, context.cache, ids[:-1])
    return context


def read(target, cache, ids):
    target.forward(Batch([Chain(cache, ids, wanted=0)]))
    cache.commit(range(len(ids)))


@pytest.mark.parametrize("name", NAMES)
@examples(10)
@given(rng=st.randoms(use_true_random=False), temperature=st.sampled_from([0.0, 0.5, 1.0]))
def test_distributions_are_those_of_the_copy_behind_the_targets_tokens(name, rng, temperature):
    """A copy of the same bits gives the target's own distributions, whatever it drafted before."""
    target, drafter = twins(name)
    pages = target.pool.used
    context = begin(target, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], temperature)
    context.begin([drafter])
    for _ in range(4):
        for tree, nodes in random_requests(rng, context.ids[-1], alone=False):
            if not nodes:
                continue
            probs = drafter.answer([DraftRequest(context, tree, nodes)])[0].dense()
            for node, row in zip(nodes, probs, strict=True):
                alone = target.pool.new()
                path = [tree.token[i] for i in tree.path(node)]
                passed = target.forward(Batch([Chain(alone, [*context.ids[:-1], *path])]))
                alone.release()
                logits = passed[0].logits / (temperature or 1.0)
                torch.testing.assert_close(row, logits.softmax(-1)[0], atol=1e-6, rtol=1e-5)
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        read(target, context.cache, [context.ids[-1], *tokens[:-1]])
        context.extend(tokens)
    context.cache.release()
    assert target.pool.used == pages


def test_a_draft_changes_nothing_that_is_committed():
    target, drafter = pair("llama")
    rng = random.Random(0)
    context = begin(target, [rng.randrange(VOCAB) for _ in range(50)]).begin([drafter])
    cache = context.cache
    cache.reserve(cache.length + 8)
    before = [page.data.clone() for page in cache.pages]
    tree = TokenTree(context.ids[-1])
    for nodes in ([0], [tree.add(0, 3, "x"), tree.add(0, 4, "x")]):
        drafter.answer([DraftRequest(context, tree, nodes)])
    assert cache.length == 49
    changed = 0
    for page, (now, then) in enumerate(zip(cache.pages, before, strict=True)):
        slots = [slot for slot in range(target.pool.page) if page * target.pool.page + slot < 49]
        for slot in range(target.pool.page):
            same = torch.equal(*(rows_of(target.pool, data, slot) for data in (now.data, then)))
            assert same or slot not in slots
            changed += not same
    assert changed == 3  # the rows of the tree
    cache.release()


def rows_of(pool, data, slot):
    """The keys and values of one slot of a page, read by moving it to an empty page."""
    cache = pool.new()
    with pool.unbounded():
        cache.reserve(2 * pool.page)
    cache.pages[0].data.copy_(data)
    cache.pages[1].data.zero_()
    cache.move([slot], [pool.page])
    moved = cache.pages[1].data.clone()
    cache.release()
    return moved


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_plain_decodings(name):
    target, drafter = pair(name)
    same_as_plain(target, drafter)


@pytest.mark.parametrize("name", few(DRAFTED, ["dyspec", "eagle2"]))
def test_every_method_answers_as_plain_decoding(name):
    target, drafter = pair("llama")
    method_as_plain(target, DRAFTED[name](drafter), PROMPTS[0])


@pytest.mark.parametrize("name", few(("llama", "gemma2-softcap-window"), ["llama"]))
def test_a_target_in_float32_keeps_its_keys_and_values_in_float32(name):
    target, drafter = pair(name, torch.float32)
    assert drafter.model.weights == "int4" and drafter.model.pool is target.pool
    same_as_plain(target, drafter, PROMPTS[:3])


class Committing(SelfDrafter):
    """A mistake: the drafter's row of the root is committed, as in a cache of its own."""

    def answer(self, requests):
        answers = super().answer(requests)
        for asked in requests:
            if asked.nodes[0] == 0:
                asked.context.cache.commit([0])
        return answers


class Leaving(SelfDrafter):
    """A mistake that no length shows: the drafter's rows are committed, not the target's."""

    def answer(self, requests):
        answers = super().answer(requests)
        for asked in requests:
            cache = asked.context.cache
            pages = [page.data.clone() for page in cache.pages]

            def commit(path, cache=cache, pages=pages):
                for page, data in zip(cache.pages, pages, strict=False):
                    page.data.copy_(data)
                type(cache).commit(cache, path)

            cache.commit = commit
        return answers


@pytest.mark.parametrize("wrong", [Committing, Leaving])
def test_rows_of_a_draft_that_stay_are_seen(wrong):
    target, drafter = pair("llama")
    with pytest.raises((AssertionError, ValueError)):
        same_as_plain(target, wrong(drafter.model))


def test_without_memory_for_its_rows_nothing_is_drafted(monkeypatch):
    target, drafter = pair("llama")
    refused = list[DraftRequest]()
    before(monkeypatch, drafter, "_nothing", refused.append)
    used = target.pool.used
    prompt = [3, 1, 4] * 5
    params = SamplingParams(max_tokens=3 * target.pool.page - 16, ignore_eos=True)
    alone = Engine(target, share=False)
    right = answer(target, NoDraft(), params, prompt, engine=alone, budget=1).output.token_ids
    engine = Engine(target, pages=used + 3)
    ones = [engine.add(request(target, DySpec(drafter), params, prompt)) for _ in range(3)]
    run(engine)
    assert all(one.error is None and one.output.token_ids == right for one in ones)
    assert refused
    engine.close()
    assert target.pool.used == used


def test_blocks_of_many_bits_are_quantised_and_the_embedding_is_shared(tmp_path):
    kinds = {"": gguf.GGMLQuantizationType.Q8_0}
    file = write(tmp_path / "m.gguf", "llama", model_of("llama"), kinds)
    target = open_model(str(file), None, CPU).model
    drafter = self_drafter(target)
    assert drafter.model._compiled._embedded is target._compiled._embedded
    assert not drafter.model._compiled.block_formats
    same_as_plain(target, drafter, PROMPTS[:3])


def self_drafter(target, **options):
    return load_drafter(SELF, target, SimpleNamespace(get_vocab=dict), **options)


def test_it_reads_the_file_of_4_bits_that_the_model_itself_would(toy_folder, cache):
    drafted = LLM(toy_folder, drafter="self", budget=8)
    files = sorted(cache.glob("weights/*.safetensors"))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answer = drafted.generate("the", params)
    assert answer.statistics.drafter_calls
    assert answer.token_ids == LLM(toy_folder, method="ar").generate("the", params).token_ids
    drafted.close()
    LLM(toy_folder, weights="int4", method="ar")
    assert files and sorted(cache.glob("weights/*.safetensors")) == files


def test_a_model_read_from_disk_has_its_copy_in_memory(toy_folder, tmp_path, cache):
    folder = saved("llama", tmp_path / "model", toy_folder, layers=6)
    checkpoint = stored(folder)
    target = on_disk(checkpoint, limits(checkpoint)[0]).model
    drafter = self_drafter(target)
    assert drafter.model.streamed is None
    same_as_plain(target, drafter, PROMPTS[:2])
    target.close()


def test_what_the_copy_takes_is_said(toy_folder):
    with LLM(toy_folder, drafter="self", method="dyspec") as llm:
        bytes_of_copy = llm.method_store.drafter.model.weight_bytes
        assert (
            llm.describe() == f"{llm.kernels}, the drafter's weights {bytes_of_copy / 1e6:.0f} MB"
        )


def test_models_that_gain_nothing_or_have_no_such_copy_are_refused(toy_folder, tmp_path):
    four = open_model(str(toy_folder), torch.bfloat16, CPU, weights="int4").model
    refuses("MB and a copy in 4 bits .* name a smaller model", self_drafter, four)
    half = open_model(str(toy_folder), torch.float16, CPU).model
    refuses("needs the native kernels", self_drafter, half)
    refuses("comes from memory", self_drafter, make_model(tiny("llama", torch.bfloat16)))
    plain = open_model(str(toy_folder), torch.bfloat16, CPU).model
    refuses("has 4 bits", self_drafter, plain, weights="int8")
    file = write(tmp_path / "hybrid.gguf", "qwen35", model_of("qwen35"))
    hybrid = open_model(str(file), torch.bfloat16, CPU).model
    refuses("recurrent layers", self_drafter, hybrid)
