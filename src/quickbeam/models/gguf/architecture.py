"""From a `.gguf` file's metadata to a configuration as transformers has it, and to its names.

llama.cpp's `gguf-py/gguf/constants.py` names the keys and tensors. Only architectures in
`ARCHITECTURES` are read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.file import GgufFile
from quickbeam.models.gguf.metadata import Metadata

SIGMOID = 2  # of expert_gating_func
MOST_LAYERS = 4096  # that a file is believed to have
LAYER = "model.layers.{}."
# tensors of a layer, without `.weight` and `.bias`
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
FEED_FORWARD = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
ANGLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def _rope(m: Metadata) -> dict[str, Any]:
    kind, base = m.get("rope.scaling.type", "none"), float(m.get("rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    length = m["context_length"]
    factors = next((m.file[one] for one in ANGLES[:2] if m.has(one)), None)
    if factors is not None:  # numbers by which frequencies are divided
        original = m.get("rope.scaling.original_context_length") or length
        rope |= {"rope_type": "longrope", "short_factor": factors.tolist()}  # type: ignore[union-attr]
        rope |= {"original_max_position_embeddings": original, "factor": length / original}
        rope["attention_factor"] = m.get("rope.scaling.attn_factor", 1.0)
        m.get("rope.scaling.factor")
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(m["rope.scaling.factor"])}
        if kind == "yarn":
            original = m["rope.scaling.original_context_length"]
            rope["original_max_position_embeddings"] = original
    elif kind != "none":
        raise NotDescribed(f"rotary angles of type {kind}")
    return rope


def _plain(m: Metadata) -> dict[str, Any]:
    heads, width = m["attention.head_count"], m["embedding_length"]
    shared = {count for count in m.each("attention.head_count_kv") if count}  # 0: no attention
    if len(shared) > 1:
        raise NotDescribed("its layers have different numbers of heads")
    return {
        "architectures": [m.name],
        "hidden_size": width,
        "intermediate_size": m["feed_forward_length"],
        "num_hidden_layers": m["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": next(iter(shared), heads),
        "head_dim": m.get("attention.key_length") or width // heads,
        "rms_norm_eps": float(m["attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": m["context_length"],
        "vocab_size": m.file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not m.has("output.weight"),
        "rope_parameters": _rope(m),
        "hidden_act": "silu",
        "attention_bias": m.has("blk.0.attn_q.bias"),
        "mlp_bias": m.has("blk.0.ffn_up.bias"),
    }


def _chosen(m: Metadata) -> dict[str, Any]:
    """How many experts a layer has, and how many a row chooses."""
    m.get("expert_feed_forward_length")  # the weights say it
    return {"num_local_experts": m["expert_count"], "num_experts_per_tok": m["expert_used_count"]}


def _llama(m: Metadata) -> dict[str, Any]:
    if m.get("expert_count"):
        return _plain(m) | _chosen(m) | {"model_type": "mixtral"}
    m.get("expert_used_count")
    return _plain(m) | {"model_type": "llama"}


def _qwen2(m: Metadata) -> dict[str, Any]:
    found = _plain(m) | {"model_type": "qwen2"}
    if not found.pop("attention_bias"):
        raise NotDescribed("its queries, keys and values have no bias")
    return found


def _qwen3(m: Metadata) -> dict[str, Any]:
    return _plain(m) | {"model_type": "qwen3"}


def _qwen3_moe(m: Metadata) -> dict[str, Any]:
    return _plain(m) | {
        "model_type": "qwen3_moe",
        **_chosen(m),
        "norm_topk_prob": True,  # as llama.cpp has it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _granite(m: Metadata) -> dict[str, Any]:
    return _plain(m) | {
        "model_type": "granite",
        "embedding_multiplier": m["embedding_scale"],
        "residual_multiplier": m["residual_scale"],
        "attention_multiplier": m["attention.scale"],
        "logits_scaling": m["logit_scale"],
    }


def _granite_moe(m: Metadata) -> dict[str, Any]:
    return _granite(m) | _chosen(m) | {"model_type": "granitemoe"}


def _olmoe(m: Metadata) -> dict[str, Any]:
    chosen = _chosen(m)
    chosen["num_experts"] = chosen.pop("num_local_experts")
    return _plain(m) | chosen | {"model_type": "olmoe", "norm_topk_prob": False}


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    """What no key says is as published."""
    found = _plain(m) | _windows(m, 2) | _chosen(m)
    if found["rope_parameters"]["rope_type"] == "yarn":
        turns = {f"beta_{one}": m.get(f"rope.scaling.yarn_beta_{one}") for one in ("fast", "slow")}
        found["rope_parameters"] |= turns | {"truncate": False}
    return found | {
        "model_type": "gpt_oss",
        "intermediate_size": m["expert_feed_forward_length"],
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _lfm2(m: Metadata) -> dict[str, Any]:
    found = _plain(m)
    del found["hidden_act"]
    heads = m.each("attention.head_count_kv")
    return found | {
        "model_type": "lfm2",
        "norm_eps": found.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": m["shortconv.l_cache"],
        "conv_bias": False,
    }


def _lfm2_moe(m: Metadata) -> dict[str, Any]:
    dense, chosen = m["leading_dense_block_count"], _chosen(m)
    if m.get("expert_gating_func") != SIGMOID:
        raise NotDescribed("its experts are not chosen by sigmoids")
    return _lfm2(m) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "num_experts": chosen["num_local_experts"],
        "num_experts_per_tok": chosen["num_experts_per_tok"],
        "norm_topk_prob": True,  # as llama.cpp has it
        "routed_scaling_factor": 1.0,
        "use_expert_bias": m.has(f"blk.{dense}.exp_probs_b.bias"),
    }


def _smollm3(m: Metadata) -> dict[str, Any]:
    turns = [int((i + 1) % 4 != 0) for i in range(m["block_count"])]  # as llama.cpp has it
    return _plain(m) | {"model_type": "smollm3", "no_rope_layers": turns}


def _phi3(m: Metadata) -> dict[str, Any]:
    if m["rope.dimension_count"] != m["embedding_length"] // m["attention.head_count"]:
        raise NotDescribed("only a part of a head turns")
    return _plain(m) | {"model_type": "phi3", "sliding_window": m.get("attention.sliding_window")}


def _windows(m: Metadata, every: int) -> dict[str, Any]:
    """Layers with a window but for each `every`-th."""
    size = m["attention.sliding_window"]
    kinds = ("full_attention", "sliding_attention")
    return {
        "sliding_window": size,
        "layer_types": [kinds[(i + 1) % every != 0] for i in range(m["block_count"])],
    }


def _gemma(m: Metadata) -> dict[str, Any]:
    return _plain(m) | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _later_gemma(m: Metadata, model_type: str, largest: int, every: int) -> dict[str, Any]:
    found = _plain(m) | _windows(m, every)
    # the largest model's attention is scaled by the width, as llama.cpp has it
    of_width = found["hidden_size"] // found["num_attention_heads"]
    return found | {
        "model_type": model_type,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": of_width if m["block_count"] == largest else found["head_dim"],
        "attn_logit_softcapping": m.get("attn_logit_softcapping"),
        "final_logit_softcapping": m.get("final_logit_softcapping"),
    }


def _gemma2(m: Metadata) -> dict[str, Any]:
    return _later_gemma(m, "gemma2", 46, 2)


def _gemma3(m: Metadata) -> dict[str, Any]:
    found = _later_gemma(m, "gemma3_text", 62, 6)
    near = {"rope_theta": float(m.get("rope.freq_base_swa", 10000.0)), "rope_type": "default"}
    rope = {"full_attention": found["rope_parameters"], "sliding_attention": near}
    return found | {"rope_parameters": rope}


def _olmo2(m: Metadata) -> dict[str, Any]:
    if m.get("attention.sliding_window"):
        raise NotDescribed("its layers have windows")
    return _plain(m) | {"model_type": "olmo2"}


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures is read.

    `config`: makes the fields of a configuration. `layer`: names of a layer's tensors, with
    `.weight` or `.bias` where transformers' name has neither. `turned`: the two halves of a head's
    queries and keys alternate row by row. `plus_one`: norms hold 1 + the weight. `woven`: for
    transformers, rows of experts' gates and of what they let through alternate, and experts'
    matrices are transposed.
    """

    config: Callable[[Metadata], dict[str, Any]]
    layer: dict[str, str]
    turned: bool = False
    plus_one: bool = False
    woven: bool = False


