"""Places of text where a drafter is asked for a token.

For each place this gives the drafter's input, the target's likeliest tokens there, and which of
those the context holds. Routers are trained on places, and measured on held-out ones. At places
below the first the drafter is unrolled over its own outputs, as in drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.feature import OFFERED
from quickbeam.errors import InvalidInput
from quickbeam.train.shards import Shards, collate, spread_lengths
from quickbeam.train.target import FrozenTarget, TrainingBatch, autocast

LIKELY = 48  # the target's likeliest tokens that are kept of each place
# Tokens that a step of decoding is assumed to emit. Once a step, the likeliest tokens of the last
# logits join what the context holds.
STEP = 3
FLOATS = 2**25  # logits that are computed at once
BATCH_TOKENS = 1024  # tokens of the conversations that the drafter runs at once


class _Unrolled:
    """The attention of training-time test (EAGLE-3, 2503.01840, §3.2).

    A row sees the keys of the first pass for all rows up to it. Of each later pass it sees only its
    own key. `window`: how many of the last positions it sees, None for all.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        self._keys.append(key)
        self._values.append(value)
        n, passes = query.shape[2], len(self._keys)
        own = torch.eye(n, dtype=torch.bool, device=query.device)
        seen = [torch.ones_like(own).tril(), *[own] * (passes - 1)]
        # in the pass before the last, keys stand one position further back, and so on
        window = self._window or n + passes
        visible = torch.cat([one.triu(passes - k - window) for k, one in enumerate(seen)], 1)
        keys, values = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        out = F.scaled_dot_product_attention(query, keys, values, visible, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def ahead(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return `[b, n, …]` moved forward in time by `by` places.

    Row i of the result is row i + by of `x`. The last `by` rows are zero.
    """
    return torch.cat([x[:, by:], x.new_zeros(x.shape[0], by, *x.shape[2:])], 1) if by else x


def unroll(
    network: EagleHead, batch: TrainingBatch, depths: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run `depths` passes, and yield of each what it reads, which rows count, and its outputs.

    In pass k, row i drafts the token at i + k + 2 from hidden states up to i. It counts if that
    token belongs to an answer. The first are `[b, n, d]` (the rest are embeddings of the tokens at
    i + k + 1), then `[b, n]` bool, m of them set, and `[m, d]`.
    """
    size = network.config.target_size
    rows = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    embedded, attend = network.embedding(batch.tokens).float(), _Unrolled(network.config.window)
    hidden = network.fuse(batch.hidden[..., : len(network.config.layers) * size].float())
    for depth in range(depths):
        following = ahead(embedded, depth + 1)
        out = network(hidden, following, (rows + depth).expand(len(batch.tokens), -1), attend)
        counts = ahead(batch.answer, depth + 2)
        yield hidden, counts, out[counts]
        hidden = out


class Places(NamedTuple):
    """Rows of the drafter, on the CPU.

    `hidden` `[n, d]` bfloat16 and `tokens` `[n]` int32: what the drafter's layer reads. `depth`:
    `[n]` uint8. `likely`: `[n, LIKELY]` int32, the target's likeliest tokens there, the likeliest
    first. `mass`: `[n, LIKELY]` float32, their probabilities. `in_context`: `[n, LIKELY]` bool,
    whether the context of the tree holds them.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    depth: torch.Tensor
    likely: torch.Tensor
    mass: torch.Tensor
    in_context: torch.Tensor

    @property
    def target(self) -> torch.Tensor:
        """The target's likeliest token, `[n]` int64."""
        return self.likely[:, 0].long()

    def take(self, rows: torch.Tensor) -> Places:
        return Places(*(column[rows] for column in self))


@torch.no_grad()
def collect_places(
    network: EagleHead,
    target: FrozenTarget,
    shards: Shards,
    chosen: Sequence[int],
    depths: int,
    count: int,
    seed: int = 0,
    report: Callable[[float], None] = lambda done: None,
) -> Places:
    """Return at most `count` places in the answers of the `chosen` conversations.

    Places are at depths 0 to `depths` - 1. `target` reads the layers that `network` does, and last
    what its own head reads. `report(done)` is called with the share that is done, 0 to 1. Raises
    `InvalidInput` if no place is in an answer.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(shards[i].tokens) for i in chosen]
    parts, collected = list[Places](), 0
    for group in spread_lengths(lengths, BATCH_TOKENS, generator) if lengths else ():
        batch = target.read(collate([shards[chosen[i]] for i in group]))
        with autocast(target.device):
            for places in _by_depth(network, target.head, batch, depths):
                parts.append(places)
                collected += len(places.tokens)
        report(min(1.0, collected / count))
        if collected >= count:
            break
    if not collected:
        raise InvalidInput("the text holds no answers that a router could be trained on")
    return Places(*(torch.cat(column)[:count] for column in zip(*parts, strict=True)))


def _by_depth(
    network: EagleHead, head: torch.Tensor, batch: TrainingBatch, depths: int
) -> Iterator[Places]:
    b, n = batch.tokens.shape
    last = batch.hidden[..., -head.shape[1] :]
    present = torch.arange(n, device=batch.tokens.device) < batch.lengths[:, None]
    likely = torch.zeros(b, n, LIKELY, dtype=torch.int32)
    mass = torch.zeros(b, n, LIKELY, dtype=torch.float32)
    values, tokens = _likeliest(last[present], head)
    likely[present.cpu()], mass[present.cpu()] = tokens.int().cpu(), values.cpu()
    first_read, first_offered = _first_known(batch, likely, len(head))
    conversation, position = (
        index.expand(b, n) for index in (torch.arange(b)[:, None], torch.arange(n))
    )
    for depth, (hidden, drafted, _) in enumerate(unroll(network, batch, depths)):
        counts = drafted.cpu()
        # hidden states are known up to `at`, so the root is the token after it
        one, at = conversation[counts], position[counts]
        candidates = likely[one, at + 1 + depth]
        in_context = first_read[one[:, None], candidates.long()] <= at[:, None] + 1
        in_context |= first_offered[one[:, None], candidates.long()] <= at[:, None]
        in_context |= (candidates[:, :, None] == likely[one, at][:, None, :OFFERED]).any(2)
        yield Places(
            hidden[drafted].to("cpu", torch.bfloat16),
            ahead(batch.tokens, depth + 1)[drafted].int().cpu(),
            torch.full((len(at),), depth, dtype=torch.uint8),
            candidates,
            mass[one, at + 1 + depth],
            in_context,
        )


def _first_known(
    batch: TrainingBatch, likely: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions at which each token is first known, `[b, vocab]` twice.

    The first tensor says where a conversation first has the token. The second says where a decoding
    step first learns that the token is one of the `OFFERED` likeliest. Both hold a position behind
    the text for tokens that never are.
    """
    b, n = batch.tokens.shape
    positions, never = torch.arange(n).expand(b, n), n + 1
    tokens = torch.where(positions < batch.lengths.cpu()[:, None], batch.tokens.cpu(), 0)
    read = torch.full((b, vocab), never).scatter_reduce_(1, tokens, positions, "amin")
    asked = ahead(batch.answer, 1).cpu() & (positions % STEP == 0)
    when = torch.where(asked, positions, never)[..., None].expand(-1, -1, OFFERED)
    offered = torch.full((b, vocab), never).scatter_reduce_(
        1, likely[..., :OFFERED].long().flatten(1), when.flatten(1), "amin"
    )
    return read, offered


def _likeliest(rows: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [
        (part.to(head.dtype) @ head.T).float().softmax(-1).topk(LIKELY)
        for part in torch.split(rows, max(1, FLOATS // len(head)))
    ]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
