"""Token Recycling (2408.08696) as a drafter: what was likely after a token the last time.

Each row of a pass tells which tokens are likely after the row's own. The paper keeps these tokens,
whether the row was accepted or not, and drafts from them when the row's token comes again. Two
things are added here. Tokens are also kept for the last two tokens together, which are looked up
first. And their probabilities are kept, so that the search of `auto` and the noise of sampling
(`methods/children.py`) treat them as any drafter's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from quickbeam.drafters.base import Context, Drafter, DraftProbs, DraftRequest
from quickbeam.drafters.largest import largest
from quickbeam.drafters.texts import TENANTS
from quickbeam.tree import TokenTree

KEPT = 12  # tokens of a row
ROWS = 1 << 16  # rows of one tenant
# confidence, by which acceptance is learned apart
PAIR = 1.0  # of a row that was found by two tokens
SINGLE = 0.6  # by one


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
        row = self._next
        self._next = (row + 1) % len(self._keys)
        for old in self._keys[row]:
            if self._row_of_key.get(old) == row:
                del self._row_of_key[old]
        self._keys[row] = (self._pair(before, token), token)
        for key in self._keys[row]:
            self._row_of_key[key] = row
        weights = np.exp(np.asarray(logits, np.float32) - logits[0])
        self._tokens[row, : len(tokens)] = tokens
        self._probs[row] = 0.0
        self._probs[row, : len(tokens)] = weights / weights.sum()

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

    It has no weights, and keeps nothing of a sequence. The tenants that were asked for least
    recently are forgotten.
    """

    name = "recycling"
    one_call = True

    def __init__(self) -> None:
        self._by_tenant = OrderedDict[Hashable, Successors]()

    def _successors(self, tenant: Hashable) -> Successors:
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = Successors()
            if len(self._by_tenant) > TENANTS:
                self._by_tenant.popitem(last=False)
        self._by_tenant.move_to_end(tenant)
        return self._by_tenant[tenant]

    def learn(self, context: Context, tree: TokenTree, logits: torch.Tensor) -> None:
        successors = self._successors(context.tenant)
        rows = largest(logits, KEPT, kernels=context.kernels)
        for node, (tokens, values) in enumerate(rows):
            if tokens and np.isfinite(values[0]):
                successors.put(_before(context, tree, node), tree.token[node], tokens, values)

    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: DraftRequest) -> DraftProbs:
        context = request.context
        tree = request.tree
        successors = self._successors(context.tenant)
        count = len(request.nodes)
        # the columns of row i are its own KEPT tokens; all other rows have probability 0 there
        tokens = np.zeros((count, KEPT), np.int64)
        values = np.zeros((count, count, KEPT), np.float32)
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
        names = torch.from_numpy(tokens.ravel())
        return DraftProbs(probs, names, len(context.logits), confidence=confidence)


def _before(context: Context, tree: TokenTree, node: int) -> int:
    """Return the token before a node, -1 where there is none."""
    if node:
        return tree.token[tree.parent[node]]
    return context.ids[-2] if len(context.ids) > 1 else -1
