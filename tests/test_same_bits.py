"""Sizes of passes that give a row the same bits: how they are found, and that they hold."""

import copy
import functools
import os
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from answers import PROMPTS, request, run
from cases import few
from models import random_tree, tiny
from quickbeam.engine.engine import Engine
from quickbeam.methods.base import NoDraft
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.families import describe
from quickbeam.models.torch import cuda_settings, paged_attention
from quickbeam.models.torch import model as of_model
from quickbeam.models.torch import recurrent as of_recurrent
from quickbeam.models.torch.attention import AttentionLayer
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.torch.recurrence import recur
from quickbeam.models.torch.rows import Padding, PassSizes, padded_sizes, passes_of, uncommitted
from quickbeam.models.torch.size_classes import (
    OTHERS,
    PADDING,
    Placement,
    class_with_widest,
    placements,
    size_classes,
)
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.params import SamplingParams
from test_batch_bits import World
from test_families import CONFIGS

pytestmark = pytest.mark.usefixtures("threads")
CPU = torch.device("cpu")
SIZES = (1, 4, 16)
FORMATS = (torch.float32, torch.bfloat16)


def config(name):
    """A layout by name; `wide`: of 256 units."""
    made = copy.deepcopy(CONFIGS["llama" if name == "wide" else name])
    if name == "wide":
        made.hidden_size, made.head_dim, made.num_hidden_layers = 256, 64, 2
    return made


@functools.cache
def made(name, dtype=torch.float32, sizes=SIZES):
    """A model that tests must leave as it is: they share it."""
    return fresh(name, dtype, sizes)


def fresh(name, dtype=torch.float32, sizes=SIZES, device=CPU):
    model = tiny("", dtype, config=config(name))
    return TorchModel(ModelParameters(model), describe(model), device, sizes=sizes)


