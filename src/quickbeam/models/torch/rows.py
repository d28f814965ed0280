"""The rows of a pass: where their keys and values are written, and which ones each row reads.

A row sees keys by their positions: the j-th key that it sees stands at position j. The first ones
are of committed tokens, in the pages of its sequence. Those after them are of its path in the draft
tree. So what a row reads, and in which order, doesn't depend on its siblings or neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.models.base import Batch, Block, Draft, Draws, Part
from quickbeam.models.torch.pages import RowPool, RowStore, to_device
from quickbeam.models.torch.states import RecurrentCall, recurrent_calls


class UncommittedTokens(NamedTuple):
    """The tokens after a sequence's committed ones: those of a pass, and those run before it.

    `depths`: for each token, how many positions behind the last committed one plus 1 it stands.
    `base`: how many of them an earlier pass has run. `seen`: of each token of this pass, the tokens
    that it sees, by depth; None where each sees all before it, and itself. `parents`: of a tree,
    each node's parent.
    """

    cache: RowStore
    depths: Sequence[int]
    base: int = 0
    seen: Sequence[Sequence[int]] | None = None
    parents: Sequence[int] | None = None

    @property
    def rows(self) -> int:
        return len(self.depths) - self.base

    def between(self, first: int, last: int) -> UncommittedTokens:
        """Return tokens `first` to `last` (excluded) alone, once those before them have run."""
        return UncommittedTokens(
            self.cache,
            self.depths[:last],
            first,
            None if self.seen is None else self.seen[first - self.base : last - self.base],
            None if self.parents is None else self.parents[:last],
        )


def uncommitted(part: Part) -> UncommittedTokens:
    """Return the tokens of a batch's part."""
    assert isinstance(part.cache, RowStore)
    if isinstance(part, Block):
        return UncommittedTokens(part.cache, range(part.rows), seen=[range(part.rows)] * part.rows)
    if not isinstance(part, Draft):
        return UncommittedTokens(part.cache, range(part.rows))
    paths: list[list[int]] = []
    for node, parent in enumerate(part.tree.parent):
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    return UncommittedTokens(
        part.cache, part.tree.depth, part.base, paths[part.base :], part.tree.parent
    )


# Of padded passes. Up to `MAX_ROWS`, rows are a power of two. There may be `NARROW` sequences and
# rows with logits, or as many as rows. A path holds the greatest tree under the measured budget.
MAX_ROWS = 512
NARROW = 64
MIN_PAGES = 16
MIN_PATH = 64
LIKELIEST = Draws(seed=0, choice=0, scale=0.0)

# the tensors of `PassRows`, in the order in which their numbers follow one another
TENSORS = (
    "tokens",
    "positions",
    "written",
    "sequence",
    "committed",
    "seen",
    "wanted",
    "pages",
    "path",
    "draws",
)