_LLAMA = ATTENTION | FEED_FORWARD


def _experts(module: str, router: str = "gate") -> dict[str, str]:
    """Return names of experts that are in a module of the layer."""
    parts = {f"ffn_{one}_exps": f"{module}.experts.{one}_proj" for one in ("gate", "up", "down")}
    return {"ffn_norm": FEED_FORWARD["ffn_norm"], "ffn_gate_inp": f"{module}.{router}", **parts}


_NORMS = {
    "post_attention_norm": AFTER["post_attention_norm"],
    "post_ffw_norm": AFTER["post_ffw_norm"],
}
_LFM2 = ATTENTION | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_OF_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_OF_LFM2_MOE = {"ffn_norm": "ffn_norm", "exp_probs_b.bias": "feed_forward.expert_bias"}
ARCHITECTURES = {
    "llama": Architecture(_llama, _LLAMA | _experts("mlp"), turned=True),
    "granite": Architecture(_granite, _LLAMA, turned=True),
    "granitemoe": Architecture(
        _granite_moe, ATTENTION | _experts("block_sparse_moe", "router"), turned=True
    ),
    "smollm3": Architecture(_smollm3, _LLAMA, turned=True),
    "qwen2": Architecture(_qwen2, _LLAMA),
    "qwen3": Architecture(_qwen3, _LLAMA),
    "qwen3moe": Architecture(_qwen3_moe, ATTENTION | _experts("mlp")),
    "olmoe": Architecture(_olmoe, ATTENTION | _experts("mlp")),
    "gpt-oss": Architecture(
        _gpt_oss, ATTENTION | _experts("mlp", "router") | _OF_GPT_OSS, woven=True
    ),
    "lfm2": Architecture(_lfm2, _LFM2),
    "lfm2moe": Architecture(_lfm2_moe, _LFM2 | _experts("feed_forward") | _OF_LFM2_MOE),
    "phi3": Architecture(_phi3, _LLAMA | FUSED),
    "olmo2": Architecture(_olmo2, _LLAMA | _NORMS),
    "gemma": Architecture(_gemma, _LLAMA, plus_one=True),
    "gemma2": Architecture(_gemma2, _LLAMA | AFTER, plus_one=True),
    "gemma3": Architecture(_gemma3, _LLAMA | AFTER, plus_one=True),
}


