"""The tensors that a `Stack` names, as its operations read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quickbeam.models.native.quantised import BlockRows
from quickbeam.models.stack import (
    Experts,
    FeedForward,
    Layer,
    Linear,
    Matrices,
    Norm,
    QueryScale,
    Stack,
    Tensor,
)


def linears(stack: Stack) -> Iterator[tuple[Linear, bool]]:
    """Yield all weights but routers', as a pass reads them, and whether each is gated."""
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
        for one in feed_forwards(layer):
            yield one.up, one.gated
            yield one.down, False
        if layer.per_layer is not None:
            yield layer.per_layer.gate, False
            yield layer.per_layer.out, False
    yield stack.head, False


def feed_forwards(layer: Layer) -> tuple[FeedForward, ...]:
    """Return a layer's feed-forward, or all of its experts, or both."""
    of = layer.feed_forward
    first = of.all if isinstance(of, Experts) else (of,) if of is not None else ()
    return first if layer.beside is None else (*first, *layer.beside.experts.all)


def experts(stack: Stack) -> Iterator[Experts]:
    """Yield the feed-forwards that are of experts."""
    for layer in stack.layers:
        if isinstance(layer.feed_forward, Experts):
            yield layer.feed_forward
        if layer.beside is not None:
            yield layer.beside.experts


def norms(stack: Stack) -> Iterator[Norm]:
    """Yield all norms."""
    for layer in stack.layers:
        of_layer = (
            layer.attention_before,
            layer.attention_after,
            layer.feed_forward_before,
            layer.feed_forward_after,
            *((layer.attention and layer.attention.norms) or ()),
            *([layer.recurrent.norm] if isinstance(layer.recurrent, Matrices) else []),
            *([layer.per_layer.after] if layer.per_layer is not None else []),
        )
        yield from (norm for norm in of_layer if norm is not None)
        if layer.attention is not None and layer.attention.latent is not None:
            yield from (norm for norm, _ in layer.attention.latent.parts)
        if (of := layer.beside) is not None:
            yield from (of.before, of.router, of.after, of.dense_after)
    if stack.per_layer is not None:
        yield stack.per_layer.norm
    yield stack.norm


def names(stack: Stack) -> set[str]:
    """Return the names of all parameters that a stack uses."""
    found = {stack.embedding, *([stack.positions] if stack.positions else [])}
    found |= {attention.sinks for attention in stack.attentions if attention.sinks}
    for recurrent in stack.recurrents:
        found |= {recurrent.weight, *([recurrent.bias] if recurrent.bias else [])}
        if isinstance(recurrent, Matrices):
            found |= {recurrent.log_slope, recurrent.shift}
            found |= {recurrent.skip} if recurrent.skip else set()
    routers = list(experts(stack))
    found |= {of.routing.correction for of in routers if of.routing.correction}
    found |= {of.routing.scale for of in routers if of.routing.scale}
    found |= {layer.scalar for layer in stack.layers if layer.scalar}
    found |= {stack.per_layer.table} if stack.per_layer is not None else set()
    for linear in (*(of.scoring for of in routers), *(linear for linear, _ in linears(stack))):
        found |= {tensor.name for tensor in (*linear.weights, *linear.biases)}
    for norm in norms(stack):
        found |= {*norm.weights, *([norm.bias] if norm.bias else [])}
    return found


def tensor_of(model: nn.Module, name: str) -> torch.Tensor:
    """Return a model's parameter or buffer."""
    owner, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(owner), last)
    return found


def rows_of(rows: Tensor, tensor: Any) -> Any:
    """Return the rows of a weight, `[outputs, inputs]`, or of a bias, `[outputs]`.

    `tensor`: the whole of it, as it is stored: a tensor, or `BlockRows` that aren't transposed.
    """
    if isinstance(tensor, BlockRows):
        return replace(tensor, data=rows_of(replace(rows, transposed=False), tensor.data))
    tensor = tensor.detach() if rows.expert is None else tensor.detach()[rows.expert]
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
    found = torch.cat([parameter(name).detach().float().flatten() for name in norm.weights])
    found = found + 1 if norm.plus_one else found
    return found * norm.factor if norm.factor != 1 else found


def query_factors(scale: QueryScale, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors of queries at `positions`, in float32."""
    return 1 + scale.beta * torch.log(1 + torch.floor(positions.float() / scale.length))
