"""What a drafter's layer begins with: the weights of one of the target's layers."""

from __future__ import annotations

import torch

from quickbeam.drafters.network import DrafterNetwork
from quickbeam.models.stack import Attention, FeedForward, Linear
from quickbeam.models.weights.parameters import norm_weight
from quickbeam.train.target import FrozenTarget, dense


@torch.no_grad()
def copy_layer(
    network: DrafterNetwork, index: int, target: FrozenTarget, number: int, scale: float = 1.0
) -> None:
    """Give the drafter's layer `index` the weights of the target's layer `number`.

    Attention, feed-forward or a norm of another shape or kind keeps its own weights. Attention
    that reads an embedding before the hidden state keeps its own columns for the embedding.
    `scale`: of what the layer adds to the residual stream.
    """
    layer, source = network.stack.layers[index], target.stack.layers[number]
    parameters, hidden_input = target.parameters, network.stack.hidden_input
    # norms
    attention_norm = layer.attention_before
    if attention_norm is None and hidden_input is not None:
        attention_norm = hidden_input.state_norm
    pairs = (
        (attention_norm, source.attention_before),
        (layer.feed_forward_before, source.feed_forward_before),
    )
    for own_norm, norm in pairs:
        if own_norm is not None and norm is not None and not norm.centred:
            weight = norm_weight(norm, parameters)
            if weight is not None:
                network.get_parameter(own_norm.weights[0]).copy_(weight)
    # attention
    own, attention = layer.attention, source.attention
    if own is not None and attention is not None and _are_alike(own, attention):
        qkv = _with_kv_heads(dense(attention.qkv, parameters), attention, own.kv_heads)
        _put(network, own.qkv, qkv)
        _put(network, own.out, dense(attention.out, parameters) * scale)
    # feed-forward
    own_forward, feed_forward = layer.feed_forward, source.feed_forward
    if isinstance(own_forward, FeedForward) and isinstance(feed_forward, FeedForward):
        kind = feed_forward.activation, feed_forward.gated
        up, down = (dense(part, parameters) for part in (feed_forward.up, feed_forward.down))
        if kind == (own_forward.activation, own_forward.gated) and _fits(
            network, own_forward.up, up
        ):
            _put(network, own_forward.up, up)
            _put(network, own_forward.down, down * scale)


def _are_alike(own: Attention, source: Attention) -> bool:
    """Whether a drafter's heads can have the weights of the target's."""
    rotary = source.rotary
    return (
        source.latent is None
        and not (source.gated or source.one_gate or source.values_are_keys)
        and not (own.values_are_keys or own.kv_heads % source.kv_heads)
        and (own.heads, own.head_dim) == (source.heads, source.head_dim)
        and rotary is not None
        and not rotary.interleaved
        and source.rotary_dim == source.head_dim
    )


def _with_kv_heads(qkv: torch.Tensor, attention: Attention, kv_heads: int) -> torch.Tensor:
    """Return the rows of queries, keys and values with so many heads of keys and values.

    A head that several heads of queries share is repeated.
    """
    size = attention.head_dim
    sizes = [attention.heads * size, attention.kv_heads * size, attention.kv_heads * size]
    query, key, value = qkv.split_with_sizes(sizes)
    repeats = kv_heads // attention.kv_heads
    key, value = (
        torch.unflatten(rows, 0, (-1, size)).repeat_interleave(repeats, 0).flatten(0, 1)
        for rows in (key, value)
    )
    return torch.cat([query, key, value])


def _weights(network: DrafterNetwork, linear: Linear) -> list[torch.nn.Parameter]:
    names = dict.fromkeys(part.name for part in linear.weights)
    return [network.get_parameter(name) for name in names]


def _fits(network: DrafterNetwork, linear: Linear, rows: torch.Tensor) -> bool:
    weights = _weights(network, linear)
    outputs = sum(len(weight) for weight in weights)
    return outputs == len(rows) and weights[0].shape[1] >= rows.shape[1]


def _put(network: DrafterNetwork, linear: Linear, rows: torch.Tensor) -> None:
    """Copy rows into the last columns of a product's weights, one below the other, if they fit."""
    if not _fits(network, linear, rows):
        return
    weights = _weights(network, linear)
    parts = rows.split_with_sizes([len(weight) for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight[:, -part.shape[1] :] = part


def target_norm(target: FrozenTarget) -> torch.Tensor | None:
    """Return the weight of the target's last norm, `[d]`; None for ones or a layer norm."""
    norm = target.stack.norm
    return None if norm.centred else norm_weight(norm, target.parameters)
