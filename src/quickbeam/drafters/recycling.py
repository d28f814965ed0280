"""Token Recycling (2408.08696) as a source: what was likely after a token the last time.

Each row of a pass tells which tokens are likely after the row's own. The paper keeps them, whether
the row was accepted or not, and drafts from them when the token comes again. Here they are kept for
the last two tokens as well, which are looked up first, and with their probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from quickbeam.drafters.base import Context, Source
from quickbeam.drafters.largest import largest
from quickbeam.drafters.texts import TENANTS
from quickbeam.noise import Array
from quickbeam.tree import TokenTree

KEPT = 12  # tokens of a row
ROWS = 1 << 16  # rows of one tenant


class Recycled(NamedTuple):
    """The likeliest tokens after a token, the likeliest first, and their probabilities `[KEPT]`.

    `pair`: whether the token before was the same, too.
    """

    tokens: Array
    probs: Array
    pair: bool


class Successors:
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

    def after(self, before: int, token: int) -> Recycled | None:
        """Return what was likely after `before` and `token`, or else after `token`; or None."""
        row = self._row_of_key.get(self._pair(before, token))
        pair = row is not None
        if row is None:
            row = self._row_of_key.get(token)
        return None if row is None else Recycled(self._tokens[row], self._probs[row], pair)


class Recycling(Source):
    """Proposes what the target found likely after the same tokens, in any answer of the tenant.

    It keeps nothing of a sequence.
    """

    name = "recycling"

    def __init__(self) -> None:
        self._of_tenant = lru_cache(TENANTS)(lambda tenant: Successors())

    def learn(self, context: Context, tree: TokenTree, logits: torch.Tensor) -> None:
        successors = self._of_tenant(context.tenant)
        width = min(KEPT, logits.shape[-1])
        ranked = [
            (node, tokens, values)
            for node, (tokens, values) in enumerate(largest(logits, width))
            if len(tokens) == width and np.isfinite(values).all()
        ]
        if not ranked:
            return
        nodes, tokens, values = zip(*ranked, strict=True)
        pairs = [(_before(context, tree, node), tree.token[node]) for node in nodes]
        probs = np.exp(np.array(values, np.float32) - np.array(values, np.float32)[:, :1])
        successors.put(pairs, np.array(tokens), probs / probs.sum(-1, keepdims=True))

    def after(self, context: Context, path: Sequence[int]) -> Recycled | None:
        """Return what was likely after the text that `path` continues; None if nothing is known."""
        before, token = [-1, *context.ids[-2:], *path][-2:]
        return self._of_tenant(context.tenant).after(before, token)


def _before(context: Context, tree: TokenTree, node: int) -> int:
    """Return the token before a node, -1 where there is none."""
    if node:
        return tree.token[tree.parent[node]]
    return context.ids[-2] if len(context.ids) > 1 else -1
