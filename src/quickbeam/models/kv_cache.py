"""Keys and values: the pool that all sequences share, and one sequence's part of it.

A pool counts its memory in pages, each of which holds the same number of tokens. Its limit is a
number of pages. A sequence takes pages as it grows, and gives all of them back with `release`. The
pool decides which tensors stand behind a page. `pages.py` has those of the native kernels,
`kv_store.py` those of PyTorch's operators on a CPU, and `gathered.py` those of accelerators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from quickbeam.errors import QuickbeamError


class NoRoom(QuickbeamError):
    """The pool has no page left.

    A scheduler then sets a sequence back. The committed tokens of all caches are still there.
    """


class LayerShape(NamedTuple):
    """What one attention layer keeps of each token.

    For each of `kv_heads`, it is a key of `key_dim` numbers and a value of `value_dim` numbers.
    """

    kv_heads: int
    key_dim: int
    value_dim: int


class SequenceCache(ABC):
    """Keys and values of one sequence.

    Tokens have an *order*. Committed tokens have the orders 0 to `length - 1`, which are their
    positions. The nodes of the draft tree in flight have the orders after these. They are forgotten
    unless `commit` keeps a path of them.
    """

    length = 0

    @abstractmethod
    def missing(self, tokens: int) -> int:
        """Return how many pages of the pool `reserve(tokens)` would take."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for the orders 0 to `tokens - 1`, and keep what is there.

        Those from `length` on may then be written. Raises `NoRoom`.
        """

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Commit the nodes of `path`, and forget the rest of the tree.

        `path`: tree indices, increasing, the root 0 first.
        """

    @abstractmethod
    def share(self, chunk: int, tokens: int) -> Any:
        """Return what another sequence of the pool needs to `adopt` a chunk of committed tokens.

        The chunk is tokens `chunk * tokens` to `(chunk + 1) * tokens - 1`.
        """

    @abstractmethod
    def adopt(self, chunks: Sequence[Any], tokens: int) -> None:
        """Begin an empty sequence with chunks of `tokens` tokens each, as `share` returned them.

        May raise `NoRoom`.
        """

    @abstractmethod
    def fork(self) -> SequenceCache:
        """Return another sequence with the same committed tokens. Raises `NoRoom`."""

    @abstractmethod
    def release(self) -> None:
        """Give all pages back to the pool."""

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on.

        Raises `ValueError` for a `length` below 0 or above the sequence's.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate a sequence of {self.length} tokens to {length}")
        self.length = length


