"""The KV cache: one pool of pages for all sequences of a model, and states of recurrent layers.

A page holds the keys and values of `Pool.page` tokens, of all layers. A sequence allocates pages as
it grows, and releases all of them at its end. A page may have several users: a fork has the pages
of the first sequence, the prefix cache pins chunks of pages, and new sequences attach them. A page
that has other users is copied before it is written. One without users is free.

A state of recurrent layers is never changed: a pass reads the state behind the committed tokens,
and a commit computes another one from it. So states may have several users, as full pages may, and
a pass that fails has changed nothing.

The pool's subclasses say how a page lies in memory: `native/pages.py` as the native kernels read
it, `torch/pages.py` as rows of PyTorch's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quickbeam.errors import QuickbeamError
from quickbeam.models.vision.positions import ImagePositions


class OutOfPages(QuickbeamError):
    """The pool has no page left.

    A scheduler then preempts a sequence. All caches still have their committed tokens.
    """


class Page:
    """Keys and values of `Pool.page` tokens, of all layers.

    `data`: where they are, in a form that only the pool knows. `users`: how many sequences and
    caches refer to the page. A page with several users is never written. `state`: it is a state of
    recurrent layers, which takes as much memory as `size` pages.
    """

    __slots__ = ("data", "size", "state", "users")

    def __init__(self, data: Any, size: int = 1, state: bool = False) -> None:
        self.data, self.users = data, 0
        self.size, self.state = size, state


class Pool(ABC):
    """Where sequences get the memory for their keys and values.

    `page`: tokens of a page; `page_bytes`: bytes of a page; `limit`: how many pages there are, None
    for any number; `used`: how many have users.

    `state_pages`: how many pages of memory a state of recurrent layers takes; 0 where there are no
    such layers. `snapshots`: whether sequences retain their states at page boundaries for a prefix
    cache (`SequenceCache.snapshot`).

    `evict`: a function that frees cached pages, and returns whether there were any. It is called
    before `OutOfPages` is raised.
    """

    page: int
    page_bytes: int
    state_pages = 0
    snapshots = False

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.used = limit, 0
        self._bounded = True
        self._free_pages, self._free_states = list[Page](), list[Page]()
        self.evict: Callable[[], bool] = lambda: False

    @abstractmethod
    def new(self) -> SequenceCache:
        """Return an empty sequence."""

    @abstractmethod
    def make(self) -> Page:
        """Return a new page."""

    @abstractmethod
    def copy(self, source: Page, target: Page) -> None:
        """Copy all tokens of one page to another."""

    def renew(self, page: Page) -> None:  # noqa: B027
        """Prepare a page that was used before."""

    def make_state(self) -> Any:
        """Return memory for a state of recurrent layers, of models that have some."""
        raise NotImplementedError

    def set_state_size(self, size: int) -> None:
        """Set how many bytes a state takes, after `page_bytes`."""
        self.state_pages = -(-size // max(1, self.page_bytes))

    def allocate_state(self) -> Page:
        """Return a state for one user, which is still to be written. Raises `OutOfPages`."""
        self._evict_for(self.state_pages)
        if self._free_states:
            return self._count_user(self._free_states.pop())
        return self._count_user(Page(self.make_state(), self.state_pages, True))

    @property
    def free(self) -> int | None:
        """How many pages are left; None for any number."""
        return None if self.limit is None else self.limit - self.used

    @property
    def most_state_pages(self) -> int:
        """How many pages the states of one sequence may take.

        Its states are the one behind its committed tokens, the next one, and two at page
        boundaries.
        """
        return self.state_pages * (4 if self.snapshots else 2)

    def allocate_page(self) -> Page:
        """Return a page for one user. Raises `OutOfPages`."""
        self._evict_for(1)
        if self._free_pages:
            page = self._free_pages.pop()
            self.renew(page)
        else:
            page = self.make()
        return self._count_user(page)

    def _evict_for(self, pages: int) -> None:
        while self._bounded and self.limit is not None and self.used + pages > self.limit:
            if not self.evict():
                raise OutOfPages(
                    f"all {self.limit} pages of keys and values ({self.page} tokens each) "
                    "are taken: raise --kv-memory"
                )

    def _count_user(self, page: Page) -> Page:
        self.used += page.size
        page.users = 1
        return page

    def release(self, page: Page) -> None:
        """Take one user from a page. Without users, the page is free again."""
        page.users -= 1
        if not page.users:
            self.used -= page.size
            (self._free_states if page.state else self._free_pages).append(page)

    def pin(self, chunk: Sequence[Page]) -> None:
        """Count one more user of a chunk's pages (`SequenceCache.chunk_pages`), as a cache is."""
        for page in chunk:
            page.users += 1

    def unpin(self, chunk: Sequence[Page]) -> None:
        """Release the pages of a chunk that was pinned."""
        for page in chunk:
            self.release(page)

    def is_evictable(self, chunk: Sequence[Page]) -> bool:
        """Whether a pinned chunk has no other user, so that unpinning it frees its memory."""
        return all(page.users == 1 for page in chunk)

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Ignore the limit within this context.

        This is for pages that are released before others are allocated. `limit` itself stays as it
        is.
        """
        self._bounded = False
        try:
            yield
        finally:
            self._bounded = True


class SequenceStates(ABC):
    """The states of one sequence.

    `length` everywhere: how many tokens are committed.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._state: Page | None = None  # behind the committed tokens; None: zeros
        self._next: Page | None = None  # what a pass, or a commit, may write
        # the last state at a page boundary, and the number of tokens before it
        self._retained: tuple[int, Page] | None = None

    def missing(self, length: int, tokens: int) -> int:
        """Return how many pages of the pool `reserve` would take."""
        return self._pool.state_pages * (self._next is None)

    def reserve(self, length: int, tokens: int) -> None:
        """Allocate the states of a pass over tokens up to `tokens`. Raises `OutOfPages`."""
        if self._next is None:
            self._next = self._pool.allocate_state()

    @abstractmethod
    def commit(self, path: Sequence[int], length: int) -> None:
        """Compute the state behind the nodes of `path`. `length`: without these."""

    def _step(self, length: int) -> None:
        """Take the next state, which is written, for that behind `length` tokens."""
        self._release(self._state)
        self._state, self._next = self._next, None
        if self._state is not None:
            self._retain_at_boundary(length, self._state)

    def _retain_at_boundary(self, tokens: int, state: Page) -> None:
        if self._pool.snapshots and not tokens % self._pool.page:
            state.users += 1
            self._retain(tokens, state)

    def _retain(self, tokens: int, state: Page) -> None:
        """Retain the state behind `tokens` tokens in place of that at an earlier boundary."""
        if self._retained is not None:
            _, earlier = self._retained
            self._release(earlier)
        self._retained = tokens, state

    def _release(self, page: Page | None) -> None:
        if page is not None:
            self._pool.release(page)

    def snapshot(self, tokens: int) -> Page | None:
        """Return the state behind the first `tokens` tokens; None where it is not retained."""
        if self._retained is None:
            return None
        length, state = self._retained
        return state if length == tokens else None

    def attach(self, state: Page | None, tokens: int) -> None:
        """Begin an empty sequence with a state of `tokens` tokens, which may have other users."""
        if state is None:
            return
        state.users += 1
        self._state = state
        self._retain_at_boundary(tokens, state)

    def fork(self, other: SequenceStates, tokens: int) -> None:
        """Attach this sequence's state to another, which is empty."""
        other.attach(self._state, tokens)

    def release(self) -> None:
        """Release all states."""
        _, retained = self._retained or (0, None)
        states = [self._state, self._next, retained]
        self._state = self._next = self._retained = None
        for state in states:
            self._release(state)


