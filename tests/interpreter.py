"""Runs a `Stack` in plain PyTorch: what the kernels compute, without their order and rounding.

Tests hold the families' descriptions to it. A text is run whole, without a cache.
"""

import torch
import torch.nn.functional as F

from quickbeam.models import stack as of_stack
from quickbeam.models.stack import (
    Attention,
    Experts,
    FeedForward,
    Linear,
    LinearAttention,
    Norm,
    Routing,
)
from quickbeam.models.stack_tensors import norm_weight, query_factors, rows_of
from reference import ACTIVATIONS


def cap(x, softcap: float | None):
    return x if softcap is None else torch.tanh(x / softcap) * softcap


class Interpreter:
    """The parts of a model with these `parameters`; `n` rows are those of one text. `angles`:
    cosines and sines `[n, half]` of a `Rotary` and positions `[n]`."""

    def __init__(self, parameters, angles=None):
        self.parameters, self.angles = parameters, angles

    def logits(self, stack: of_stack.Stack, tokens):
        """Return the logits after each of `tokens` `[n]`, `[n, vocab]`, in the model's dtype."""
        x = F.embedding(tokens, self.parameters[stack.embedding]) * stack.scale
        x = self.norm(x, stack.embedding_norm)
        if stack.positions is not None:
            x = x + self.parameters[stack.positions][: len(tokens)]
        inputs, held = self.per_layer(stack, tokens, x), []
        for i, layer in enumerate(stack.layers):
            normed = self.norm(x, layer.attention_before)
            mixed = torch.zeros_like(x)
            if (attention := layer.attention) is not None:
                attended = self.attend(normed, attention, held) * attention.factor
                mixed = mixed + self.norm(attended, layer.attention_after) * layer.residual
            if (recurrent := layer.recurrent) is not None:
                recurred = self.recur(normed, recurrent) * recurrent.factor
                mixed = mixed + self.norm(recurred, layer.attention_after) * layer.residual
            if not layer.parallel:
                x, mixed = x + mixed, torch.zeros_like(mixed)
            if not layer.parallel or layer.feed_forward_before is not None:
                normed = self.norm(x, layer.feed_forward_before)
            x = x + mixed
            if layer.feed_forward is not None:
                fed = self.feed(normed, layer.feed_forward)
                if (beside := layer.parallel_experts) is not None:
                    fed = self.norm(fed, beside.dense_after) + self.feed_beside(x, beside)
                x = x + self.norm(fed, layer.feed_forward_after) * layer.residual
            if (mine := layer.per_layer) is not None:
                gate = ACTIVATIONS[mine.activation](self.linear(x, mine.gate))
                x = x + self.norm(self.linear(gate * inputs[:, i], mine.out), mine.after)
            if layer.scalar is not None:
                x = x * self.parameters[layer.scalar]
        x = self.norm(x, stack.norm)
        return cap(self.linear(x, stack.head) * stack.head_scale, stack.softcap)

    def linear(self, x, of: Linear):
        weight, *bias = (
            torch.cat([rows_of(one, self.parameters[one.name]) for one in parts])
            for parts in (of.weights, of.biases)
            if parts
        )
        return F.linear(x, weight, *bias)

    def norm(self, x, norm: Norm | None):
        """Apply a norm to the last dimension, or of several heads' weights to the last two."""
        if norm is None:
            return x
        y = x.float()
        if norm.centred:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.epsilon)
        weight = norm_weight(norm, self.parameters.__getitem__)
        if weight is not None:
            y = y * (weight.view(x.shape[-2:]) if weight.numel() > x.shape[-1] else weight)
        if norm.bias is not None:
            y = y + self.parameters[norm.bias].float()
        return y.to(x.dtype)

    def turn(self, x, of: Attention):
        if of.rotary is None or self.angles is None:
            return x
        both = self.angles(of.rotary, torch.arange(len(x)))
        cosine, sine = (part[:, None].to(x.dtype) for part in both)
        turned, rest = x[..., : of.rotary_dim], x[..., of.rotary_dim :]
        if of.rotary.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            pairs = torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
        return torch.cat([pairs, rest], -1)

    def attend(self, x, of: Attention, held):
        n, group, positions = len(x), of.heads // of.kv_heads, torch.arange(len(x))
        sizes = [of.heads * of.head_dim, of.kv_heads * of.head_dim, of.kv_heads * of.head_dim]
        read = self.linear(x, of.qkv)
        if of.source is not None:  # keys and values are another layer's
            read = torch.cat([read, read.new_zeros(n, 2 * sizes[1])], -1)
        elif of.values_are_keys:
            read = torch.cat([read, read[:, sizes[0] :]], -1)
        gates = read[:, sum(sizes) :]
        if of.latent is not None:
            query, key, value = self.from_latent(read, of, of.latent)
        else:
            query, key, value = read[:, : sum(sizes)].split(sizes, -1)
        both, norms = [query, key], of.norms if of.norms is not None else (None, None)
        if of.norm_all:
            both, norms = [self.norm(*one) for one in zip(both, norms, strict=True)], (None, None)
        both = [one.reshape(n, -1, of.head_dim) for one in both]
        for last in (False, True):
            if last:
                both = [self.turn(one, of) for one in both]
            if last == of.norm_last:
                both = [self.norm(*one) for one in zip(both, norms, strict=True)]
        query, key = both
        value = value.reshape(n, of.kv_heads, -1)
        if of.query_scale is not None:
            query = query * query_factors(of.query_scale, positions)[:, None, None].to(query.dtype)
        if of.value_norm:
            value = self.norm(value, Norm((), of.norms[0].epsilon if of.norms else 0.0))
        key, value = (key, value) if of.source is None else held[of.source]
        held.append((key, value))
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        score = cap(torch.einsum("qhd,khd->hqk", query, key) * of.scaling, of.softcap)
        behind = positions[:, None] - positions[None]
        seen = (behind >= 0) & (behind < (of.window or n + 1))
        score = score.masked_fill(~seen, -torch.inf)
        if of.sinks is not None:
            sinks = self.parameters[of.sinks].to(score.dtype).view(-1, 1, 1).expand(-1, n, 1)
            score = torch.cat([score, sinks], -1)
        mixed = torch.einsum("hqk,khd->qhd", score.softmax(-1)[..., :n], value).reshape(n, -1)
        if of.gated:
            gates = gates.sigmoid()
            mixed = mixed * gates.repeat_interleave(of.head_dim if of.one_gate else 1, -1)
        return self.linear(mixed, of.out)

    def per_layer(self, stack: of_stack.Stack, tokens, x):
        """Return the per-layer inputs `[n, layers, width]`; none where there are no such."""
        if (of := stack.per_layer) is None:
            return torch.empty(0)
        apart = (len(tokens), len(stack.layers), of.width)
        rows = F.embedding(tokens, self.parameters[of.table]).view(apart) * of.scale
        made = (self.linear(x, of.projection) * of.factor).view(apart)
        return (self.norm(made, of.norm) + rows) * of.mixed

    def recur(self, x, of: of_stack.Recurrent):
        if isinstance(of, LinearAttention):
            return self.recur_matrices(x, of)
        b, c, x = self.linear(x, of.into).chunk(3, -1)
        return self.linear(c * self.convolve(b * x, of), of.out)

    def recur_matrices(self, x, of: LinearAttention):
        keys, values = of.key_heads * of.key_dim, of.heads * of.value_dim
        sizes = [of.channels, values, of.heads if of.delta else 0, of.heads]
        mixed, gates, rate, step = self.linear(x, of.into).split(sizes, -1)
        if not of.delta:
            parts = mixed.split([values, keys, keys], -1)
            scaled = [part * scale for part, scale in zip(parts, of.scales, strict=True)]
            mixed, gates, step = torch.cat(scaled, -1), gates * of.gate_scale, step * of.step_scale
        mixed = F.silu(self.convolve(mixed, of))
        if of.delta:
            q, k, v = mixed.split([keys, keys, values], -1)
        else:
            v, k, q = mixed.split([values, keys, keys], -1)
        of_heads = of.heads // of.key_heads
        q, k = (one.view(len(x), -1, of.key_dim) for one in (q, k))
        if of.tiled:
            q, k = (one.repeat(1, of_heads, 1) for one in (q, k))
        else:
            q, k = (one.repeat_interleave(of_heads, 1) for one in (q, k))
        v = v.view(len(x), of.heads, of.value_dim)
        step = F.softplus(step + self.parameters[of.shift]).clamp(of.least, of.most)
        decay = (-self.parameters[of.log_slope].exp() * step).exp()[..., None, None]
        if of.delta:
            q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
            q = q / of.key_dim**0.5
        state, rows = torch.zeros(of.heads, of.key_dim, of.value_dim, dtype=x.dtype), []
        for i in range(len(x)):
            state = state * decay[i]
            if of.delta:
                u = rate[i].sigmoid()[:, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
            else:
                u = step[i][:, None] * v[i]
            state = state + k[i][..., None] * u[:, None]
            rows.append(torch.einsum("hkv,hk->hv", state, q[i]))
        y = torch.stack(rows)
        if of.skip is not None:
            y = y + self.parameters[of.skip][:, None] * v
        y, gates = (one.reshape(len(x), of.groups, -1) for one in (y, F.silu(gates)))
        y = self.norm(y * gates, of.norm) if of.norm_last else self.norm(y, of.norm) * gates
        return self.linear(y.flatten(1), of.out)

    def convolve(self, x, of: of_stack.Recurrent):
        bias = None if of.bias is None else self.parameters[of.bias]
        padded = F.pad(x.t(), (of.taps - 1, 0))
        return F.conv1d(padded, self.parameters[of.weight], bias, groups=of.channels).t()

    def from_latent(self, made, of: Attention, latent: of_stack.Latent):
        """Return queries, keys, values `[n, heads, ...]`; what turns of a head comes first here."""
        sizes = [made.shape[-1] - latent.rank - of.rotary_dim, latent.rank, of.rotary_dim]
        query, small, turning = torch.split(made, sizes, -1)
        if latent.query is not None:
            norm, up = latent.query
            query = self.linear(self.norm(query, norm), up)
        query = query.view(len(made), of.heads, -1).roll(of.rotary_dim, -1)
        rest = self.linear(self.norm(small, latent.norm), latent.up).view(len(made), of.heads, -1)
        still, value = torch.split(rest, [of.head_dim - of.rotary_dim, latent.value_dim], -1)
        return query, torch.cat([turning[:, None].expand(-1, of.heads, -1), still], -1), value

    def feed(self, x, of: FeedForward | Experts):
        if isinstance(of, Experts):
            return self.feed_experts(x, of)
        up = self.linear(x, of.up)
        if of.activation == "clamped":
            gate, rest = up.chunk(2, -1)
            gate, rest = gate.clamp(max=of.limit), rest.clamp(-of.limit, of.limit)
            return self.linear((rest + 1) * gate * (of.slope * gate).sigmoid(), of.down)
        activation = ACTIVATIONS[of.activation]
        if of.gated:
            gate, rest = up.chunk(2, -1)
            up = activation(gate * of.gate_scale) * rest
        else:
            up = activation(up)
        return self.linear(up, of.down) * of.factor

    def feed_beside(self, x, of: of_stack.ParallelExperts):
        made = self.feed_experts(self.norm(x, of.before), of.experts, self.norm(x, of.router))
        return self.norm(made, of.after)

    def feed_experts(self, x, of: Experts, router=None):
        weight, expert = self.route(x if router is None else router, of.routing)
        total = torch.zeros_like(x)
        for i, one in enumerate(of.chosen):
            rows, place = torch.where(expert == i)
            total[rows] += weight[rows, place, None].to(x.dtype) * self.feed(x[rows], one)
        if of.shared is not None:
            shared = self.feed(x, of.shared)
            if of.shared_gate is not None:
                shared = shared * self.linear(x, of.shared_gate).sigmoid()
            total = total + shared
        return total

    def route(self, x, of: Routing):
        """Return the weights and numbers of each row's experts, `[n, top]` each."""
        logits = self.linear(x, of.logits).float()
        if of.scores == "mixer":
            weight, expert = mix(logits, of)
        else:
            scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}
            choice = score = scores.get(of.scores, logits)
            if of.correction is not None:
                choice = choice + self.parameters[of.correction].float().flatten()
            parts = choice.unflatten(-1, (of.groups, -1))
            worth = parts.topk(of.best_of_group, -1).values.sum(-1)
            kept = torch.zeros_like(worth).scatter(-1, worth.topk(of.top_groups, -1).indices, 1)
            choice = parts.masked_fill(kept[..., None] == 0, -torch.inf).flatten(-2)
            expert = choice.topk(of.top, -1).indices
            weight = score.gather(-1, expert)
            if of.scores == "softmax_of_chosen":
                weight = weight.softmax(-1)
        if of.renormalised:
            weight = weight / (weight.sum(-1, keepdim=True) + of.plus).clamp(min=of.least)
        if of.scale is not None:
            weight = weight * self.parameters[of.scale].float()[expert]
        return weight * of.factor, expert


def mix(logits, of: Routing):
    left, weights, experts = logits, [], []
    for _ in range(of.top):
        top, expert = left.max(-1, keepdim=True)
        far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * of.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, -1), torch.cat(experts, -1)
