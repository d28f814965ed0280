"""Keys and values: the pool that all sequences share, and one sequence's part of it.

A pool is bounded in pages of some tokens. A sequence takes pages as it grows and gives all of them back with `release`. Which tensors
stand behind a page is the pool's affair: `pages.py` has those of the native kernels, `KVStore` below those of PyTorch's operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quickbeam.errors import QuickbeamError


class NoRoom(QuickbeamError):
    """The pool has no page left. A scheduler sets a sequence back then; nothing that was computed before is lost."""


class LayerShape(NamedTuple):
    """What one attention layer keeps a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class SequenceCache(ABC):
    """Keys and values of one sequence.

    Tokens have an *order*: committed tokens 0 to `length - 1` (their positions), then the nodes of the draft tree in flight, which are
    forgotten unless `commit` keeps a path of them.
    """

    length = 0

    @abstractmethod
    def missing(self, tokens: int) -> int:
        """How many pages of the pool `reserve(tokens)` would take."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` orders that may be written from `length` on, keeping what is there. Raises `NoRoom`."""

    @abstractmethod
    def commit(self, path: Sequence[int]) -> None:
        """Make the nodes of `path` (tree indices, increasing, the root 0 first) committed; the rest of the tree is forgotten."""

    @abstractmethod
    def share(self, chunk: int, tokens: int) -> Any:
        """What another sequence of the pool needs to `adopt` committed tokens `chunk * tokens` to `(chunk + 1) * tokens - 1`."""

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
    """Where sequences get their memory. `page`: tokens of one; `limit`: how many there are, None for any number; `used`: given out.

    `spare`: frees a page that nobody needs at the moment, and says whether there was one; asked before `NoRoom` is raised.
    """

    page: int
    page_bytes: int

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.used = limit, 0
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
        """Hold what a sequence shared (`SequenceCache.share`) beyond the sequence's life. Raises `NoRoom`."""

    @abstractmethod
    def drop(self, chunk: Any) -> None:
        """Let go of it."""

    @abstractmethod
    def idle(self, chunk: Any) -> bool:
        """Whether letting go of it frees its memory."""

    def take(self, pages: int) -> None:
        """Count pages as given out. Raises `NoRoom`."""
        while self.limit is not None and self.used + pages > self.limit:
            if not self.spare():
                raise NoRoom(f"all {self.limit} pages of keys and values ({self.page} tokens each) are taken: raise --kv-memory")
        self.used += pages

    def give(self, pages: int) -> None:
        """Count pages as free again."""
        self.used -= pages


