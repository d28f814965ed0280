"""Runs a `Stack` in plain PyTorch: what the kernels compute, without their order and rounding.

Tests hold the families' descriptions to it. A text is run whole, without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from quickbeam.models.stack import (
    Attention,
    Beside,
    Experts,
    FeedForward,
    Latent,
    Linear,
    Matrices,
    Norm,
    Recurrent,
    Rotary,
    Routing,
    Stack,
)
from quickbeam.models.stack_tensors import norm_weight, query_factors, rows_of

Parameters = Mapping[str, torch.Tensor]
# cosines and sines `[n, half]` of positions `[n]`
Angles = Callable[[Rotary, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def logits(
    stack: Stack, parameters: Parameters, angles: Angles, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logits after each of `tokens` `[n]`, `[n, vocab]`, in the parameters' dtype."""
    positions = torch.arange(len(tokens))
    x = F.embedding(tokens, parameters[stack.embedding]) * stack.scale
    if stack.positions is not None:
        x = x + F.embedding(positions, parameters[stack.positions])
    inputs = _per_layer(stack, parameters, tokens, x)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each layer
    for i, layer in enumerate(stack.layers):
        normed = _norm(x, layer.attention_before, parameters)
        both = []
        if layer.attention is not None:
            attended = _attend(normed, layer.attention, parameters, angles, positions, held)
            both.append(attended * layer.attention.factor)
        if layer.recurrent is not None:
            recurred = _recur(normed, layer.recurrent, parameters)
            both.append(recurred * layer.recurrent.factor)
        after, mixed = layer.attention_after, torch.zeros_like(x)
        for one in both:
            mixed = mixed + _norm(one, after, parameters) * layer.residual
        if not layer.parallel:
            x, mixed = x + mixed, torch.zeros_like(mixed)
        if not layer.parallel or layer.feed_forward_before is not None:
            normed = _norm(x, layer.feed_forward_before, parameters)
        x = x + mixed
        if layer.feed_forward is not None:
            fed = _feed(normed, layer.feed_forward, parameters)
            if (of := layer.beside) is not None:
                fed = _norm(fed, of.dense_after, parameters) + _feed_beside(x, of, parameters)
            x = x + _norm(fed, layer.feed_forward_after, parameters) * layer.residual
        if (mine := layer.per_layer) is not None:
            gate = ACTIVATIONS[mine.activation](_linear(x, mine.gate, parameters))
            made = _linear(gate * inputs[:, i], mine.out, parameters)
            x = x + _norm(made, mine.after, parameters)
        if layer.scalar is not None:
            x = x * parameters[layer.scalar]
    x = _norm(x, stack.norm, parameters)
    return _cap(_linear(x, stack.head, parameters) * stack.head_scale, stack.softcap)


def _cap(x: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return x if softcap is None else torch.tanh(x / softcap) * softcap


def _linear(x: torch.Tensor, linear: Linear, parameters: Parameters) -> torch.Tensor:
    bias = (
        torch.cat([rows_of(b, parameters[b.name]) for b in linear.biases])
        if linear.biases
        else None
    )
    return F.linear(x, torch.cat([rows_of(w, parameters[w.name]) for w in linear.weights]), bias)


def _norm(x: torch.Tensor, norm: Norm | None, parameters: Parameters) -> torch.Tensor:
    """Apply a norm to the last dimension, or of several heads' weights to the last two."""
    if norm is None:
        return x
    y = x.float()
    if norm.centred:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.epsilon)
    weight = norm_weight(norm, parameters.__getitem__)
    if weight is not None:
        y = y * (weight.view(x.shape[-2:]) if weight.numel() > x.shape[-1] else weight)
    if norm.bias is not None:
        y = y + parameters[norm.bias].float()
    return y.to(x.dtype)


def _turn(x: torch.Tensor, of: Attention, angles: Angles, positions: torch.Tensor) -> torch.Tensor:
    """Apply rotary angles to heads `[n, heads, dim]`."""
    if of.rotary is None:
        return x
    cosine, sine = (part[:, None].to(x.dtype) for part in angles(of.rotary, positions))
    turned, rest = x[..., : of.turned], x[..., of.turned :]
    if of.rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        pairs = torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
    return torch.cat([pairs, rest], -1)


