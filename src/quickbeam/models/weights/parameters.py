"""The tensors that a `Stack` names, as its operations read them, and a model's parameters by name:
in a model of transformers, or in files (`checkpoint.py`)."""

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
    QueryScale,
    Stack,
    Tensor,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def linears(stack: Stack) -> Iterator[tuple[Linear, bool]]:
    """Yield all weights but routers', as a pass reads them, and whether each is gated."""
    if stack.fusion is not None:
        yield stack.fusion.linear, False
    if stack.hidden_input is not None:
        for linear in (stack.hidden_input.join, stack.hidden_input.lift):
            if linear is not None:
                yield linear, False
    if stack.per_layer is not None:
        yield stack.per_layer.projection, False
    for layer in stack.layers:
        if layer.attention is not None:
            yield layer.attention.qkv, False
            if layer.attention.latent is not None:
                yield from ((one, False) for _, one in layer.attention.latent.parts)
            yield layer.attention.out, False
        if layer.recurrent is not None:
            yield layer.recurrent.into, False
            yield layer.recurrent.out, False
        yield from ((conv.shared, False) for conv in layer.convs or ())
        for one in feed_forwards(layer):
            yield one.up, one.gated
            yield one.down, False
        if layer.per_layer is not None:
            yield layer.per_layer.gate, False
            yield layer.per_layer.out, False
    if stack.head.weights:
        yield stack.head, False


def feed_forwards(layer: Layer) -> tuple[FeedForward, ...]:
    """Return a layer's feed-forward, or all of its experts, or both."""
    of = layer.feed_forward
    first = of.all if isinstance(of, Experts) else (of,) if of is not None else ()
    parallel = layer.parallel_experts
    return first if parallel is None else (*first, *parallel.experts.all)


def experts(stack: Stack) -> Iterator[Experts]:
    """Yield the feed-forwards that are of experts."""
    for layer in stack.layers:
        if isinstance(layer.feed_forward, Experts):
            yield layer.feed_forward
        if layer.parallel_experts is not None:
            yield layer.parallel_experts.experts


def norms(of: object) -> Iterator[Norm]:
    """Yield all norms of a stack, or of a part of one."""
    if isinstance(of, Norm):
        yield of
    elif isinstance(of, tuple):
        yield from (norm for one in of for norm in norms(one))
    elif is_dataclass(of):
        yield from norms(tuple(vars(of).values()))


def names(of: object) -> set[str]:
    """Return what a stack, or a part of one, has in fields of type `Name`."""
    own = set[str]()
    if isinstance(of, tuple):
        return own.union(*map(names, of))
    for field in fields(of) if is_dataclass(of) else ():
        value = getattr(of, field.name)
        if "Name" not in str(field.type):
            own |= names(value)
        elif value is not None:
            own |= {value} if isinstance(value, str) else set(value)
    return own


def tensor_of(model: nn.Module, name: str) -> torch.Tensor:
    """Return a model's parameter or buffer."""
    owner, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), last)
    return tensor


def rows_of(rows: Tensor, tensor: Any) -> Any:
    """Return the rows of a weight, `[outputs, inputs]`, or of a bias, `[outputs]`.

    `tensor`: the whole of it, as it is stored: a tensor, or `BlockRows` that aren't transposed.
    """
    if isinstance(tensor, BlockRows):
        return replace(tensor, data=rows_of(replace(rows, transposed=False), tensor.data))
    tensor = tensor if rows.expert is None else tensor[rows.expert]
    if rows.transposed and tensor.dim() == 2:
        tensor = tensor.t()
    if rows.cut is not None:
        apart = tensor.reshape(rows.heads, -1, *tensor.shape[1:])
        return apart[:, rows.cut[0] : rows.cut[1]].flatten(0, 1)
    if rows.parts == 1:
        return tensor
    size = len(tensor) // rows.heads // rows.parts
    apart = tensor.reshape(rows.heads, rows.parts, size, *tensor.shape[1:])
    return apart[:, rows.part].reshape(rows.heads * size, *tensor.shape[1:])


def norm_weight(norm: Norm, parameter: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """Return a norm's weight in float32, flat; None for ones. `parameter`: gives one by name."""
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

    `config`: the model's configuration, of its text part. `dtype`: what all are given in.
    """

    config: Any
    dtype: torch.dtype

    @abstractmethod
    def shape(self, name: str) -> list[int]:
        """Return the shape of one."""

    @abstractmethod
    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Return rows `first` to `last` (excluded) of one; to its end where `last` is None."""

    def __call__(self, name: str) -> Any:
        """Return the whole of one."""
        return self.rows(name)

    def mapped(self, name: str) -> Any:
        """Return the whole of one, whose rows are read from its file as they are needed, where that
        can be."""
        return self.rows(name)

    def like(self, name: str) -> Weight:
        """Return something of the shape and format of one, without its numbers."""
        return torch.empty(self.shape(name), device="meta")

    def release(self, layers: str, layer: int | None) -> None:  # noqa: B027
        """Let go of a layer of the list `layers`, which is not needed any more; None: of a head."""


class ModelParameters(Parameters):
    """Those of a model of transformers, which is taken over: what is released is emptied."""

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
