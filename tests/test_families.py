"""Every family of `quickbeam.models.families` on tiny random models: transformers' logits and
tokens, and the same answers with drafts and without."""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from answers import answer, request
from cases import few
from interpreter import Interpreter
from models import SIZES, VOCAB
from models import tiny as tiny_model
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram
from quickbeam.engine.engine import Engine
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.methods.dyspec import DySpec
from quickbeam.methods.logitspec import LogitSpec
from quickbeam.models.angles import angles_of
from quickbeam.models.base import Batch, Chain
from quickbeam.models.compiled import CompiledStack, kv_shapes
from quickbeam.models.families import FAMILIES, describe
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native.operands import RowList
from quickbeam.models.native_model import why_not_native
from quickbeam.models.opening import make_model
from quickbeam.models.pages import PagePool
from quickbeam.models.recurrent import state_shape
from quickbeam.models.stack import Experts, Stack
from quickbeam.models.stack_tensors import ModelParameters
from quickbeam.params import SamplingParams

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

ONE_HEAD_A_KEY = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CONVOLVED = ["conv", "full_attention", "conv"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
FACTORS = {
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "embedding_multiplier": 2.0,
    "key_multiplier": 0.7,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.6, 1.4],
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_out_multiplier": 0.6,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "shared_intermediate_size": 24,
}
HYBRID_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
# experts of 24 numbers inside, three of seven for a token
EXPERTS = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24)
LATENT = dict(kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8) | dict(
    num_key_value_heads=4, num_experts_per_tok=3, moe_intermediate_size=24
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "bamba": BambaConfig(
        **SIZES | MAMBA | {"mamba_n_groups": 2}, attn_layer_indices=[1], mamba_proj_bias=True
    ),
    "cohere": CohereConfig(**SIZES, use_qk_norm=True),
    "cohere2": Cohere2Config(**SIZES | MIXED, sliding_window=6, head_dim=8),
    "deepseek_v2": DeepseekV2Config(
        **SIZES | LATENT, n_routed_experts=7, first_k_dense_replace=1, q_lora_rank=None
    ),
    "deepseek_v2-groups": DeepseekV2Config(
        **SIZES | LATENT,
        n_routed_experts=8,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        attention_bias=True,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | LATENT,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=20,
        num_mtp_layers=0,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "deepseek_v3-halves": DeepseekV3Config(
        **SIZES | LATENT,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=None,
        rope_interleave=False,
        num_mtp_layers=0,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **SIZES, moe_k=3, moe_num_experts=7, moe_intermediate_size=24, moe_norm_min=0.5
    ),
    "exaone4": Exaone4Config(**SIZES | MIXED, sliding_window=6),
    "exaone4-full": Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 3),
    "falcon_h1": FalconH1Config(**SIZES | MAMBA | FACTORS, mamba_d_ssm=64),
    "falcon_h1-normed": FalconH1Config(
        **SIZES | MAMBA | FACTORS | {"mamba_n_groups": 2}, mamba_d_ssm=64, mamba_rms_norm=True
    ),
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma2": Gemma2Config(
        **SIZES | MIXED,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=16,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=4.0,
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES | MIXED, head_dim=8, sliding_window=6, query_pre_attn_scalar=16
    ),
    "gemma4-experts": Gemma4TextConfig(
        **SIZES | GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=24,
        final_logit_softcapping=5.0,
    ),
    "gemma4-per_layer": Gemma4TextConfig(
        **SIZES | GEMMA4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "glm": GlmConfig(**SIZES, head_dim=8),
    "glm4": Glm4Config(**SIZES, head_dim=8),
    "glm4_moe": Glm4MoeConfig(
        **SIZES,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
        num_mtp_layers=0,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=512,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": GPTNeoXConfig(**ONE_HEAD_A_KEY, rotary_pct=0.5),
    "gpt_neox-serial": GPTNeoXConfig(**ONE_HEAD_A_KEY, rotary_pct=0.5, use_parallel_residual=False),
    "gpt_oss": GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=5, num_experts_per_tok=2, sliding_window=6
    ),
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        logits_scaling=4.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
    ),
    "granitemoe": GraniteMoeConfig(
        **SIZES, attention_multiplier=0.2, residual_multiplier=0.3, num_local_experts=5
    ),
    "granite_hybrid": GraniteMoeHybridConfig(
        **SIZES | MAMBA | GRANITE, layer_types=LINEAR, num_local_experts=0
    ),
    "granite_hybrid-moe": GraniteMoeHybridConfig(
        **SIZES | MAMBA | GRANITE,
        layer_types=LINEAR,
        num_local_experts=4,
        position_embedding_type="rope",
    ),
    "hunyuan": HunYuanDenseV1Config(**SIZES, head_dim=16),
    "lfm2": Lfm2Config(**SIZES, layer_types=CONVOLVED, conv_bias=True),
    "lfm2_moe": Lfm2MoeConfig(**SIZES | EXPERTS, layer_types=CONVOLVED, num_dense_layers=1),
    "lfm3": Lfm3Config(
        **SIZES | {"num_hidden_layers": 4},
        layer_types=["conv", "sliding_attention", "full_attention", "conv"],
        sliding_window=6,
        head_dim=8,
    ),
    "llama": LlamaConfig(**SIZES),
    "llama-bias": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "ministral3": Ministral3Config(**SIZES, sliding_window=7, head_dim=16, rope_parameters=YARN),
    "mistral": MistralConfig(**SIZES, sliding_window=7, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, sliding_window=7),
    "nemotron": NemotronConfig(**SIZES, head_dim=8),
    "nemotron_h": NemotronHConfig(
        **SIZES,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        head_dim=8,
        mamba_num_heads=6,
        mamba_head_dim=12,
        ssm_state_size=8,
        n_groups=2,
        time_step_min=0.3,
    ),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(**SIZES | MIXED, sliding_window=6),
    "olmoe": OlmoeConfig(**SIZES, num_experts=7, num_experts_per_tok=3),
    "phi": PhiConfig(**SIZES),
    "phimoe": PhimoeConfig(
        **SIZES, num_local_experts=5, sliding_window=7, router_jitter_noise=0.3, lm_head_bias=True
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=7, partial_rotary_factor=0.5),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES | EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3_5": Qwen3_5TextConfig(**SIZES | DELTA, layer_types=LINEAR),
    "qwen3_5-moe": Qwen3_5MoeTextConfig(**SIZES | DELTA | HYBRID_EXPERTS, layer_types=LINEAR),
    "qwen3_next": Qwen3NextConfig(**SIZES | DELTA | HYBRID_EXPERTS, layer_types=LINEAR),
    "qwen3_moe": Qwen3MoeConfig(**SIZES | EXPERTS, head_dim=16, norm_topk_prob=True),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=16, attention_out_bias=True),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "stablelm": StableLmConfig(**SIZES, partial_rotary_factor=0.5),
    "stablelm-parallel": StableLmConfig(
        **SIZES, use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True
    ),
    "starcoder2": Starcoder2Config(**SIZES | {"bos_token_id": 1}, sliding_window=6),
}
IDS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1))


