"""Helpers that the families' files share: a configuration that notes what is read, and parts of a
`Stack` that many families have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Layer,
    Linear,
    Norm,
    ParameterRows,
    Recurrent,
    Rotary,
    Routing,
    Stack,
)

TOKENS = ("_token_id", "_token_ids", "_token_index")  # how the names of special tokens end
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
# What a configuration may set without changing what the model computes: for training, for
# generation, and for other programs. Who reads the weights heeds `quantization_config`.
_HARMLESS = """
    architectures attention_dropout attn_pdrop auto_map cache_implementation chunk_size_feed_forward
    classifier_dropout dtype embd_pdrop embedding_dropout hidden_dropout hidden_size id2label
    init_method initializer_range input_jitter_noise intermediate_size is_encoder_decoder
    is_llama_config label2id max_position_embeddings max_window_layers model_type
    moe_intermediate_size n_positions neftune_noise_alpha num_logits_to_keep
    num_nextn_predict_layers original_max_position_embeddings output_attentions
    output_hidden_states output_router_logits pretraining_tp problem_type quantization_config
    resid_pdrop residual_dropout return_dict router_aux_loss_coef shared_expert_intermediate_size
    tie_word_embeddings tokenizer_class torch_dtype transformers.js_config transformers_version
    unsloth_fixed unsloth_version use_cache vocab_size
"""
HARMLESS = set(_HARMLESS.split())
_LOCAL_EXPERTS = ("gpt_oss", "minimax_m2", "mixtral", "qwen3_moe", "qwen3_vl_moe_text")
# other names of attributes, by the configuration's model_type, as transformers has them
_DEEPSEEK = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_GPT2 = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_BAMBA = {"layer_types": "layers_block_type"}
ATTRIBUTES: dict[str, dict[str, str]] = {
    "bamba": _BAMBA,
    "codegen": _GPT2,
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": _DEEPSEEK,
    "dots1": {"num_local_experts": "n_routed_experts"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "exaone": {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
    },
    "falcon_h1": _BAMBA,
    "flex_olmo": {"num_local_experts": "num_experts"},
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": {"head_dim": "qk_rope_head_dim", "num_local_experts": "n_routed_experts"},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "gptj": _GPT2,
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "hunyuan_v1_moe": {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    "internlm3": {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
    "lfm3": {"rms_norm_eps": "norm_eps"},
    "mellum": {"num_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    "nemotron_h": _BAMBA | {"num_local_experts": "n_routed_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "sarvam_mla": _DEEPSEEK
    | {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    "solar_open": {"num_local_experts": "n_routed_experts"},
    **{kind: {"num_experts": "num_local_experts"} for kind in _LOCAL_EXPERTS},
}
# model types whose layers heed `partial_rotary_factor`; transformers' code for others doesn't
_PARTIAL = """
    bamba glm glm4 glm4_moe glm4v_text gpt_neox mellum minimax_m2 nemotron persimmon phi phi3
    qwen3_5_moe_text qwen3_5_text qwen3_next solar_open stablelm
"""
PARTIAL = set(_PARTIAL.split())
ROTARY = Rotary()  # angles by the configuration's `rope_parameters`
PAGE = "docs/extending/architectures.md"  # how a family is described
MOST = 4096  # layers, or experts of a layer, that a configuration is believed to name
NormMaker = Callable[[str], Norm]  # from a module's name


class NormNames(NamedTuple):
    """The modules' names of a layer's norms, by the fields of `Layer`; None for no norm."""

    attention_before: str | None
    feed_forward_before: str | None
    attention_after: str | None = None
    feed_forward_after: str | None = None


BEFORE = NormNames("input_layernorm", "post_attention_layernorm")
AFTER = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
AROUND = AFTER._replace(
    attention_before="input_layernorm", feed_forward_before="pre_feedforward_layernorm"
)
PARALLEL = NormNames("input_layernorm", None)  # the feed-forward reads what the attention reads


class NotDescribed(InvalidInput):
    """No family's file describes this model. The message says why."""


