"""Every family of `quickbeam.models.families` on tiny random models: transformers' logits and
tokens, and the same answers with drafts and without."""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from answers import answer, conversation, drafts_change_nothing, methods_over
from cases import few, refuses
from models import VOCAB, spread_out, table
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Batch, Chain
from quickbeam.models.compile.compiled_stack import CompiledStack, kv_shapes
from quickbeam.models.compile.recurrent import state_shape
from quickbeam.models.families import FAMILIES, describe
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.pages import PagePool
from quickbeam.models.opening import make_model
from quickbeam.models.stack import Rotary, Stack
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.params import SamplingParams
from target import logits_of

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

CONFIGS = table("families")
IDS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
FORMATS = ("float32", "bfloat16", "int8", "int4")
SAMPLING = ({}, {"temperature": 0.8, "seed": 5})


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    spread_out(model, vectors=0.3)
    with torch.no_grad():
        for name, correction in (*model.named_parameters(), *model.named_buffers()):
            if "correction" in name or "expert_bias" in name:
                correction.copy_(torch.randn_like(correction) * 0.1)
            if "layer_scalar" in name:
                correction.fill_(0.7)
    return model.eval()


def off(got, right):
    """The largest difference, as a share of the largest number."""
    return float((got - right).abs().max() / right.abs().max())


def by_pytorch(model, stack):
    network = TorchModel(ModelParameters(copy.deepcopy(model)), stack, torch.device("cpu"))
    return logits_of(network, IDS.tolist())


def by_kernels(model, stack):
    pool = PagePool(kv_shapes(stack), library.kernels(), None, torch.float32, state_shape(stack))
    compiled = CompiledStack(ModelParameters(model), stack, pool)
    store, rows = pool.new(), RowList()
    store.add_chain(rows, IDS.tolist(), range(len(IDS)))
    return compiled(rows)


def test_every_family_is_here():
    here = {kind for kind in FAMILIES if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert {config.model_type for config in CONFIGS.values()} == here


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits_and_tokens_are_those_of_transformers(name):
    """In float32, by a share of the largest logit: 2e-5 in PyTorch and 5e-5 by the kernels.

    In PyTorch half of the families have transformers' bits. Next come Qwen3.5 (1e-5), whose
    recurrence transformers computes in chunks, and Youtu (1.1e-5), whose dot products add rotary
    dimensions first. Their spread weights enlarge a last bit as much: transformers' logits are 1.6
    and 1.3e-5 off those of float64.
    """
    plain = made(name)
    right = plain(input_ids=IDS[None], use_cache=False).logits[0]
    by_torch = by_pytorch(plain, describe(plain))
    assert off(by_torch, right) < 2e-5
    ids = IDS.tolist()
    for _ in range(8):
        last = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(last.argmax()))
    model = make_model(plain)
    assert model.exact and model.dtype is torch.float32
    cache = model.pool.new()
    (passed,) = model.forward(Batch([Chain(cache, IDS[:17].tolist(), 17)]))
    cache.commit(range(17))
    (more,) = model.forward(Batch([Chain(cache, IDS[17:].tolist(), 23)]))
    by_kernels = torch.cat([passed.logits, more.logits])
    assert off(by_kernels, right) < 5e-5
    assert off(by_kernels, by_torch) < 5e-5
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert answer(model, NoDraft(), params, IDS.tolist()).output.token_ids == ids[len(IDS) :]


def each(path="", **changes):
    """A stack with other fields of what stands at `path` in each layer, where it has them."""

    def change(of, names):
        if not all(hasattr(of, name) for name in names[:1] or changes):
            return of
        own = {name: change(getattr(of, name), names[1:]) for name in names[:1]}
        return replace(of, **own or changes)

    return of_layers(lambda layer: change(layer, path.split(".") if path else []))


def of_layers(change):
    return lambda stack: replace(stack, layers=tuple(map(change, stack.layers)))


def angles_everywhere(stack):
    of = stack.layers[0].attention
    return each("attention", rotary=of.rotary, rotary_dim=of.rotary_dim)(stack)


def in_turn(layer):
    return replace(layer, parallel=False, feed_forward_before=layer.attention_before)


def as_dense(layer):
    beside = replace(layer.parallel_experts, before=layer.feed_forward_before)
    return replace(layer, parallel_experts=beside)


