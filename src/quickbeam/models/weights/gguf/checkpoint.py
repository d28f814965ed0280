"""A `.gguf` file as a model's parameters (`Parameters`), its blocks as they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from quickbeam.errors import InvalidInput, refuse_incomplete, some_of
from quickbeam.models.families import stack_of
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.quantised import BlockRows, Weight, with_data
from quickbeam.models.rotary import limit_context
from quickbeam.models.stack import LinearAttention, Stack
from quickbeam.models.text.gguf_tokenizer import file_eos_ids, load_tokenizer
from quickbeam.models.weights.checkpoint import ModelConfig
from quickbeam.models.weights.gguf.architecture import (
    INTERLEAVED,
    INTERLEAVED_EXPERTS,
    architecture_of,
)
from quickbeam.models.weights.gguf.file import GgufFile, kind_name, widened
from quickbeam.models.weights.gguf.names import (
    ANGLES,
    BESIDE_TEXT,
    StoredName,
    is_behind,
    stored_names,
)
from quickbeam.models.weights.parameters import Parameters, experts, linears, names, norms
from quickbeam.models.weights.shapes import check_shapes, expected, refuse_shared_experts

logger = logging.getLogger(__name__)

logger = logging.getLogger(__name__)

SAMPLED = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GgufParameters(Parameters):
    """Parameters of a `.gguf` file, by the names of transformers' causal language model.

    With `kernels`, weights in blocks are given as `BlockRows`, and others as they are stored. With
    `dtype` float32, or without kernels, blocks are widened first. `stored_name`: gives the file's
    name of a parameter, or None. `beside`: shapes of parameters that the `stack` doesn't name,
    among them norms of its last norm's kind.
    """

    def __init__(
        self,
        file: GgufFile,
        architecture: str,
        config: Any,
        stack: Stack,
        dtype: torch.dtype,
        kernels: Kernels | None,
        stored_name: StoredName,
        beside: Mapping[str, list[int]] = MappingProxyType({}),
    ) -> None:
        """Raises `NotDescribed` for what is not described, and `InvalidInput` for a file that is
        not whole."""
        self.file, self.config, self.stack = file, config, stack
        self._interleaved = architecture in INTERLEAVED
        self._interleaved_experts = architecture in INTERLEAVED_EXPERTS
        self.dtype, self._kernels = dtype, kernels
        self._widens = dtype is torch.float32 or kernels is None
        self._plus_one = {name for norm in norms(stack) if norm.plus_one for name in norm.weights}
        if stack.norm.plus_one:
            self._plus_one |= {name for name, shape in beside.items() if len(shape) == 1}
        self._transposed = {
            one.name for linear, _ in linears(stack) for one in linear.weights if one.transposed
        }
        matrices = [one for one in stack.recurrents if isinstance(one, LinearAttention)]
        self._slopes = {one.log_slope for one in matrices}
        # what may be stored with an axis more
        self._flat = self._slopes | {name for one in matrices for name in _of_heads(one)}
        head_norms = norms(tuple(one.norms for one in stack.attentions))
        self._flat |= {name for norm in head_norms for name in norm.weights}
        wanted = names(stack) | beside.keys()
        self._stored = self._places(stored_name, wanted)
        file.refuse_formats(one for parts in self._stored.values() for one in parts)
        refuse_incomplete(set(wanted) - self._stored.keys(), [])
        if not self._widens:
            self._refuse_two_formats()
        self._lacking = {one.weight: 1 for one in stack.recurrents}  # axes of one number
        gates = (one.shared_gate for one in experts(stack) if one.shared_gate)
        for name in (tensor.name for gate in gates for tensor in gate.weights):
            if len(self.shape(name)) == 1:
                self._lacking[name] = 0
        check_shapes(stack, self.shape, expected(stack, config) | {**beside})
        if dtype is torch.bfloat16:
            refuse_shared_experts(stack, self.like)

    def _places(self, stored_name: StoredName, wanted: Set[str]) -> dict[str, tuple[str, ...]]:
        """Return the names in the file of each `wanted` parameter, one above the other."""
        stored = {}
        for name in wanted:
            own, _, kind = name.rpartition(".")
            parts = [stored_name(name) or ""]
            if own.endswith(".experts"):
                module, end = kind.removesuffix("_bias"), "bias" if "_bias" in kind else "weight"
                parts = [stored_name(f"{own}.{module}.{end}") or ""]
                if module == "gate_up_proj" and not parts[0]:  # gates may lie apart, in each layout
                    down = stored_name(f"{own}.down_proj.{end}") or ""
                    parts = [down.replace("_down_", f"_{one}_") for one in ("gate", "up")]
            if all(one in self.file.tensors for one in parts):
                stored[name] = tuple(parts)
                if len({self.file.tensors[one].shape for one in parts}) > 1:
                    raise InvalidInput(f"{self.file.path}: {' and '.join(parts)} have other shapes")
        return stored

    def _refuse_two_formats(self) -> None:
        """Raise `NotDescribed` for a parameter whose parts are of two formats."""
        for parts in self._stored.values():
            kinds = sorted({kind_name(self.file.tensors[one].kind) for one in parts})
            if len(kinds) > 1:
                raise NotDescribed(
                    f"experts' gates and what they let through are {' and '.join(kinds)}"
                )

    def shape(self, name: str) -> list[int]:
        first, *rest = [list(self.file.tensors[one].shape) for one in self._stored[name]]
        shape = [first[0], first[1] + rest[0][1], *first[2:]] if rest else first
        if name in self._flat:
            return [math.prod(shape)]
        if name in self._lacking:
            shape.insert(self._lacking[name], 1)
            return shape
        if name in self._transposed:
            *of_experts, outputs, inputs = shape
            return [*of_experts, inputs, outputs]
        return shape

    def like(self, name: str) -> Weight:
        if self._widens:
            return super().like(name)
        weights = [self.file[one] for one in self._stored[name]]  # mapped
        part = weights[0]
        if len(weights) > 1:
            none = [one[:0] for one in weights]
            part = _joined(none, self._interleaved_experts, self.shape(name)[0])
        if isinstance(part, BlockRows):
            return with_data(part, torch.empty_like(part.data, device="meta"))
        return torch.empty(self.shape(name), dtype=part.dtype, device="meta")

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Return rows `first` to `last` (excluded) of a tensor, `BlockRows` or numbers.

        Blocks are never transposed. Of a matrix that is, rows are those of the file.
        Where `first` is not 0, what was read before it is let go of.
        """
        if first:
            self.file.forget()
        parts = [self._ordered(name, self.file[one])[first:last] for one in self._stored[name]]
        if self._widens:
            parts = [widened(one, self._kernels) for one in parts]
        part = parts[0] if len(parts) == 1 else _joined(parts, self._interleaved_experts)
        if isinstance(part, BlockRows):
            return part
        if name in self._transposed:
            part = part.transpose(-1, -2)
        if name in self._plus_one:
            part = part.float() - 1
        elif name in self._slopes:  # stored as it is used
            part = torch.log(-part.float())
        return part.to(self.dtype) if part.dim() > 1 or self.dtype is torch.float32 else part

    def _ordered(self, name: str, weight: Weight) -> Weight:
        """Return a weight with its axes, and the halves of a head one behind the other."""
        if name in self._flat and isinstance(weight, torch.Tensor):
            return weight.flatten()
        if name in self._lacking and isinstance(weight, torch.Tensor):
            return weight.unsqueeze(self._lacking[name])
        module = name.rpartition(".")[0].rpartition(".")[2]
        if not self._interleaved or module not in ("q_proj", "k_proj"):
            return weight
        config = self.config
        heads = config.num_attention_heads if module == "q_proj" else config.num_key_value_heads
        return with_data(weight, _halves(weight.data, heads))

    def release(self, layers: str, layer: int | None) -> None:
        """Let go of what was read; it is mapped."""
        self.file.forget()


