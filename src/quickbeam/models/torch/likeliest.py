"""A drafter's distributions and its likeliest tokens, as a part of its pass."""

from __future__ import annotations

import logging

import numpy as np
import torch

from quickbeam.noise import Row

logger = logging.getLogger(__name__)

# Tokens of each row that are copied to the host: a tree has no more nodes where the budget is
# measured.
COUNT = 64


def rank_tokens(
    logits: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of logits `[w, s]`, and the likeliest tokens of each row.

    The probabilities are float32, and 0 in rows that are not finite. The likeliest tokens are
    `[w, 2, COUNT]` int32, which `rows_of` reads: tokens, then the bits of their probabilities.
    `tokens`: the token of each column, `[s]`; None: column i is token i.
    """
    probs = logits.float().softmax(-1).nan_to_num(0.0)
    top = probs.topk(min(COUNT, probs.shape[-1]))
    names = top.indices if tokens is None else tokens[top.indices]
    return probs, torch.stack([names.int(), top.values.view(torch.int32)], 1)


def rows_of(likeliest: torch.Tensor) -> list[Row]:
    """Return the likeliest tokens of each row and their probabilities, by one copy to the host.

    Logs a warning where a row is not finite.
    """
    packed = likeliest.cpu().numpy()
    tokens = packed[:, 0].tolist()
    values = np.ascontiguousarray(packed[:, 1]).view(np.float32).tolist()
    if any(row[0] == 0 for row in values):
        logger.warning("the drafter's logits are not finite (NaN): it proposes nothing there")
    return list(zip(tokens, values, strict=True))
