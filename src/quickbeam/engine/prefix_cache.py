"""The prefix cache: what was computed of the beginnings of texts, in chunks of tokens.

Requests whose texts begin alike share these chunks. They are cut where the model cuts prompts
(`Model.granularity`), so what is read from the cache has the bits of what would be computed anew.

A drafter's rows are kept beside the target's. Its last row of a chunk also depends on the token
after the chunk; the cache holds that of the text that came first, which never changes an answer. If
the drafter has not read a chunk yet, the chunk holds its hidden states.

Where the target has recurrent layers, a text can go on only behind a chunk whose state is kept: a
*snapshot*. There are at most `SNAPSHOTS`; the least recently used one goes first.

With `kept`, chunks are written to files while the engine is idle, and read from them where a text
begins with a chunk that is not in memory (`kept_prefixes.py`): those of the native kernels alone.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from quickbeam.drafters.base import Drafter
from quickbeam.engine.kept_prefixes import KeptPrefixes
from quickbeam.engine.sequence import SequenceState
from quickbeam.models.base import inference
from quickbeam.models.cache.kv import OutOfPages, Page, Pool
from quickbeam.models.native.pages import PagePool

SNAPSHOTS = 32


@dataclass(eq=False, slots=True)
class Chunk:
    """One chunk of tokens, behind those of its parents.

    - `key`: its tokens (`SequenceState.prefix_key`).
    - `kv`: the target's keys and values; empty once the chunk is dropped.
    - `last_hidden`: the hidden states `[1, layers * d]` of the last token, if known.
    - `draft`: the drafter's rows, if known.
    - `hidden`: the hidden states of all its tokens, as long as the drafter's rows are not known.
    - `snapshot`: the state of recurrent layers behind it, if kept.
    - `name`: that of its file, where chunks are kept in files.
    - `saved`: how many parts of it the file has.
    """

    parent: Chunk | None = None
    key: tuple[int, ...] = ()
    kv: list[Page] = field(default_factory=list)
    last_hidden: torch.Tensor | None = None
    draft: list[Page] | None = None
    hidden: torch.Tensor | None = None
    snapshot: Page | None = None
    name: str = ""
    saved: int = 0
    children: dict[tuple[int, ...], Chunk] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        """How many parts there are of it that a file can have."""
        parts = (self.kv, self.snapshot, self.last_hidden, self.hidden, self.draft)
        return sum(part is not None for part in parts)


class PrefixCache:
    """A tree of chunks of `size` tokens each; without a size it keeps none.

    `pool` is the target's. `drafter` is the one whose rows are kept too: that of the first sequence
    that has one. If the pool runs short, the least recently used chunks that no sequence holds are
    dropped.

    `kept`: where chunks are kept in files; None: nowhere.
    """

    def __init__(self, size: int | None, pool: Pool) -> None:
        self.size = size or sys.maxsize
        self._pool = pool
        pool.snapshots = size is not None and pool.state_pages > 0
        self._snapshots: OrderedDict[Chunk, None] = OrderedDict()  # least recently used first
        self.drafter: Drafter | None = None
        self._root = Chunk()
        self._kept: KeptPrefixes | None = None
        # least recently used first; children come before their parents
        self._by_use: OrderedDict[Chunk, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    @property
    def kept(self) -> KeptPrefixes | None:
        return self._kept

    @kept.setter
    def kept(self, kept: KeptPrefixes | None) -> None:
        if isinstance(self._pool, PagePool):
            self._kept = kept
            self._root.name = kept.root if kept is not None else ""

    def find(self, key: Sequence[int], drafter: Drafter | None = None) -> list[Chunk]:
        """Return the chunks that a text begins with, leaving at least one token.

        `key`: the text's `SequenceState.prefix_key`.

        For a drafter that reads the hidden states of every token, they end where neither its rows
        nor the hidden states are known.
        """
        needs_hidden = drafter is not None and drafter.needs_hidden and drafter.pool is not None
        if needs_hidden and drafter is not self.drafter:
            return []
        chunk = self._root
        chunks = list[Chunk]()
        has_rows = True
        for begin in range(0, len(key) - self.size, self.size):
            part = tuple(key[begin : begin + self.size])
            following = chunk.children.get(part) or self._load(chunk, part)
            if following is None:
                break
            read = following.draft is not None and following.last_hidden is not None
            has_rows = has_rows and read
            if needs_hidden and not has_rows and following.hidden is None:
                break
            chunk = following
            chunks.append(chunk)
        while self._pool.state_pages and chunks and chunks[-1].snapshot is None:
            chunks.pop()
        self._touch(chunks)
        return chunks

    def remember(self, sequence: SequenceState, tokens: int) -> None:
        """Enter the complete chunks among the first `tokens` ids of a sequence.

        These ids must have keys and values. If the pool runs short, the later chunks are left out.
        """
        chunks = sequence.chunks
        while (len(chunks) + 1) * self.size <= tokens:
            chunk = self._enter_next(sequence)
            if chunk is None:
                return
            chunks.append(chunk)
            self._keep_snapshot(chunk, sequence)
        self._keep_drafter_rows(sequence)
        self._touch(chunks)

    def _enter_next(self, sequence: SequenceState) -> Chunk | None:
        """Return the chunk after `sequence.chunks`, entered if it is new; None if it can't be."""
        cache = sequence.cache
        assert cache is not None
        at = len(sequence.chunks)
        parent = sequence.chunks[-1] if sequence.chunks else self._root
        key = tuple(sequence.prefix_key[at * self.size : (at + 1) * self.size])
        last_hidden = sequence.last_hidden.get(at)
        chunk = parent.children.get(key)
        if chunk is not None and chunk in self._by_use:
            if chunk.last_hidden is None:
                chunk.last_hidden = last_hidden
            return chunk
        kv = cache.chunk_pages(at, self.size)
        try:
            self._pool.pin(kv)
        except OutOfPages:
            return None
        return self._add(Chunk(parent, key, kv, last_hidden))

    def _add(self, chunk: Chunk) -> Chunk:
        assert chunk.parent is not None
        if self._kept is not None:
            chunk.name = self._kept.name(chunk.parent.name, chunk.key)
        chunk.parent.children[chunk.key] = chunk
        self._by_use[chunk] = None
        return chunk

    def save_next(self) -> bool:
        """Write one chunk whose file lacks something. Returns whether there was one."""
        if self._kept is None:
            return False
        for chunk in self._by_use:  # children before their parents, which so are removed later
            if chunk.parts > chunk.saved:
                chunk.saved = chunk.parts
                self._kept.save(chunk.name, self._tensors(chunk))
                return True
        return False

    def _tensors(self, chunk: Chunk) -> dict[str, torch.Tensor]:
        """Return what the file of a chunk holds. Each page is a row."""
        tensors = {"kv": torch.stack([page.data for page in chunk.kv])}
        if chunk.snapshot is not None:
            tensors["snapshot"] = chunk.snapshot.data
        if chunk.last_hidden is not None:
            tensors["last_hidden"] = chunk.last_hidden
        if chunk.hidden is not None:
            tensors["hidden"] = chunk.hidden
        if chunk.draft is not None and self._draft_pool is not None:
            tensors["draft"] = torch.stack([page.data for page in chunk.draft])
        return tensors

    @property
    def _draft_pool(self) -> PagePool | None:
        pool = None if self.drafter is None else self.drafter.pool
        return pool if isinstance(pool, PagePool) else None

    def _load(self, parent: Chunk, key: tuple[int, ...]) -> Chunk | None:
        """Return the chunk behind `parent` from its file, entered; None if it has none.

        Nothing is evicted for it, since that might be a chunk that was found just before.
        """
        if self._kept is None:
            return None
        pages = self.size // self._pool.page
        free = self._pool.free
        if free is not None and free < 2 * pages + self._pool.state_pages:
            return None
        tensors = self._kept.load(self._kept.name(parent.name, key))
        if tensors is None:
            return None
        kv = _read_pages(self._pool, pages, tensors["kv"]) if "kv" in tensors else None
        if kv is None:
            return None
        chunk = Chunk(parent, key, kv, tensors.get("last_hidden"), hidden=tensors.get("hidden"))
        if "snapshot" in tensors and self._pool.state_pages:
            snapshot = self._pool.allocate_state()
            if _alike(snapshot.data, tensors["snapshot"]):
                snapshot.data.copy_(tensors["snapshot"])
                self._hold_snapshot(chunk, snapshot)
            else:
                self._pool.release(snapshot)
        draft_pool = self._draft_pool
        if "draft" in tensors and draft_pool is not None:
            chunk.draft = _read_pages(draft_pool, self.size // draft_pool.page, tensors["draft"])
        chunk.saved = chunk.parts
        return self._add(chunk)

    def _keep_snapshot(self, chunk: Chunk, sequence: SequenceState) -> None:
        """Keep the state of recurrent layers behind the last chunk, if the cache has it."""
        if chunk.snapshot is not None or sequence.cache is None:
            return
        snapshot = sequence.cache.snapshot(len(sequence.chunks) * self.size)
        if snapshot is None:
            return
        self._pool.pin([snapshot])
        self._hold_snapshot(chunk, snapshot)

    def _hold_snapshot(self, chunk: Chunk, snapshot: Page) -> None:
        """Let a chunk hold a snapshot, which already counts the cache as a user."""
        chunk.snapshot = snapshot
        self._snapshots[chunk] = None
        if len(self._snapshots) > SNAPSHOTS:
            self._drop_snapshot(next(iter(self._snapshots)))

    def _keep_drafter_rows(self, sequence: SequenceState) -> None:
        """Keep the drafter's rows of `sequence.chunks`, else the hidden states of their tokens."""
        state = sequence.draft_state
        pool = None if self.drafter is None else self.drafter.pool
        if pool is None or state is None or sequence.drafter is not self.drafter:
            return
        for at, chunk in reversed(list(enumerate(sequence.chunks))):
            if chunk.draft is not None:
                break
            if chunk not in self._by_use:
                continue
            rows = state.chunk_pages(at, self.size)
            if rows is not None:
                pool.pin(rows)
                chunk.draft = rows
                chunk.hidden = None
            elif chunk.hidden is None:
                chunk.hidden = state.unread_hidden(at, self.size)

    def _drop_snapshot(self, chunk: Chunk) -> None:
        if chunk.snapshot is not None:
            self._pool.unpin([chunk.snapshot])
            del self._snapshots[chunk]
            chunk.snapshot = None

    def evictable_pages(self, kept: Sequence[Chunk] = ()) -> int:
        """Return how many pages could be freed by dropping chunks other than `kept`.

        May be called from any thread. Chunks that are dropped meanwhile don't count.
        """
        pages = 0
        without = set(kept)
        for chunk in list(self._by_use):
            kv = chunk.kv
            snapshot = chunk.snapshot
            if chunk in without or not kv or not self._pool.is_evictable(kv):
                continue
            pages += -(-self.size // self._pool.page)
            if snapshot is not None and self._pool.is_evictable([snapshot]):
                pages += self._pool.state_pages
        return pages

    def evict(self) -> bool:
        """Drop the least recently used chunk that nothing else holds, with those behind it.

        Where all are held, a snapshot goes. Returns whether there was anything to drop.
        """
        free = (chunk for chunk in self._by_use if self._pool.is_evictable(chunk.kv))
        if (first := next(free, None)) is not None:
            below = [first]
            for chunk in below:  # which gets longer in the loop
                below += chunk.children.values()
            for chunk in reversed(below):
                self._drop(chunk)
            return True
        if (oldest := next(iter(self._snapshots), None)) is not None:
            self._drop_snapshot(oldest)
        return oldest is not None

    def clear(self) -> None:
        for chunk in list(self._by_use):
            self._drop(chunk)

    def _drop(self, chunk: Chunk) -> None:
        del self._by_use[chunk]
        if chunk.parent is not None:
            chunk.parent.children.pop(chunk.key, None)
        self._pool.unpin(chunk.kv)
        self._drop_snapshot(chunk)
        if chunk.draft is not None and self.drafter is not None and self.drafter.pool is not None:
            self.drafter.pool.unpin(chunk.draft)
        chunk.kv = []
        chunk.draft = chunk.last_hidden = chunk.hidden = None
        chunk.children = {}

    def _touch(self, chunks: Sequence[Chunk]) -> None:
        for chunk in reversed(chunks):
            if chunk in self._by_use:
                self._by_use.move_to_end(chunk)
        if chunks and chunks[-1] in self._snapshots:
            self._snapshots.move_to_end(chunks[-1])


@inference
def _read_pages(pool: Pool, count: int, rows: torch.Tensor) -> list[Page] | None:
    """Return `count` new pages with these rows; None if they don't fit, or there is no memory."""
    if len(rows) != count:
        return None
    pages = list[Page]()
    try:
        for row in rows:
            page = pool.allocate_page()
            pages.append(page)
            if not _alike(page.data, row):
                raise OutOfPages("rows of other pages")
            page.data.copy_(row)
    except OutOfPages:
        pool.unpin(pages)
        return None
    return pages


def _alike(memory: torch.Tensor, stored: torch.Tensor) -> bool:
    return memory.shape == stored.shape and memory.dtype == stored.dtype
