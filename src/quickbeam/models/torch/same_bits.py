"""Finds the sizes of a model's passes that give a row the same bits.

Whole passes are compared, not products: a row's logits, its keys and values of all layers, and the
states of recurrent layers behind it. So norms, attention and experts are covered, too. This is a
check of a few rows and no proof: it misses a difference that is rounded away in all of them. In a
model of usual size, each row has so many elements that some differences are not rounded away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from quickbeam.models.base import Batch, Chain, Draft, Part
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.models.torch.pages import RowPool, RowStore
from quickbeam.models.torch.rows import ListedRows, Padding, list_pass, uncommitted
from quickbeam.models.torch.size_classes import (
    PADDING,
    PROMPT,
    TREE,
    Placement,
    class_with_widest,
)
from quickbeam.tree import TokenTree

TEXT = 160  # tokens of the text that is compared
OTHER_TEXT = 300  # tokens of another text
PATH = 12  # nodes of the text's path in a draft tree
# The last rows of the text are compared: `FEW` where each takes passes of its own, and elsewhere so
# many that their keys and values have `ELEMENTS` elements, but at most `MOST`.
FEW, MOST = 4, 64
ELEMENTS = 2**15
PAGES = 64  # of keys and values, at most
STATES = 32  # of recurrent layers, at most

LogitsOf = Callable[[ListedRows], torch.Tensor]  # runs a pass: `[wanted, vocab]`


def find_padding(
    logits_of: LogitsOf, pool: RowPool, vocab: int, context: int | None, sizes: Sequence[int]
) -> Padding | None:
    """Return sizes of passes in which a row has the same bits wherever it stands.

    The sizes include the largest of `sizes`, for rows and for rows with logits. `vocab`: tokens of
    the vocabulary. `context`: tokens that the model can read; None for no bound. Returns None where
    there are no such sizes, and for a context that is too short for the comparison.
    """
    if context is not None and context < 2 * max(sizes):
        return None
    limit = pool.limit
    pool.limit = PAGES + STATES * pool.state_pages  # on CUDA, pools without a limit begin large
    probe = Probe(logits_of, pool, vocab, context, max(sizes))
    try:
        rows = class_with_widest(probe.in_rows, sizes)
        wanted = class_with_widest(probe.in_wanted, sizes) if rows else ()
    finally:
        probe.release()
        pool.limit = limit
    return Padding(rows, wanted) if rows and wanted else None


class Neighbours(NamedTuple):
    """The parts of a pass: those before and behind `part`, whose last row is compared."""

    before: list[Part]
    part: Part
    behind: list[Part]

    @property
    def parts(self) -> list[Part]:
        return [*self.before, self.part, *self.behind]

    @property
    def row(self) -> int:
        """The index of the row that is compared, in the pass."""
        return sum(part.rows for part in [*self.before, self.part]) - 1


class ComparedBits(NamedTuple):
    """Digests of what a pass gave.

    `rows`: of each compared row, with its keys and values. `states`: of the recurrent layers'
    states behind the last of them.
    """

    rows: list[bytes]
    states: bytes


class Probe:
    """Runs the last tokens of a text in passes of any placement.

    The tokens before them have been run in the widest passes. There are two other sequences.
    """

    def __init__(
        self, logits_of: LogitsOf, pool: RowPool, vocab: int, context: int | None, widest: int
    ) -> None:
        self._logits_of = logits_of
        self._pool = pool
        self._vocab = vocab
        self._widest = widest
        capacity = OTHER_TEXT + widest if context is None else context
        self._ids = self._text(min(TEXT, capacity), seed=3)
        elements = pool.page_bytes // pool.page // pool.dtype.itemsize  # of a token
        rows = min(MOST, len(self._ids), max(FEW, ELEMENTS // elements))
        self._rows = range(len(self._ids) - rows, len(self._ids))
        # beginnings of the text: where states can't go back, one behind each pass over it
        self._beginnings = list[SequenceCache]([pool.new()])
        last = len(self._ids) - 1
        step = widest if pool.state_pages else last
        for length in [*range(step, last, step), last]:
            self._beginnings.append(self._prefix(length))
        long = max(1, min(OTHER_TEXT, capacity - widest))
        self._long, self._short = pool.new(), pool.new()
        self._read(self._long, self._text(long, seed=5 + long))
        self._read(self._short, self._text(9, seed=14))

    def release(self) -> None:
        for cache in self._beginnings:
            cache.release()
        self._long.release()
        self._short.release()

    def in_rows(self, placement: Placement) -> dict[int, bytes]:
        """Return the bits of tokens in passes of this many rows."""
        padding = Padding((placement.size,), (self._widest,))
        bits = dict[int, bytes]()
        for tokens in self._passes(placement):
            neighbours = self._neighbours(placement, tokens[-1] + 1)
            rows = range(neighbours.row + 1 - len(tokens), neighbours.row + 1)
            compared = self._bits(neighbours, rows, [*rows], 0, padding)
            bits.update(zip(tokens, compared.rows, strict=True))
            bits[~tokens[-1]] = compared.states
        return bits

    def in_wanted(self, placement: Placement) -> dict[int, bytes]:
        """Return the bits of tokens where logits of this many rows are wanted."""
        size, position, kind = placement
        padding = Padding((self._widest,), (size,))
        bits = dict[int, bytes]()
        for tokens in self._passes(placement):
            prompt = Placement(self._widest, self._widest - 1, PROMPT)
            neighbours = self._neighbours(prompt, tokens[-1] + 1)
            rows = range(self._widest - len(tokens), self._widest)
            if kind in (PADDING, PROMPT):
                wanted = [*rows]
                first = 0
            else:
                wanted = [*range(position), rows[0], *range(position + 1, size)]
                first = position
            compared = self._bits(neighbours, rows, wanted, first, padding)
            bits.update(zip(tokens, compared.rows, strict=True))
        return bits

    def _passes(self, placement: Placement) -> Iterator[range]:
        """Yield the successive tokens of the text that are compared in each pass."""
        is_prompt = placement.neighbours == PROMPT
        rows_of_pass = placement.size if is_prompt else 1
        compared = self._rows if is_prompt or placement.size == 1 else self._rows[-FEW:]
        for end in range(len(compared), 0, -rows_of_pass):
            yield compared[max(0, end - rows_of_pass) : end]

    def _bits(
        self,
        neighbours: Neighbours,
        rows: range,
        wanted: list[int],
        first: int,
        padding: Padding,
    ) -> ComparedBits:
        """Return the bits of `rows` of a pass. Their logits are the ones from `first` on."""
        batch = Batch(neighbours.parts)
        parts = [uncommitted(part) for part in batch.parts]
        listed = list_pass(parts, self._pool, batch.tokens, wanted, padding)
        logits = self._logits_of(listed)[first : first + len(rows)].cpu()
        slots = torch.from_numpy(listed.written[rows.start : rows.stop]).to(self._pool.device)
        written = [tensor[slots].cpu() for tensor in (*self._pool.key, *self._pool.value)]
        states = _digest(self._states_behind(neighbours.part))
        for part in batch.parts:
            part.cache.release()
        bits_of_rows = list[bytes]()
        for i in range(len(rows)):
            bits_of_rows.append(_digest([logits[i], *(tensor[i] for tensor in written)]))
        return ComparedBits(bits_of_rows, states)

    def _states_behind(self, part: Part) -> list[torch.Tensor]:
        """Return the states of recurrent layers behind a part's last token, once it has run."""
        cache = part.cache
        states = list[torch.Tensor]()
        for layer in self._pool.states.layers.values():
            assert isinstance(cache, RowStore)
            slot = cache.states.slot(part.rows - 1)
            states += [tensor[slot].cpu() for tensor in layer if tensor is not None]
        return states

    def _neighbours(self, placement: Placement, end: int) -> Neighbours:
        """Return a pass in which the last token before `end` stands as `placement` says."""
        size, position, kind = placement
        part = self._part(kind, position, end)
        if kind == PADDING:
            return Neighbours([], part, [])
        before = position + 1 - part.rows
        behind = size - 1 - position
        return Neighbours(
            before=[self._chain(self._long, before)] if before else [],
            part=part,
            behind=[self._tree(self._short, behind)] if behind else [],
        )

    def _part(self, kind: str, position: int, end: int) -> Part:
        """Return the part of the pass that ends in the row that is compared."""
        tokens = 1
        if kind == PROMPT:
            tokens = position + 1
        elif kind == TREE:
            tokens = min(PATH, position // 2 + 1)
        first = max(0, end - tokens)
        cache = self._prefix(first)
        path = self._ids[first:end]
        if kind != TREE:
            return Chain(cache, path)
        tree = TokenTree(path[0])
        node = 0
        for token in path[1:]:  # each has a sibling before it
            tree.add(node, (token + 1) % self._vocab, "probe")
            node = tree.add(node, token, "probe")
        return Draft(cache, tree)

    def _prefix(self, length: int) -> SequenceCache:
        """Return a sequence of the first `length` tokens of the text."""
        longest = self._beginnings[-1]
        if not self._pool.state_pages and length <= longest.length:
            cache = longest.fork()
            cache.truncate(length)
            return cache
        nearest = max(i for i, each in enumerate(self._beginnings) if each.length <= length)
        cache = self._beginnings[nearest].fork()
        self._read(cache, self._ids[cache.length : length])
        return cache

    def _chain(self, text: SequenceCache, rows: int) -> Part:
        return Chain(text.fork(), self._text(rows, seed=rows))

    def _tree(self, text: SequenceCache, rows: int) -> Part:
        """Return a tree whose nodes have at most two children."""
        tree = TokenTree(1)
        for node in range(1, rows):
            tree.add((node - 1) // 2, 2 + node % 2, "probe")
        return Draft(text.fork(), tree)

    def _text(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self._vocab, (length,), generator=generator).tolist()

    def _read(self, cache: SequenceCache, ids: Sequence[int]) -> None:
        """Append tokens to a text, by the widest passes over them."""
        padding = Padding((self._widest,), (self._widest,))
        for first in range(0, len(ids), self._widest):
            tokens = ids[first : first + self._widest]
            parts = [uncommitted(Chain(cache, tokens))]
            self._logits_of(list_pass(parts, self._pool, tokens, [0], padding))
            cache.commit(range(len(tokens)))


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
