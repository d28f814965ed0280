"""What the configurations of many `.gguf` architectures have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.metadata import Metadata
from quickbeam.models.gguf.names import ANGLES


def rope_of(m: Metadata, dim: int) -> dict[str, Any]:
    """Return the rotary parameters of heads of `dim` dimensions."""
    kind, base = m.get("rope.scaling.type", "none"), float(m.get("rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    if (turned := m.get("rope.dimension_count") or dim) != dim:
        rope["partial_rotary_factor"] = turned / dim
    length = m["context_length"]
    factors = next((m.numbers(one) for one in ANGLES[:2] if m.has(one)), None)
    if factors is not None:  # by which frequencies are divided
        original = m.get("rope.scaling.original_context_length") or length
        rope |= {"rope_type": "longrope", "short_factor": factors}
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


def only(values: Iterable[Any], told: str) -> Any:
    """Return the one value that isn't 0 or missing; None where there is none."""
    found = {one for one in values if one}
    if len(found) > 1:
        raise NotDescribed(f"its layers have different {told}")
    return next(iter(found), None)


def plain(m: Metadata, **known: Any) -> dict[str, Any]:
    """`known`: what an architecture has otherwise."""
    heads, width = m["attention.head_count"], m["embedding_length"]
    dim = m.get("attention.key_length") or width // heads
    return {
        "architectures": [m.name],
        "hidden_size": width,
        "intermediate_size": known.get("intermediate_size")
        or only(m.each("feed_forward_length"), "feed-forwards")
        or m["expert_feed_forward_length"],
        "num_hidden_layers": m["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": known.get("num_key_value_heads")
        or only(m.each("attention.head_count_kv"), "numbers of heads")
        or heads,
        "head_dim": dim,
        "rms_norm_eps": float(m["attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": m["context_length"],
        "vocab_size": m.file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not m.has("output.weight"),
        "rope_parameters": known.get("rope_parameters") or rope_of(m, dim),
        "hidden_act": "silu",
        "attention_bias": m.has("blk.0.attn_q.bias"),
        "mlp_bias": m.has("blk.0.ffn_up.bias"),
    }


def chosen(m: Metadata, name: str = "num_local_experts") -> dict[str, Any]:
    """How many experts a layer has, and how many a row chooses."""
    return {name: m["expert_count"], "num_experts_per_tok": m["expert_used_count"]}


def windows(m: Metadata, every: int) -> dict[str, Any]:
    """Layers with a window but for each `every`-th."""
    size = m["attention.sliding_window"]
    kinds = ("full_attention", "sliding_attention")
    return {
        "sliding_window": size,
        "layer_types": [kinds[(i + 1) % every != 0] for i in range(m["block_count"])],
    }
