"""Places: positions of text, and depths of a draft, at which a drafter is asked for a token.

For each place this gives the drafter's input, the target's likeliest tokens there, and which of
those the context holds. Routers are trained on places, and measured on held-out ones. At depths
from 1 on the drafter is unrolled over its own outputs, as in drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.loss import autocast
from quickbeam.drafters.scoring import OFFERED
from quickbeam.drafters.unrolled import moved_forward, unroll
from quickbeam.errors import InvalidInput
from quickbeam.train.shards import Shards, collate, spread_lengths
from quickbeam.train.states import StateCache
from quickbeam.train.target import FrozenTarget, TrainingBatch

LIKELY = 48  # the target's likeliest tokens that a place has
# Tokens that a step of decoding is assumed to emit. Once a step, the likeliest tokens of the last
# logits join what the context holds.
TOKENS_PER_STEP = 3
FLOATS = 2**25  # logits that are computed at once
BATCH_TOKENS = 1024  # tokens of the conversations that the drafter runs at once


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
    indices: Sequence[int],
    depths: int,
    count: int,
    seed: int = 0,
    report: Callable[[float], None] = lambda done: None,
    states: StateCache | None = None,
) -> Places:
    """Return at most `count` places in the answers of the conversations at `indices`.

    Places are at depths 0 to `depths` - 1. `target` reads the layers that `network` does, and last
    what its own head reads. `states`: has them of texts that were read before. `report(done)` is
    called with the share that is done, 0 to 1. Raises `InvalidInput` if no place is in an answer.
    """
    reader = target if states is None else states
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(shards[index].tokens) for index in indices]
    parts = list[Places]()
    collected = 0
    for group in spread_lengths(lengths, BATCH_TOKENS, generator) if lengths else ():
        batch = reader.read(collate([shards[indices[i]] for i in group]))
        with autocast(target.device):
            for places in _places_of_batch(network, target.head, batch, depths):
                parts.append(places)
                collected += len(places.tokens)
        report(min(1.0, collected / count))
        if collected >= count:
            break
    if not collected:
        raise InvalidInput("the text holds no answers that a router could be trained on")
    return Places(*(torch.cat(column)[:count] for column in zip(*parts, strict=True)))


def _places_of_batch(
    network: EagleHead, head: torch.Tensor, batch: TrainingBatch, depths: int
) -> Iterator[Places]:
    """Yield the places of a batch, those of one depth after the other."""
    likely, mass = _likely_tokens(batch, head)
    first_in_text = _first_in_text(batch, len(head))
    first_offered = _first_offered(batch, likely, len(head))
    for depth, (hidden, _) in enumerate(unroll(network, batch.tokens, batch.hidden, depths)):
        asked = moved_forward(batch.answer, depth + 2)
        # hidden states are known up to `position`, so the root is the token after it
        conversation, position = asked.cpu().nonzero(as_tuple=True)
        drafted = position + 1 + depth  # whose logits give the token that is drafted
        candidates = likely[conversation, drafted]
        row = conversation[:, None], candidates.long()
        in_text = first_in_text[row] <= position[:, None] + 1
        was_offered = first_offered[row] <= position[:, None]
        offered = likely[conversation, position][:, None, :OFFERED]
        is_offered = (candidates[:, :, None] == offered).any(2)
        yield Places(
            hidden=hidden[asked].to("cpu", torch.bfloat16),
            tokens=moved_forward(batch.tokens, depth + 1)[asked].int().cpu(),
            depth=torch.full((len(position),), depth, dtype=torch.uint8),
            likely=candidates,
            mass=mass[conversation, drafted],
            in_context=in_text | was_offered | is_offered,
        )


def _likely_tokens(batch: TrainingBatch, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's likeliest tokens after each token, and their probabilities.

    Both are `[b, n, LIKELY]` on the CPU, the likeliest first, and zero at padding.
    """
    b, n = batch.tokens.shape
    likely = torch.zeros(b, n, LIKELY, dtype=torch.int32)
    mass = torch.zeros(b, n, LIKELY, dtype=torch.float32)
    in_text = torch.arange(n, device=batch.tokens.device) < batch.lengths[:, None]
    last_hidden = batch.hidden[..., -head.shape[1] :][in_text]
    tokens, probabilities = list[torch.Tensor](), list[torch.Tensor]()
    for rows in torch.split(last_hidden, max(1, FLOATS // len(head))):
        probs = (rows.to(head.dtype) @ head.T).float().softmax(-1)
        top = probs.topk(LIKELY)
        tokens.append(top.indices)
        probabilities.append(top.values)
    likely[in_text.cpu()] = torch.cat(tokens).int().cpu()
    mass[in_text.cpu()] = torch.cat(probabilities).cpu()
    return likely, mass


def _first_in_text(batch: TrainingBatch, vocab: int) -> torch.Tensor:
    """Return the position at which each conversation first has each token, `[b, vocab]`.

    It is behind the text for a token that the conversation lacks.
    """
    b, n = batch.tokens.shape
    positions = torch.arange(n).expand(b, n)
    tokens = torch.where(positions < batch.lengths.cpu()[:, None], batch.tokens.cpu(), 0)
    first = torch.full((b, vocab), n + 1)
    return first.scatter_reduce_(1, tokens, positions, "amin")


def _first_offered(batch: TrainingBatch, likely: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the position after which each token is first among the `OFFERED` likeliest ones.

    `[b, vocab]`. Only the last position of a decoding step in an answer counts. It is behind the
    text for a token that never is.
    """
    b, n = batch.tokens.shape
    positions = torch.arange(n).expand(b, n)
    never = n + 1
    ends_step = moved_forward(batch.answer, 1).cpu() & (positions % TOKENS_PER_STEP == 0)
    offered_at = torch.where(ends_step, positions, never)[..., None].expand(-1, -1, OFFERED)
    offered = likely[..., :OFFERED].long()
    first = torch.full((b, vocab), never)
    return first.scatter_reduce_(1, offered.flatten(1), offered_at.flatten(1), "amin")
