"""The Triton kernels of paged attention, of recurrent layers and of noise against the reference: on
CUDA where there is one, in Triton's interpreter (a process of its own) otherwise."""

import os
import sys

import numpy as np
import pytest
import torch

from models import random_tree
from quickbeam.models.base import Chain, Draft
from quickbeam.models.native.operands import KVShape
from quickbeam.models.torch import paged_attention
from quickbeam.models.torch.noise import DrawnRows, philox
from quickbeam.models.torch.paged_attention import AttentionParams
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.recurrence import recur
from quickbeam.models.torch.rows import Padding, list_pass, uncommitted
from quickbeam.models.torch.states import SCRATCH, StateShape
from scripts import captured

triton = pytest.importorskip("triton")
fused = pytest.importorskip("quickbeam.models.torch.fused_attention")
fused_recurrence = pytest.importorskip("quickbeam.models.torch.fused_recurrence")
fused_noise = pytest.importorskip("quickbeam.models.torch.fused_noise")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if CUDA else "cpu")
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or CUDA), reason="needs CUDA; see the test with the interpreter"
)
NOISE = dict.fromkeys(("first", "key0", "key1", "choice", "position", "words"), "*i64")
NOISE |= dict.fromkeys(("rows", "count", "purpose"), "i32") | {"BLOCK": "constexpr"}
RECURRENCE = dict.fromkeys(("query", "key", "value", "rate", "decay", "states", "out"), "*fp32")
RECURRENCE |= dict.fromkeys(("bounds", "read", "written"), "*i64")
SHAPE = KVShape(2, 24, 20)
HEADS = 6


@pytest.mark.skipif(INTERPRETED, reason="is in it already")
def test_all_of_this_holds_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    kept = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
    done = captured(command, env=kept | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_a_gpu_without_one():
    """Triton's interpreter takes more than its compiler does: types that change, for one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel in (fused.attend_chunk, fused.join_chunks):
        assert compiled(kernel, 80, "*bf16", 64, 64).asm["cubin"]

    sizes = dict(HEADS=3, KEY_DIM=128, VALUE_DIM=128, K=128, V=32, DELTA=True, SCRATCH=SCRATCH)
    types = RECURRENCE | dict.fromkeys(sizes, "constexpr")
    source = ASTSource(fused_recurrence.recur_rows, types, sizes)
    assert triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]

    source = ASTSource(fused_noise.philox_words, NOISE, {"BLOCK": fused_noise.BLOCK})
    assert triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]


def compiled(kernel, capability, dtype, head_dim, block):
    """A kernel for a GPU of this compute capability, for pages in this format."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = ("pages", "path", "sequence", "committed", "seen", "positions")
    kinds = dict.fromkeys(("query", "key", "value"), dtype) | dict.fromkeys(numbers, "*i64")
    kinds |= dict.fromkeys(("sums", "maxima", "weights", "sinks", "out"), "*fp32")
    kinds |= dict.fromkeys(("scaling", "softcap"), "fp32")
    sizes = {"PAGE": 64, "KV_HEADS": 2, "GROUP": 3, "KEY_DIM": head_dim, "VALUE_DIM": head_dim}
    sizes |= {"G": 16, "K": fused.padded(head_dim), "V": fused.padded(head_dim)}
    sizes |= {"BLOCK": block, "CHUNK": 512, "CAUSAL": True}
    sizes |= {"HEADS": 6, "HAS_SINKS": True}
    constants = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    types = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("capability", "limit"), [(80, 163), (86, 99)])
def test_wide_heads_in_float32_fit_in_shared_memory(capability, limit):
    block = fused.keys_in_block(256, 256, 4)
    assert (
        compiled(fused.attend_chunk, capability, "*fp32", 192, block).metadata.shared <= limit << 10
    )


@pytest.mark.parametrize(
    ("itemsize", "head_dim", "block"),
    [(2, 64, 64), (2, 256, 64), (2, 512, 32), (4, 128, 64), (4, 256, 32), (4, 512, 16)],
)
def test_wide_heads_are_multiplied_with_fewer_keys_at_a_time(itemsize, head_dim, block):
    assert fused.keys_in_block(head_dim, head_dim, itemsize) == block


