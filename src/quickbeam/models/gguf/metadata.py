"""The metadata of a `.gguf` file's architecture, which notes what is read of it, and what the
configurations of many architectures have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.gguf.file import GgufFile
from quickbeam.models.gguf.names import ANGLES
from quickbeam.models.native.quantised import BlockRows

# keys of an architecture that are no part of what it computes here, or follow from tensors
HARMLESS = {
    *("attention.causal", "attention.layer_norm_epsilon", "attention.value_length"),
    *("attention.value_length_swa", "block_count", "context_length"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("feed_forward_length", "rope.dimension_count", "rope.dimension_sections"),
    *("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"),
    "vocab_size",
}


class Metadata:
    """The metadata of an architecture, which notes what is read of it."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.name, self._read = file, name, set[str]()

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise NotDescribed(f"its metadata has no {self.name}.{key}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number or a text; `default` where it is missing."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise NotDescribed(f"{self.name}.{key} differs from layer to layer")
            value = value.tolist()[0]
        if isinstance(value, list) or (isinstance(value, float) and not math.isfinite(value)):
            raise NotDescribed(f"{self.name}.{key} is {str(value)[:80]}")
        return value

    def note(self, *keys: str) -> None:
        """Accept keys that are read otherwise, or change nothing."""
        self._read.update(keys)

    def each(self, key: str) -> list[Any]:
        """Return a number for each layer, of an array or of one for all."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.name}.{key}")
        every = value.tolist() if isinstance(value, np.ndarray) else [value] * self["block_count"]
        if len(every) != self["block_count"]:
            raise NotDescribed(f"{self.name}.{key} is of {len(every)} layers")
        return every

    def numbers(self, tensor: str) -> list[float]:
        """Return those of a tensor that is no matrix."""
        stored = self.file[tensor]
        if isinstance(stored, BlockRows) or stored.dim() > 1:
            raise NotDescribed(f"{tensor} is a matrix")
        return stored.tolist()

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def refuse_unknown(self) -> None:
        """Raise `NotDescribed` naming keys that are set and were not read."""
        start = f"{self.name}."
        unknown = [
            key
            for key, value in self.file.metadata.items()
            if key.startswith(start)
            and key.removeprefix(start) not in self._read | HARMLESS
            and (isinstance(value, np.ndarray) or value not in (0, False, "", 0.0))
        ]
        if unknown:
            raise NotDescribed(f"its metadata sets {', '.join(sorted(unknown))}")


def rope_of(m: Metadata, dim: int) -> dict[str, Any]:
    """Return the rotary parameters of heads of `dim` dimensions."""
    kind, base = m.get("rope.scaling.type", "none"), float(m.get("rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    if (rotary_dim := m.get("rope.dimension_count") or dim) != dim:
        rope["rotary_dim"] = rotary_dim
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


def only(values: Iterable[Any], what: str) -> Any:
    """Return the one value that isn't 0 or missing; None where there is none."""
    distinct = {one for one in values if one}
    if len(distinct) > 1:
        raise NotDescribed(f"its layers have different {what}")
    return next(iter(distinct), None)


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
    fields = plain(
        m,
        intermediate_size=widths[0],
        num_key_value_heads=only((n for is_near, n in counts if is_near), "numbers of heads"),
        rope_parameters=kinds,
    )
    fields |= {
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
    if full != fields["num_key_value_heads"] and not same:
        raise NotDescribed("its layers have different numbers of heads")
    if fields["enable_moe_block"]:
        fields |= chosen(m, "num_experts")
        fields["top_k_experts"] = fields.pop("num_experts_per_tok")
    return fields


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
