"""Which numbers of rows of a pass give a row the same bits.

A library takes other kernels for other numbers of rows, and these add in other orders. So rows are
run in passes of every size, and the bits that they get are compared. Sizes that agree are a class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

# What stands beside a row that is looked at: nothing but padding; rows of other sequences; the
# tokens before it in its own text, as a prompt; or these tokens as a path of a draft tree.
PADDING, OTHERS, PROMPT, TREE = "padding", "others", "prompt", "tree"


class Placement(NamedTuple):
    """Where a row stands: it is row number `position` of `size`, among `neighbours`."""

    size: int
    position: int
    neighbours: str


# Runs rows that are placed so, one after the other, and returns the bits of each. In `PROMPT`, the
# rows of a pass are all looked at. A row has the same number wherever it is placed.
Run = Callable[[Placement], Mapping[int, bytes]]


def placements(size: int) -> Iterator[Placement]:
    """Yield where rows are run in passes of `size` rows: alone, elsewhere, and among others."""
    yield Placement(size, 0, PADDING)
    if size == 1:
        return
    for position in sorted({0, size // 2, size - 1}):
        yield Placement(size, position, OTHERS)
    yield Placement(size, size - 1, PROMPT)
    yield Placement(size, size - 1, TREE)


def size_classes(run: Run, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the classes of `sizes`, each in their order.

    A size is in no class where a row's bits depend on its position or its neighbours.
    """
    classes = dict[tuple[tuple[int, bytes], ...], list[int]]()
    for size in sizes:
        seen = [bits for placement in placements(size) for bits in run(placement).items()]
        by_row = dict(seen)
        if all(by_row[row] == bits for row, bits in seen):
            classes.setdefault(tuple(sorted(by_row.items())), []).append(size)
    return [tuple(members) for members in classes.values()]


def class_with_widest(run: Run, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the class of the largest of `sizes`; none where it is in no class."""
    widest = max(sizes)
    return next((members for members in size_classes(run, sizes) if widest in members), ())