def architecture_of(file: GgufFile) -> tuple[Architecture, dict[str, Any]]:
    """Return a file's architecture, and a configuration's fields.

    Raises `NotDescribed` for another architecture, or metadata that is not known.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise NotDescribed(f"the architecture {name!r} of a .gguf file")
    if "token_embd.weight" not in file.tensors:
        raise NotDescribed("it has no token_embd.weight")
    found, metadata = ARCHITECTURES[name], Metadata(file, name)
    layers = metadata["block_count"]
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise NotDescribed(f"its metadata names {str(layers)[:80]} layers")
    try:
        fields = found.config(metadata)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise NotDescribed(f"its metadata is of other kinds ({error})") from error
    metadata.refuse_unknown()
    for key in ("bos", "eos", "padding", "unknown"):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        fields[f"{ {'padding': 'pad', 'unknown': 'unk'}.get(key, key) }_token_id"] = token
    return found, fields


def stored_names(of: Architecture, layers: int) -> dict[str, str]:
    """Return the file's names of tensors by transformers' names, as of `Architecture`."""
    found = {own: name for name, own in OUTSIDE.items()}
    for i in range(layers):
        at = LAYER.format(i)
        found |= {f"{at}{own}": f"blk.{i}.{name}" for name, own in of.layer.items()}
    return found
