"""Places of text where a drafter is asked for a token.

For each place this gives the drafter's input, the tokens that are wanted there, and which of those
the context holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from quickbeam.drafters.eagle import OFFERED
from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.errors import InvalidInput
from quickbeam.train.drafter import autocast
from quickbeam.train.labels import BATCH_TOKENS, inputs
from quickbeam.train.shards import Shards, spread_lengths
from quickbeam.train.unroll import Batch, ahead, collate

LIKELY = 48  # the target's likeliest tokens that are kept of each place
# Tokens that a step of decoding is assumed to emit. Once a step, the likeliest tokens of the last
# logits join what the context holds.
STEP = 3
FLOATS = 2**25  # logits that are computed at once


class Places(NamedTuple):
    """Rows of the drafter, on the CPU.

    `hidden` `[n, d]` bfloat16 and `tokens` `[n]` int32: what the drafter's layer reads. `depth`:
    `[n]` uint8. `root`: `[n]` int64, the same number for all rows of one tree. `likely`:
    `[n, LIKELY]` int32, the target's likeliest tokens there, the likeliest first. `mass`:
    `[n, LIKELY]` float32, their probabilities. `near`: `[n, LIKELY]` bool, whether the context of
    the tree holds them. `feature`: `[n, d]` bfloat16, what the drafter's head reads. `drafted`:
    `[n]` int32, the likeliest token of the drafter's head over the whole vocabulary. `feature` and
    `drafted` are empty if they were not asked for.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    depth: torch.Tensor
    root: torch.Tensor
    likely: torch.Tensor
    mass: torch.Tensor
    near: torch.Tensor
    feature: torch.Tensor
    drafted: torch.Tensor

    @property
    def wanted(self) -> torch.Tensor:
        """The target's likeliest token, `[n]` int64."""
        return self.likely[:, 0].long()

    @property
    def known(self) -> torch.Tensor:
        """Whether the context holds the wanted token, `[n]` bool."""
        return self.near[:, 0]

    def take(self, rows: torch.Tensor) -> Places:
        return Places(*(column[rows] if len(column) else column for column in self))


@torch.no_grad()
def collect_places(
    network: EagleHead,
    head: torch.Tensor,
    shards: Shards,
    chosen: Sequence[int],
    depths: int,
    count: int,
    seed: int,
    drafted: bool,
    report: Callable[[float], None] = lambda done: None,
) -> Places:
    """Return at most `count` places in the answers of the `chosen` conversations.

    Places are at depths 0 to `depths` - 1. `head`: the target's, `[vocab, d]`. `drafted`: run the
    drafter's head, too. `report(done)` is called with the share that is done, 0 to 1. Raises
    `InvalidInput` if there is no row in an answer.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [shards.length(i) for i in chosen]
    parts, found, trees = list[Places](), 0, 0
    for group in spread_lengths(lengths, BATCH_TOKENS, generator) if lengths else ():
        batch = collate([shards[chosen[i]] for i in group]).to(head.device)
        with autocast(head.device):
            part = _of(network, head, batch, depths, drafted, trees)
        parts.append(part)
        trees += batch.tokens.numel()
        found += len(part.tokens)
        report(min(1.0, found / count))
        if found >= count:
            break
    if not found:
        raise InvalidInput("the text holds no answers that a router could be trained on")
    return Places(*(torch.cat(column)[:count] for column in zip(*parts, strict=True)))


def _of(
    network: EagleHead, head: torch.Tensor, batch: Batch, depths: int, drafted: bool, first: int
) -> Places:
    """Return the places of one batch.

    `first`: a number for its first tree, above those of earlier trees.
    """
    b, n = batch.tokens.shape
    last = batch.hidden[..., -head.shape[1] :]
    there = torch.arange(n, device=batch.tokens.device) < batch.lengths[:, None]
    likely = torch.zeros(b, n, LIKELY, dtype=torch.int32)
    mass = torch.zeros(b, n, LIKELY, dtype=torch.float32)
    values, tokens = _likeliest(last[there], head)
    likely[there.cpu()], mass[there.cpu()] = tokens.int().cpu(), values.cpu()
    first_read, first_told = _first(batch, likely, len(head))
    conversation, place = (
        index.expand(b, n) for index in (torch.arange(b)[:, None], torch.arange(n))
    )
    parts = []
    for depth, row in enumerate(inputs(network, batch, depths)):
        counts = ahead(batch.answer, depth + 2).cpu()
        # hidden states are known up to `at`, so the root is the token after it
        one, at = conversation[counts], place[counts]
        wanted = likely[one, at + 1 + depth]
        near = first_read[one[:, None], wanted.long()] <= at[:, None] + 1
        near |= first_told[one[:, None], wanted.long()] <= at[:, None]
        near |= (wanted[:, :, None] == likely[one, at][:, None, :OFFERED]).any(2)
        feature = network.feature(row.out).to(head.dtype)
        best = _best(feature, head).int().cpu() if drafted else torch.empty(0, dtype=torch.int32)
        kept = (
            feature.to("cpu", torch.bfloat16)
            if drafted
            else torch.empty(0, feature.shape[1], dtype=torch.bfloat16)
        )
        parts.append(
            Places(
                row.hidden.to("cpu", torch.bfloat16),
                row.tokens.int().cpu(),
                torch.full((len(at),), depth, dtype=torch.uint8),
                first + one * n + at,
                wanted,
                mass[one, at + 1 + depth],
                near,
                kept,
                best,
            )
        )
    return Places(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _first(batch: Batch, likely: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions at which each token is first known, `[b, vocab]` twice.

    The first tensor says where a conversation first has the token. The second says where a decoding
    step first learns that the token is one of the `OFFERED` likeliest. Both hold a position behind
    the text for tokens that never are.
    """
    b, n = batch.tokens.shape
    places = torch.arange(n).expand(b, n)
    never = n + 1
    tokens = torch.where(places < batch.lengths.cpu()[:, None], batch.tokens.cpu(), 0)
    read = torch.full((b, vocab), never).scatter_reduce_(1, tokens, places, "amin")
    asked = (ahead(batch.answer, 1).cpu() & (places % STEP == 0))[..., None].expand(-1, -1, OFFERED)
    told = likely[..., :OFFERED].long()
    when = torch.where(asked, places[..., None], never)
    return read, torch.full((b, vocab), never).scatter_reduce_(
        1, told.flatten(1), when.flatten(1), "amin"
    )


def _likeliest(rows: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = [
        (part.to(head.dtype) @ head.T).float().softmax(-1).topk(LIKELY)
        for part in _split(rows, head)
    ]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])


def _best(rows: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return torch.cat([(part @ head.T).argmax(-1) for part in _split(rows, head)])


def _split(rows: torch.Tensor, head: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(rows, max(1, FLOATS // len(head)))
