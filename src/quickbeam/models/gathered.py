"""Attention of many sequences in one masked call a layer, by PyTorch's operators.

The keys of all sequences lie in one tensor a layer, and so do the values. A pass needs to know
where rows are written, whose keys each sequence reads, and what each row sees. The host works this
out once for all layers, and sends it over in a few pieces, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quickbeam.models.base import Draft, Part, inference
from quickbeam.models.hf_recurrent import RecurrentCall, State, TorchStates, recurrent_calls
from quickbeam.models.kv import Page, Pool, SequenceCache
from quickbeam.models.native.operands import KVShape


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which attention is not cuDNN's.

    That plans anew for each shape, 40 ms each (an H200, PyTorch 2.11), and trees have many shapes.
    """
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(others) if device.type == "cuda" else nullcontext()


@dataclass
class AttentionParams:
    """What attention needs to know of one layer besides its keys and values.

    `index`: the layer's number; `scaling`: the factor of its scores; `window`: tokens of its
    sliding window; `softcap`: the cap of its scores; `sinks`: a logit for each head, `[heads]`.
    None means that the layer has no such thing. `causal`: rows see no keys of later positions,
    whatever the pass says.
    """

    index: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    causal: bool = False


class RowPool(Pool):
    """Pages that are rows of two tensors a layer, for keys and for values.

    The tensors are `[rows, kv_heads, dim]`. Page 0 holds zeros and belongs to no sequence. Places
    without a key of their own read it, and are hidden. `zeros`: the state of an empty sequence.
    """

    page = 64

    def __init__(
        self,
        shapes: Sequence[KVShape],
        dtype: torch.dtype,
        device: torch.device,
        zeros: State | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.device, self.zeros = dtype, device, zeros or {}
        numbers = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        self.page_bytes = self.page * dtype.itemsize * numbers
        self._made = 1
        self.key = [self._rows(shape.kv_heads, shape.key_dim) for shape in shapes]
        self.value = [self._rows(shape.kv_heads, shape.value_dim) for shape in shapes]
        if zeros:
            kept = [one for state in zeros.values() for one in state if one is not None]
            self.has_states(sum(one.nbytes for one in kept), 1)

    def make_state(self) -> State:
        return {}

    def _rows(self, heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(self.page, heads, dim, dtype=self.dtype, device=self.device)

    def new(self) -> RowStore:
        return RowStore(self)

    @inference
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

    @inference
    def renew(self, page: Page) -> None:
        """Fill the page with zeros. A hidden key has weight zero, but zero times NaN is NaN."""
        for tensor in (*self.key, *self.value):
            tensor[page.data * self.page : (page.data + 1) * self.page] = 0

    @inference
    def copy(self, source: Page, target: Page) -> None:
        size = self.page
        for tensor in (*self.key, *self.value):
            rows = tensor[source.data * size : (source.data + 1) * size]
            tensor[target.data * size : (target.data + 1) * size] = rows


class RowStore(SequenceCache):
    """One sequence's pages of a `RowPool`."""

    pool: RowPool

    def __init__(self, pool: RowPool) -> None:
        super().__init__(pool)
        self._numbers = np.zeros(0, np.int64)
        self._states: TorchStates | None = TorchStates(pool, pool.zeros) if pool.zeros else None

    @property
    def states(self) -> TorchStates:
        """Those of recurrent layers, which the model must have."""
        assert self._states is not None
        return self._states

    def bind(self) -> None:
        self._numbers = np.array([page.data for page in self.pages], np.int64)

    def rows(self, orders: np.ndarray) -> np.ndarray:
        """Return the rows of the pool in which these orders live."""
        rows: np.ndarray = self._numbers[orders // self.page] * self.page + orders % self.page
        return rows

    @inference
    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        both = to_device(self.rows(np.array([*source, *target], np.int64)), self.pool.device)
        read, written = both[: len(source)], both[len(source) :]
        for tensor in (*self.pool.key, *self.pool.value):
            tensor.index_copy_(0, written, tensor.index_select(0, read))


def to_device(numbers: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers of the host to the device; on CUDA, without waiting for it."""
    tensor = torch.as_tensor(numbers)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class UncommittedTokens(NamedTuple):
    """The tokens after a sequence's committed ones: those of a pass, and those run before it.

    `depths`: for each token, how many positions behind the last committed one plus 1 it stands.
    `base`: how many of them an earlier pass has run. `visible`: `[n - base, n]` bool, which of them
    each token of this pass sees; None where each sees all before it, and itself. `parents`: of a
    tree, each node's parent.
    """

    cache: RowStore
    depths: Sequence[int]
    base: int = 0
    visible: np.ndarray | None = None
    parents: Sequence[int] | None = None

    @property
    def rows(self) -> int:
        return len(self.depths) - self.base


def uncommitted(part: Part) -> UncommittedTokens:
    """Return the tokens of a batch's part."""
    assert isinstance(part.cache, RowStore)
    if not isinstance(part, Draft):
        return UncommittedTokens(part.cache, range(part.rows))
    visible = part.tree.visible()[part.base :].numpy()
    return UncommittedTokens(part.cache, part.tree.depth, part.base, visible, part.tree.parent)


@dataclass
class AttentionGroup:
    """Parts that attend in one call: S sequences of at most R rows, over at most K keys.

    All tensors are on the device. `at` `[S, R]`: the row of the pass that stands at each place, row
    0 where none does. `keys` `[S, K]`: rows of the pool. `place` `[S, R]`: positions of the rows.
    `key_place` `[S, K]`: positions of the keys. `seen` `[S, R, K]`: whether a row sees a key, in a
    layer without a window that is not causal. `whole`: the group is all of the pass, and one
    sequence: its rows are the pass's as they are.
    """

    at: torch.Tensor
    keys: torch.Tensor
    place: torch.Tensor
    key_place: torch.Tensor
    seen: torch.Tensor
    # [n]: the flat place in `at` of each row of the group, in the order of the pass
    rows: torch.Tensor
    whole: bool = False
    masks: dict[tuple[int | None, bool, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, layer: AttentionParams, times: int) -> torch.Tensor:
        """Return the mask of what is seen, `[S, 1, times * R, K]` bool, made once for layers alike.

        `times`: how many heads share keys. They are rows of one product.
        """
        kind = layer.window, layer.causal, times
        if kind not in self.masks:
            seen, key, place = self.seen, self.key_place[:, None], self.place[..., None]
            if layer.window is not None:
                seen = seen & (key > place - layer.window)
            if layer.causal:
                seen = seen & (key <= place)
            self.masks[kind] = seen[:, None].repeat(1, 1, times, 1)
        return self.masks[kind]


class GatheredStep:
    """One pass over tokens of different sequences.

    Trees attend together. Each text attends by itself.

    `n`: the number of rows; `positions`: `[n]` on the device. `recurrent_calls`: of recurrent
    layers.
    """

    def __init__(self, parts: Sequence[UncommittedTokens], pool: RowPool) -> None:
        self._pool = pool
        firsts = np.cumsum([0, *(part.rows for part in parts)])
        self.n = int(firsts[-1])
        written, positions = [], []
        for part in parts:
            start, total = part.cache.length, part.cache.length + len(part.depths)
            part.cache.reserve(total)
            written.append(part.cache.rows(np.arange(start + part.base, total)))
            positions.append(start + np.array(part.depths[part.base :], np.int64))
        both = to_device(np.concatenate([*written, *positions]), pool.device)
        self._written, self.positions = both[: self.n], both[self.n :]
        self.recurrent_calls = list[RecurrentCall]()
        if pool.zeros:
            of_parts = [(p.cache.states, p.parents, p.base, len(p.depths)) for p in parts]
            self.recurrent_calls = recurrent_calls(of_parts, pool.device)
        trees = [i for i, part in enumerate(parts) if part.visible is not None]
        texts = [[i] for i, part in enumerate(parts) if part.visible is None]
        groups = [trees, *texts] if trees else texts
        self._groups = [
            _group([parts[i] for i in group], [int(firsts[i]) for i in group], pool.device)
            for group in groups
        ]
        order = np.concatenate(
            [np.arange(firsts[i], firsts[i + 1]) for group in groups for i in group]
        )
        in_order = (order == np.arange(self.n)).all()
        self._back = None if in_order else to_device(np.argsort(order), pool.device)
        self._groups[0].whole = len(parts) == 1

    def write(self, layer: AttentionParams, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values `[kv_heads, n, dim]` of all rows to the pool."""
        self._pool.key[layer.index].index_copy_(0, self._written, key.transpose(0, 1))
        self._pool.value[layer.index].index_copy_(0, self._written, value.transpose(0, 1))

    def attend(self, query: torch.Tensor, layer: AttentionParams) -> torch.Tensor:
        """Return the attention of all rows: `[n, heads, key_dim]` to `[n, heads * value_dim]`."""
        results = [self._attend(group, query, layer) for group in self._groups]
        out = torch.cat(results) if len(results) > 1 else results[0]
        return out if self._back is None else out[self._back]

    def _attend(
        self, group: AttentionGroup, query: torch.Tensor, layer: AttentionParams
    ) -> torch.Tensor:
        sequences, rows = group.at.shape
        key = self._pool.key[layer.index][group.keys].transpose(1, 2)  # [S, kv_heads, K, d]
        value = self._pool.value[layer.index][group.keys].transpose(1, 2)
        kv_heads, heads = key.shape[1], query.shape[1]
        grouped = (
            (query if group.whole else query[group.at])
            .reshape(sequences, rows, kv_heads, heads // kv_heads, -1)
            .permute(0, 2, 3, 1, 4)
            .flatten(2, 3)
        )
        mask = group.mask(layer, heads // kv_heads)
        if layer.softcap is None and layer.sinks is None:
            out = F.scaled_dot_product_attention(
                grouped, key, value, attn_mask=mask, scale=layer.scaling
            )
        else:
            out = _by_hand(grouped, key, value, mask, layer, rows)
        out = out.reshape(sequences, kv_heads, heads // kv_heads, rows, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(sequences * rows, -1)
        return out if group.whole else out[group.rows]


def _by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    layer: AttentionParams,
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


def _group(
    parts: Sequence[UncommittedTokens], firsts: Sequence[int], device: torch.device
) -> AttentionGroup:
    most = max(part.rows for part in parts)
    longest = max(part.cache.length + len(part.depths) for part in parts)
    longest = -(-longest // 64) * 64  # kernels are chosen by shape: keep shapes few
    shape = len(parts), most
    at, place, flat = np.zeros(shape, np.int64), np.zeros(shape, np.int64), []
    keys, key_place = (np.zeros((len(parts), longest), np.int64) for _ in range(2))
    seen = np.zeros((*shape, longest), np.bool_)
    # a place without a row must see some key; its result is not read
    seen[:, :, 0] = True
    for s, (part, first) in enumerate(zip(parts, firsts, strict=True)):
        start, n = part.cache.length, part.rows
        total = start + len(part.depths)
        at[s, :n] = np.arange(first, first + n)
        flat.append(s * most + np.arange(n))
        key_place[s, :start] = np.arange(start)
        key_place[s, start:total] = start + np.array(part.depths)
        place[s, :n] = key_place[s, start + part.base : total]
        seen[s, :n, :start] = True
        seen[s, :n, start:total] = (
            np.tri(n, total - start, part.base, dtype=np.bool_)
            if part.visible is None
            else part.visible
        )
        keys[s, :total] = part.cache.rows(np.arange(total))
    numbers = [at, keys, place, key_place, np.concatenate(flat)]
    every = to_device(np.concatenate([part.ravel() for part in numbers]), device)
    pieces = every.split_with_sizes([part.size for part in numbers])
    shaped = [piece.view(part.shape) for piece, part in zip(pieces, numbers, strict=True)]
    mask = to_device(seen, device)
    return AttentionGroup(shaped[0], shaped[1], shaped[2], shaped[3], mask, shaped[4])
