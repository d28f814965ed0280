"""The metadata of a `.gguf` file's architecture, which notes what is read of it, and what the
configurations of many architectures have in common."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.native.quantised import BlockRows
from quickbeam.models.rotary import frequencies
from quickbeam.models.weights.gguf.file import GgufFile
from quickbeam.models.weights.gguf.names import ANGLES

logger = logging.getLogger(__name__)

# keys of an architecture that are no part of what it computes here, or follow from tensors
HARMLESS = {
    *("attention.layer_norm_epsilon", "attention.value_length", "attention.value_length_swa"),
    *("block_count", "context_length", "embedding_length", "pooling_type"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("feed_forward_length", "rope.dimension_count", "rope.dimension_sections"),
    *("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"),
    *("use_parallel_residual", "vocab_size"),
}
BESIDE_TEXT = ("vision.", "mm.", "audio.")  # how keys of what reads images and sound begin
# values with which a key changes nothing; of keys that are not named here, 0, False and ""
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.output_scale": 1.0,
    "embedding_scale": 1.0,
    "expert_gating_func": 1,  # softmax
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
SHORTEST = 2048  # tokens: a context that every family was made for
INSTEAD = "take the model's folder instead, or a file without it"


class Metadata:
    """The metadata of an architecture, which notes what is read of it.

    `neutral`: values with which a key changes nothing.
    """

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.name, self._read = file, name, set[str]()
        self.neutral = dict(NEUTRAL)

    def __getitem__(self, key: str) -> Any:
        """Raises `InvalidInput` where a key is missing."""
        if (value := self.get(key)) is None:
            raise InvalidInput(f"its metadata has no {self.name}.{key}: download it again")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number or a text; `default` where it is missing.

        Raises `InvalidInput` for values that differ from layer to layer, or that are none.
        """
        self._read.add(key)
        value = self.file.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise self.refusal(key, "differs from layer to layer")
            value = value.tolist()[0]
        if isinstance(value, list) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.refusal(key, f"is {str(value)[:80]}")
        return value

    def refusal(self, key: str, what: str) -> InvalidInput:
        """Return the error for a key that `what` is said of."""
        return InvalidInput(f"{self.name}.{key} {what}, which is not known here: {INSTEAD}")

    @cached_property
    def context_length(self) -> int:
        """How many positions the model was made for.

        Where a file doesn't say, that is the context which its angles were scaled from, or
        `SHORTEST`.
        """
        if (length := int(self.get("context_length") or 0)) > 0:
            return length
        length = int(self.get("rope.scaling.original_context_length") or SHORTEST)
        logger.warning(
            "the file doesn't say how long texts may be (%s.context_length): they are limited to "
            "%d tokens",
            self.name,
            length,
        )
        return length

    def note(self, *keys: str) -> None:
        """Accept keys that are read otherwise, or change nothing."""
        self._read.update(keys)

    def each(self, key: str) -> list[Any]:
        """Return a number for each layer, of an array or of one for all."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.name}.{key}")
        every = value.tolist() if isinstance(value, np.ndarray) else [value] * self["block_count"]
        if len(every) != self["block_count"]:
            raise self.refusal(key, f"is of {len(every)} layers")
        return every

    def numbers(self, tensor: str) -> list[float]:
        """Return those of a tensor that is no matrix."""
        stored = self.file[tensor]
        if isinstance(stored, BlockRows) or stored.dim() > 1:
            raise InvalidInput(f"{tensor} is a matrix: download it again")
        return stored.tolist()

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def refuse_unknown(self) -> None:
        """Raise `InvalidInput` naming keys that were not read, and may change answers."""
        start = f"{self.name}."
        unknown = [
            name
            for name, value in self.file.metadata.items()
            if name.startswith(start)
            and (key := name.removeprefix(start)) not in self._read | HARMLESS
            and not key.startswith(BESIDE_TEXT)
            and not self._is_neutral(key, value)
        ]
        if unknown:
            raise InvalidInput(
                f"its metadata sets {', '.join(sorted(unknown))}, which is not known here and may "
                f"change answers: {INSTEAD}"
            )

    def _is_neutral(self, key: str, value: Any) -> bool:
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        if (same := self.neutral.get(key)) is None:
            return all(one in (0, "") for one in values)
        numbers = all(isinstance(one, int | float) for one in values)
        return numbers and all(math.isclose(one, same, rel_tol=1e-6) for one in values)


def rope_of(m: Metadata, dim: int) -> dict[str, Any]:
    """Return the rotary parameters of heads of `dim` dimensions."""
    rope: dict[str, Any] = {"rope_theta": float(m.get("rope.freq_base", 10000.0))}
    if (rotary_dim := m.get("rope.dimension_count") or dim) != dim:
        rope["rotary_dim"] = rotary_dim
    scaled = rope | scaling_of(m)
    attention = float(m.get("rope.scaling.attn_factor") or 1.0)
    tensor = next((one for one in ANGLES[:2] if m.has(one)), None)
    if tensor is None and attention == 1:
        return scaled
    # Numbers by which the frequencies are divided, one for each pair of dimensions: those of the
    # tensor, and what the scaling comes to. It is LongRoPE that has such numbers.
    by = torch.ones(rotary_dim // 2) if tensor is None else torch.tensor(m.numbers(tensor))
    if len(by) != rotary_dim // 2:
        raise InvalidInput(f"{tensor} has {len(by)} numbers for {rotary_dim // 2} pairs that turn")
    if scaled["rope_type"] != "default":
        plain, _ = frequencies(rope, rotary_dim)
        angles, factor = frequencies(scaled, rotary_dim)
        by, attention = by * plain / angles, attention * factor
    factors = by.tolist()
    original = m.context_length
    if tensor == ANGLES[1]:  # for texts of the first context; longer ones have others
        original = m.get("rope.scaling.original_context_length") or original
    return rope | {
        "rope_type": "longrope",
        "short_factor": factors,
        "original_max_position_embeddings": original,
        "factor": m.context_length / original,
        "attention_factor": attention,
    }


def scaling_of(m: Metadata) -> dict[str, Any]:
    """Return how rotary angles are scaled, as llama.cpp has it: linear where no type is given."""
    kind = m.get("rope.scaling.type", "linear")
    factor = float(m.get("rope.scaling.factor") or m.get("rope.scale_linear") or 1.0)
    m.note("rope.scaling.factor", "rope.scale_linear")
    # what changes nothing without YaRN
    fast, slow = (m.get(f"rope.scaling.yarn_beta_{one}") for one in ("fast", "slow"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise m.refusal("rope.scaling.type", f"is {str(kind)[:80]!r}")
    if kind == "longrope" and (factor != 1 or not m.has(ANGLES[1])):
        raise m.refusal("rope.scaling.type", "is 'longrope' with a factor, or without its tensors")
    mixed = m.get("rope.scaling.yarn_ext_factor", -1.0)  # below 0 is not set
    mixed = float(kind == "yarn") if mixed < 0 else mixed
    if mixed not in (0, 1):
        raise m.refusal("rope.scaling.yarn_ext_factor", f"is {mixed}")
    if kind == "none" or factor == 1:
        return {"rope_type": "default"}
    if not mixed:
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": m.get("rope.scaling.original_context_length")
        or m.context_length,
        "beta_fast": float(fast or 32.0),
        "beta_slow": float(slow or 1.0),
    }


def only(values: Iterable[Any], what: str) -> Any:
    """Return the one value that isn't 0 or missing; None where there is none."""
    distinct = {one for one in values if one}
    if len(distinct) > 1:
        raise InvalidInput(f"its layers have different {what}, which is not known: {INSTEAD}")
    return next(iter(distinct), None)


