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
    OTHER_INPUTS,
    StoredName,
    is_behind,
    stored_names,
)
from quickbeam.models.weights.parameters import Parameters, experts, linears, names, norms
from quickbeam.models.weights.shapes import check_shapes, expected, refuse_shared_experts

logger = logging.getLogger(__name__)

SAMPLING_KEYS = {  # to the names of a generation config
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
    name of a parameter, or None. `extra_shapes`: shapes by name of parameters that the `stack`
    doesn't name. Vectors among them are norms of the kind of the stack's last norm.
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
        extra_shapes: Mapping[str, list[int]] = MappingProxyType({}),
    ) -> None:
        """Raises `NotDescribed` for what is not described, and `InvalidInput` for a file that is
        not whole."""
        self.file = file
        self.config, self.stack = config, stack
        self._interleaved = architecture in INTERLEAVED
        self._interleaved_experts = architecture in INTERLEAVED_EXPERTS
        self.dtype, self._kernels = dtype, kernels
        self._widens = dtype is torch.float32 or kernels is None
        self._plus_one = {name for norm in norms(stack) if norm.plus_one for name in norm.weights}
        if stack.norm.plus_one:
            self._plus_one |= {name for name, shape in extra_shapes.items() if len(shape) == 1}
        self._transposed = {
            tensor.name
            for linear, _ in linears(stack)
            for tensor in linear.weights
            if tensor.transposed
        }
        self._slopes = set[str]()
        self._vectors = set[str]()  # what may be stored with an axis more
        for recurrent in stack.recurrents:
            if isinstance(recurrent, LinearAttention):
                self._slopes.add(recurrent.log_slope)
                self._vectors.update(_vectors_of(recurrent))
        for norm in norms(tuple(attention.norms for attention in stack.attentions)):
            self._vectors.update(norm.weights)
        wanted = names(stack) | extra_shapes.keys()
        self._stored = self._stored_names(stored_name, wanted)
        file.refuse_formats(name for parts in self._stored.values() for name in parts)
        refuse_incomplete(set(wanted) - self._stored.keys(), [])
        if not self._widens:
            self._refuse_two_formats()
        # where a parameter has an axis of length 1 that the file's tensor lacks
        self._missing_axis = {recurrent.weight: 1 for recurrent in stack.recurrents}
        for mixture in experts(stack):
            for tensor in mixture.shared_gate.weights if mixture.shared_gate else ():
                if len(self.shape(tensor.name)) == 1:
                    self._missing_axis[tensor.name] = 0
        check_shapes(stack, self.shape, expected(stack, config) | {**extra_shapes})
        if dtype is torch.bfloat16:
            refuse_shared_experts(stack, self.like)

    def _stored_names(
        self, stored_name: StoredName, wanted: Set[str]
    ) -> dict[str, tuple[str, ...]]:
        """Return the tensors of the file that are each `wanted` parameter, one above the other."""
        stored = {}
        for name in wanted:
            parts = _parts(name, stored_name)
            if all(part in self.file.tensors for part in parts):
                stored[name] = tuple(parts)
                if len({self.file.tensors[part].shape for part in parts}) > 1:
                    raise InvalidInput(f"{self.file.path}: {' and '.join(parts)} have other shapes")
        return stored

    def _refuse_two_formats(self) -> None:
        """Raise `NotDescribed` for a parameter whose parts are of two formats."""
        for parts in self._stored.values():
            kinds = sorted({kind_name(self.file.tensors[part].kind) for part in parts})
            if len(kinds) > 1:
                raise NotDescribed(
                    f"experts' gates and what they multiply are {' and '.join(kinds)}"
                )

    def shape(self, name: str) -> list[int]:
        parts = [self.file.tensors[part] for part in self._stored[name]]
        shape = list(parts[0].shape)
        if len(parts) > 1:
            shape[1] = sum(part.shape[1] for part in parts)
        if name in self._vectors:
            return [math.prod(shape)]
        if name in self._missing_axis:
            shape.insert(self._missing_axis[name], 1)
            return shape
        if name in self._transposed:
            shape[-2:] = shape[-1], shape[-2]
        return shape

    def like(self, name: str) -> Weight:
        if self._widens:
            return super().like(name)
        weights = [self.file[part] for part in self._stored[name]]  # mapped
        weight = weights[0]
        if len(weights) > 1:
            without_experts = _joined([part[:0] for part in weights], self._interleaved_experts)
            shape = (self.shape(name)[0], *without_experts.data.shape[1:])
            data = torch.empty(shape, dtype=without_experts.data.dtype, device="meta")
            weight = with_data(without_experts, data)
        if isinstance(weight, BlockRows):
            return with_data(weight, torch.empty_like(weight.data, device="meta"))
        return torch.empty(self.shape(name), dtype=weight.dtype, device="meta")

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Return rows `first` to `last` (excluded) of a tensor, as `BlockRows` or a tensor.

        Blocks are never transposed. Of a transposed matrix, rows are those of the file. Where
        `first` is not 0, pages that were read before are dropped from memory.
        """
        if first:
            self.file.forget()
        parts = [self._arranged(name, self.file[part])[first:last] for part in self._stored[name]]
        if self._widens:
            parts = [widened(part, self._kernels) for part in parts]
        weight = parts[0] if len(parts) == 1 else _joined(parts, self._interleaved_experts)
        if isinstance(weight, BlockRows):
            return weight
        if name in self._transposed:
            weight = weight.transpose(-1, -2)
        if name in self._plus_one:
            weight = weight.float() - 1
        elif name in self._slopes:  # stored as it is used
            weight = torch.log(-weight.float())
        converted = weight.dim() > 1 or self.dtype is torch.float32
        return weight.to(self.dtype) if converted else weight

    def _arranged(self, name: str, weight: Weight) -> Weight:
        """Return a weight with its axes, and the halves of a head one behind the other."""
        if name in self._vectors and isinstance(weight, torch.Tensor):
            return weight.flatten()
        if name in self._missing_axis and isinstance(weight, torch.Tensor):
            return weight.unsqueeze(self._missing_axis[name])
        module = name.rpartition(".")[0].rpartition(".")[2]
        if not self._interleaved or module not in ("q_proj", "k_proj"):
            return weight
        config = self.config
        heads = config.num_attention_heads if module == "q_proj" else config.num_key_value_heads
        return with_data(weight, _halves(weight.data, heads))

    def release(self, layers: str, layer: int | None) -> None:
        """Drop what was read from memory; the file is mapped."""
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
        self.path = path
        file, dtype = GgufFile(path), dtype or torch.bfloat16
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
        head = stack.head.weights[0].name

        def tied_name(parameter: str) -> str | None:
            tied = config.tie_word_embeddings and parameter == head
            return stored_name(stack.embedding if tied else parameter)

        super().__init__(file, name, config, stack, dtype, kernels, tied_name)

    def _stored_names(
        self, stored_name: StoredName, wanted: Set[str]
    ) -> dict[str, tuple[str, ...]]:
        stored = super()._stored_names(stored_name, wanted)
        read = {part for parts in stored.values() for part in parts}
        read.update(stored_name(name) or "" for name in self.stack.unread)
        layers = self.config.num_hidden_layers
        unread = {
            name
            for name in self.file.tensors.keys() - read - set(ANGLES)
            if not name.startswith(OTHER_INPUTS)
        }
        behind = {name for name in unread if is_behind(name, layers)}
        unknown = unread - behind
        if unknown:
            raise InvalidInput(
                f"the file holds {min(unknown)}, which is not known here and may change answers: "
                "take the model's folder instead"
            )
        heads = self.file.metadata.get(f"{self._architecture}.nextn_predict_layers", 0)
        unnamed = {name for name in behind if is_behind(name, layers + heads)}
        if unnamed:
            logger.warning(
                "%s: it holds %s, behind the %d layers that its metadata names: left out",
                self.path,
                some_of(unnamed),
                layers,
            )
        return stored

    @property
    def sampling(self) -> dict[str, Any]:
        """What the file says of sampling, in the words of a generation config."""
        metadata, sampling = self.file.metadata, {}
        for key, name in SAMPLING_KEYS.items():
            value = metadata.get(f"general.sampling.{key}")
            if value is not None:
                sampling[name] = value
        return sampling


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


def _parts(name: str, stored_name: StoredName) -> list[str]:
    """Return the tensors that are a parameter, one above the other; "" for none."""
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return [stored_name(name) or ""]
    module, kind = last.removesuffix("_bias"), "bias" if "_bias" in last else "weight"
    stored = stored_name(f"{prefix}.{module}.{kind}") or ""
    if stored or module != "gate_up_proj":
        return [stored]
    # gates may be a tensor of their own, in each layout
    down = stored_name(f"{prefix}.down_proj.{kind}") or ""
    return [down.replace("_down_", "_gate_"), down.replace("_down_", "_up_")]


def _vectors_of(recurrent: LinearAttention) -> Iterator[str]:
    """Yield the parameters of a recurrence that have a number, or a row, for each head or group."""
    yield recurrent.log_slope
    if recurrent.skip is not None:
        yield recurrent.skip
    if recurrent.norm is not None:
        yield from recurrent.norm.weights


def _joined(parts: Sequence[Weight], interleaved: bool) -> Weight:
    """Return matrices `[experts, rows, …]` one below the other, or `interleaved` row by row.

    All are of one format.
    """
    matrices = [part.data for part in parts]
    data = torch.stack(matrices, 2).flatten(1, 2) if interleaved else torch.cat(matrices, 1)
    return with_data(parts[0], data)


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows 2i and 2i + 1 of each head to i and i + half."""
    pairs = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