class Config:
    """A configuration that notes which attributes a family reads.

    `number_format`: the model's.
    """

    def __init__(self, config: Any, number_format: torch.dtype) -> None:
        self._config = config
        self._read = set[str]()
        self.number_format = number_format

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._config, name):
            raise NotDescribed(f"its configuration has no {name}")
        return self.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or `default` where it is missing or None."""
        self.ignore(name)
        value = getattr(self._config, name, None)
        return default if value is None else value

    def ignore(self, names: str = "", **only: Any) -> None:
        """Accept attributes that change nothing in the family's models.

        `names`: separated by spaces. Attributes of these names follow from others, or transformers'
        code for the family doesn't read them. `only`: attributes that are accepted with this value
        alone.
        """
        equal = [name for name, value in only.items() if getattr(self._config, name, None) == value]
        other_names = self._config.attribute_map
        self._read.update(other_names.get(name, name) for name in (*names.split(), *equal))

    def must(self, name: str, *accepted: Any) -> None:
        """Raise `NotDescribed` for an attribute with another value than `accepted` and None."""
        value = self.get(name)
        if value is not None and value not in accepted:
            raise NotDescribed(f"{name}={value!r}")

    def layer(self, i: int) -> Config:
        """Return the configuration of layer `i`, for a model whose layers may have their own."""
        fields = self._config.to_dict()
        by_layer = fields.get("per_layer_config") or {}
        overrides = {int(number): values for number, values in by_layer.items()}.get(i, {})
        config = Config(SimpleNamespace(attribute_map={}, **fields | overrides), self.number_format)
        self._read.add("per_layer_config")
        config._read = self._read
        return config

    def refuse_unknown(self) -> None:
        """Raise `NotDescribed` naming attributes that are set and that the family didn't read."""
        unknown = [
            name
            for name, value in self._config.to_dict().items()
            if name not in self._read | HARMLESS
            and not name.startswith("_")  # transformers' own notes
            and not name.endswith(TOKENS)
            and value not in (None, False, 0, "", [], {}, ())
        ]
        if unknown:
            raise NotDescribed(f"its configuration sets {', '.join(sorted(unknown))}")


def check_count(count: Any, what: str) -> None:
    """Raise `InvalidInput` for a number of layers or experts that no model has."""
    if type(count) is not int or not 0 < count <= MOST:
        raise InvalidInput(
            f"its configuration can't be read ({str(count)[:80]} {what}; 1 to {MOST} are "
            "accepted): download it again"
        )


def linear(*modules: str, bias: bool = False, transposed: bool = False) -> Linear:
    """Return the weights of modules one below the other, and with `bias` their biases."""
    return Linear(
        tuple(ParameterRows(f"{name}.weight", transposed=transposed) for name in modules),
        tuple(ParameterRows(f"{name}.bias") for name in modules) if bias else (),
    )


def stacked(prefix: str, *names: str, bias: bool = False) -> Linear:
    """Return the weights of the modules `names` in the module `prefix`, as `linear` does."""
    return linear(*(f"{prefix}.{name}" for name in names), bias=bias)


def halves(module: str) -> Linear:
    """Return the two halves of one module's weight, the first as gates."""
    return Linear(
        (ParameterRows(f"{module}.weight", 0, 2), ParameterRows(f"{module}.weight", 1, 2))
    )


def rms_norms(epsilon: float, plus_one: bool = False) -> NormMaker:
    """Return what makes an RMS norm of a module's name. `plus_one`: weights are stored less 1."""
    return lambda module: Norm((f"{module}.weight",), float(epsilon), plus_one=plus_one)


def layer_norms(epsilon: float, bias: bool = True, plus_one: bool = False) -> NormMaker:
    """Return what makes a layer norm of a module's name. `plus_one`: weights are stored less 1."""

    def norm(module: str) -> Norm:
        return Norm(
            (f"{module}.weight",),
            float(epsilon),
            bias=f"{module}.bias" if bias else None,
            centred=True,
            plus_one=plus_one,
        )

    return norm


