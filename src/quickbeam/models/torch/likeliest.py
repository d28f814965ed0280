"""A drafter's distributions and its likeliest tokens, as a part of its pass."""

from __future__ import annotations

import logging

import numpy as np
import torch

from quickbeam.models.base import RankedRows

logger = logging.getLogger(__name__)

# Tokens of each row that are copied to the host: a tree has no more nodes where the budget is
# measured.
COUNT = 64


def rank_tokens(
    logits: torch.Tensor,
    columns: torch.Tensor | None = None,
    sequence: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of logits `[w, s]`, and the likeliest tokens of each row.

    The probabilities are float32, and 0 in rows that are not finite. The likeliest tokens are
    `[w, 1 + 2 * COUNT]` int32, which `ranked_rows` reads: how many tokens are scored, the tokens,
    and the bits of their probabilities.

    `columns`: of each sequence, the token of each column, -1 where a column doesn't count,
    `[S, s]`. None: column i is token i. `sequence`: with `columns`, the sequence of each row,
    `[w]`.
    """
    probs = logits.float().softmax(-1).nan_to_num(0.0)
    top = probs.topk(min(COUNT, probs.shape[-1]))
    if columns is None:
        scored = torch.full_like(top.indices[:, :1], probs.shape[-1])
        names = top.indices
    else:
        assert sequence is not None
        scored = (columns >= 0).sum(-1, keepdim=True)[sequence]
        names = columns[sequence[:, None], top.indices]
    bits = top.values.view(torch.int32)
    return probs, torch.cat([scored.int(), names.int(), bits], 1)


def ranked_rows(probs: torch.Tensor, likeliest: torch.Tensor) -> RankedRows:
    """Return what `rank_tokens` has computed, by one copy to the host.

    Logs a warning where a row is not finite.
    """
    packed = likeliest.cpu().numpy()
    count = packed.shape[1] // 2
    scored = packed[:, 0].tolist()
    tokens = packed[:, 1 : 1 + count].tolist()
    values = np.ascontiguousarray(packed[:, 1 + count :]).view(np.float32).tolist()
    if any(row[0] == 0 for row in values):
        logger.warning("the drafter's logits are not finite (NaN): it proposes nothing there")
    return RankedRows(probs, list(zip(tokens, values, strict=True)), scored)