def values_of_the_first(stack):
    fifth = replace(stack.layers[4], attention=replace(stack.layers[4].attention, source=0))
    return replace(stack, layers=(*stack.layers[:4], fifth, stack.layers[5]))


def unscaled(stack):
    return replace(stack, per_layer=replace(stack.per_layer, scale=0.0))


def curves_swapped(layer):
    xielu = layer.feed_forward.xielu
    other = replace(xielu, positive=xielu.negative, negative=xielu.positive)
    return replace(layer, feed_forward=replace(layer.feed_forward, xielu=other))


def swapped(layer):
    """A convolution whose two gates are taken for each other."""
    if layer.recurrent is None:
        return layer
    (whole,) = layer.recurrent.into.weights
    b, c, x = (replace(whole, part=i, parts=3) for i in range(3))
    into = replace(layer.recurrent.into, weights=(c, b, x), biases=())
    return replace(layer, recurrent=replace(layer.recurrent, into=into))


def wider(by):
    def change(layer):
        window = layer.attention.window
        return replace(layer, attention=replace(layer.attention, window=window and window + by))

    return of_layers(change)


def turning(interleaved):
    def change(stack):
        rotary = replace(stack.attentions[0].rotary, interleaved=interleaved)
        return each("attention", rotary=rotary)(stack)

    return change


def without_biases(layer):
    norms = tuple(replace(norm, bias=None) for norm in layer.attention.norms)
    return replace(layer, attention=replace(layer.attention, norms=norms))


ROUTING, PARALLEL = "feed_forward.routing", "parallel_experts.experts.routing"
WRONG: dict[str, tuple[str, Callable[[Stack], Stack]]] = {
    "a window one too wide": ("mistral", wider(1)),
    "a window one too narrow": ("gemma3", wider(-1)),
    "no angles": ("llama", each("attention", rotary=None)),
    "angles forwards": ("nanochat", each("attention", rotary=Rotary())),
    "angles in every layer": ("smollm3", angles_everywhere),
    "halves turn, not neighbours": ("cohere", turning(False)),
    "norms without the 1": ("gemma", each("attention_before", plus_one=False)),
    "no gate of attention": ("qwen3_5", each("attention", gated=False)),
    "no gate of a head": ("lfm3", each("attention", gated=False)),
    "a gate before the norm": ("qwen3_5", each("recurrent", norm_last=True)),
    "decays held too low": ("qwen3_next", each("recurrent", most=0.1)),
    "no value beside the state": ("bamba", each("recurrent", skip=None)),
    "no factors of what is convolved": ("falcon_h1", each("recurrent", scales=(1.0, 1.0, 1.0))),
    "steps that are not held": ("nemotron_h", each("recurrent", least=0.0)),
    "the wrong gate": ("lfm2", of_layers(swapped)),
    "the curve above zero below it": ("apertus", of_layers(curves_swapped)),
    "no mean": ("phi", lambda s: replace(s, norm=replace(s.norm, centred=False))),
    "norms before the angles": ("hunyuan", each("attention", norm_last=False)),
    "norms by head": ("olmo2", each("attention", norms=None)),
    "no softcap of scores": ("gemma2", each("attention", softcap=None)),
    "no softcap of logits": ("gemma2", lambda s: replace(s, softcap=None)),
    "no scale of embeddings": ("gemma", lambda s: replace(s, scale=1.0)),
    "no scale of logits": ("cohere", lambda s: replace(s, head_scale=1.0)),
    "no scale of residuals": ("granite", each(residual=1.0)),
    "no scale of queries": ("ministral3", each("attention", query_scale=None)),
    "one after the other": ("phi", of_layers(in_turn)),
    "no norm after": ("glm4", each(attention_after=None)),
    "another activation": ("nemotron", each("feed_forward", activation="relu")),
    "values without their norm": ("gemma4-experts", each("attention", value_norm=False)),
    "values of another layer": ("gemma4-per_layer", values_of_the_first),
    "no scalar of a layer": ("gemma4-per_layer", each(scalar=None)),
    "per-layer inputs of the token alone": ("gemma4-per_layer", unscaled),
    "experts without their scales": ("gemma4-experts", each(PARALLEL, scale=None)),
    "experts that read what the dense one reads": ("gemma4-experts", of_layers(as_dense)),
    "positions from the first row": ("opt", lambda s: replace(s, first_position=0)),
    "no biases of heads' norms": ("persimmon", of_layers(without_biases)),
    "no positions": ("gpt2", lambda s: replace(s, positions=None)),
    "weights of experts as they are": ("mixtral", each(ROUTING, renormalised=False)),
    "weights of experts that add up to 1": ("olmoe", each(ROUTING, renormalised=True)),
    "an expert fewer": ("qwen3_moe", each(ROUTING, top=2)),
    "no shared expert": ("qwen2_moe", each("feed_forward", shared=None, shared_gate=None)),
    "a scale of scores without YaRN's": ("deepseek_v3", each("attention", scaling=10**-0.5)),
    "neighbours turn, not halves": ("deepseek_v3-halves", turning(True)),
    "no correction of the choice": ("ernie4_5_moe", each(ROUTING, correction=None)),
    "groups left out": ("glm4_moe", each(ROUTING, groups=1, top_groups=1)),
    "no sinks": ("gpt_oss", each("attention", sinks=None)),
    "softmax before the choice": ("granitemoe", each(ROUTING, scores="softmax")),
    "no experts left out of a softmax": ("phimoe", each(ROUTING, jitter=1e9)),
    "a shared expert without its gate": ("qwen2_moe", each("feed_forward", shared_gate=None)),
}