class PassSizes(NamedTuple):
    """How many rows, rows with logits, sequences, pages of a sequence and nodes of a path fit.

    `draws`: whether the pass draws tokens.
    """

    rows: int
    wanted: int
    sequences: int
    pages: int
    path: int
    draws: bool = False

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of `TENSORS`."""
        rows = (self.rows,)
        tables = (self.sequences, self.pages), (self.rows, self.path)
        draws = (self.wanted if self.draws else 0, len(Draws._fields))
        return [rows] * 6 + [(self.wanted,), *tables, draws]

    @property
    def numbers(self) -> int:
        """How many numbers these tensors have."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class PassRows:
    """The n rows of a pass over S sequences, on the device; all numbers are int64.

    `tokens`, `positions` `[n]`. `written` `[n]`: the row of the pool that each row's key and value
    take. `sequence` `[n]`: the number of each row's sequence. `committed` `[n]`: how many keys each
    row sees in the pages of its sequence. `seen` `[n]`: how many it sees in all. `wanted` `[w]`:
    the rows after which logits are wanted. `pages` `[S, P]`: the sequences' pages. `path` `[n, D]`:
    the rows of the pool with the keys that a row sees behind those in pages. `draws` `[w, 3]`: how
    tokens are drawn after the wanted rows, the bits of `Draws`; `[0, 3]` where none are.

    `page`: tokens of a page. `recurrent_calls`: of recurrent layers. `texts`: which rows are texts,
    of which each row sees what the one before it sees; a pass of padded sizes names none.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    written: torch.Tensor
    sequence: torch.Tensor
    committed: torch.Tensor
    seen: torch.Tensor
    wanted: torch.Tensor
    pages: torch.Tensor
    path: torch.Tensor
    draws: torch.Tensor
    page: int
    recurrent_calls: Sequence[RecurrentCall] = ()
    texts: Sequence[range] = ()

    @classmethod
    def of(cls, numbers: torch.Tensor, sizes: PassSizes, page: int, **more: Any) -> PassRows:
        """Return the rows that `ListedRows.numbers` stand for, once they are on the device.

        `more`: fields that are no tensors.
        """
        pieces = numbers.split_with_sizes([math.prod(shape) for shape in sizes.shapes])
        tensors = [piece.view(shape) for piece, shape in zip(pieces, sizes.shapes, strict=True)]
        named: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
        return cls(**named, page=page, **more)

    @cached_property
    def is_padding(self) -> torch.Tensor:
        """Which rows belong to no sequence, `[n]` bool."""
        return self.seen == 0

    @cached_property
    def keys(self) -> torch.Tensor:
        """The rows of the pool that each row reads, by position, `[n, P * page]`.

        Row 0 stands for positions that a row doesn't see.
        """
        position = torch.arange(self.pages.shape[1] * self.page, device=self.pages.device)
        in_pages = self.pages[:, position // self.page] * self.page + position % self.page
        behind = position - self.committed[:, None]
        on_path = self.path.gather(1, behind.clamp(0, self.path.shape[1] - 1))
        keys = torch.where(behind < 0, in_pages[self.sequence], on_path)
        return torch.where(position < self.seen[:, None], keys, 0)

    def visible(self, window: int | None, causal: bool) -> torch.Tensor:
        """Return which positions each row sees in a layer, `[n, P * page]` bool.

        A row of padding sees position 0, so that its results are numbers.
        """
        position = torch.arange(self.pages.shape[1] * self.page, device=self.pages.device)
        visible = position < self.seen.clamp(min=1)[:, None]
        if window is not None:
            visible = visible & (position > self.positions[:, None] - window)
        if causal:
            visible = visible & (position <= self.positions[:, None])
        return visible


class ListedRows(NamedTuple):
    """The rows of a pass on the host.

    `numbers`: those of `TENSORS`, one after the other, int64. Others are as there.
    """

    numbers: np.ndarray
    sizes: PassSizes
    page: int
    recurrent_calls: Sequence[RecurrentCall]
    texts: Sequence[range]

    @property
    def written(self) -> np.ndarray:
        """As of `PassRows`."""
        before = TENSORS.index("written") * self.sizes.rows
        return self.numbers[before : before + self.sizes.rows]

    def to(self, device: torch.device) -> PassRows:
        return PassRows.of(
            to_device(self.numbers, device),
            self.sizes,
            self.page,
            recurrent_calls=self.recurrent_calls,
            texts=self.texts,
        )


def passes_of(parts: Sequence[UncommittedTokens], widest: int) -> Iterator[list[UncommittedTokens]]:
    """Yield parts of passes of at most `widest` rows that run the rows of `parts` in turn."""
    parts_of_pass = list[UncommittedTokens]()
    left = widest
    for part in parts:
        first = part.base
        while first < len(part.depths):
            last = min(len(part.depths), first + left)
            parts_of_pass.append(part.between(first, last))
            left -= last - first
            first = last
            if not left:
                yield parts_of_pass
                parts_of_pass, left = [], widest
    if parts_of_pass:
        yield parts_of_pass


def next_power(number: int, least: int = 1, base: int = 2) -> int:
    """Return the smallest of `least`, `least * base`, `least * base**2`, … that holds `number`."""
    size = least
    while size < number:
        size *= base
    return size


def padded_sizes(needed: PassSizes, block: int = 1) -> PassSizes:
    """Return the sizes of the padded pass that a pass of the sizes `needed` runs in.

    Rows come in blocks of `block` rows. There are few sizes, since each is a graph of its own: 11
    numbers of rows up to 2,048, and 4 more where 128 rows or more are of many sequences or have
    many logits. Each comes with 3 numbers of pages for contexts up to 16,384 tokens, 4 up to
    65,536, and draws tokens or doesn't. Together these are at most 120 sizes.
    """
    blocks = -(-needed.rows // block)
    rows = block * next_power(blocks)
    if rows > MAX_ROWS:
        rows = block * next_power(blocks, MAX_ROWS // block, 4)
    narrow = min(rows, NARROW)
    if max(needed.wanted, needed.sequences) > narrow:
        narrow = rows
    return PassSizes(
        rows=rows,
        wanted=narrow,
        sequences=narrow,
        pages=next_power(needed.pages, MIN_PAGES, 4),
        path=next_power(needed.path, MIN_PATH),
        draws=needed.draws,
    )


class Padding(NamedTuple):
    """How sizes of passes are rounded up: as by `padded_sizes`, for rows in blocks of `block`.

    `rows`, `wanted`: where given, the numbers of rows, and of rows with logits, that passes may
    have; the smallest that fits is taken.
    """

    rows: Sequence[int] = ()
    wanted: Sequence[int] = ()
    block: int = 1

    def around(self, needed: PassSizes) -> PassSizes:
        """Return the sizes of the padded pass that a pass of the sizes `needed` runs in."""
        sizes = padded_sizes(needed, self.block)
        rows = [size for size in self.rows if size >= needed.rows]
        wanted = [size for size in self.wanted if size >= needed.wanted]
        return sizes._replace(
            rows=min(rows, default=sizes.rows), wanted=min(wanted, default=sizes.wanted)
        )


def list_draws(batch: Batch) -> np.ndarray | None:
    """Return `PassRows.draws` of a batch, `[w, 3]` int64; None where nothing is drawn."""
    listed = list[Draws]()
    for part in batch.parts:
        draws = part.draws if isinstance(part, Draft) else None
        listed += [draws or LIKELIEST] * part.wanted
    if not any(draws.scale for draws in listed):
        return None
    seeds = np.array([draws.seed % 2**64 for draws in listed], np.uint64)
    choices = np.array([draws.choice for draws in listed], np.int64)
    scales = np.array([draws.scale for draws in listed], np.float64)
    return np.stack([seeds.view(np.int64), choices, scales.view(np.int64)], 1)


def list_pass(
    parts: Sequence[UncommittedTokens],
    pool: RowPool,
    tokens: Sequence[int] = (),
    wanted: Sequence[int] = (),
    padding: Padding | None = None,
    draws: np.ndarray | None = None,
) -> ListedRows:
    """List the rows of a pass over these parts, for which room is made. Raises `OutOfPages`.

    `tokens`: of all rows. `wanted`: the numbers of rows after which logits are wanted. `padding`:
    how sizes are rounded up; None where they stay as they are. `draws`: as of `list_draws`.
    """
    totals = [part.cache.length + len(part.depths) for part in parts]
    for part, total in zip(parts, totals, strict=True):
        part.cache.reserve(total)
    pages = [-(-total // pool.page) for total in totals]
    depths = [len(tokens) for part in parts for tokens in part.seen or ()]
    sizes = PassSizes(
        rows=sum(part.rows for part in parts),
        wanted=len(wanted),
        sequences=len(parts),
        pages=max(pages),
        path=max([1, *depths]),
        draws=draws is not None,
    )
    if padding is not None:
        sizes = padding.around(sizes)
    numbers = np.zeros(sizes.numbers, np.int64)
    ends = np.cumsum([math.prod(shape) for shape in sizes.shapes])
    pieces = zip(np.split(numbers, ends[:-1]), sizes.shapes, strict=True)
    listed = [piece.reshape(shape) for piece, shape in pieces]
    ids, positions, written, sequence, committed, seen, with_logits = listed[:7]
    tables, paths, drawn = listed[7:]
    ids[: len(tokens)] = tokens
    with_logits[: len(wanted)] = wanted
    if draws is not None:
        drawn[: len(wanted)] = draws
    written[:] = pool.page - 1  # where padding writes
    first, texts = 0, list[range]()
    for number, part in enumerate(parts):
        start, rows = part.cache.length, slice(first, first + part.rows)
        own = part.cache.rows(np.arange(start, totals[number]))
        tables[number, : pages[number]] = part.cache.page_numbers[: pages[number]]
        positions[rows] = start + np.array(part.depths[part.base :], np.int64)
        written[rows], sequence[rows] = own[part.base :], number
        if part.seen is None:
            committed[rows] = seen[rows] = positions[rows] + 1
            texts.append(range(first, first + part.rows))
        else:
            committed[rows] = start
            seen[rows] = start + np.array([len(path) for path in part.seen], np.int64)
            for row, path in zip(paths[rows], part.seen, strict=True):
                row[: len(path)] = own[list(path)]
        first += part.rows
    calls = list[RecurrentCall]()
    if pool.zeros:
        of_parts = [(p.cache.states, p.parents, p.base, len(p.depths)) for p in parts]
        calls = recurrent_calls(of_parts, pool.device)
    return ListedRows(numbers, sizes, pool.page, calls, texts if padding is None else [])