class SequenceCache(ABC):
    """Keys and values of one sequence: a list of `pages`, and states of recurrent layers.

    Each token has a *slot*. Committed tokens have the slots 0 to `length - 1`, which are their
    positions. The nodes of the draft tree in flight have the slots after these. Nodes are forgotten
    unless `commit` keeps a path of them.

    `positions`: the rotary positions of tokens, where images have three numbers each; None where a
    token's is its index.
    """

    positions: ImagePositions | None = None

    def __init__(self, pool: Pool) -> None:
        self.pool, self.page = pool, pool.page
        self.length = 0
        self.pages: list[Page] = []
        self._states: SequenceStates | None = None  # where the model has recurrent layers

    @abstractmethod
    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the keys and values of the slots `source` to the slots `target`."""

    def bind(self) -> None:  # noqa: B027
        """React to a change of the list of pages, which every change is followed by."""

    def _pages_to_copy(self) -> list[int]:
        """Return the indices of the pages that would be written next and have other users too."""
        first = self.length // self.page
        return [i for i in range(first, len(self.pages)) if self.pages[i].users > 1]

    def _pages_to_add(self, tokens: int) -> int:
        return max(0, -(-tokens // self.page) - len(self.pages))

    def missing(self, tokens: int) -> int:
        """Return how many pages of the pool `reserve(tokens)` would take."""
        missing = self._pages_to_add(tokens) + len(self._pages_to_copy())
        if self._states is not None:
            missing += self._states.missing(self.length, tokens)
        return missing

    def reserve(self, tokens: int) -> None:
        """Allocate pages for the slots 0 to `tokens - 1`, and keep what is in them.

        The slots from `length` on may then be written. Raises `OutOfPages`.
        """
        to_add, to_copy = self._pages_to_add(tokens), self._pages_to_copy()
        if to_add or to_copy:
            try:
                for i in to_copy:
                    copied = self.pool.allocate_page()
                    self.pool.copy(self.pages[i], copied)
                    self.pool.release(self.pages[i])
                    self.pages[i] = copied
                for _ in range(to_add):
                    self.pages.append(self.pool.allocate_page())
            finally:
                self.bind()
        if self._states is not None:
            self._states.reserve(self.length, tokens)

    def commit(self, path: Sequence[int]) -> None:
        """Commit the nodes of `path`, and forget the rest of the tree.

        `path`: tree indices, increasing, the root 0 first.
        """
        start = self.length
        if self._states is not None:
            self._states.commit(path, start)
        source, target = list[int](), list[int]()
        for depth, node in enumerate(path):
            if node != depth:
                source.append(start + node)
                target.append(start + depth)
        if source:
            self.move(source, target)
        self.length = start + len(path)

    def chunk_pages(self, chunk: int, tokens: int) -> list[Page]:
        """Return the pages of a chunk of committed tokens, which other sequences may `attach`.

        The chunk is tokens `chunk * tokens` to `(chunk + 1) * tokens - 1`, full pages. A cache that
        keeps them pins them (`Pool.pin`).
        """
        pages = tokens // self.page
        return self.pages[chunk * pages : (chunk + 1) * pages]

    def snapshot(self, tokens: int) -> Page | None:
        """Return the state of the recurrent layers behind the first `tokens` committed tokens.

        None where it is not retained. A cache that keeps it pins it (`Pool.pin`).
        """
        return None if self._states is None else self._states.snapshot(tokens)

    def attach(
        self, chunks: Sequence[Sequence[Page]], tokens: int, snapshot: Page | None = None
    ) -> None:
        """Begin an empty sequence with the pages of chunks of `tokens` tokens each.

        `snapshot`: the state behind the chunks, which recurrent layers need.
        """
        for chunk in chunks:
            for page in chunk:
                page.users += 1
                self.pages.append(page)
        self.length = len(chunks) * tokens
        self.bind()
        if self._states is not None:
            self._states.attach(snapshot, self.length)

    def fork(self) -> SequenceCache:
        """Return another sequence with the same committed tokens."""
        other = self.pool.new()
        other.attach([self.pages[: -(-self.length // self.page)]], 0)
        other.length = self.length
        if self._states is not None and other._states is not None:
            self._states.fork(other._states, self.length)
        return other

    def release(self) -> None:
        """Release all pages."""
        while self.pages:  # one by one, so that an interrupt leaves those that still count it
            self.pool.release(self.pages.pop())
        self.length = 0
        self.bind()
        if self._states is not None:
            self._states.release()

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on. With recurrent layers, these are all or none.

        Raises `ValueError` for another `length`, and for one below 0 or above the sequence's.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate a sequence of {self.length} tokens to {length}")
        if self._states is not None and length != self.length:
            if length:
                raise ValueError(
                    f"a sequence of {self.length} tokens with recurrent layers can't go back to "
                    f"{length}: only to 0"
                )
            self._states.release()
        self.length = length
