"""Training-time test (EAGLE-3, 2503.01840, §3.2).

The drafter is unrolled over its own outputs, as in drafting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.train.target import Batch


class _Unrolled:
    """The attention of training-time test.

    A row sees the keys of the first pass for all rows up to it. Of each later pass it sees only its
    own key.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        shared = query.shape[2] // key.shape[2]
        query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        self._keys.append(key.repeat_interleave(shared, 1))
        self._values.append(value.repeat_interleave(shared, 1))
        if len(self._keys) == 1:
            out = F.scaled_dot_product_attention(
                query, self._keys[0], self._values[0], is_causal=True
            )
        else:
            out = self._later(query)
        return out.transpose(1, 2).flatten(2)

    def _later(self, query: torch.Tensor) -> torch.Tensor:
        """Return the attention output for queries of a later pass, `[b, heads, n, head_dim]`.

        It is computed step by step, without a kernel that reads a mask over the keys of all passes.
        Such a mask would show a row one key of each later pass, but the kernel would take as long
        for those keys as for the first pass's.
        """
        n = query.shape[2]
        with torch.autocast(query.device.type, enabled=False):
            query = query.float() * query.shape[-1] ** -0.5
            first, *later = (key.float() for key in self._keys)
            causal = torch.ones(n, n, dtype=torch.bool, device=query.device).tril_()
            scores = (query @ first.transpose(2, 3)).masked_fill(~causal, float("-inf"))
            weights = torch.cat(
                [scores, *[(query * key).sum(-1, keepdim=True) for key in later]], -1
            ).softmax(-1)
            first, *later = (value.float() for value in self._values)
            out = weights[..., :n] @ first
            for i, value in enumerate(later, n):
                out = out + weights[..., i : i + 1] * value
        return out.to(self._values[0].dtype)


def ahead(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return `[b, n, …]` moved forward in time by `by` places.

    Row i of the result is row i + by of `x`. The last `by` rows are zero.
    """
    return torch.cat([x[:, by:], x.new_zeros(x.shape[0], by, *x.shape[2:])], 1) if by else x


class Pass(NamedTuple):
    """One depth of the unrolling.

    `hidden` `[b, n, d]`: what the layer read beside the embeddings of the tokens at i + depth + 1.
    `counts` `[b, n]` bool: the m rows that count. `out` `[m, d]`: the network's outputs there.
    """

    hidden: torch.Tensor
    counts: torch.Tensor
    out: torch.Tensor


def unroll(network: EagleHead, batch: Batch, depths: int) -> Iterator[Pass]:
    """Run `depths` passes, and yield each of them.

    In pass k, row i drafts the token at i + k + 2 from hidden states up to i. It counts if that
    token belongs to an answer.
    """
    size = network.config.target_size
    rows = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    with torch.no_grad():
        embedded = network.embedding(batch.tokens).float()
    attend = _Unrolled()
    hidden = network.fuse(batch.hidden[..., : len(network.config.layers) * size].float())
    for depth in range(depths):
        following = ahead(embedded, depth + 1)
        out = network(hidden, following, (rows + depth).expand(len(batch.tokens), -1), attend)
        counts = ahead(batch.answer, depth + 2)
        yield Pass(hidden, counts, out[counts])
        hidden = out