class Pool(ABC):
    """Where sequences get the memory for their keys and values.

    `page`: tokens of a page; `page_bytes`: bytes of a page; `limit`: how many pages there are, None
    for any number; `used`: how many are given out.

    `spare`: a function that frees pages that nobody needs at the moment, and returns whether there
    were any. It is called before `NoRoom` is raised.
    """

    page: int
    page_bytes: int
    shares = True  # whether sequences that adopt a chunk use its memory; otherwise they copy it

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.used = limit, 0
        self._bounded = True
        self.spare: Callable[[], bool] = lambda: False

    @abstractmethod
    def new(self) -> SequenceCache:
        """Return an empty sequence."""

    @property
    def free(self) -> int | None:
        """How many pages are left; None for any number."""
        return None if self.limit is None else self.limit - self.used

    @abstractmethod
    def keep(self, chunk: Any) -> None:
        """Hold what a sequence shared (`SequenceCache.share`) beyond the sequence's life.

        May raise `NoRoom`.
        """

    @abstractmethod
    def drop(self, chunk: Any) -> None:
        """Let go of a chunk that `keep` holds."""

    @abstractmethod
    def idle(self, chunk: Any) -> bool:
        """Whether letting go of a chunk frees its memory."""

    def take(self, pages: int) -> None:
        """Count pages as given out. Raises `NoRoom` where not so many are left."""
        while self._bounded and self.limit is not None and self.used + pages > self.limit:
            if not self.spare():
                raise NoRoom(
                    f"all {self.limit} pages of keys and values ({self.page} tokens each) "
                    "are taken: raise --kv-memory"
                )
        self.used += pages

    def give(self, pages: int) -> None:
        """Count pages as free again."""
        self.used -= pages

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Let `take` ignore the limit within this context.

        This is for pages that are given back before anyone else asks for some. `limit` itself stays
        as it is for all who read it.
        """
        self._bounded = False
        try:
            yield
        finally:
            self._bounded = True


class Page:
    """Keys and values of `Pool.page` tokens, of all layers.

    `data`: where they are, in a form that only the pool knows. `users`: how many sequences and
    caches hold the page. A page with several users is never written.
    """

    __slots__ = ("data", "users")

    def __init__(self, data: Any) -> None:
        self.data, self.users = data, 0


class SharedPages(Pool):
    """A pool whose pages sequences can share. Pages without users are used again."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._unused: list[Page] = []

    @abstractmethod
    def make(self) -> Page:
        """Return a new page."""

    @abstractmethod
    def copy(self, source: Page, target: Page) -> None:
        """Copy all tokens of one page to another."""

    def renew(self, page: Page) -> None:
        """Prepare a page that was used before."""

    def page_for(self) -> Page:
        """Return a page for one user. Raises `NoRoom`."""
        self.take(1)
        if self._unused:
            page = self._unused.pop()
            self.renew(page)
        else:
            page = self.make()
        page.users = 1
        return page

    def leave(self, page: Page) -> None:
        """Take one user from a page. Without users, the page is free again."""
        page.users -= 1
        if not page.users:
            self.give(1)
            self._unused.append(page)

    def keep(self, chunk: list[Page]) -> None:
        for page in chunk:
            page.users += 1

    def drop(self, chunk: list[Page]) -> None:
        for page in chunk:
            self.leave(page)

    def idle(self, chunk: list[Page]) -> bool:
        return all(page.users == 1 for page in chunk)


class PagedSequence(SequenceCache):
    """One sequence's pages of a `SharedPages`.

    A page that has other users too is copied before it is written.
    """

    def __init__(self, pool: SharedPages) -> None:
        self.pages_of: SharedPages = pool
        self.page = pool.page
        self.length = 0
        self._pages: list[Page] = []

    @property
    def capacity(self) -> int:
        """How many orders there is room for."""
        return len(self._pages) * self.page

    def bind(self) -> None:
        """Called when the list of pages has changed."""

    def _shared(self) -> list[int]:
        """Return the indices of the pages that would be written next and have other users too."""
        return [
            i for i in range(self.length // self.page, len(self._pages)) if self._pages[i].users > 1
        ]

    def missing(self, tokens: int) -> int:
        return max(0, -(-tokens // self.page) - len(self._pages)) + len(self._shared())

    def reserve(self, tokens: int) -> None:
        missing, shared = -(-tokens // self.page) - len(self._pages), self._shared()
        if missing <= 0 and not shared:
            return
        try:
            for i in shared:
                own = self.pages_of.page_for()
                self.pages_of.copy(self._pages[i], own)
                self.pages_of.leave(self._pages[i])
                self._pages[i] = own
            for _ in range(missing):
                self._pages.append(self.pages_of.page_for())
        finally:
            self.bind()

    def share(self, chunk: int, tokens: int) -> list[Page]:
        """Return the pages themselves. Whoever keeps them counts as a user (`Page.users`)."""
        pages = tokens // self.page
        return self._pages[chunk * pages : (chunk + 1) * pages]

    def adopt(self, chunks: Sequence[list[Page]], tokens: int) -> None:
        for page in (page for chunk in chunks for page in chunk):
            page.users += 1
            self._pages.append(page)
        self.length = len(chunks) * tokens
        self.bind()

    def fork(self) -> SequenceCache:
        other = self.pages_of.new()
        other.adopt([self._pages[: -(-self.length // self.page)]], 0)
        other.length = self.length
        return other

    def release(self) -> None:
        while self._pages:  # one by one, so that an interrupt leaves those that are still held
            self.pages_of.leave(self._pages.pop())
        self.length = 0
        self.bind()
