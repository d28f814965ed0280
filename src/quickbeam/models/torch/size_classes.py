"""Which sizes of passes give a row the same bits.

A library runs other kernels for other numbers of rows, and these add in other orders. So rows are
run in passes of every size, and their bits are compared. Sizes that agree are a class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

# The neighbours of a row that is compared.
PADDING = "padding"  # padding alone
OTHERS = "others"  # rows of other sequences
PROMPT = "prompt"  # the tokens before it in its text
TREE = "tree"  # the tokens before it, as a path of a draft tree


class Placement(NamedTuple):
    """Where a row stands: it is row `position` of `size` rows, among `neighbours`."""

    size: int
    position: int
    neighbours: str


# Runs rows with this placement, one after the other, and returns the bits of each by its index. A
# row has the same index in all placements. In `PROMPT`, all rows of a pass are compared.
Run = Callable[[Placement], Mapping[int, bytes]]


def placements(size: int) -> Iterator[Placement]:
    """Yield the placements of rows in passes of `size` rows."""
    yield Placement(size, 0, PADDING)
    if size == 1:
        return
    for position in sorted({0, size // 2, size - 1}):
        yield Placement(size, position, OTHERS)
    yield Placement(size, size - 1, PROMPT)
    yield Placement(size, size - 1, TREE)


def size_classes(run: Run, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the classes of `sizes`. A class has its sizes in the order of `sizes`.

    A size is in no class if a row's bits depend on the row's position or neighbours.
    """
    classes = dict[tuple[tuple[int, bytes], ...], list[int]]()
    for size in sizes:
        bits_of_row = dict[int, bytes]()
        agree = True
        for placement in placements(size):
            for row, bits in run(placement).items():
                agree &= bits_of_row.setdefault(row, bits) == bits
        if agree:
            classes.setdefault(tuple(sorted(bits_of_row.items())), []).append(size)
    return [tuple(members) for members in classes.values()]


def class_with_widest(run: Run, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the class of the largest of `sizes`; empty where it is in no class."""
    for members in size_classes(run, sizes):
        if max(sizes) in members:
            return members
    return ()