def _attend(
    x: torch.Tensor,
    of: Attention,
    parameters: Parameters,
    angles: Angles,
    positions: torch.Tensor,
    held: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    n, dim, group = len(x), of.head_dim, of.heads // of.kv_heads
    sizes = [of.heads * dim, of.kv_heads * dim, of.kv_heads * dim]
    read = _linear(x, of.qkv, parameters)
    if of.source is not None:  # keys and values are another layer's
        read = torch.cat([read, read.new_zeros(n, 2 * sizes[1])], -1)
    elif of.values_are_keys:
        read = torch.cat([read, read[:, sizes[0] :]], -1)
    gates = read[:, sum(sizes) :]
    if of.latent is not None:
        query, key, value = _from_latent(read, of, of.latent, parameters)
    else:
        query, key, value = read[:, : sum(sizes)].split(sizes, -1)
    if of.norms is not None and of.norm_all:
        query, key = (
            _norm(query, of.norms[0], parameters),
            _norm(key, of.norms[1], parameters),
        )
    query, key = query.reshape(n, -1, dim), key.reshape(n, -1, dim)
    value = value.reshape(n, of.kv_heads, -1)
    of_heads = of.norms if not of.norm_all else None
    if of_heads is not None and not of.norm_last:
        query, key = (
            _norm(query, of_heads[0], parameters),
            _norm(key, of_heads[1], parameters),
        )
    query, key = _turn(query, of, angles, positions), _turn(key, of, angles, positions)
    if of_heads is not None and of.norm_last:
        query, key = (
            _norm(query, of_heads[0], parameters),
            _norm(key, of_heads[1], parameters),
        )
    if of.query_scale is not None:
        query = query * query_factors(of.query_scale, positions)[:, None, None].to(query.dtype)
    if of.value_norm:
        value = _norm(value, Norm((), of.norms[0].epsilon if of.norms else 0.0), parameters)
    key, value = (key, value) if of.source is None else held[of.source]
    held.append((key, value))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    score = _cap(torch.einsum("qhd,khd->hqk", query, key) * of.scaling, of.softcap)
    behind = positions[:, None] - positions[None]
    seen = (behind >= 0) & (behind < (of.window or n + 1))
    score = score.masked_fill(~seen, -torch.inf)
    if of.sinks is not None:
        sinks = parameters[of.sinks].to(score.dtype).view(-1, 1, 1).expand(-1, n, 1)
        score = torch.cat([score, sinks], -1)
    weight = score.softmax(-1)[..., :n]
    mixed = torch.einsum("hqk,khd->qhd", weight, value).reshape(n, -1)
    if of.gated:
        mixed = mixed * gates.sigmoid().repeat_interleave(dim if of.one_gate else 1, -1)
    return _linear(mixed, of.out, parameters)


def _per_layer(
    stack: Stack, parameters: Parameters, tokens: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return the per-layer inputs `[n, layers, width]`; none where there are no such."""
    if (of := stack.per_layer) is None:
        return torch.empty(0)
    apart = (len(tokens), len(stack.layers), of.width)
    rows = F.embedding(tokens, parameters[of.table]).view(apart) * of.scale
    made = (_linear(x, of.projection, parameters) * of.factor).view(apart)
    return (_norm(made, of.norm, parameters) + rows) * of.mixed


def _recur(x: torch.Tensor, of: Recurrent, parameters: Parameters) -> torch.Tensor:
    if isinstance(of, Matrices):
        return _recur_matrices(x, of, parameters)
    b, c, x = _linear(x, of.into, parameters).chunk(3, -1)
    return _linear(c * _convolve(b * x, of, parameters), of.out, parameters)


def _recur_matrices(x: torch.Tensor, of: Matrices, parameters: Parameters) -> torch.Tensor:
    keys, values = of.key_heads * of.key_dim, of.heads * of.value_dim
    rates = of.heads if of.delta else 0
    sizes = [of.channels, values, rates, of.heads]
    mixed, gates, rate, step = _linear(x, of.into, parameters).split(sizes, -1)
    if not of.delta:
        parts = mixed.split([values, keys, keys], -1)
        scaled = [part * scale for part, scale in zip(parts, of.scales, strict=True)]
        mixed, gates, step = torch.cat(scaled, -1), gates * of.gate_scale, step * of.step_scale
    mixed = F.silu(_convolve(mixed, of, parameters))
    if of.delta:
        q, k, v = mixed.split([keys, keys, values], -1)
    else:
        v, k, q = mixed.split([values, keys, keys], -1)
    of_heads = of.heads // of.key_heads
    q, k = (one.view(len(x), -1, of.key_dim).repeat_interleave(of_heads, 1) for one in (q, k))
    v = v.view(len(x), of.heads, of.value_dim)
    step = F.softplus(step + parameters[of.shift]).clamp(of.least, of.most)
    decay = (-parameters[of.log_slope].exp() * step).exp()[..., None, None]
    if of.delta:
        q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
        q = q / of.key_dim**0.5
    state, found = torch.zeros(of.heads, of.key_dim, of.value_dim, dtype=x.dtype), []
    for i in range(len(x)):
        state = state * decay[i]
        if of.delta:
            u = rate[i].sigmoid()[:, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
        else:
            u = step[i][:, None] * v[i]
        state = state + k[i][..., None] * u[:, None]
        found.append(torch.einsum("hkv,hk->hv", state, q[i]))
    y = torch.stack(found)
    if of.skip is not None:
        y = y + parameters[of.skip][:, None] * v
    y, gates = (one.reshape(len(x), of.groups, -1) for one in (y, F.silu(gates)))
    if of.norm_last:
        y = _norm(y * gates, of.norm, parameters)
    else:
        y = _norm(y, of.norm, parameters) * gates
    return _linear(y.flatten(1), of.out, parameters)


def _convolve(x: torch.Tensor, of: Recurrent, parameters: Parameters) -> torch.Tensor:
    """The convolution of `[n, channels]` over the last `taps` tokens."""
    bias = None if of.bias is None else parameters[of.bias]
    padded = F.pad(x.t(), (of.taps - 1, 0))
    return F.conv1d(padded, parameters[of.weight], bias, groups=of.channels).t()


def _from_latent(
    made: torch.Tensor, of: Attention, latent: Latent, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values `[n, heads, ...]`; what turns of a head comes first here."""
    sizes = [made.shape[-1] - latent.rank - of.turned, latent.rank, of.turned]
    query, small, turning = torch.split(made, sizes, -1)
    if latent.query is not None:
        norm, up = latent.query
        query = _linear(_norm(query, norm, parameters), up, parameters)
    query = query.view(len(made), of.heads, -1).roll(of.turned, -1)
    rest = _linear(_norm(small, latent.norm, parameters), latent.up, parameters)
    still, value = torch.split(
        rest.view(len(made), of.heads, -1), [of.head_dim - of.turned, latent.value_dim], -1
    )
    key = torch.cat([turning[:, None].expand(-1, of.heads, -1), still], -1)
    return query, key, value


def _feed(x: torch.Tensor, of: FeedForward | Experts, parameters: Parameters) -> torch.Tensor:
    if isinstance(of, Experts):
        return _feed_experts(x, of, parameters)
    up = _linear(x, of.up, parameters)
    if of.activation == "clamped":
        gate, rest = up.chunk(2, -1)
        gate, rest = gate.clamp(max=of.limit), rest.clamp(-of.limit, of.limit)
        return _linear((rest + 1) * gate * (of.slope * gate).sigmoid(), of.down, parameters)
    activation = ACTIVATIONS[of.activation]
    if of.gated:
        gate, rest = up.chunk(2, -1)
        up = activation(gate * of.gate_scale) * rest
    else:
        up = activation(up)
    return _linear(up, of.down, parameters) * of.factor


def _feed_beside(x: torch.Tensor, of: Beside, parameters: Parameters) -> torch.Tensor:
    read = _norm(x, of.router, parameters)
    made = _feed_experts(_norm(x, of.before, parameters), of.experts, parameters, read)
    return _norm(made, of.after, parameters)


def _feed_experts(
    x: torch.Tensor, of: Experts, parameters: Parameters, router: torch.Tensor | None = None
) -> torch.Tensor:
    logits = _linear(x if router is None else router, of.routing.logits, parameters)
    weight, expert = _route(logits.float(), of.routing, parameters)
    total = torch.zeros_like(x)
    for i, one in enumerate(of.chosen):
        rows, place = torch.where(expert == i)
        total[rows] += weight[rows, place, None].to(x.dtype) * _feed(x[rows], one, parameters)
    if of.shared is not None:
        shared = _feed(x, of.shared, parameters)
        if of.shared_gate is not None:
            shared = shared * _linear(x, of.shared_gate, parameters).sigmoid()
        total = total + shared
    return total


def _route(
    logits: torch.Tensor, of: Routing, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and numbers of each row's experts, `[n, top]` each."""
    if of.scores == "mixer":
        weight, expert = _mix(logits, of)
    else:
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(of.scores, logits)
        choice = scores
        if of.correction is not None:
            choice = choice + parameters[of.correction].float().flatten()
        parts = choice.unflatten(-1, (of.groups, -1))
        worth = parts.topk(of.best_of_group, -1).values.sum(-1)
        kept = torch.zeros_like(worth).scatter(-1, worth.topk(of.top_groups, -1).indices, 1)
        choice = parts.masked_fill(kept[..., None] == 0, -torch.inf).flatten(-2)
        expert = choice.topk(of.top, -1).indices
        weight = scores.gather(-1, expert)
        if of.scores == "softmax_of_chosen":
            weight = weight.softmax(-1)
    if of.renormalised:
        weight = weight / (weight.sum(-1, keepdim=True) + of.plus).clamp(min=of.least)
    if of.scale is not None:
        weight = weight * parameters[of.scale].float()[expert]
    return weight * of.factor, expert


def _mix(logits: torch.Tensor, of: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    left, weights, experts = logits, [], []
    for _ in range(of.top):
        top, expert = left.max(-1, keepdim=True)
        far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * of.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, -1), torch.cat(experts, -1)
