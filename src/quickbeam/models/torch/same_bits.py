"""Finds the sizes of a model's passes that give a row the same bits.

Whole passes are compared rather than products one by one: a row's logits, and its keys and values
of all layers. So norms, attention and experts are covered, too. It is a check of a few rows and not
a proof: a difference that is rounded away in all of them is not seen. In a model of usual size each
row has so many numbers that some are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from quickbeam.models.base import Batch, Chain, Draft, Part
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import ListedRows, Padding, list_pass, uncommitted
from quickbeam.models.torch.size_classes import (
    PADDING,
    PROMPT,
    TREE,
    Placement,
    class_with_widest,
)
from quickbeam.tree import TokenTree

TEXT, LONGER = 160, 300  # tokens of the text that is looked at, and of one beside it
PATH = 12  # nodes of its path in a draft tree
# How many of the text's last tokens are looked at: so many that they have `NUMBERS` numbers in keys
# and values. Where each takes passes of its own, there are `FEW`.
FEW, MOST, NUMBERS = 4, 64, 2**15
PAGES = 64  # of keys and values, at most

LogitsOf = Callable[[ListedRows], torch.Tensor]  # runs a pass: `[wanted, vocab]`


def find_padding(
    logits_of: LogitsOf, pool: RowPool, vocab: int, context: int | None, sizes: Sequence[int]
) -> Padding | None:
    """Return sizes of passes in which a row has the same bits wherever it stands.

    They include the largest of `sizes`, for rows and for rows with logits. `vocab`: of the model.
    `context`: tokens that it can read, None for any number. Returns None where there are no such
    sizes, and for a context that is too short to look.
    """
    if context is not None and context < 2 * max(sizes):
        return None
    limit, pool.limit = pool.limit, PAGES  # on CUDA, pools without a limit begin large
    probe = Probe(logits_of, pool, vocab, context, max(sizes))
    try:
        rows = class_with_widest(probe.in_rows, sizes)
        wanted = class_with_widest(probe.in_wanted, sizes) if rows else ()
    finally:
        probe.release()
        pool.limit = limit
    return Padding(rows, wanted) if rows and wanted else None


class Neighbours(NamedTuple):
    """Parts of a pass before and behind the part with the row that is looked at."""

    before: list[Part]
    part: Part
    behind: list[Part]

    @property
    def parts(self) -> list[Part]:
        return [*self.before, self.part, *self.behind]

    @property
    def row(self) -> int:
        """The number of the row that is looked at: the last one of its part."""
        return sum(part.rows for part in [*self.before, self.part]) - 1


class Probe:
    """Runs the last tokens of a text, each of them wherever it is asked to.

    All that comes before a token has been run in the widest passes. There are two other sequences.
    """

    def __init__(
        self, logits_of: LogitsOf, pool: RowPool, vocab: int, context: int | None, widest: int
    ) -> None:
        self._logits_of, self._pool, self._vocab = logits_of, pool, vocab
        self._widest = widest
        most = LONGER + widest if context is None else context
        self._ids = self._text(min(TEXT, most), 3)
        numbers = pool.page_bytes // pool.page // pool.dtype.itemsize
        rows = min(MOST, len(self._ids), max(FEW, NUMBERS // numbers))
        self._rows = range(len(self._ids) - rows, len(self._ids))
        self._cache = self._read(self._ids[:-1])
        lengths = max(1, min(LONGER, most - widest)), 9
        self._others = [self._read(self._text(length, 5 + length)) for length in lengths]

    def release(self) -> None:
        for cache in (self._cache, *self._others):
            cache.release()

    def in_rows(self, placement: Placement) -> dict[int, bytes]:
        """Return the bits of tokens in passes of so many rows."""
        padding = Padding((placement.size,), (self._widest,))
        bits = dict[int, bytes]()
        for tokens in self._passes(placement):
            neighbours = self._neighbours(placement, tokens[-1] + 1)
            rows = range(neighbours.row + 1 - len(tokens), neighbours.row + 1)
            bits |= zip(tokens, self._bits(neighbours, rows, [*rows], 0, padding), strict=True)
        return bits

    def in_wanted(self, placement: Placement) -> dict[int, bytes]:
        """Return the bits of tokens where logits of so many rows are wanted."""
        size, position, kind = placement
        padding = Padding((self._widest,), (size,))
        bits = dict[int, bytes]()
        for tokens in self._passes(placement):
            prompt = Placement(self._widest, self._widest - 1, PROMPT)
            neighbours = self._neighbours(prompt, tokens[-1] + 1)
            rows = range(self._widest - len(tokens), self._widest)
            alone = kind in (PADDING, PROMPT)
            wanted = [*rows] if alone else [*range(position), rows[0], *range(position + 1, size)]
            first = 0 if alone else position
            bits |= zip(tokens, self._bits(neighbours, rows, wanted, first, padding), strict=True)
        return bits

    def _passes(self, placement: Placement) -> Iterator[range]:
        """Yield the tokens that are looked at in each pass, which follow one another."""
        size, _, kind = placement
        together = size if kind == PROMPT else 1
        looked_at = self._rows if kind == PROMPT or size == 1 else self._rows[-FEW:]
        for end in range(len(looked_at), 0, -together):
            yield looked_at[max(0, end - together) : end]

    def _bits(
        self,
        neighbours: Neighbours,
        rows: range,
        wanted: list[int],
        first: int,
        padding: Padding,
    ) -> list[bytes]:
        """Return the bits of rows of a pass, of which number `first` of `wanted` is the first."""
        batch = Batch(neighbours.parts)
        parts = [*map(uncommitted, batch.parts)]
        listed = list_pass(parts, self._pool, batch.tokens, wanted, padding)
        logits = self._logits_of(listed)[first : first + len(rows)].cpu()
        slots = torch.from_numpy(listed.written[rows.start : rows.stop]).to(self._pool.device)
        written = [tensor[slots].cpu() for tensor in (*self._pool.key, *self._pool.value)]
        for part in batch.parts:
            part.cache.release()
        return [_digest([of_rows[i] for of_rows in (logits, *written)]) for i in range(len(rows))]

    def _neighbours(self, placement: Placement, end: int) -> Neighbours:
        """Return a pass in which the last token before `end` stands as `placement` says."""
        size, position, kind = placement
        part = self._part(kind, position, end)
        if kind == PADDING:
            return Neighbours([], part, [])
        before, behind = position + 1 - part.rows, size - 1 - position
        return Neighbours(
            [self._chain(self._others[0], before)] if before else [],
            part,
            [self._tree(self._others[1], behind)] if behind else [],
        )

    def _part(self, kind: str, position: int, end: int) -> Part:
        """Return the part of the pass that ends in the row that is looked at."""
        tokens = {PROMPT: position + 1, TREE: min(PATH, position // 2 + 1)}.get(kind, 1)
        first = max(0, end - tokens)
        cache = self._cache.fork()
        cache.truncate(first)
        path = self._ids[first:end]
        if kind != TREE:
            return Chain(cache, path)
        tree = TokenTree(path[0])
        node = 0
        for token in path[1:]:  # each of them behind a sibling
            tree.add(node, (token + 1) % self._vocab, "probe")
            node = tree.add(node, token, "probe")
        return Draft(cache, tree)

    def _chain(self, text: SequenceCache, rows: int) -> Part:
        return Chain(text.fork(), self._text(rows, rows))

    def _tree(self, text: SequenceCache, rows: int) -> Part:
        """Return a tree whose nodes have at most two children."""
        tree = TokenTree(1)
        for node in range(1, rows):
            tree.add((node - 1) // 2, 2 + node % 2, "probe")
        return Draft(text.fork(), tree)

    def _text(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self._vocab, (length,), generator=generator).tolist()

    def _read(self, ids: Sequence[int]) -> SequenceCache:
        """Return the cache of a text that the widest passes have read."""
        cache = self._pool.new()
        padding = Padding((self._widest,), (self._widest,))
        for first in range(0, len(ids), self._widest):
            tokens = ids[first : first + self._widest]
            parts = [uncommitted(Chain(cache, tokens))]
            self._logits_of(list_pass(parts, self._pool, tokens, [0], padding))
            cache.commit(range(len(tokens)))
        return cache


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for numbers in tensors:
        digest.update(numbers.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
