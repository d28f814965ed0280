"""The rows of a pass: where their keys and values are written, and which ones each row reads.

A row sees keys by their positions: the j-th key that it sees stands at position j. The first keys
are of committed tokens, in the pages of its sequence. The keys after them are of its path in the
draft tree. So what a row reads, and in which order, doesn't depend on its siblings or neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from quickbeam.models.base import Batch, Block, Draft, Draws, Part
from quickbeam.models.torch.pages import RowPool, RowStore, to_device
from quickbeam.models.torch.states import (
    NO_TOKENS,
    SCRATCH,
    ListedStates,
    list_text,
    list_tree,
)


class UncommittedTokens(NamedTuple):
    """The tokens after a sequence's committed ones: those of a pass, and those run before it.

    `depths`: the position of each token, counted from the first uncommitted position. `base`: how
    many of the tokens an earlier pass has run. `seen`: for each token of this pass, the tokens that
    it sees, by depth; None where each sees itself and all before it. `parents`: each node's parent,
    for a tree.
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
        cache=part.cache,
        depths=part.tree.depth,
        base=part.base,
        seen=paths[part.base :],
        parents=part.tree.parent,
    )


# Sizes of padded passes. Up to `MAX_ROWS`, rows are a power of two. There may be `NARROW` sequences
# and rows with logits, or as many as rows. A path holds the largest tree under the measured budget.
MAX_ROWS = 512
NARROW = 64
MIN_PAGES = 16
MIN_PATH = 64
LIKELIEST = Draws(seed=0, choice=0, scale=0.0)

# the tensors of `PassRows`, in the order in which their elements follow one another
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
    "state_read",
    "state_written",
    "history",
    "bounds",
)


