"""Attention of many sequences in one masked call a layer, for accelerators.

The keys of all sequences lie in one tensor a layer, and so do the values. A pass needs to know
where rows are written, whose keys each sequence reads, and what each row sees. The host works this
out once for all layers, and sends it over in a few pieces, so that nothing waits for the device. On
a CPU this way measured 5 to 46 % slower behind 1,000 tokens than attention sequence by sequence
(`attention.Steps`), which is why both exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from quickbeam.models.attention import Attend, Layer, Step, Steps
from quickbeam.models.batch import Draft, Part
from quickbeam.models.inference import inference
from quickbeam.models.kv_cache import LayerShape, Page, PagedSequence, SharedPages


class RowPool(SharedPages):
    """Pages that are rows of two tensors a layer, for keys and for values.

    The tensors are `[rows, kv_heads, dim]`. Page 0 holds zeros and belongs to no sequence. Places
    without a key of their own read it, and are hidden.
    """

    page = 64

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        limit: int | None = None,
    ) -> None:
        super().__init__(limit)
        self.shapes, self.dtype, self.device = list(shapes), dtype, device
        self.page_bytes = (
            self.page
            * dtype.itemsize
            * sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        )
        self._made = 1
        self.key = [self._rows(shape.kv_heads, shape.key_dim) for shape in shapes]
        self.value = [self._rows(shape.kv_heads, shape.value_dim) for shape in shapes]

    def _rows(self, heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(self.page, heads, dim, dtype=self.dtype, device=self.device)

    def new(self) -> RowStore:
        return RowStore(self)

    def make(self) -> Page:
        rows = (self._made + 1) * self.page
        if rows > len(self.key[0]):  # grows by half at least: everything is copied
            more = max(rows, len(self.key[0]) * 3 // 2) - len(self.key[0])
            for tensors in (self.key, self.value):
                tensors[:] = [
                    torch.cat([old, old.new_zeros(more, *old.shape[1:])]) for old in tensors
                ]
        self._made += 1
        return Page(self._made - 1)

    def renew(self, page: Page) -> None:
        """Fill the page with zeros. A hidden key has weight zero, but zero times NaN is NaN."""
        for tensor in (*self.key, *self.value):
            tensor[page.data * self.page : (page.data + 1) * self.page] = 0

    def copy(self, source: Page, target: Page) -> None:
        for tensor in (*self.key, *self.value):
            size = self.page
            tensor[target.data * size : (target.data + 1) * size] = tensor[
                source.data * size : (source.data + 1) * size
            ]


class RowStore(PagedSequence):
    """One sequence's pages of a `RowPool`."""

    def __init__(self, pool: RowPool) -> None:
        super().__init__(pool)
        self.pool = pool
        self._numbers = np.zeros(0, np.int64)

    def bind(self) -> None:
        self._numbers = np.array([page.data for page in self._pages], np.int64)

    def rows(self, orders: np.ndarray) -> np.ndarray:
        """Return the rows of the pool in which these orders live."""
        found: np.ndarray = self._numbers[orders // self.page] * self.page + orders % self.page
        return found

    @inference
    def commit(self, path: Sequence[int]) -> None:
        start = self.length
        moved = [(start + node, start + depth) for depth, node in enumerate(path) if node != depth]
        if moved:
            ends = np.array(moved, np.int64)
            both = _to(
                np.concatenate([self.rows(ends[:, 0]), self.rows(ends[:, 1])]), self.pool.device
            )
            source, target = both[: len(moved)], both[len(moved) :]
            for tensor in (*self.pool.key, *self.pool.value):
                tensor.index_copy_(0, target, tensor.index_select(0, source))
        self.length = start + len(path)


def _to(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy numbers to the device; on CUDA, without waiting for it."""
    tensor = torch.from_numpy(numbers)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


@dataclass
class Group:
    """Parts that attend in one call: S sequences of at most R rows, over at most K keys.

    All tensors are on the device. `at` `[S, R]`: the row of the pass that stands at each place, row
    0 where none does. `keys` `[S, K]`: rows of the pool. `place` `[S, R]`: positions of the rows.
    `key_place` `[S, K]`: positions of the keys. `seen` `[S, R, K]`: whether a row sees a key,
    before a window is applied.
    """

    at: torch.Tensor
    keys: torch.Tensor
    place: torch.Tensor
    key_place: torch.Tensor
    seen: torch.Tensor
    # [n]: the flat place in `at` of each row of the group, in the order of the pass
    rows: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return the mask `[S, 1, R, K]` bool of what is seen, made once for each window."""
        if window not in self.masks:
            seen = self.seen
            if window is not None:
                seen = seen & (self.key_place[:, None] > self.place[..., None] - window)
            self.masks[window] = seen[:, None]
        return self.masks[window]


class GatheredStep:
    """One pass over parts of different sequences.

    Drafts attend together. Each chain attends by itself.
    """

    def __init__(self, parts: Sequence[Part], pool: RowPool) -> None:
        self._pool = pool
        firsts = np.cumsum([0, *(part.rows for part in parts)])
        self.n = int(firsts[-1])
        written, positions = [], []
        for part in parts:
            store = part.cache
            assert isinstance(store, RowStore)
            orders, places = _orders(part)
            store.reserve(int(orders[-1]) + 1)
            written.append(store.rows(orders))
            positions.append(places)
        both = _to(np.concatenate([*written, *positions]), pool.device)
        self._written, self.new_positions = both[: self.n], both[self.n :]
        drafts = [i for i, part in enumerate(parts) if isinstance(part, Draft)]
        groups = ([drafts] if drafts else []) + [
            [i] for i, part in enumerate(parts) if not isinstance(part, Draft)
        ]
        self._groups = [
            _group([parts[i] for i in group], [int(firsts[i]) for i in group], pool.device)
            for group in groups
        ]
        order = np.concatenate(
            [np.arange(firsts[i], firsts[i + 1]) for group in groups for i in group]
        )
        self._back = (
            None if (order == np.arange(self.n)).all() else _to(np.argsort(order), pool.device)
        )

    def write(self, layer: Layer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values `[kv_heads, n, dim]` of all rows to the pool."""
        self._pool.key[layer.index].index_copy_(0, self._written, key.transpose(0, 1))
        self._pool.value[layer.index].index_copy_(0, self._written, value.transpose(0, 1))

    def run(self, attend: Attend, query: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Return the attention of all rows: `[n, heads, key_dim]` to `[n, heads * value_dim]`.

        `attend` is ignored.
        """
        found = [self._attend(group, query, layer) for group in self._groups]
        out = torch.cat(found) if len(found) > 1 else found[0]
        return out if self._back is None else out[self._back]

    def _attend(self, group: Group, query: torch.Tensor, layer: Layer) -> torch.Tensor:
        sequences, rows = group.at.shape
        key = self._pool.key[layer.index][group.keys].transpose(1, 2)  # [S, kv_heads, K, d]
        value = self._pool.value[layer.index][group.keys].transpose(1, 2)
        kv_heads, heads = key.shape[1], query.shape[1]
        grouped = (
            query[group.at]
            .view(sequences, rows, kv_heads, heads // kv_heads, -1)
            .permute(0, 2, 3, 1, 4)
            .flatten(2, 3)
        )
        # the heads that share keys are rows of one product
        mask = group.mask(layer.window).repeat(1, 1, heads // kv_heads, 1)
        if layer.softcap is None and layer.sinks is None:
            out = F.scaled_dot_product_attention(
                grouped, key, value, attn_mask=mask, scale=layer.scaling
            )
        else:
            out = _by_hand(grouped, key, value, mask, layer, rows)
        out = out.reshape(sequences, kv_heads, heads // kv_heads, rows, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(sequences * rows, -1)[group.rows]


AnyStep = Step | Steps | GatheredStep


def _by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    layer: Layer,
    rows: int,
) -> torch.Tensor:
    """Attend in plain PyTorch where scores have a cap or a layer has sinks."""
    score = (query.float() @ key.float().transpose(2, 3)) * layer.scaling
    if layer.softcap is not None:
        score = torch.tanh(score / layer.softcap) * layer.softcap
    score = score.masked_fill(~mask, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, key.shape[1], -1, 1).repeat_interleave(rows, 2)
        score = torch.cat([score, sinks.expand(len(score), -1, -1, 1)], -1)
    weight = torch.softmax(score, -1)[..., : key.shape[2]]
    return (weight @ value.float()).to(query.dtype)


def _orders(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Return the orders of a part's rows in their sequence, and their positions."""
    start = part.cache.length
    if isinstance(part, Draft):
        return np.arange(start + part.base, start + len(part.tree)), start + np.array(
            part.tree.depth[part.base :], np.int64
        )
    places = np.arange(start, start + part.rows)
    return places, places


def _group(parts: Sequence[Part], firsts: Sequence[int], device: torch.device) -> Group:
    most = max(part.rows for part in parts)
    longest = max(
        part.cache.length + (len(part.tree) if isinstance(part, Draft) else part.rows)
        for part in parts
    )
    longest = -(-longest // 64) * 64  # kernels are chosen by shape: keep shapes few
    shape = len(parts), most
    at, place, flat = np.zeros(shape, np.int64), np.zeros(shape, np.int64), []
    keys, key_place = (
        np.zeros((len(parts), longest), np.int64),
        np.zeros((len(parts), longest), np.int64),
    )
    seen = np.zeros((*shape, longest), np.bool_)
    # a place without a row must see some key; its result is not read
    seen[:, :, 0] = True
    for s, (part, first) in enumerate(zip(parts, firsts, strict=True)):
        store, start, n = part.cache, part.cache.length, part.rows
        assert isinstance(store, RowStore)
        at[s, :n] = np.arange(first, first + n)
        flat.append(s * most + np.arange(n))
        if isinstance(part, Draft):
            total = start + len(part.tree)
            key_place[s, start:total] = start + np.array(part.tree.depth)
            place[s, :n] = key_place[s, start + part.base : total]
            seen[s, :n, start:total] = part.tree.visible()[part.base :].numpy()
        else:
            total = start + n
            key_place[s, start:total] = place[s, :n] = np.arange(start, total)
            seen[s, :n, start:total] = np.tri(n, dtype=np.bool_)
        keys[s, :total] = store.rows(np.arange(total))
        key_place[s, :start] = np.arange(start)
        seen[s, :n, :start] = True
    numbers = [at, keys, place, key_place, np.concatenate(flat)]
    every = _to(np.concatenate([part.ravel() for part in numbers]), device)
    pieces = every.split_with_sizes([part.size for part in numbers])
    shaped = [piece.view(part.shape) for piece, part in zip(pieces, numbers, strict=True)]
    return Group(shaped[0], shaped[1], shaped[2], shaped[3], _to(seen, device), shaped[4])
