"""Plain PyTorch versions of the kernels' operations, in float64 and without rounding.

They show what each operation computes. The kernels read bfloat16 or float32, sum in float32, and
round what they store. Here n is the number of rows, and `seen` lists for each row the orders of the
tokens that it attends to. Tests compare the kernels with these functions.
"""

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def norm(x, weight, epsilon):
    """NORM: RMS norm over the last dimension of `[..., d]`, with `weight` `[d]` or none."""
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return x if weight is None else x * weight.double()


def linear(x, weight, bias=None):
    """STORE: `[n, inputs]` by `[outputs, inputs]` to `[n, outputs]`, plus `bias` `[outputs]`."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def add(before, x, weight, bias=None):
    """ADD: the product, added to what the target held, `[n, outputs]`."""
    return before.double() + linear(x, weight, bias)


def activate(x, weight, bias=None):
    """ACTIVATE: silu of the product, `[n, outputs]`."""
    return F.silu(linear(x, weight, bias))


def gated(x, gate, up, bias=None):
    """GATED: silu of one product times another, `[n, outputs]`; of `bias`, the gate's is first."""
    first, second = (None, None) if bias is None else bias.chunk(2)
    return activate(x, gate, first) * linear(x, up, second)


def best(logits):
    """BEST: the column `[n]` of the first largest logit; -1 if one is NaN or it is infinite."""
    top = logits.amax(-1, keepdim=True)  # NaN where any logit is
    first = (logits == top).int().argmax(-1)
    return torch.where(top[..., 0].isfinite(), first, -1)


def rotate(x, cosine, sine):
    """Turn the first half of each head `[n, heads, dim]` with the second, by `[n, dim / 2]`."""
    first, second = x.double().chunk(2, -1)
    cosine, sine = cosine.double()[:, None], sine.double()[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def heads(x, heads, kv_heads, cosine, sine, norms=None, epsilon=0.0):
    """HEADS: queries, keys and values `[n, heads or kv_heads, dim]`, which stand side by side in
    `x` `[n, (heads + 2 * kv_heads) * dim]`. Queries and keys are normed (`norms`: `[dim]` each),
    then turned."""
    each = x.double().view(len(x), heads + 2 * kv_heads, -1)
    query, key, value = each.split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        query, key = norm(query, norms[0], epsilon), norm(key, norms[1], epsilon)
    return rotate(query, cosine, sine), rotate(key, cosine, sine), value


def sort_queries(query, kv_heads):
    """Return queries `[n, heads, dim]` as HEADS leaves them for ATTEND, by head of keys."""
    n, heads, dim = query.shape
    return query.reshape(n, kv_heads, heads // kv_heads, dim).transpose(0, 1).contiguous()


def visible(prefix, path):
    """Return the orders that a row sees: those below its prefix, then its path."""
    return [*range(prefix), *path]


def weights(query, keys, scaling, window=None, softcap=None, sinks=None):
    """Return the attention weights `[heads, tokens]` of one row, `query` `[heads, dim]`, for the
    `keys` `[heads, tokens, dim]` that it sees. `window`: of the last tokens, so many. `softcap`:
    scores stay between -softcap and softcap. `sinks`: `[heads]`, scores without tokens."""
    scores = torch.einsum("hd,htd->ht", query.double(), keys.double()) * scaling
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if window:
        scores[:, : max(0, scores.shape[1] - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    return scores.softmax(-1)[:, : keys.shape[1]]


def attend(query, keys, values, seen, scaling, window=None, softcap=None, sinks=None):
    """ATTEND over one sequence, `[n, heads, value_dim]`: `query` `[n, heads, key_dim]` over `keys`
    and `values` `[kv_heads, tokens, dim]`, by order."""
    group = query.shape[1] // len(keys)
    rows = []
    for row, orders in zip(query, seen, strict=True):
        key, value = (part[:, list(orders)].repeat_interleave(group, 0) for part in (keys, values))
        share = weights(row, key, scaling, window, softcap, sinks)
        rows.append(torch.einsum("ht,htd->hd", share, value.double()))
    return torch.stack(rows)
