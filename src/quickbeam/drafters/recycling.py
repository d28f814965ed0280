"""Token Recycling (2408.08696) as a source: what was likely after a token the last time.

Each row of a pass tells which tokens are likely after the row's own. The paper keeps these tokens,
whether the row was accepted or not, and drafts from them when the row's token comes again. Two
things are added here. Tokens are also kept for the last two tokens together, which are looked up
first. And their probabilities are kept, by which acceptance rates are learned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from quickbeam.drafters.base import Context, SuccessorSource
from quickbeam.drafters.largest import largest
from quickbeam.drafters.successors import Successors
from quickbeam.drafters.texts import TENANTS
from quickbeam.noise import Array
from quickbeam.tree import TokenTree

KEPT = 12  # tokens of a row
ROWS = 1 << 16  # rows of one tenant


class RecycledRows:
    """The likeliest tokens after the latest `rows` rows, by their last two tokens and their last.

    A new row takes the place of the oldest one.
    """

    def __init__(self, rows: int = ROWS) -> None:
        self._row_of_key: dict[int, int] = {}  # the latest
        self._keys = [(-1, -1)] * rows
        self._tokens = np.zeros((rows, KEPT), np.int32)
        self._probs = np.zeros((rows, KEPT), np.float32)
        self._next = 0

    @staticmethod
    def _pair(before: int, token: int) -> int:
        return (before + 1) << 32 | token  # a token alone is its own key

    def put(self, pairs: Sequence[tuple[int, int]], tokens: Array, probs: Array) -> None:
        """Keep rows of `tokens` and `probs` `[n, k]`, k at most `KEPT`.

        `pairs`: for each row, the last two tokens that they were likely after.
        """
        width = tokens.shape[1]
        for (before, token), row_tokens, row_probs in zip(pairs, tokens, probs, strict=True):
            row = self._next
            self._next = (row + 1) % len(self._keys)
            for old in self._keys[row]:
                if self._row_of_key.get(old) == row:
                    del self._row_of_key[old]
            self._keys[row] = self._pair(before, token), token
            for key in self._keys[row]:
                self._row_of_key[key] = row
            self._tokens[row, :width] = row_tokens
            self._probs[row, :width] = row_probs

    def after(self, before: int, token: int) -> Successors | None:
        """Return what was likely after `before` and `token`, or else after `token`; or None."""
        row = self._row_of_key.get(self._pair(before, token))
        known = 2
        if row is None:
            row = self._row_of_key.get(token)
            known = 1
        return None if row is None else Successors(self._tokens[row], self._probs[row], known)


class Recycling(SuccessorSource):
    """Proposes what the target found likely after the same tokens, in any answer of the tenant.

    It keeps nothing of a sequence. The tenants that were asked for least recently are forgotten.
    """

    name = "recycling"

    def __init__(self) -> None:
        self._by_tenant = OrderedDict[Hashable, RecycledRows]()

    def _rows(self, tenant: Hashable) -> RecycledRows:
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = RecycledRows()
            if len(self._by_tenant) > TENANTS:
                self._by_tenant.popitem(last=False)
        self._by_tenant.move_to_end(tenant)
        return self._by_tenant[tenant]

    def learn(self, context: Context, tree: TokenTree, logits: torch.Tensor) -> None:
        width = min(KEPT, logits.shape[-1])
        rows = largest(logits, width, kernels=context.kernels)
        ranked = [
            (node, tokens, values)
            for node, (tokens, values) in enumerate(rows)
            if len(tokens) == width and np.isfinite(values).all()
        ]
        if not ranked:
            return
        nodes, tokens, values = zip(*ranked, strict=True)
        pairs = [(_before(context, tree, node), tree.token[node]) for node in nodes]
        scores = np.array(values, np.float32)
        probs = np.exp(scores - scores[:, :1])
        probs /= probs.sum(-1, keepdims=True)
        self._rows(context.tenant).put(pairs, np.array(tokens), probs)

    def forget(self) -> None:
        self._by_tenant.clear()

    def after(self, context: Context, path: Sequence[int]) -> Successors | None:
        before, token = [-1, *context.ids[-2:], *path][-2:]
        return self._rows(context.tenant).after(before, token)


def _before(context: Context, tree: TokenTree, node: int) -> int:
    """Return the token before a node, -1 where there is none."""
    if node:
        return tree.token[tree.parent[node]]
    return context.ids[-2] if len(context.ids) > 1 else -1
