"""Hidden states of committed tokens that a drafter was given and has not read."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Unread:
    """A queue of hidden states, one row a token."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, hidden: torch.Tensor) -> None:
        """Append the rows `[k, width]` of the next k tokens."""
        if self._parts:  # they wait for longer than a step
            self._parts[-1] = _own(self._parts[-1])
        self._parts.append(hidden)
        self._count += len(hidden)

    def reset(self, parts: Sequence[torch.Tensor] = ()) -> None:
        """Forget all rows and take these."""
        self._parts, self._count = list(parts), sum(map(len, parts))

    def first(self, count: int) -> torch.Tensor:
        """Return the first `count` rows."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0][:count]

    def drop(self, count: int) -> None:
        """Drop the first `count` rows."""
        left = self.first(self._count)[count:]
        self.reset([_own(left)] if len(left) else [])


def _own(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` without the larger tensor that they are a slice of.

    That tensor would stay in memory as long as the slice. Rows that are no such slice are returned
    as they are.
    """
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows
