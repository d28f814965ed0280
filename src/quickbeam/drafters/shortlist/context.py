"""The context's tokens as part of a shortlist: the drafter's head scores them beside the rest.

Text repeats itself, rare words most of all (NanoSpec).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from quickbeam.drafters.shortlist.native import NativeRows
from quickbeam.errors import InvalidInput
from quickbeam.models.base import inference

WINDOW = 3072
# A full window drops one token in `SPARE` at once, so that it is rebuilt only after that many new
# tokens.
SPARE = 4


class ContextTokens:
    """Tokens that are in the context or that other sources proposed.

    - `window`: the most distinct tokens that are kept. If more come, the quarter of the window that
      was seen least recently is dropped.
    - `skip`: tokens that are never kept.
    - `rows`: where the native kernels keep these tokens' rows of the head, in the same order.
    - `tokens`: `[m]` int64, distinct, `m <= window`. `version`: changes whenever they do.

    Raises `InvalidInput` for a window below 1.
    """

    def __init__(
        self,
        window: int = WINDOW,
        skip: Collection[int] = (),
        rows: NativeRows | None = None,
        device: torch.device | None = None,
    ) -> None:
        if window < 1:
            raise InvalidInput(f"a window of {window} tokens of the context: must be at least 1")
        self.window, self.rows, self.version, self._skip = window, rows, 0, skip
        # by token: its place in `tokens`; the least recently seen token first
        self._place: dict[int, int] = {}
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)

    @inference
    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens, the newest last."""
        recent = [token for token in dict.fromkeys(reversed(tokens)) if token not in self._skip]
        recent = recent[: self.window][::-1]
        for token in recent:
            self._place[token] = self._place.pop(token, -1)
        if len(self._place) > self.window:
            self._drop(max(len(recent), self.window - self.window // SPARE))
        self._append([token for token in recent if self._place[token] < 0])

    def __contains__(self, token: int) -> bool:
        return token in self._place

    def _drop(self, keep: int) -> None:
        """Drop all but the `keep` most recently seen tokens, and move the others to the front."""
        for token in list(self._place)[:-keep]:
            del self._place[token]
        kept = sorted((place, token) for token, place in self._place.items() if place >= 0)
        self.tokens = self.tokens[:0]
        self._append([token for _, token in kept])

    def _append(self, tokens: list[int]) -> None:
        if not tokens:
            return
        first, ids = len(self.tokens), torch.tensor(tokens, device=self.tokens.device)
        self.tokens, self.version = torch.cat([self.tokens, ids]), self.version + 1
        self._place.update(zip(tokens, range(first, len(self.tokens)), strict=True))
        if self.rows is not None:
            self.rows.reserve(len(self.tokens))
            self.rows.write(first, ids)
