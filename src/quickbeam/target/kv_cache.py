"""Keys and values: the pool that all sequences share, and one sequence's part of it.

A pool is bounded in pages of some tokens. A sequence takes pages as it grows and gives all of them
back with `release`. Which tensors stand behind a page is the pool's affair: `pages.py` has those of
the native kernels, `kv_store.py` those of PyTorch's operators on a CPU, `gathered.py` those of
accelerators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from quickbeam.errors import QuickbeamError


class NoRoom(QuickbeamError):
    """The pool has no page left. A scheduler sets a sequence back then; nothing that was computed
    before is lost."""


class LayerShape(NamedTuple):
    """What one attention layer keeps a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class SequenceCache(ABC):
    """Keys and values of one sequence.

    Tokens have an *order*: committed tokens 0 to `length - 1` (their positions), then the nodes of
    the draft tree in flight, which are forgotten unless `commit` keeps a path of them.
    """

    length = 0

    @abstractmethod
    def missing(self, tokens: int) -> int:
        """How many pages of the pool `reserve(tokens)` would take."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` orders that may be written from `length` on, keeping what is
        there. Raises `NoRoom`."""

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Make the nodes of `path` (tree indices, increasing, the root 0 first) committed; the rest
        of the tree is forgotten."""

    @abstractmethod
    def share(self, chunk: int, tokens: int) -> Any:
        """What another sequence of the pool needs to `adopt` committed tokens `chunk * tokens` to
        `(chunk + 1) * tokens - 1`."""

    @abstractmethod
    def adopt(self, chunks: Sequence[Any], tokens: int) -> None:
        """Begin an empty sequence with chunks of `tokens` tokens each, as `share` gave them."""

    @abstractmethod
    def fork(self) -> SequenceCache:
        """Another sequence with the same committed tokens. Raises `NoRoom`."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back to the pool."""

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate a sequence of {self.length} tokens to {length}")
        self.length = length


class Pool(ABC):
    """Where sequences get their memory. `page`: tokens of one; `limit`: how many there are, None
    for any number; `used`: given out.

    `spare`: frees a page that nobody needs at the moment, and says whether there was one; asked
    before `NoRoom` is raised.
    """

    page: int
    page_bytes: int

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.used = limit, 0
        self._bounded = True
        self.spare: Callable[[], bool] = lambda: False

    @abstractmethod
    def new(self) -> SequenceCache:
        """An empty sequence."""

    @property
    def free(self) -> int | None:
        """Pages that are left; None: any number."""
        return None if self.limit is None else self.limit - self.used

    @abstractmethod
    def keep(self, chunk: Any) -> None:
        """Hold what a sequence shared (`SequenceCache.share`) beyond the sequence's life. Raises
        `NoRoom`."""

    @abstractmethod
    def drop(self, chunk: Any) -> None:
        """Let go of it."""

    @abstractmethod
    def idle(self, chunk: Any) -> bool:
        """Whether letting go of it frees its memory."""

    def take(self, pages: int) -> None:
        """Count pages as given out. Raises `NoRoom`."""
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
        """`take` heeds no limit meanwhile, for what is given back before anyone else asks. `limit`
        stays what it is to all who read it."""
        self._bounded = False
        try:
            yield
        finally:
            self._bounded = True


class Page:
    """Keys and values of `Pool.page` tokens, of all layers. `data`: where they are, the pool's
    affair. `users`: sequences and caches that hold it; one that has several is never written."""

    __slots__ = ("data", "users")

    def __init__(self, data: Any) -> None:
        self.data, self.users = data, 0


class SharedPages(Pool):
    """A pool whose pages sequences share; those that nobody holds any more are used again."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._unused: list[Page] = []

    @abstractmethod
    def make(self) -> Page:
        """Another page."""

    @abstractmethod
    def copy(self, source: Page, target: Page) -> None:
        """All tokens of one page to another."""

    def renew(self, page: Page) -> None:
        """Prepare a page that somebody else had."""

    def page_for(self) -> Page:
        """A page for one user. Raises `NoRoom`."""
        self.take(1)
        if self._unused:
            page = self._unused.pop()
            self.renew(page)
        else:
            page = self.make()
        page.users = 1
        return page

    def leave(self, page: Page) -> None:
        """One user less."""
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
    """One sequence's pages of a `SharedPages`. A page that others hold too is copied before it is
    written."""

    def __init__(self, pool: SharedPages) -> None:
        self.pages_of: SharedPages = pool
        self.page = pool.page
        self.length = 0
        self._pages: list[Page] = []

    @property
    def capacity(self) -> int:
        """Orders that there is room for."""
        return len(self._pages) * self.page

    def bind(self) -> None:
        """The list of pages is another one."""

    def _shared(self) -> list[int]:
        """Pages from `length` on that others hold too."""
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
        """The pages themselves; who keeps them counts as a user (`Page.users`)."""
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
        for page in self._pages:
            self.pages_of.leave(page)
        self._pages, self.length = [], 0
        self.bind()