def plain(m: Metadata, **known: Any) -> dict[str, Any]:
    """`known`: what an architecture has otherwise."""
    heads, width = m["attention.head_count"], m["embedding_length"]
    dim = m.get("attention.key_length") or width // heads
    m.neutral["attention.scale"] = dim**-0.5
    m.neutral["attention.key_length_swa"] = dim
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
        "rms_norm_eps": known.get("rms_norm_eps") or float(m["attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": m.context_length,
        "vocab_size": m.file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not m.has("output.weight"),
        "rope_parameters": known.get("rope_parameters") or rope_of(m, dim),
        "hidden_act": "silu",
        "attention_bias": m.has("blk.0.attn_q.bias"),
        "mlp_bias": m.has("blk.0.ffn_up.bias"),
    }


def layer_normed(m: Metadata, name: str) -> dict[str, Any]:
    """Return the same for layer norms, whose epsilon is called `name`."""
    m.note("attention.layer_norm_rms_epsilon")  # the converter may write it as well
    fields = plain(m, rms_norm_eps=float(m["attention.layer_norm_epsilon"]))
    return fields | {name: fields.pop("rms_norm_eps")}


def chosen(m: Metadata, name: str = "num_local_experts") -> dict[str, Any]:
    """How many experts a layer has, how many a row chooses, and how wide they are."""
    return {
        name: m["expert_count"],
        "num_experts_per_tok": m["expert_used_count"],
        "moe_intermediate_size": m.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length"),
    }


def windows(m: Metadata, every: int | None = None) -> dict[str, Any]:
    """Return a window, and the kinds of the layers: those with it, and those without.

    Where a file doesn't say which layers have it, each `every`-th has none. Raises `InvalidInput`
    where neither says it.
    """
    size = m["attention.sliding_window"]
    key, layers = "attention.sliding_window_pattern", m["block_count"]
    if isinstance(m.file.metadata.get(f"{m.name}.{key}"), np.ndarray):
        near = [bool(one) for one in m.each(key)]
    elif (period := m.get(key, every)) is None:
        raise m.refusal("attention.sliding_window", f"is {size}, of layers that no key names")
    else:
        near = [period == 0 or (i + 1) % period != 0 for i in range(layers)]
    kinds = ("full_attention", "sliding_attention")
    return {"sliding_window": size, "layer_types": [kinds[one] for one in near]}


def has_window(m: Metadata) -> bool:
    """Return whether a window is shorter than the context; one that isn't changes nothing."""
    size = m.get("attention.sliding_window") or 0
    if size >= m.context_length:
        m.note("attention.sliding_window_pattern")
    return 0 < size < m.context_length


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
        raise m.refusal("attention.head_count_kv", "differs from layer to layer")
    if fields["enable_moe_block"]:
        fields |= chosen(m, "num_experts")
        fields["top_k_experts"] = fields.pop("num_experts_per_tok")
    return fields


def _turning(m: Metadata, kind: str, dim: int) -> dict[str, Any]:
    """Return the rotary parameters of one kind of layers, of which whole heads turn."""
    if (rotary_dim := m.get(key := f"rope.dimension_count{kind}", dim)) != dim:
        raise m.refusal(key, f"is {rotary_dim} of heads of {dim}")
    if (scaling := scaling_of(m)["rope_type"]) != "default":
        raise m.refusal("rope.scaling.factor", f"makes angles {scaling}")
    return {"rope_theta": float(m[f"rope.freq_base{kind}"]), "rope_type": "default"}


def _proportional(m: Metadata) -> dict[str, Any]:
    """Return what says that the first pairs of a head turn: numbers by which the others' angles
    are divided that leave nothing of them."""
    if not m.has(ANGLES[0]):
        return {}
    by = m.numbers(ANGLES[0])
    turning = by.count(1.0)
    if any(one < 1e20 for one in by[turning:]):
        raise InvalidInput(f"the angles of {ANGLES[0]} are not known: {INSTEAD}")
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(by)}