class GgufCheckpoint(GgufParameters):
    """A `.gguf` file as a model's checkpoint.

    `dtype`: None for bfloat16. `kernels`: as of `GgufParameters`. `config`, `stack`: as of
    `Checkpoint`. `eos_ids`: the tokens that end an answer.
    """

    quantised = True  # most of its weights

    def __init__(self, path: Path, dtype: torch.dtype | None, kernels: Kernels | None) -> None:
        """Raises `NotDescribed` for what is not described, and `InvalidInput` for a file that is
        not whole, or has weights in other formats."""
        self.path, file, dtype = path, GgufFile(path), dtype or torch.bfloat16
        name, fields = architecture_of(file)
        self._architecture = name
        config: Any = ModelConfig(fields)
        limit_context(config)
        stack: Stack = stack_of(config, dtype)
        try:
            self.tokenizer = load_tokenizer(file)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"{path}: its tokenizer can't be read: {error}") from error
        self.eos_ids = file_eos_ids(file.metadata, self.tokenizer)
        for key in ("tokens", "merges", "scores", "token_type"):  # large, and read
            file.metadata.pop(f"tokenizer.ggml.{key}", None)
        stored_name = stored_names(name, config.num_hidden_layers, file.tensors)
        (head,) = {one.name for one in stack.head.weights}
        tied = {head: stack.embedding} if config.tie_word_embeddings else {}
        super().__init__(
            file, name, config, stack, dtype, kernels, lambda own: stored_name(tied.get(own, own))
        )

    def _places(self, stored_name: StoredName, wanted: Set[str]) -> dict[str, tuple[str, ...]]:
        stored = super()._places(stored_name, wanted)
        read = {one for parts in stored.values() for one in parts}
        read.update(one for name in self.stack.unread if (one := stored_name(name)) is not None)
        odd, layers = self.file.tensors.keys() - read - set(ANGLES), self.config.num_hidden_layers
        odd = {one for one in odd if not one.startswith(BESIDE_TEXT)}
        behind = {one for one in odd if is_behind(one, layers)}
        if odd := odd - behind:
            raise InvalidInput(
                f"the file holds {min(odd)}, which is not known here and may change answers: take "
                "the model's folder instead"
            )
        heads = self.file.metadata.get(f"{self._architecture}.nextn_predict_layers", 0)
        if more := {one for one in behind if is_behind(one, layers + heads)}:
            logger.warning(
                "%s: it holds %s, behind the %d layers that its metadata names: left out",
                self.path,
                some_of(more),
                layers,
            )
        return stored

    @property
    def sampling(self) -> dict[str, Any]:
        """What the file says of sampling, in the words of a generation config."""
        of = self.file.metadata
        values = {own: of.get(f"general.sampling.{name}") for name, own in SAMPLED.items()}
        return {name: value for name, value in values.items() if value is not None}


