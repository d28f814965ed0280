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
OTHER_INPUTS = ("vision.", "mm.", "audio.")  # how keys of what reads images and sound begin
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
LAYER_KINDS = ("full_attention", "sliding_attention")  # without a window, and with one
SHORTEST = 2048  # tokens: a context that every family was made for
INSTEAD = "take the model's folder instead, or a file without it"


class Metadata:
    """The metadata of an architecture, which notes what is read of it.

    `neutral`: values with which a key changes nothing.
    """

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.name = file, name
        self._read = set[str]()
        self.neutral = dict(NEUTRAL)

    def __getitem__(self, key: str) -> Any:
        """Raises `InvalidInput` where a key is missing."""
        value = self.get(key)
        if value is None:
            raise InvalidInput(f"its metadata has no {self.name}.{key}: download it again")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number or a text; `default` where it is missing.

        Raises `InvalidInput` for values that differ from layer to layer, and for lists, infinities
        and NaN.
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
        """Return the error for a key with a value that is not known. `what`: what the value is."""
        return InvalidInput(f"{self.name}.{key} {what}, which is not known here: {INSTEAD}")

    @cached_property
    def context_length(self) -> int:
        """How many positions the model was made for.

        Where a file doesn't say, that is the context which its angles were scaled from, or
        `SHORTEST`.
        """
        length = int(self.get("context_length") or 0)
        if length > 0:
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

    def by_layer(self, key: str) -> list[Any]:
        """Return a number for each layer, of an array or of one for all."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.name}.{key}")
        layers = self["block_count"]
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * layers
        if len(values) != layers:
            raise self.refusal(key, f"is of {len(values)} layers")
        return values

    def values(self, tensor: str) -> list[float]:
        """Return the elements of a vector."""
        stored = self.file[tensor]
        if isinstance(stored, BlockRows) or stored.dim() > 1:
            raise InvalidInput(f"{tensor} is a matrix: download it again")
        return stored.tolist()

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def refuse_unknown(self) -> None:
        """Raise `InvalidInput` naming keys that were not read, and may change answers."""
        start = f"{self.name}."
        accepted = self._read | HARMLESS
        unknown = []
        for name, value in self.file.metadata.items():
            key = name.removeprefix(start)
            if not name.startswith(start) or key in accepted or key.startswith(OTHER_INPUTS):
                continue
            if not self._is_neutral(key, value):
                unknown.append(name)
        if unknown:
            raise InvalidInput(
                f"its metadata sets {', '.join(sorted(unknown))}, which is not known here and may "
                f"change answers: {INSTEAD}"
            )

    def _is_neutral(self, key: str, value: Any) -> bool:
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        neutral = self.neutral.get(key)
        if neutral is None:
            return all(element in (0, "") for element in values)
        numeric = all(isinstance(element, int | float) for element in values)
        return numeric and all(math.isclose(element, neutral, rel_tol=1e-6) for element in values)


def rope_of(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the rotary parameters of heads of `head_dim` dimensions."""
    rope: dict[str, Any] = {"rope_theta": float(metadata.get("rope.freq_base", 10000.0))}
    rotary_dim = metadata.get("rope.dimension_count") or head_dim
    if rotary_dim != head_dim:
        rope["rotary_dim"] = rotary_dim
    scaled = rope | scaling_of(metadata)
    attention = float(metadata.get("rope.scaling.attn_factor") or 1.0)
    tensor = next((name for name in ANGLES[:2] if metadata.has(name)), None)
    if tensor is None and attention == 1:
        return scaled
    # Each frequency, of a pair of dimensions, has a divisor: the tensor's times that of the
    # scaling. The rotary parameters that can hold divisors are LongRoPE's.
    pairs = rotary_dim // 2
    divisors = torch.ones(pairs) if tensor is None else torch.tensor(metadata.values(tensor))
    if len(divisors) != pairs:
        raise InvalidInput(f"{tensor} has {len(divisors)} numbers for {pairs} rotated pairs")
    if scaled["rope_type"] != "default":
        unscaled, _ = frequencies(rope, rotary_dim)
        angles, factor = frequencies(scaled, rotary_dim)
        divisors = divisors * unscaled / angles
        attention *= factor
    original = metadata.context_length
    if tensor == ANGLES[1]:  # for texts of the first context; longer ones have others
        original = metadata.get("rope.scaling.original_context_length") or original
    return rope | {
        "rope_type": "longrope",
        "short_factor": divisors.tolist(),
        "original_max_position_embeddings": original,
        "factor": metadata.context_length / original,
        "attention_factor": attention,
    }