def activation(name: str) -> str:
    """Return the kernels' name of transformers' activation. Raises `NotDescribed`."""
    if name not in ACTIVATIONS:
        raise NotDescribed(f"the activation {name}")
    return ACTIVATIONS[name]


def head_dim_of(config: Config) -> int:
    """Return how many dimensions a head has."""
    return int(config.get("head_dim") or config.hidden_size // config.num_attention_heads)


def window_of(config: Config, i: int) -> int | None:
    """Return the window of layer `i`, in tokens, by the configuration's `layer_types`."""
    kinds, size = config.get("layer_types"), config.get("sliding_window")
    if kinds is None and size:
        raise NotDescribed(f"a window of {size} without layer_types")
    if kinds is None or kinds[i] == "full_attention":
        return None
    if kinds[i] != "sliding_attention" or not size:
        raise NotDescribed(f"a layer of kind {kinds[i]} with a window of {size}")
    return int(size)


def rotary_dim_of(config: Config, head_dim: int, kind: str | None = None) -> int:
    """Return how many of a head's dimensions are rotated.

    `kind`: that of the layer, where angles go by it.
    """
    # older names of what `rope_parameters` holds
    config.ignore("partial_rotary_factor rope_theta rope_scaling rope_local_base_freq")
    rope = config.rope_parameters if kind is None else config.rope_parameters.get(kind)
    if rope.get("rope_type") == "proportional":  # other dimensions have angles of 0
        return head_dim
    stored = rope.get("rotary_dim")  # in .gguf files
    if stored:
        return int(stored)
    factor = rope.get("partial_rotary_factor") if config.get("model_type") in PARTIAL else None
    return int(head_dim * (factor or 1))


def attention(
    config: Config,
    i: int,
    bias: bool = False,
    out_bias: bool | None = None,
    head_dim: int | None = None,
    rotary: Rotary | None = ROTARY,
    **changes: Any,
) -> Attention:
    """Return the attention of layer `i`, which is Llama's but for `changes`, fields of `Attention`.

    `bias`: of queries, keys and values, and of the output projection if `out_bias` is None.
    """
    prefix = f"model.layers.{i}.self_attn"
    head_dim = head_dim or head_dim_of(config)
    config.ignore("layer_types sliding_window")  # what the window follows from, if at all
    if "window" not in changes:
        changes["window"] = window_of(config, i)
    plain = Attention(
        qkv=stacked(prefix, "q_proj", "k_proj", "v_proj", bias=bias),
        out=linear(f"{prefix}.o_proj", bias=bias if out_bias is None else out_bias),
        heads=config.num_attention_heads,
        kv_heads=config.get("num_key_value_heads", config.num_attention_heads),
        head_dim=head_dim,
        scaling=head_dim**-0.5,
        rotary=rotary,
        rotary_dim=rotary_dim_of(config, head_dim, rotary.kind) if rotary else 0,
    )
    return replace(plain, **changes)


def head_norms(
    config: Config,
    i: int,
    names: tuple[str, str] = ("q_norm", "k_norm"),
    norm: NormMaker | None = None,
) -> tuple[Norm, Norm]:
    """Return the norms of queries and of keys, by their names in the attention of layer `i`.

    `norm`: makes each; RMS norms where it is None.
    """
    prefix = f"model.layers.{i}.self_attn"
    make = norm or rms_norms(config.rms_norm_eps)
    return make(f"{prefix}.{names[0]}"), make(f"{prefix}.{names[1]}")


def gated(
    config: Config,
    i: int,
    bias: bool = False,
    act: str | None = None,
    name: str = "mlp",
    fused: bool = False,
) -> FeedForward:
    """Return Llama's feed-forward of layer `i`.

    `act`: the activation, by transformers' name; None for `hidden_act`. `name`: the module's in the
    layer. `fused`: the gates and what they are multiplied with are one weight.
    """
    prefix = f"model.layers.{i}.{name}"
    up = stacked(prefix, "gate_proj", "up_proj", bias=bias)
    if fused:
        up = halves(f"{prefix}.gate_up_proj")
    down = linear(f"{prefix}.down_proj", bias=bias)
    return FeedForward(up, down, activation(act or config.hidden_act), gated=True)


def plain(
    config: Config,
    prefix: str,
    bias: bool,
    modules: tuple[str, str] = ("up_proj", "down_proj"),
    act: str | None = None,
    transposed: bool = False,
) -> FeedForward:
    """Return a feed-forward without a gate, of two `modules` in the module `prefix`.

    `act`: the activation, by transformers' name; None for `hidden_act`. `transposed`: weights are
    stored as `[inputs, outputs]`.
    """
    up = linear(f"{prefix}.{modules[0]}", bias=bias, transposed=transposed)
    down = linear(f"{prefix}.{modules[1]}", bias=bias, transposed=transposed)
    return FeedForward(up, down, activation(act or config.hidden_act), gated=False)


def experts(
    config: Config,
    i: int,
    routing: Routing,
    count: int,
    name: str = "mlp",
    act: str | None = None,
    shared: FeedForward | None = None,
    shared_gate: Linear | None = None,
) -> Experts:
    """Return the experts of layer `i`, whose weights are stacked.

    The weights are `[count, 2 * inner, d]`, gates first, and `[count, d, inner]`. `name`: the
    module that holds them, empty for the layer itself. `act`: as of `gated`.
    """
    check_count(count, "experts")
    prefix = f"model.layers.{i}.{name}.experts" if name else f"model.layers.{i}.experts"
    kernel = activation(act or config.hidden_act)

    def expert(number: int) -> FeedForward:
        gate = ParameterRows(f"{prefix}.gate_up_proj", 0, 2, expert=number)
        up = ParameterRows(f"{prefix}.gate_up_proj", 1, 2, expert=number)
        down = ParameterRows(f"{prefix}.down_proj", expert=number)
        return FeedForward(Linear((gate, up)), Linear((down,)), kernel, gated=True)

    feed_forwards = tuple(expert(number) for number in range(count))
    return Experts(routing, feed_forwards, shared, shared_gate)


def layer_of(
    config: Config,
    i: int,
    mixer: Attention | Recurrent | None,
    feed_forward: FeedForward | Experts | None,
    names: NormNames = BEFORE,
    norm: NormMaker | None = None,
    inside: str = "model.layers",
    **changes: Any,
) -> Layer:
    """Return layer `i` of the list `inside`.

    `names`: of its norms. `norm`: makes each; RMS norms where it is None. `changes`: other fields
    of `Layer`.
    """
    make = norm or rms_norms(config.rms_norm_eps)

    def norm_of(name: str | None) -> Norm | None:
        return make(f"{inside}.{i}.{name}") if name else None

    plain = Layer(
        attention=mixer if isinstance(mixer, Attention) else None,
        feed_forward=feed_forward,
        attention_before=norm_of(names.attention_before),
        feed_forward_before=norm_of(names.feed_forward_before),
        attention_after=norm_of(names.attention_after),
        feed_forward_after=norm_of(names.feed_forward_after),
        recurrent=mixer if isinstance(mixer, Recurrent) else None,
    )
    return replace(plain, **changes)


def decoder(
    config: Config, layer: Callable[[int], Layer], norm: Norm | None = None, **changes: Any
) -> Stack:
    """Return a stack with Llama's names but for `changes`, fields of `Stack`.

    `layer`: makes a layer of its number. `norm`: the last one; an RMS norm where it is None.
    """
    plain = Stack(
        embedding="model.embed_tokens.weight",
        inside="model.layers",
        layers=tuple(layer(i) for i in range(config.num_hidden_layers)),
        norm=norm or rms_norms(config.rms_norm_eps)("model.norm"),
        head=linear("lm_head"),
    )
    return replace(plain, **changes)