@functools.cache
def products_differ_by_rows():
    """Whether PyTorch's products give a row other bits in other numbers of rows here."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(16, 256, generator=generator) for _ in range(2))
    return not torch.equal(F.linear(rows[:1], weight), F.linear(rows, weight)[:1])


def needs_other_bits():
    if not products_differ_by_rows():
        pytest.skip("products give a row the same bits whatever their number of rows here")


# classes


def bits_of(**by):
    """A stand-in for passes. Each argument gives a part of the bits of a placement."""

    def bits(placement):
        return {0: repr(tuple(part(placement) for part in by.values())).encode()}

    return bits


def test_sizes_that_agree_are_one_class():
    bits = bits_of(kernel=lambda at: (at.size > 1) + (at.size > 8))
    assert size_classes(bits, (1, 2, 4, 8, 16, 32)) == [(1,), (2, 4, 8), (16, 32)]
    assert class_with_widest(bits, (1, 2, 4, 8, 16, 32)) == (16, 32)
    assert class_with_widest(bits_of(), (1, 2, 4)) == (1, 2, 4)


@pytest.mark.parametrize("depends_on", ["position", "neighbours"])
def test_a_size_in_which_a_row_depends_on_where_it_stands_is_in_no_class(depends_on):
    bits = bits_of(tile=lambda at: at.size == 8 and getattr(at, depends_on))
    assert size_classes(bits, (4, 8, 16)) == [(4, 16)]
    assert class_with_widest(bits, (4, 8)) == ()


def test_other_bits_of_any_row_make_other_classes():
    def bits(at):
        few = {1: b"a", 2: b"b"}
        return few | {3: b"d" if at.size == 2 else b"c"} if at.neighbours == "prompt" else few

    assert size_classes(bits, (2, 4, 8)) == [(2,), (4, 8)]


def test_a_row_is_looked_at_alone_elsewhere_and_among_others():
    assert [*placements(1)] == [Placement(1, 0, PADDING)]
    others = [at.position for at in placements(8) if at.neighbours == OTHERS]
    assert others == [0, 4, 7]
    assert {at.neighbours for at in placements(2)} == {"padding", "others", "prompt", "tree"}
    assert all(at.position < at.size for size in SIZES for at in placements(size))


def test_passes_are_padded_to_the_smallest_size_that_fits():
    sizes = PassSizes(rows=3, wanted=1, sequences=2, pages=1, path=1)
    usual = padded_sizes(sizes)
    assert Padding().around(sizes) == usual and usual.rows == 4
    assert Padding((4, 16), (2, 8)).around(sizes) == usual._replace(wanted=2)
    assert Padding((16,), (8,)).around(sizes) == usual._replace(rows=16, wanted=8)
    assert Padding((2,)).around(sizes).rows == 4


# whole passes


class Rows(World):
    """Sequences whose pages are rows of tensors. Those with states of recurrent layers neither go
    back nor begin with chunks."""

    def truncate(self):
        if not self.model.pool.state_pages:
            super().truncate()

    def attach(self):
        if not self.model.pool.state_pages:
            super().attach()

    def release(self):
        if self.texts:
            text = self.texts.pop(self.below(len(self.texts)))
            for page in text.cache.pages:
                if page.users == 1:
                    self.spoil(page.data)
            text.cache.release()

    def spoil(self, page):
        first = page * self.model.pool.page
        for tensor in (*self.model.pool.key, *self.model.pool.value):
            tensor[first : first + self.model.pool.page] = torch.nan


def wrong_rows(model, other, steps=25):
    """Rows in random passes that have other bits than alone."""
    world = Rows(model, other, seed=1)
    world.live(steps)
    world.end()
    assert world.compared > steps
    return world.wrong


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        [
            *((name, FORMATS[0]) for name in ("llama", "gemma3", "lfm2", "qwen3_5", "bamba")),
            *(("wide", one) for one in FORMATS),
        ],
        [("llama", FORMATS[0]), ("wide", FORMATS[1]), ("qwen3_5", FORMATS[0])],
    ),
)
@torch.inference_mode()
def test_rows_side_by_side_have_the_bits_of_the_same_rows_alone(name, dtype):
    """Trees, texts wider than a pass, and a wrong version, whose passes are not padded."""
    model, other = fresh(name, dtype), fresh(name, dtype)
    assert model.exact and 16 in model._padding.rows and 16 in model._padding.wanted
    for each in (model, other):
        each.set_aux_layers([1, 2])
    assert wrong_rows(model, other) == 0


@torch.inference_mode()
def test_rows_in_passes_of_any_size_have_other_bits():
    needs_other_bits()
    assert wrong_rows(fresh("llama", sizes=()), made("llama", sizes=())) > 0
    model = fresh("llama")
    assert 1 not in model._padding.rows
    model._padding = Padding()  # powers of two, whether they agree or not
    assert wrong_rows(model, made("llama")) > 0


def test_a_model_whose_rows_agree_says_so():
    model = made("llama")
    rows = ", ".join(map(str, model._padding.rows))
    assert model.exact
    assert model.describe().endswith(f", the same bits in passes of {rows} rows")


def test_experts_that_multiply_as_many_rows_as_come_are_seen():
    """In float32 here: how many rows an expert gets depends on all rows of a pass."""
    needs_other_bits()
    model = made("qwen2_moe")
    assert not model.exact and model._padding is None
    assert model.describe().endswith("a row's bits depend on the pass")


def by_position(*args, **named):
    mixed = paged_attention.attend(*args, **named)
    return mixed * (1 + 2**-16 * torch.arange(len(mixed))[:, None])


def by_neighbours(*args, **named):
    mixed = paged_attention.attend(*args, **named)
    return mixed + 2**-16 * mixed.mean()


@pytest.mark.parametrize("wrong", [by_position, by_neighbours])
def test_attention_that_depends_on_the_pass_is_seen(wrong, monkeypatch):
    """Products alone would agree."""
    forward = AttentionLayer.forward
    monkeypatch.setattr(
        AttentionLayer, "forward", lambda self, x, at: forward(self, x, at._replace(attend=wrong))
    )
    assert not fresh("llama").exact


def test_a_state_that_depends_on_the_pass_is_seen(monkeypatch):
    """By so little that no result of its row tells."""

    def wrong(states, rows, *inputs, **options):
        results = recur(states, rows, *inputs, **options)
        states[rows.state_written] *= 1 + 2**-20 * rows.positions.float().mean()
        return results

    monkeypatch.setattr(of_recurrent, "recurrence_on", lambda device: wrong)
    assert not fresh("qwen3_5").exact


def test_nothing_is_looked_for_where_it_can_not_hold(monkeypatch):
    monkeypatch.setattr(of_model, "find_padding", None)
    assert fresh("llama", sizes=None).describe() == fresh("llama", sizes=()).describe()


def test_a_short_context_is_not_looked_at():
    of = config("llama")
    of.max_position_embeddings = 20
    model = tiny("", config=of)
    model = TorchModel(ModelParameters(model), describe(model), CPU, sizes=SIZES)
    assert not model.exact and model.pool.used == 0


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_the_check_gives_all_memory_back_and_makes_little(name):
    pool = made(name).pool
    assert pool.used == 0 and pool.limit is None and pool.rows <= 64 * pool.page


def test_wide_passes_are_cut_between_any_rows():
    model = made("llama", sizes=())
    parts = [uncommitted(Chain(model.pool.new(), range(count))) for count in (5, 1, 9)]
    cut = [[(part.base, len(part.depths)) for part in each] for each in passes_of(parts, 4)]
    assert cut == [[(0, 4)], [(4, 5), (0, 1), (0, 2)], [(2, 6)], [(6, 9)]]


@torch.inference_mode()
def test_a_tree_that_is_run_in_parts_has_the_same_bits():
    """A part of its nodes by an earlier pass, and the others in passes that are cut."""
    model = made("llama")
    tree = random_tree(torch.Generator().manual_seed(1), 45)
    whole, in_parts = model.pool.new(), model.pool.new()
    (right,) = model.forward(Batch([Draft(whole, tree)]))
    (begun,) = model.forward(Batch([Draft(in_parts, tree.first(7))]))
    (rest,) = model.forward(Batch([Draft(in_parts, tree, 7)]))
    assert len(rest.logits) > 32
    assert torch.equal(torch.cat([begun.logits, rest.logits]), right.logits)
    whole.release()
    in_parts.release()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", FORMATS)
@torch.inference_mode()
def test_rows_on_a_gpu_have_the_bits_of_the_same_rows_alone(dtype):
    """Where the check, which is made by default, finds that they do."""
    models = [fresh("wide", dtype, None, torch.device("cuda")) for _ in range(2)]
    assert "rows" in models[0].describe() or "depend on the pass" in models[0].describe()
    if models[0].exact:
        assert wrong_rows(*models) == 0


# answers

METHODS = {"ar": NoDraft, "logitspec": lambda: LogitSpec()}


def answered(model, prompts, method, params):
    """Tokens and logprobs of prompts that run together."""
    engine = Engine(model)
    running = [engine.add(request(model, METHODS[method](), params, one)) for one in prompts]
    run(engine)
    engine.close()
    return [(one.output.token_ids, repr(one.logprobs)) for one in running]


def answers_differ(model, temperature=0.7):
    """How many answers are others in a batch or with drafts than alone without."""
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3, logprobs=2)
    alone = [answered(model, [prompt], "ar", params)[0] for prompt in PROMPTS]
    differ = 0
    for method in METHODS:
        together = answered(model, PROMPTS, method, params)
        differ += sum(one != other for one, other in zip(together, alone, strict=True))
    return differ


@pytest.mark.parametrize(("name", "dtype"), [("llama", FORMATS[0]), ("wide", FORMATS[1])])
def test_answers_are_the_same_alone_and_among_others(name, dtype):
    """In bfloat16, rounding hides some differences of a narrow model's rows from the check."""
    model = made(name, dtype)
    assert model.exact
    assert answers_differ(model) == 0