@pytest.mark.parametrize("what", WRONG)
@torch.inference_mode()
def test_a_wrong_description_is_seen(what):
    name, change = WRONG[what]
    plain = made(name)
    right = plain(input_ids=IDS[None], use_cache=False).logits[0]
    stack = change(describe(plain))
    assert off(by_pytorch(plain, stack), right) > 2e-4
    assert off(by_kernels(plain, stack), right) > 2e-4


def test_what_a_family_does_not_know_is_named():
    plain = made("llama")
    plain.config.value_multiplier = 2.5
    words = r"'llama' doesn't .*sets value_multiplier; docs/extending/architectures\.md"
    for call in (describe, make_model):
        refuses(words, call, plain, error=NotDescribed)
    plain.config._model_name_or_path = "somewhere"
    for harmless in (None, False, 0):
        plain.config.value_multiplier = harmless
        assert describe(plain)
    plain = made("qwen2")
    plain.model.layers[1].mlp.extra = torch.nn.Parameter(torch.ones(3))
    refuses(r"layers\.1\.mlp\.extra", describe, plain, error=NotDescribed)
    plain = made("phi")
    plain.config.qk_layernorm = True
    refuses("qk_layernorm", describe, plain, error=NotDescribed)
    plain = made("cohere")
    plain.config.layer_norm_eps = None
    refuses("its configuration can't be read .*float", describe, plain)


@functools.cache
def methods(dtype):
    return methods_over(LMDrafter(make_model(made("llama", dtype)), VOCAB))


OTHERS = [kind for kind in FORMATS if kind != "bfloat16"]

HYBRIDS = "bamba falcon_h1 granite_hybrid lfm2 lfm3 nemotron_h qwen3_5 qwen3_next"


# `make test` runs each family in bfloat16 and in one of the other formats, in turns, and hybrids,
# which `test_recurrent.py` runs too, in one format
@pytest.mark.parametrize(
    ("name", "kind"),
    few(
        itertools.product(CONFIGS, FORMATS),
        [
            (name, kind)
            for i, name in enumerate(CONFIGS)
            for kind in (
                (FORMATS[i % len(FORMATS)],)
                if name.startswith(tuple(HYBRIDS.split()))
                else ("bfloat16", OTHERS[i % len(OTHERS)])
            )
        ],
    ),
)
def test_answers_do_not_depend_on_drafts_neighbours_or_the_cache(name, kind):
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weights = kind if kind.startswith("int") else "bfloat16"
    model = make_model(made(name, dtype), weights=weights, chunk=16)
    assert model.exact
    ids = IDS.tolist()
    for sampling in SAMPLING:
        params = SamplingParams(max_tokens=9, ignore_eos=True, **sampling)
        right = conversation(model, params, ids[:20] * 2, [ids[:5], ids[5:9]])
        right += conversation(model, params, [*ids[:20] * 2, 7, 8], [[]])  # of the same beginning
        drafts_change_nothing(model, methods(dtype), params, right, right[1:2])
