"""Token Recycling (2408.08696) as a drafter: what was likely after a token the last time.

Each row of a pass tells which tokens are likely after the row's own. The paper keeps them, whether
the row was accepted or not, and drafts from them when the token comes again. Here they are kept for
the last two tokens as well, which are asked first, and with their probabilities, so that the search
of `auto` and the noise of sampling (`methods/children.py`) treat them as any drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from quickbeam.drafters.base import Context, Drafter, DraftProbs, DraftRequest
from quickbeam.drafters.largest import largest
from quickbeam.drafters.texts import TENANTS
from quickbeam.tree import TokenTree

KEPT = 12  # tokens of a row
ROWS = 1 << 16  # rows of one tenant
PAIR, SINGLE = 1.0, 0.6  # confidence, by which acceptance is learned apart


class Successors:
    """The likeliest tokens after the latest `rows` rows, by their last two tokens and their last.

    A new row takes the place of the oldest one.
    """

    def __init__(self, rows: int = ROWS) -> None:
        self._row_of_key: dict[int, int] = {}  # the latest
        self._keys = [(-1, -1)] * rows
        self._tokens = np.zeros((rows, KEPT), np.int64)
        self._probs = np.zeros((rows, KEPT), np.float32)
        self._next = 0

    @staticmethod
    def _pair(before: int, token: int) -> int:
        return (before + 1) << 32 | token  # a token alone is its own key

    def put(self, before: int, token: int, tokens: Sequence[int], logits: Sequence[float]) -> None:
        """Keep the likeliest `tokens` after `token`, which followed `before`, and their logits."""
        row, keys = self._next, (self._pair(before, token), token)
        self._next = (row + 1) % len(self._keys)
        for old in self._keys[row]:
            if self._row_of_key.get(old) == row:
                del self._row_of_key[old]
        self._keys[row] = keys
        for key in keys:
            self._row_of_key[key] = row
        probs = np.exp(np.asarray(logits, np.float32) - logits[0])
        self._tokens[row, : len(tokens)] = tokens
        self._probs[row] = 0.0
        self._probs[row, : len(tokens)] = probs / probs.sum()

    def after(self, before: int, token: int) -> tuple[int, float] | None:
        """Return the number of the row to draft from and its confidence; None without one."""
        row = self._row_of_key.get(self._pair(before, token))
        if row is not None:
            return row, PAIR
        row = self._row_of_key.get(token)
        return None if row is None else (row, SINGLE)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a row's tokens and probabilities, `[KEPT]` each."""
        return self._tokens[number], self._probs[number]


class TokenRecycling(Drafter):
    """Drafts what the target found likely after the same tokens, in any answer of the same tenant.

    It has no weights, and keeps nothing of a sequence.
    """

    name = "recycling"
    one_call = True

    def __init__(self) -> None:
        self._of_tenant = lru_cache(TENANTS)(lambda tenant: Successors())

    def learn(self, context: Context, tree: TokenTree, logits: torch.Tensor) -> None:
        successors = self._of_tenant(context.tenant)
        for node, (tokens, values) in enumerate(largest(logits, KEPT)):
            if tokens and np.isfinite(values[0]):
                successors.put(_before(context, tree, node), tree.token[node], tokens, values)

    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: DraftRequest) -> DraftProbs:
        context, tree = request.context, request.tree
        successors, count = self._of_tenant(context.tenant), len(request.nodes)
        tokens = np.zeros((count, KEPT), np.int64)
        values = np.zeros((count, count, KEPT), np.float32)  # each row has columns of its own
        confidence = [0.0] * count
        for i, node in enumerate(request.nodes):
            match = successors.after(_before(context, tree, node), tree.token[node])
            if match is not None:
                row, confidence[i] = match
                tokens[i], values[i, i] = successors.row(row)
        probs = torch.from_numpy(values.reshape(count, -1))
        if context.draft_temperature != 1:
            probs = probs.pow(1 / max(context.draft_temperature, 1e-3))
            probs /= probs.sum(-1, keepdim=True).clamp(min=1e-30)
        return DraftProbs(
            probs, torch.from_numpy(tokens.ravel()), len(context.logits), confidence=confidence
        )


def _before(context: Context, tree: TokenTree, node: int) -> int:
    """Return the token before a node, -1 where there is none."""
    if node:
        return tree.token[tree.parent[node]]
    return context.ids[-2] if len(context.ids) > 1 else -1