class PassSizes(NamedTuple):
    """The sizes of a pass.

    `rows`: rows. `wanted`: rows with logits. `sequences`: sequences. `pages`: pages of a sequence.
    `path`: nodes of a path in a draft tree. `draws`: whether the pass draws tokens. `history`: how
    many tokens before a row recurrent layers read; 0 where the model has no such layers.
    """

    rows: int
    wanted: int
    sequences: int
    pages: int
    path: int
    draws: bool = False
    history: int = 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of `TENSORS`."""
        rows = (self.rows,)
        wanted = (self.wanted,)
        pages = (self.sequences, self.pages)
        path = (self.rows, self.path)
        draws = (self.wanted if self.draws else 0, len(Draws._fields))
        states = (self.rows if self.history else 0,)
        history = (self.rows, self.history)
        bounds = (self.sequences + 1 if self.history else 0,)
        of_attention = [rows, rows, rows, rows, rows, rows, wanted, pages, path, draws]
        return [*of_attention, states, states, history, bounds]

    @property
    def numbers(self) -> int:
        """How many elements these tensors have."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class PassRows:
    """The n rows of a pass over S sequences, on the device. All tensors are int64.

    - `tokens`, `positions`: of each row, `[n]`.
    - `written`: the row of the pool to which each row's key and value are written, `[n]`.
    - `sequence`: the index of each row's sequence, `[n]`.
    - `committed`: how many keys each row sees in the pages of its sequence, `[n]`.
    - `seen`: how many keys each row sees in all, `[n]`; 0 for padding.
    - `wanted`: the rows after which logits are wanted, `[w]`; -1, the last row, for padding.
    - `pages`: the sequences' pages, `[S, P]`.
    - `path`: the rows of the pool with the keys that a row sees behind those in pages, `[n, D]`.
    - `draws`: how tokens are drawn after the wanted rows, the bits of `Draws`, `[w, 3]`; `[0, 3]`
      where no tokens are drawn.
    - `state_read`, `state_written`, `history`: which states of recurrent layers the rows read and
      write (`ListedStates`). Rows of padding read `NO_TOKENS` and write `SCRATCH`.
    - `bounds`: the first row of each sequence, then the first row of padding, `[S + 1]`.
    - `page`: tokens of a page.
    - `texts`: which rows are texts. Each row of a text sees all that the row before it sees. A pass
      of padded sizes has none.
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
    state_read: torch.Tensor
    state_written: torch.Tensor
    history: torch.Tensor
    bounds: torch.Tensor
    page: int
    texts: Sequence[range] = ()

    @classmethod
    def of(
        cls,
        numbers: torch.Tensor,
        sizes: PassSizes,
        page: int,
        texts: Sequence[range] = (),
    ) -> PassRows:
        """Return the rows with the elements `numbers` (`ListedRows`), which are on the device."""
        pieces = numbers.split_with_sizes([math.prod(shape) for shape in sizes.shapes])
        tensors = dict[str, torch.Tensor]()
        for name, piece, shape in zip(TENSORS, pieces, sizes.shapes, strict=True):
            tensors[name] = piece.view(shape)
        return cls(**tensors, page=page, texts=texts)

    @cached_property
    def is_padding(self) -> torch.Tensor:
        """Which rows belong to no sequence, `[n]` bool."""
        return self.seen == 0

    @cached_property
    def keys(self) -> torch.Tensor:
        """The rows of the pool that each row reads, by position, `[n, P * page]`.

        A row reads row 0 in place of positions that it doesn't see.
        """
        position = torch.arange(self.pages.shape[1] * self.page, device=self.pages.device)
        in_pages = self.pages[:, position // self.page] * self.page + position % self.page
        behind = position - self.committed[:, None]
        on_path = self.path.gather(1, behind.clamp(0, self.path.shape[1] - 1))
        keys = torch.where(behind < 0, in_pages[self.sequence], on_path)
        return torch.where(position < self.seen[:, None], keys, 0)

    def visible(self, window: int | None, causal: bool) -> torch.Tensor:
        """Return which positions each row sees in a layer, `[n, P * page]` bool.

        A row of padding sees position 0, so that its results are not NaN.
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

    `numbers`: the elements of `TENSORS`, one tensor after the other, int64. The other fields are
    those of `PassRows`.
    """

    numbers: np.ndarray
    sizes: PassSizes
    page: int
    texts: Sequence[range]

    @property
    def written(self) -> np.ndarray:
        """The field of `PassRows`, `[n]`."""
        first = TENSORS.index("written") * self.sizes.rows
        return self.numbers[first : first + self.sizes.rows]

    def to(self, device: torch.device) -> PassRows:
        numbers = to_device(self.numbers, device)
        return PassRows.of(numbers, self.sizes, self.page, self.texts)


def passes_of(parts: Sequence[UncommittedTokens], widest: int) -> Iterator[list[UncommittedTokens]]:
    """Divide `parts` among passes of at most `widest` rows, and yield the parts of each pass."""
    parts_of_pass = list[UncommittedTokens]()
    capacity = widest
    for part in parts:
        first = part.base
        while first < len(part.depths):
            last = min(len(part.depths), first + capacity)
            parts_of_pass.append(part.between(first, last))
            capacity -= last - first
            first = last
            if not capacity:
                yield parts_of_pass
                parts_of_pass = []
                capacity = widest
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

    Rows come in blocks of `block` rows. There are few sizes, since each takes a graph: 11 numbers
    of rows up to 2,048, and 4 more where 128 rows or more are of many sequences or have many
    logits. For each of these there are 3 numbers of pages for contexts up to 16,384 tokens, 4 up to
    65,536, and passes that draw tokens or don't. Together these are at most 120 sizes.
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
        history=needed.history,
    )


class Padding(NamedTuple):
    """How sizes of passes are rounded up: as by `padded_sizes`, for rows in blocks of `block`.

    `rows`, `wanted`: where not empty, the numbers of rows, and of rows with logits, that passes may
    have. A pass gets the smallest that fits.
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
            rows=min(rows, default=sizes.rows),
            wanted=min(wanted, default=sizes.wanted),
        )


def list_draws(batch: Batch) -> np.ndarray | None:
    """Return `PassRows.draws` of a batch, `[w, 3]` int64; None where nothing is drawn."""
    draws = list[Draws]()
    for part in batch.parts:
        draws_of_part = part.draws if isinstance(part, Draft) else None
        draws += [draws_of_part or LIKELIEST] * part.wanted
    if not any(row.scale for row in draws):
        return None
    seeds = np.array([row.seed % 2**64 for row in draws], np.uint64)
    choices = np.array([row.choice for row in draws], np.int64)
    scales = np.array([row.scale for row in draws], np.float64)
    return np.stack([seeds.view(np.int64), choices, scales.view(np.int64)], 1)