def made(name, dtype=torch.float32):
    """A random model whose norms and biases matter."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, correction in (*model.named_parameters(), *model.named_buffers()):
            if "correction" in name or "expert_bias" in name:
                correction.copy_(torch.randn_like(correction) * 0.1)
            if "layer_scalar" in name:
                correction.fill_(0.7)
    return model.eval()


def off(got, right):
    return float((got - right).abs().max() / right.abs().max())


def by_interpreter(model, stack):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameters |= dict(model.named_buffers())

    turned = {one.rotary: one.turned for one in stack.attentions}

    def of(rotary, positions):
        return angles_of(model.config, rotary, turned[rotary]).at(positions)

    return Interpreter(parameters, of).logits(stack, IDS)


def by_kernels(model, stack):
    kernels = library.kernels()
    assert kernels is not None
    pool = PagePool(kv_shapes(stack), kernels, None, torch.float32, state_shape(stack))
    compiled = CompiledStack(ModelParameters(model), stack, pool)
    store, rows = pool.new(), RowList()
    store.add_chain(rows, IDS.tolist(), range(len(IDS)))
    return compiled(rows.rows(), len(IDS) - 1)


# --- transformers ---


def test_every_family_is_here():
    here = {kind for kind in FAMILIES if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert {config.model_type for config in CONFIGS.values()} == here


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits_and_tokens_are_those_of_transformers(name):
    plain = made(name)
    right = plain(input_ids=IDS[None], use_cache=False).logits[0]
    assert off(by_interpreter(plain, describe(plain)), right) < 2e-5
    ids = IDS.tolist()
    for _ in range(8):
        ids.append(
            int(plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        )
    model = make_model(plain)
    assert model.exact and model.dtype is torch.float32
    cache = model.pool.new()
    (passed,) = model.forward(Batch([Chain(cache, IDS[:17].tolist(), 17)]))
    cache.commit(range(17))
    (more,) = model.forward(Batch([Chain(cache, IDS[17:].tolist(), 23)]))
    assert off(torch.cat([passed.logits, more.logits]), right) < 2e-5
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert answer(model, NoDraft(), params, IDS.tolist()).output.token_ids == ids[len(IDS) :]


def each_layer(change):
    return lambda stack: replace(stack, layers=tuple(change(layer) for layer in stack.layers))


def each_attention(**changes):
    def changed(layer):
        of = layer.attention
        return replace(layer, attention=of and replace(of, **changes))

    return each_layer(changed)


def each_recurrent(**changes):
    def changed(layer):
        of = layer.recurrent
        return replace(layer, recurrent=of and replace(of, **changes))

    return each_layer(changed)


def each_experts(**changes):
    def changed(layer):
        of = layer.feed_forward
        return replace(
            layer, feed_forward=replace(of, **changes) if isinstance(of, Experts) else of
        )

    return each_layer(changed)


def each_routing(**changes):
    def changed(layer):
        of = layer.feed_forward
        if not isinstance(of, Experts):
            return layer
        return replace(layer, feed_forward=replace(of, routing=replace(of.routing, **changes)))

    return each_layer(changed)


def swapped(layer):
    """A convolution whose two gates are taken for each other."""
    if layer.recurrent is None:
        return layer
    (whole,) = layer.recurrent.into.weights
    b, c, x = (replace(whole, part=i, parts=3) for i in range(3))
    into = replace(layer.recurrent.into, weights=(c, b, x), biases=())
    return replace(layer, recurrent=replace(layer.recurrent, into=into))


def unscaled(of):
    routing = replace(of.experts.routing, scale=None)
    return replace(of, experts=replace(of.experts, routing=routing))


def wider(layer, by):
    window = layer.attention.window
    return replace(layer, attention=replace(layer.attention, window=window and window + by))


WRONG: dict[str, tuple[str, Callable[[Stack], Stack]]] = {
    "a window one too wide": ("mistral", each_layer(lambda layer: wider(layer, 1))),
    "a window one too narrow": ("gemma3", each_layer(lambda layer: wider(layer, -1))),
    "no angles": ("llama", each_attention(rotary=None)),
    "angles in every layer": (
        "smollm3",
        lambda s: replace(
            s,
            layers=s.layers[:1] * 1
            + tuple(
                replace(
                    layer,
                    attention=replace(
                        layer.attention,
                        rotary=s.layers[0].attention.rotary,
                        turned=s.layers[0].attention.turned,
                    ),
                )
                for layer in s.layers[1:]
            ),
        ),
    ),
    "halves turn, not neighbours": (
        "cohere",
        lambda s: each_attention(rotary=replace(s.rotaries[0], interleaved=False))(s),
    ),
    "norms without the 1": (
        "gemma",
        each_layer(
            lambda layer: replace(
                layer, attention_before=replace(layer.attention_before, plus_one=False)
            )
        ),
    ),
    "no gate of attention": ("qwen3_5", each_attention(gated=False)),
    "no gate of a head": ("lfm3", each_attention(gated=False)),
    "a gate before the norm": ("qwen3_5", each_recurrent(norm_last=True)),
    "decays held too low": ("qwen3_next", each_recurrent(most=0.1)),
    "no value beside the state": ("bamba", each_recurrent(skip=None)),
    "no factors of what is convolved": ("falcon_h1", each_recurrent(scales=(1.0, 1.0, 1.0))),
    "steps that are not held": ("nemotron_h", each_recurrent(least=0.0)),
    "the wrong gate": ("lfm2", each_layer(swapped)),
    "no mean": ("phi", lambda s: replace(s, norm=replace(s.norm, centred=False))),
    "norms before the angles": ("hunyuan", each_attention(norm_last=False)),
    "norms by head": ("olmo2", lambda s: each_attention(norms=None)(s)),
    "no softcap of scores": ("gemma2", each_attention(softcap=None)),
    "no softcap of logits": ("gemma2", lambda s: replace(s, softcap=None)),
    "no scale of embeddings": ("gemma", lambda s: replace(s, scale=1.0)),
    "no scale of logits": ("cohere", lambda s: replace(s, head_scale=1.0)),
    "no scale of residuals": ("granite", each_layer(lambda layer: replace(layer, residual=1.0))),
    "no scale of queries": ("ministral3", each_attention(query_scale=None)),
    "one after the other": (
        "phi",
        each_layer(
            lambda layer: replace(layer, parallel=False, feed_forward_before=layer.attention_before)
        ),
    ),
    "no norm after": ("glm4", each_layer(lambda layer: replace(layer, attention_after=None))),
    "another activation": (
        "nemotron",
        each_layer(
            lambda layer: replace(
                layer, feed_forward=replace(layer.feed_forward, activation="relu")
            )
        ),
    ),
    "values without their norm": ("gemma4-experts", each_attention(value_norm=False)),
    "values of another layer": (
        "gemma4-per_layer",
        lambda s: replace(
            s,
            layers=(
                *s.layers[:4],
                replace(s.layers[4], attention=replace(s.layers[4].attention, source=0)),
                s.layers[5],
            ),
        ),
    ),
    "no scalar of a layer": ("gemma4-per_layer", each_layer(lambda one: replace(one, scalar=None))),
    "per-layer inputs of the token alone": (
        "gemma4-per_layer",
        lambda s: replace(s, per_layer=replace(s.per_layer, scale=0.0)),
    ),
    "experts without their scales": (
        "gemma4-experts",
        each_layer(lambda one: replace(one, beside=unscaled(one.beside))),
    ),
    "experts that read what the dense one reads": (
        "gemma4-experts",
        each_layer(
            lambda one: replace(one, beside=replace(one.beside, before=one.feed_forward_before))
        ),
    ),
    "no positions": ("gpt2", lambda s: replace(s, positions=None)),
    "weights of experts as they are": ("mixtral", each_routing(renormalised=False)),
    "weights of experts that add up to 1": ("olmoe", each_routing(renormalised=True)),
    "an expert fewer": ("qwen3_moe", each_routing(top=2)),
    "no shared expert": ("qwen2_moe", each_experts(shared=None, shared_gate=None)),
    "a scale of scores without YaRN's": ("deepseek_v3", each_attention(scaling=10**-0.5)),
    "neighbours turn, not halves": (
        "deepseek_v3-halves",
        lambda s: each_attention(rotary=replace(s.rotaries[0], interleaved=True))(s),
    ),
    "no correction of the choice": ("ernie4_5_moe", each_routing(correction=None)),
    "groups left out": ("glm4_moe", each_routing(groups=1, top_groups=1)),
    "no sinks": ("gpt_oss", each_attention(sinks=None)),
    "softmax before the choice": ("granitemoe", each_routing(scores="softmax")),
    "no experts left out of a softmax": ("phimoe", each_routing(jitter=1e9)),
    "a shared expert without its gate": ("qwen2_moe", each_experts(shared_gate=None)),
}


@pytest.mark.parametrize("what", WRONG)
@torch.inference_mode()
def test_a_wrong_description_is_seen(what):
    name, change = WRONG[what]
    plain = made(name)
    right = plain(input_ids=IDS[None], use_cache=False).logits[0]
    stack = change(describe(plain))
    assert off(by_interpreter(plain, stack), right) > 2e-4
    assert off(by_kernels(plain, stack), right) > 2e-4


# --- what is not described ---


def test_what_a_family_does_not_know_is_named_and_run_by_pytorch(caplog):
    plain = made("llama")
    plain.config.value_multiplier = 2.5
    with pytest.raises(NotDescribed, match="value_multiplier"):
        describe(plain)
    with caplog.at_level("INFO", "quickbeam"):
        model = make_model(plain)
    assert not model.exact and "value_multiplier" in caplog.text
    for harmless in (None, False, 0):
        plain = made("llama")
        plain.config.value_multiplier = harmless
        assert not why_not_native(plain)


def test_parameters_that_no_family_names_are_seen():
    plain = made("qwen2")
    plain.model.layers[1].mlp.extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(NotDescribed, match=r"layers\.1\.mlp\.extra"):
        describe(plain)
    plain = made("phi")
    plain.config.qk_layernorm = True
    with pytest.raises(NotDescribed, match="qk_layernorm"):
        describe(plain)


# --- drafts ---


@pytest.mark.parametrize("name", ["mixtral", "gemma4-experts", "gemma4-per_layer"])
def test_what_a_token_reads_is_known_of_every_drafter(name):
    """Transformers refuses to tell sizes that differ from layer to layer."""
    model, drafter = make_model(made(name)), LMDrafter(made(name), VOCAB)
    assert drafter.weight_bytes == model.token_bytes > 0
    every = model.weight_bytes
    assert model.token_bytes < every if model.expert_share else model.token_bytes == every
    assert LMDrafter(made(name), VOCAB, native=False).weight_bytes >= model.token_bytes


FORMATS = ("float32", "bfloat16", "int8", "int4")
SAMPLING = ({}, {"temperature": 0.8, "seed": 5})


@functools.cache
def policies(dtype):
    drafter = LMDrafter(made("llama", dtype), VOCAB)
    return {
        "logitspec": LogitSpec(Ngram(), LastLogits()),
        "dyspec": DySpec(drafter),
        "auto": Auto(drafter, Ngram(), LastLogits()),
    }


def turns(model, params):
    """Prompts and answers by plain decoding without a cache: a first turn, a second one behind it,
    and another text with the same beginning."""
    found, prompt = [], IDS[:20].tolist() * 2
    for more in (IDS[:5].tolist(), IDS[5:9].tolist()):
        engine = Engine(model, share=False)
        said = answer(model, NoDraft(), params, prompt, engine=engine, budget=1).output.token_ids
        found.append((prompt, said))
        prompt = [*prompt, *said, *more]
    other = [*IDS[:20].tolist() * 2, 7, 8]
    engine = Engine(model, share=False)
    said = answer(model, NoDraft(), params, other, engine=engine, budget=1).output.token_ids
    return [*found, (other, said)]


OTHERS = [kind for kind in FORMATS if kind != "bfloat16"]


HYBRIDS = (
    *("bamba", "falcon_h1", "granite_hybrid", "lfm2", "lfm3", "nemotron_h", "qwen3_5"),
    "qwen3_next",
)


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
                if name.startswith(HYBRIDS)
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
    found = policies(dtype)
    for sampling in SAMPLING:
        params = SamplingParams(max_tokens=9, ignore_eos=True, **sampling)
        right, engine = turns(model, params), Engine(model)
        for policy in found.values():  # alone, on a prefix that is cached from the first on
            prompt, said = right[1]
            state = answer(model, policy, params, prompt, engine=engine, budget=8)
            assert state.output.token_ids == said
        states = [  # all methods and prompts at once
            (engine.add(request(model, policy, params, prompt, budget=8)), said)
            for policy in found.values()
            for prompt, said in right
        ]
        while any(not state.over for state, _ in states):
            engine.step()
        for state, said in states:
            assert state.error is None and state.output.token_ids == said


def test_what_transformers_notes_in_a_configuration_is_no_attribute():
    model = tiny_model("llama", torch.float32)
    model.config._model_name_or_path = "somewhere"
    assert not why_not_native(model)
    model.config.unknown_scaling = 2.0
    assert "unknown_scaling" in why_not_native(model)