def open_gguf(path: Path, dtype: torch.dtype | None, kernels: Kernels | None) -> GgufCheckpoint:
    """Return a file's checkpoint, with all blocks widened where `kernels` can't read them.

    Raises `InvalidInput` for what is not described, and as `GgufCheckpoint` does.
    """
    try:
        return GgufCheckpoint(path, dtype, kernels)
    except NotDescribed as error:
        reason = str(error)
    checkpoint = GgufCheckpoint(path, dtype, None)
    logger.info("%s is widened: %s", path, reason)
    return checkpoint


def _of_heads(of: LinearAttention) -> Iterator[str]:
    """Yield what a recurrence has of each head or group, beside its slopes."""
    if of.skip is not None:
        yield of.skip
    if of.norm is not None:
        yield from of.norm.weights


def _joined(parts: Sequence[Weight], interleaved: bool, count: int | None = None) -> Weight:
    """Return matrices `[experts, rows, …]` one below the other, or `interleaved` row by row.

    All are of one format. `count`: without their numbers, of so many experts.
    """
    of = [one.data for one in parts]
    data = torch.stack(of, 2).flatten(1, 2) if interleaved else torch.cat(of, 1)
    if count is not None:
        data = torch.empty(count, *data.shape[1:], dtype=data.dtype, device="meta")
    return with_data(parts[0], data)


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows 2i and 2i + 1 of each head to i and i + half."""
    apart = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return apart.transpose(1, 2).reshape(rows.shape)
