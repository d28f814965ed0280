"""Gemma 4 from a `.gguf` file's metadata."""

from __future__ import annotations

from typing import Any

from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.common import chosen, only, plain
from quickbeam.models.gguf.metadata import Metadata
from quickbeam.models.gguf.names import ANGLES


def gemma4(m: Metadata) -> dict[str, Any]:
    """Keys and values of full attention are the same where such a layer has no tensor of values."""
    near = [bool(one) for one in m.each("attention.sliding_window_pattern")]
    widths, shared = m.each("feed_forward_length"), m.get("attention.shared_kv_layers", 0)
    counts = list(zip(near, m.each("attention.head_count_kv"), strict=True))
    full = only((count for is_near, count in counts if not is_near), "numbers of heads")
    own = [i for i in range(len(near)) if not near[i] and i < len(near) - shared]
    same = any(not m.has(f"blk.{i}.attn_v.weight") for i in own)
    dim, table = m["attention.key_length_swa"], m.file.tensors.get("per_layer_token_embd.weight")
    kinds = {
        "sliding_attention": _turning(m, "_swa", dim),
        "full_attention": _turning(m, "", m["attention.key_length"]) | _proportional(m),
    }
    found = plain(
        m,
        intermediate_size=widths[0],
        num_key_value_heads=only((n for is_near, n in counts if is_near), "numbers of heads"),
        rope_parameters=kinds,
    )
    found |= {
        "model_type": "gemma4_text",
        "head_dim": dim,
        "global_head_dim": m["attention.key_length"],
        "attention_k_eq_v": same,
        "num_global_key_value_heads": full if same else None,
        "layer_types": [("full_attention", "sliding_attention")[one] for one in near],
        "sliding_window": m["attention.sliding_window"],
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": m.get("final_logit_softcapping"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len(set(widths)) > 1,
        "hidden_size_per_layer_input": m.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else 1,
        "enable_moe_block": bool(m.get("expert_count")),
    }
    if full != found["num_key_value_heads"] and not same:
        raise NotDescribed("its layers have different numbers of heads")
    if found["enable_moe_block"]:
        found |= chosen(m, "num_experts")
        found["top_k_experts"] = found.pop("num_experts_per_tok")
    return found


def _turning(m: Metadata, kind: str, dim: int) -> dict[str, Any]:
    """Return the rotary parameters of one kind of layers, of which whole heads turn."""
    if m.get(f"rope.dimension_count{kind}", dim) != dim or m.get("rope.scaling.type"):
        raise NotDescribed("only a part of a head turns, or angles are scaled")
    return {"rope_theta": float(m[f"rope.freq_base{kind}"]), "rope_type": "default"}


def _proportional(m: Metadata) -> dict[str, Any]:
    """Return what says that the first pairs of a head turn: numbers by which the others' angles
    are divided that leave nothing of them."""
    if not m.has(ANGLES[0]):
        return {}
    by = m.numbers(ANGLES[0])
    turning = by.count(1.0)
    if any(one < 1e20 for one in by[turning:]):
        raise NotDescribed(f"the angles of {ANGLES[0]}")
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(by)}