def list_pass(
    parts: Sequence[UncommittedTokens],
    pool: RowPool,
    tokens: Sequence[int] = (),
    wanted: Sequence[int] = (),
    padding: Padding | None = None,
    draws: np.ndarray | None = None,
) -> ListedRows:
    """List the rows of a pass over these parts, and reserve pages. Raises `OutOfPages`.

    `tokens`: of all rows. `wanted`: the rows after which logits are wanted. `padding`: how sizes
    are rounded up; None for no padding. `draws`: the result of `list_draws`.
    """
    totals = [part.cache.length + len(part.depths) for part in parts]
    for part, total in zip(parts, totals, strict=True):
        part.cache.reserve(total)
    pages = [-(-total // pool.page) for total in totals]
    path_lengths = [len(path) for part in parts for path in part.seen or ()]
    sizes = PassSizes(
        rows=sum(part.rows for part in parts),
        wanted=len(wanted),
        sequences=len(parts),
        pages=max(pages),
        path=max([1, *path_lengths]),
        draws=draws is not None,
        history=pool.states.history,
    )
    if padding is not None:
        sizes = padding.around(sizes)
    numbers = np.zeros(sizes.numbers, np.int64)
    arrays = views_of(numbers, sizes)
    arrays["tokens"][: len(tokens)] = tokens
    arrays["wanted"][:] = -1
    arrays["wanted"][: len(wanted)] = wanted
    if draws is not None:
        arrays["draws"][: len(wanted)] = draws
    arrays["written"][:] = pool.page - 1  # where padding writes
    arrays["state_read"][:] = NO_TOKENS
    arrays["state_written"][:] = SCRATCH
    arrays["history"][:] = -1  # a token of the state of no tokens
    arrays["bounds"][:] = sum(part.rows for part in parts)
    texts = list[range]()
    first = 0  # the first row of a part
    for index, part in enumerate(parts):
        rows = range(first, first + part.rows)
        arrays["sequence"][rows.start : rows.stop] = index
        arrays["pages"][index, : pages[index]] = part.cache.page_numbers[: pages[index]]
        fill_rows(arrays, part, rows)
        if sizes.history:
            arrays["bounds"][index] = first
            fill_states(arrays, part, rows)
        if part.seen is None:
            texts.append(rows)
        first = rows.stop
    return ListedRows(numbers, sizes, pool.page, texts if padding is None else [])


def views_of(numbers: np.ndarray, sizes: PassSizes) -> dict[str, np.ndarray]:
    """Return views of the elements of `ListedRows`, by the names of `TENSORS`."""
    views = dict[str, np.ndarray]()
    first = 0
    for name, shape in zip(TENSORS, sizes.shapes, strict=True):
        end = first + math.prod(shape)
        views[name] = numbers[first:end].reshape(shape)
        first = end
    return views


def fill_rows(arrays: dict[str, np.ndarray], part: UncommittedTokens, rows: range) -> None:
    """Set what the rows of a part read and write, in the arrays of `views_of`."""
    start = part.cache.length
    of_part = slice(rows.start, rows.stop)
    slots = part.cache.rows(np.arange(start, start + len(part.depths)))
    positions = start + np.array(part.depths[part.base :], np.int64)
    arrays["positions"][of_part] = positions
    arrays["written"][of_part] = slots[part.base :]
    if part.seen is None:
        arrays["committed"][of_part] = positions + 1
        arrays["seen"][of_part] = positions + 1
        return
    arrays["committed"][of_part] = start
    arrays["seen"][of_part] = start + np.array([len(path) for path in part.seen], np.int64)
    for row, path in zip(arrays["path"][of_part], part.seen, strict=True):
        row[: len(path)] = slots[list(path)]


def fill_states(arrays: dict[str, np.ndarray], part: UncommittedTokens, rows: range) -> None:
    """Set which states the rows of a part read and write, in the arrays of `views_of`."""
    of_part = slice(rows.start, rows.stop)
    listed = ListedStates(
        read=arrays["state_read"][of_part],
        written=arrays["state_written"][of_part],
        history=arrays["history"][of_part],
    )
    if part.parents is None:
        list_text(part.cache.states, part.base, rows.start, listed)
    else:
        list_tree(part.cache.states, part.parents, part.base, rows.start, listed)