def test_logprobs_differ_where_passes_are_not_padded():
    needs_other_bits()
    assert answers_differ(made("llama", sizes=())) > 0


def test_an_answer_that_is_read_as_a_prompt_has_the_same_bits():
    """As that of a preempted request."""
    model = made("llama")
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    ((ids, _),) = answered(model, PROMPTS[:1], "ar", params)
    text = [*PROMPTS[0], *ids]
    (whole,) = model.forward(Batch([Chain(model.pool.new(), text[:-1], len(ids))]))
    cache = model.pool.new()
    model.forward(Batch([Chain(cache, PROMPTS[0][:-1])]))
    cache.commit(range(len(PROMPTS[0]) - 1))
    for token, logits in zip(text[len(PROMPTS[0]) - 1 : -1], whole.logits, strict=True):
        (step,) = model.forward(Batch([Chain(cache, [token])]))
        assert torch.equal(step.logits[0], logits)
        cache.commit([0])


# settings


@contextmanager
def matmul_settings():
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction")
    names += ("allow_fp16_reduced_precision_reduction",)
    before = {name: getattr(matmul, name) for name in names}
    try:
        yield names
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def test_sums_are_in_float32_on_cuda(monkeypatch):
    monkeypatch.setattr(os, "environ", {"CUBLASLT_WORKSPACE_SIZE": "4096"})
    with matmul_settings() as names:
        torch.backends.cuda.matmul.allow_tf32 = True
        cuda_settings.fix_sums()
        assert not any(getattr(torch.backends.cuda.matmul, name) for name in names)
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "4096"}
    assert os.environ == wanted, "what a user chose stays"