def scaling_of(metadata: Metadata) -> dict[str, Any]:
    """Return how rotary angles are scaled, as llama.cpp has it: linear where no type is given."""
    kind = metadata.get("rope.scaling.type", "linear")
    factor = float(metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0)
    metadata.note("rope.scaling.factor", "rope.scale_linear")
    # these change nothing without YaRN
    beta_fast = metadata.get("rope.scaling.yarn_beta_fast")
    beta_slow = metadata.get("rope.scaling.yarn_beta_slow")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.refusal("rope.scaling.type", f"is {str(kind)[:80]!r}")
    if kind == "longrope" and (factor != 1 or not metadata.has(ANGLES[1])):
        raise metadata.refusal(
            "rope.scaling.type", "is 'longrope' with a factor, or without its tensors"
        )
    mixed = metadata.get("rope.scaling.yarn_ext_factor", -1.0)  # below 0 is not set
    mixed = float(kind == "yarn") if mixed < 0 else mixed
    if mixed not in (0, 1):
        raise metadata.refusal("rope.scaling.yarn_ext_factor", f"is {mixed}")
    if kind == "none" or factor == 1:
        return {"rope_type": "default"}
    if not mixed:
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length")
        or metadata.context_length,
        "beta_fast": float(beta_fast or 32.0),
        "beta_slow": float(beta_slow or 1.0),
    }


def single(values: Iterable[Any], what: str) -> Any:
    """Return the value that is in `values` beside 0 and None; None where there is no such value.

    Raises `InvalidInput`, with the word `what`, for several values.
    """
    distinct = {value for value in values if value}
    if len(distinct) > 1:
        raise InvalidInput(f"its layers have different {what}, which is not known: {INSTEAD}")
    return next(iter(distinct), None)


def usual_fields(
    metadata: Metadata,
    model_type: str,
    intermediate_size: int | None = None,
    num_key_value_heads: int | None = None,
    rms_norm_eps: float | None = None,
    rope_parameters: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields that most configurations have, by the keys that most architectures have.

    Fields that an architecture has under other keys are arguments.
    """
    heads, width = metadata["attention.head_count"], metadata["embedding_length"]
    head_dim = metadata.get("attention.key_length") or width // heads
    metadata.neutral["attention.scale"] = head_dim**-0.5
    metadata.neutral["attention.key_length_swa"] = head_dim
    intermediate_size = (
        intermediate_size
        or single(metadata.by_layer("feed_forward_length"), "feed-forwards")
        or metadata["expert_feed_forward_length"]
    )
    kv_heads = (
        num_key_value_heads
        or single(metadata.by_layer("attention.head_count_kv"), "numbers of heads")
        or heads
    )
    return {
        "model_type": model_type,
        "architectures": [metadata.name],
        "hidden_size": width,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": metadata["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": rms_norm_eps or float(metadata["attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": metadata.context_length,
        "vocab_size": metadata.file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not metadata.has("output.weight"),
        "rope_parameters": rope_parameters or rope_of(metadata, head_dim),
        "hidden_act": "silu",
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
    }


def layer_normed(metadata: Metadata, model_type: str, epsilon_name: str) -> dict[str, Any]:
    """Return the usual fields of an architecture with layer norms.

    `epsilon_name`: the field of their epsilon.
    """
    metadata.note("attention.layer_norm_rms_epsilon")  # the converter may write it as well
    epsilon = float(metadata["attention.layer_norm_epsilon"])
    fields = usual_fields(metadata, model_type, rms_norm_eps=epsilon)
    return fields | {epsilon_name: fields.pop("rms_norm_eps")}


def expert_fields(metadata: Metadata, name: str = "num_local_experts") -> dict[str, Any]:
    """Return how many experts a layer has (as `name`), how many a row uses, and their widths."""
    return {
        name: metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length"),
    }


def window_fields(metadata: Metadata, every: int | None = None) -> dict[str, Any]:
    """Return the window in tokens, and for each layer whether it has the window.

    `every`: where a file doesn't name the layers, each `every`-th has no window (0: all have one).
    Raises `InvalidInput` where neither names them.
    """
    size = metadata["attention.sliding_window"]
    key, layers = "attention.sliding_window_pattern", metadata["block_count"]
    if isinstance(metadata.file.metadata.get(f"{metadata.name}.{key}"), np.ndarray):
        windowed = [bool(flag) for flag in metadata.by_layer(key)]
    else:
        period = metadata.get(key, every)
        if period is None:
            what = f"is {size}, of layers that no key names"
            raise metadata.refusal("attention.sliding_window", what)
        windowed = [period == 0 or (i + 1) % period != 0 for i in range(layers)]
    return {"sliding_window": size, "layer_types": [LAYER_KINDS[flag] for flag in windowed]}


def has_window(metadata: Metadata) -> bool:
    """Whether there is a window that is shorter than the context. Others change nothing."""
    size = metadata.get("attention.sliding_window") or 0
    if size >= metadata.context_length:
        metadata.note("attention.sliding_window_pattern")
    return 0 < size < metadata.context_length
