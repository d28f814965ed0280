"""The context's tokens as part of a shortlist: the drafter's head scores them beside the rest.

Text repeats itself, rare words most of all (NanoSpec).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quickbeam.drafters.shortlist.head import native_fits
from quickbeam.drafters.shortlist.native import NativeRows
from quickbeam.errors import InvalidInput
from quickbeam.models.base import inference
from quickbeam.models.native.library import kernels

STEP = 64  # rows that the buffer grows by
# A full window drops one token in `SPARE` at once, so that it is rebuilt only after that many new
# tokens.
SPARE = 4


class PlainRows:
    """Rows of a head side by side in one tensor.

    `NativeRows` is the same for the native kernels.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight, self._rows = weight, weight[:0]

    def reserve(self, size: int) -> None:
        """Make room for `size` rows, keeping those that are there."""
        if size > len(self._rows):
            rows = self._rows.new_empty(size, self._rows.shape[1])
            rows[: len(self._rows)] = self._rows
            self._rows = rows

    def write(self, first: int, tokens: torch.Tensor) -> None:
        """Copy the rows of `tokens` into the places from `first` on."""
        self._rows[first : first + len(tokens)] = self._weight[tokens]

    def logits(self, h: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits `[n, count]` of `h` `[n, d]` for the first `count` rows."""
        return F.linear(h, self._rows[:count])


class ContextTokens:
    """Rows of the head for tokens that are in the context or that other sources proposed.

    They lie side by side in one buffer, into which a token's row is copied once.

    - `weight`: `[vocab, d]`, the head in the order of token ids.
    - `window`: the most distinct tokens that are kept. If more come, the quarter of the window that
      was seen least recently is dropped.
    - `skip`: `[vocab]` bool, tokens that are never kept.
    - `rows`: the format in which the native kernels keep rows (see `NativeRows`).

    Raises `InvalidInput` for a window below 1.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        window: int = 3072,
        skip: torch.Tensor | None = None,
        rows: str | None = None,
    ) -> None:
        if window < 1:
            raise InvalidInput(f"a window of {window} tokens of the context: must be at least 1")
        self.window = window
        self.rebuilt = 0  # how often tokens were dropped
        self.version = 0  # changes whenever the kept tokens or their places change
        self._weight = weight.detach()
        self._skip = frozenset(() if skip is None else skip.nonzero()[:, 0].tolist())
        # by token: its row of the buffer; the least recently seen token first
        self._row: dict[int, int] = {}
        library = kernels() if native_fits(self._weight) else None
        self.rows: NativeRows | PlainRows = (
            PlainRows(self._weight) if library is None else NativeRows(self._weight, library, rows)
        )
        self._tokens = torch.empty(0, dtype=torch.int64, device=weight.device)

    def reset(self, ids: Sequence[int]) -> None:
        """Forget all tokens and read `ids`."""
        self._row.clear()
        self.version += 1
        self.extend(ids)

    @inference
    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens, the newest last."""
        recent = [token for token in dict.fromkeys(reversed(tokens)) if token not in self._skip][
            : self.window
        ]
        known = len(self._row)
        for token in reversed(recent):
            self._row[token] = self._row.pop(token, -1)
        if len(self._row) > self.window:
            known = self._rebuild(max(len(recent), self.window - self.window // SPARE))
        fresh = [token for token in reversed(recent) if self._row[token] < 0]
        if not fresh:
            return
        self.version += 1
        self._reserve(known, known + len(fresh))
        ids = torch.tensor(fresh, device=self._tokens.device)
        self._tokens[known : known + len(fresh)] = ids
        self.rows.write(known, ids)
        self._row.update(zip(fresh, range(known, known + len(fresh)), strict=True))

    @property
    def tokens(self) -> torch.Tensor:
        """The kept tokens: `[m]` int64, distinct, `m <= window`, on the head's device.

        The next `extend` may overwrite this tensor.
        """
        return self._tokens[: len(self._row)]

    def __contains__(self, token: int) -> bool:
        return token in self._row

    def __len__(self) -> int:
        return len(self._row)

    @inference
    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits `[n, m]` of `h` `[n, d]`, a column for each of `tokens`."""
        return self.rows.logits(h, len(self._row))

    def _rebuild(self, keep: int) -> int:
        """Drop all but the `keep` most recently seen tokens.

        The rows of those that have one are moved to the front. Returns how many these are.
        """
        for token in list(self._row)[:-keep]:
            del self._row[token]
        self.rebuilt += 1
        kept = sorted((row, token) for token, row in self._row.items() if row >= 0)
        rows = torch.tensor([row for row, _ in kept], dtype=torch.int64, device=self._tokens.device)
        self._tokens[: len(kept)] = self._tokens[rows]
        self.rows.write(0, self._tokens[: len(kept)])
        self._row.update((token, place) for place, (_, token) in enumerate(kept))
        return len(kept)

    def _reserve(self, used: int, size: int) -> None:
        """Make the buffer hold at least `size` rows, keeping the first `used`."""
        if size <= len(self._tokens):
            return
        size = -(-min(self.window, max(2 * len(self._tokens), size)) // STEP) * STEP
        self.rows.reserve(size)
        tokens = self._tokens.new_empty(size)
        tokens[:used] = self._tokens[:used]
        self._tokens = tokens