class Page:
    """Keys and values of `Pool.page` tokens, of all layers. `data`: where they are, the pool's affair. `users`: sequences and caches that
    hold it; one that has several is never written."""

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
    """One sequence's pages of a `SharedPages`. A page that others hold too is copied before it is written."""

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
        return [i for i in range(self.length // self.page, len(self._pages)) if self._pages[i].users > 1]

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


class KVPool(Pool):
    """A pool of `KVStore`s, whose tensors are each sequence's own: it keeps count."""

    page = 64

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pairwise: bool = False,
        limit: int | None = None,
    ) -> None:
        super().__init__(limit)
        self.shapes, self.dtype, self.device, self.pairwise = list(shapes), dtype, device, pairwise
        self.page_bytes = self.page * dtype.itemsize * sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)

    def new(self) -> KVStore:
        return KVStore(self.shapes, self.dtype, self.device, pairwise=self.pairwise, pool=self)

    def keep(self, chunk: Any) -> None:
        self.take(self._pages(chunk))

    def drop(self, chunk: Any) -> None:
        self.give(self._pages(chunk))

    def idle(self, chunk: Any) -> bool:
        return True  # it is a copy

    def _pages(self, chunk: Any) -> int:
        return -(-int(chunk[0][0].shape[2]) // self.page)


class KVStore(SequenceCache):
    """One sequence's keys and values, layers of a kind in one tensor `[layers, kv_heads, capacity, dim]`, which grows by a quarter at
    least.

    `rows` says where an order lives. With `pairwise` neighbours change places (order 0 lives in row 1, order 1 in row 0): bfloat16 products
    add each pair of rows last-first, so this is the layout in which they add strictly in order (see `attention.attend_grouped`).
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pairwise: bool = False,
        block: int = 256,
        pool: KVPool | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.pairwise = pairwise
        self.block = block
        self.length = 0
        self.capacity = 0
        self.pool = pool or KVPool(shapes, dtype, device, pairwise=pairwise)
        self._pages = 0
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(self.shapes):
            groups.setdefault(shape, []).append(layer)
        self._groups = [(layers, shape) for shape, layers in groups.items()]
        self._tensors = [
            (
                torch.zeros(len(layers), shape.kv_heads, 0, shape.key_dim, dtype=dtype, device=device),
                torch.zeros(len(layers), shape.kv_heads, 0, shape.value_dim, dtype=dtype, device=device),
            )
            for layers, shape in self._groups
        ]
        self.key: list[torch.Tensor] = []  # by layer, [kv_heads, capacity, key_dim]: views
        self.value: list[torch.Tensor] = []
        self.device = device
        self._bind()

    def _bind(self) -> None:
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for (layers, _), (keys, values) in zip(self._groups, self._tensors, strict=True):
            views |= {layer: (keys[i], values[i]) for i, layer in enumerate(layers)}
        self.key = [views[layer][0] for layer in range(len(self.shapes))]
        self.value = [views[layer][1] for layer in range(len(self.shapes))]

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.pool.page)

    def missing(self, tokens: int) -> int:
        return max(0, self._pages_of(tokens) - self._pages)

    def reserve(self, tokens: int) -> None:
        if missing := self.missing(tokens):
            self.pool.take(missing)
            self._pages += missing
        if tokens <= self.capacity:
            return
        capacity = -(-max(tokens, self.capacity * 5 // 4) // self.block) * self.block
        grown = []
        for pair in self._tensors:
            wider = tuple(old.new_zeros(*old.shape[:2], capacity, old.shape[3]) for old in pair)
            for new, old in zip(wider, pair, strict=True):
                new[:, :, : self.capacity] = old
            grown.append((wider[0], wider[1]))
        self._tensors = grown
        self.capacity = capacity
        self._bind()

    def rows(self, orders: Sequence[int] | range) -> torch.Tensor:
        """Rows of the given orders, `[n]` int64 on the store's device."""
        places = torch.tensor(list(orders), dtype=torch.int64)
        return (places ^ 1 if self.pairwise else places).to(self.device)

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put `key`, `value` (`[kv_heads, n, dim]`) into `rows` of a layer."""
        self.key[layer].index_copy_(1, rows, key)
        self.value[layer].index_copy_(1, rows, value)

    def commit(self, path: Sequence[int]) -> None:
        start = self.length
        moved = [(start + node, start + depth) for depth, node in enumerate(path) if node != depth]
        if moved:
            source, target = self.rows([a for a, _ in moved]), self.rows([b for _, b in moved])
            for pair in self._tensors:
                for tensor in pair:
                    tensor.index_copy_(2, target, tensor.index_select(2, source))
        self.length = start + len(path)

    def share(self, chunk: int, tokens: int) -> Any:
        """Copies; `tokens` is even, so that pairs stay together."""
        return [tuple(tensor[:, :, chunk * tokens : (chunk + 1) * tokens].clone() for tensor in pair) for pair in self._tensors]

    def adopt(self, chunks: Sequence[Any], tokens: int) -> None:
        self.reserve(len(chunks) * tokens + 1)
        for i, chunk in enumerate(chunks):
            for pair, held in zip(self._tensors, chunk, strict=True):
                for tensor, part in zip(pair, held, strict=True):
                    tensor[:, :, i * tokens : (i + 1) * tokens] = part
        self.length = len(chunks) * tokens

    def fork(self) -> KVStore:
        other = KVStore(self.shapes, self.key[0].dtype, self.device, pairwise=self.pairwise, block=self.block, pool=self.pool)
        even = self.length + self.length % 2
        other.reserve(max(even, 1))
        for ours, theirs in zip(self._tensors, other._tensors, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                b[:, :, :even] = a[:, :, :even]
        other.length = self.length
        return other

    def release(self) -> None:
        self.pool.give(self._pages)
        self._pages = self.length = self.capacity = 0
        self._tensors = [(keys[:, :, :0].clone(), values[:, :, :0].clone()) for keys, values in self._tensors]
        self._bind()
