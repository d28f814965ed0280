"""A model's parameters by name, and what of them a `Stack` names, as its operations read them.

The parameters are those of a model of transformers, or of files (`checkpoint.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quickbeam.models.native.quantised import BlockRows, Weight
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Linear,
    Norm,
    ParameterRows,
    QueryScale,
    Stack,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def linears(stack: Stack) -> Iterator[tuple[Linear, bool]]:
    """Yield all weights but routers', as a pass reads them, and whether each is gated."""
    if stack.fusion is not None:
        yield stack.fusion.linear, False
    if stack.hidden_input is not None and stack.hidden_input.join is not None:
        yield stack.hidden_input.join, False
    if stack.per_layer is not None:
        yield stack.per_layer.projection, False
    for layer in stack.layers:
        if layer.attention is not None:
            yield layer.attention.qkv, False
            if layer.attention.latent is not None:
                for _, up in layer.attention.latent.parts:
                    yield up, False
            yield layer.attention.out, False
        if layer.recurrent is not None:
            yield layer.recurrent.into, False
            yield layer.recurrent.out, False
        for conv in layer.convs or ():
            yield conv.shared, False
        for feed_forward in feed_forwards(layer):
            yield feed_forward.up, feed_forward.gated
            yield feed_forward.down, False
        if layer.per_layer is not None:
            yield layer.per_layer.gate, False
            yield layer.per_layer.out, False
    if stack.head.weights:
        yield stack.head, False


def feed_forwards(layer: Layer) -> tuple[FeedForward, ...]:
    """Return a layer's feed-forward, or all of its experts, or both."""
    feed_forward, parallel = layer.feed_forward, layer.parallel_experts
    if isinstance(feed_forward, Experts):
        several = feed_forward.all
    else:
        several = () if feed_forward is None else (feed_forward,)
    return several if parallel is None else (*several, *parallel.experts.all)


def experts(stack: Stack) -> Iterator[Experts]:
    """Yield the feed-forwards that are of experts."""
    for layer in stack.layers:
        if isinstance(layer.feed_forward, Experts):
            yield layer.feed_forward
        if layer.parallel_experts is not None:
            yield layer.parallel_experts.experts


def norms(part: object) -> Iterator[Norm]:
    """Yield all norms of a stack, or of a part of one."""
    if isinstance(part, Norm):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from norms(inner)
    elif is_dataclass(part):
        yield from norms(tuple(vars(part).values()))


def names(part: object) -> set[str]:
    """Return the names of parameters in a stack, or in a part of one: its fields of type `Name`."""
    parameter_names = set[str]()
    if isinstance(part, tuple):
        for inner in part:
            parameter_names |= names(inner)
        return parameter_names
    for field in fields(part) if is_dataclass(part) else ():
        value = getattr(part, field.name)
        if "Name" not in str(field.type):
            parameter_names |= names(value)
        elif isinstance(value, str):
            parameter_names.add(value)
        elif value is not None:
            parameter_names.update(value)
    return parameter_names


def tensor_of(model: nn.Module, name: str) -> torch.Tensor:
    """Return a model's parameter or buffer."""
    owner, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), last)
    return tensor


def rows_of(rows: ParameterRows, tensor: Any) -> Any:
    """Return rows of a weight, `[outputs, inputs]`, or of a bias, `[outputs]`.

    `tensor`: all rows of the parameter: dense, or `BlockRows` that aren't transposed.
    """
    if isinstance(tensor, BlockRows):
        return replace(tensor, data=rows_of(replace(rows, transposed=False), tensor.data))
    tensor = tensor if rows.expert is None else tensor[rows.expert]
    if rows.transposed and tensor.dim() == 2:
        tensor = tensor.t()
    if rows.cut is not None:
        heads = tensor.reshape(rows.heads, -1, *tensor.shape[1:])
        return heads[:, rows.cut[0] : rows.cut[1]].flatten(0, 1)
    if rows.parts == 1:
        return tensor
    size = len(tensor) // rows.heads // rows.parts
    parts = tensor.reshape(rows.heads, rows.parts, size, *tensor.shape[1:])
    return parts[:, rows.part].reshape(rows.heads * size, *tensor.shape[1:])


def norm_weight(norm: Norm, parameter: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """Return a norm's weight in float32, flat; None for ones.

    `parameter`: a function from a name to the parameter.
    """
    if not norm.weights:
        return None
    weight = torch.cat([parameter(name).float().flatten() for name in norm.weights])
    weight = weight + 1 if norm.plus_one else weight
    return weight * norm.factor if norm.factor != 1 else weight


def query_factors(scale: QueryScale, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors of queries at `positions`, in float32."""
    return 1 + scale.beta * torch.log(1 + torch.floor(positions.float() / scale.length))


class Parameters(ABC):
    """Parameters by the names of transformers' causal language models.

    `config`: the configuration of the model's language part. `dtype`: the format that dense
    parameters are read in.
    """

    config: Any
    dtype: torch.dtype

    @abstractmethod
    def shape(self, name: str) -> list[int]:
        """Return a parameter's shape."""

    @abstractmethod
    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Return rows `first` to `last` (excluded) of a parameter; `last` None: to its end."""

    def __call__(self, name: str) -> Any:
        """Return all rows of a parameter."""
        return self.rows(name)

    def mapped(self, name: str) -> Any:
        """Return a parameter whose rows are read from the file as they are needed, if possible."""
        return self.rows(name)

    def like(self, name: str) -> Weight:
        """Return a parameter's shape and format alone, on the device `meta`."""
        return torch.empty(self.shape(name), device="meta")

    def release(self, layers: str, layer: int | None) -> None:  # noqa: B027
        """Free a layer of the list `layers`, which is not needed any more; None: the head."""


class ModelParameters(Parameters):
    """The parameters of a model of transformers, whose released layers are removed from it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.dtype = model.config.get_text_config(), model.dtype
        self._model = model

    def shape(self, name: str) -> list[int]:
        return list(tensor_of(self._model, name).shape)

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        return tensor_of(self._model, name).detach()[first:last]

    def release(self, layers: str, layer: int | None) -> None:
        if layer is None:
            self._model.set_output_embeddings(nn.Identity())
        else:
            modules: Any = self._model.get_submodule(layers)
            modules[layer] = nn.Identity()