class Text:
    """A sequence of `length` committed tokens with random keys and values."""

    def __init__(self, pool, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.cache, self.pool = pool.new(), pool
        self.cache.reserve(length)
        self.fill(range(length), generator)
        self.cache.length = length

    def fill(self, orders, generator):
        rows = torch.from_numpy(self.cache.rows(np.array(orders, np.int64)))
        for tensor in (self.pool.key[0], self.pool.value[0]):
            made = torch.randn(len(rows), *tensor.shape[1:], generator=generator)
            tensor[rows.to(DEVICE)] = made.to(DEVICE)

    def draft(self, tree, seed):
        self.cache.reserve(self.cache.length + len(tree))
        orders = range(self.cache.length, self.cache.length + len(tree))
        self.fill(orders, torch.Generator().manual_seed(seed))
        return uncommitted(Draft(self.cache, tree))


def queries(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS, SHAPE.key_dim, generator=generator).to(DEVICE)


KINDS = {
    "plain": ({}, False),
    "window": ({"window": 70}, False),
    "softcap": ({"softcap": 2.0}, False),
    "sinks": ({}, True),
    "causal": ({"causal": True, "window": 600}, False),
}


@runs_kernels
@pytest.mark.parametrize(("kind", "padded"), [(kind, kind == "plain") for kind in KINDS])
@torch.inference_mode()
def test_the_kernel_gives_what_the_reference_does(kind, padded):
    options, has_sinks = KINDS[kind]
    pool = RowPool([SHAPE], torch.float32, DEVICE)
    generator = torch.Generator().manual_seed(0)
    texts = [Text(pool, length, i) for i, length in enumerate((0, 64, 511, 600))]
    parts = [text.draft(random_tree(generator, 3), i) for i, text in enumerate(texts)]
    parts.append(uncommitted(Chain(texts[3].cache, range(2))))
    rows = list_pass(parts, pool, padding=Padding() if padded else None).to(DEVICE)
    params = AttentionParams(0, 0.3, **options)
    sinks = torch.randn(HEADS, generator=generator).to(DEVICE) if has_sinks else None
    query = queries(len(rows.positions), 5)
    right = paged_attention.attend(pool, rows, params, query, sinks)
    got = fused.attend(pool, rows, params, query, sinks)
    real = ~rows.is_padding
    assert torch.allclose(got[real], right[real], rtol=1e-4, atol=1e-5)
    assert bool(got.isfinite().all())
    if kind != "plain":
        other = fused.attend(pool, rows, AttentionParams(0, 0.3), query)
        assert not torch.allclose(other[real], right[real], rtol=1e-3, atol=1e-3)


@runs_kernels
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others(monkeypatch):
    pool = RowPool([SHAPE], torch.float32, DEVICE)
    texts = [Text(pool, length, i) for i, length in enumerate((600, 40, 511))]
    trees = [random_tree(torch.Generator().manual_seed(i), 3) for i in range(3)]
    parts = [text.draft(tree, i) for i, (text, tree) in enumerate(zip(texts, trees, strict=True))]
    params, query = AttentionParams(0, 0.3, window=550), queries(sum(map(len, trees)), 1)
    rows = list_pass(parts, pool, padding=Padding()).to(DEVICE)
    padding = queries(len(rows.positions) - len(query), 2)
    together = fused.attend(pool, rows, params, torch.cat([query, padding]))
    # some rows at a time
    monkeypatch.setattr(fused, "SUMS_BYTES", 3 * 4 * HEADS * 2 * SHAPE.value_dim)
    assert torch.equal(fused.attend(pool, rows, params, torch.cat([query, padding])), together)
    first = 0
    for part in parts:
        own = slice(first, first + part.rows)
        alone = fused.attend(pool, list_pass([part], pool).to(DEVICE), params, query[own])
        assert torch.equal(alone, together[own])
        first += part.rows


class Recurrence:
    """Rows of two trees and two texts, and what their recurrence reads."""

    def __init__(self, delta, heads=3, key_dim=12, value_dim=40):
        self.delta = delta
        states = {0: StateShape(channels=8, history=3, matrix=(heads, key_dim, value_dim))}
        self.pool = RowPool([SHAPE], torch.float32, DEVICE, states)
        self.generator = torch.Generator().manual_seed(int(delta))
        self.trees = [random_tree(self.generator, nodes) for nodes in (9, 6)]
        caches = [self.pool.new() for _ in range(4)]
        list_pass([uncommitted(Chain(cache, [1, 2])) for cache in caches], self.pool)
        for cache in caches[1:]:  # one begins with no tokens
            cache.commit(range(2))
        drafts = [Draft(cache, tree) for cache, tree in zip(caches, self.trees, strict=False)]
        first = [uncommitted(Draft(caches[0], self.trees[0].first(4)))]
        drafts[0] = Draft(caches[0], self.trees[0], 4)  # the first nodes run in a pass before
        texts = [Chain(caches[2], range(7)), Chain(caches[3], [5])]
        self.first = list_pass(first, self.pool).to(DEVICE)
        self.parts = [uncommitted(part) for part in (*drafts, *texts)]
        list_pass(self.parts, self.pool)  # tensors have grown for all nodes
        self.states = self.pool.states.layers[0].matrix
        self.states[2:] = self.random(*self.states[2:].shape)
        self.inputs = [self.random(64, heads, size) for size in (key_dim, key_dim, value_dim)]
        self.inputs += [self.random(64, heads).sigmoid() for _ in range(2)]

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def listed(self, parts, padding=None):
        return list_pass(parts, self.pool, padding=padding).to(DEVICE)

    def run(self, run, rows, first=0):
        """The results for rows that are in `inputs` from `first` on, and the states after them."""
        states = self.states.clone()
        run(states, self.first, *self._inputs(50, len(self.first.tokens)), self.delta)
        results = run(states, rows, *self._inputs(first, len(rows.tokens)), self.delta)
        states[SCRATCH] = 0
        return results, states

    def _inputs(self, first, count):
        return [tensor[first : first + count] for tensor in self.inputs]


@runs_kernels
@pytest.mark.parametrize("delta", [False, True])
@torch.inference_mode()
def test_the_kernel_steps_states_as_the_reference_does(delta):
    one = Recurrence(delta)
    count = sum(part.rows for part in one.parts)
    for padding in (None, Padding()):
        rows = one.listed(one.parts, padding)
        right = one.run(recur, rows)
        got = one.run(fused_recurrence.recur, rows)
        assert torch.allclose(got[0][:count], right[0][:count], rtol=1e-4, atol=1e-5)
        assert torch.allclose(got[1], right[1], rtol=1e-4, atol=1e-5)
    # other states are read
    other = one.run(recur, one.listed([one.parts[0]]), first=one.parts[0].rows)[0]
    assert not torch.allclose(other, got[0][one.parts[0].rows :][: len(other)], atol=1e-2)


@runs_kernels
@torch.inference_mode()
def test_the_kernel_gives_a_row_the_same_bits_alone_and_among_others():
    one = Recurrence(delta=True)
    together, _ = one.run(fused_recurrence.recur, one.listed(one.parts, Padding()))
    first = 0
    for part in one.parts:
        alone, _ = one.run(fused_recurrence.recur, one.listed([part]), first)
        assert torch.equal(alone, together[first : first + part.rows])
        first += part.rows


@runs_kernels
@pytest.mark.parametrize("purpose", [0, 1])
def test_the_kernels_words_are_the_references(purpose):
    generator = torch.Generator().manual_seed(purpose)
    draws = torch.randint(-(2**63), 2**63 - 1, (5, 3), generator=generator)
    draws[:, 1] = torch.arange(5)
    rows = DrawnRows.of(draws.to(DEVICE), torch.tensor([0, 3, 2**20, 2**31, 9], device=DEVICE))
    first = torch.randint(2**18, (5, 300), generator=generator).to(DEVICE)
    right = philox(rows, first, purpose)
    got = fused_noise.philox(rows, first, purpose)
    assert all(map(torch.equal, got, right))
    assert not torch.equal(got[0], philox(rows, first, 1 - purpose)[0])
