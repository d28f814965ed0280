"""Attention of a few new tokens over a KV store: one way for each kind of device, and a reference.

Each function takes queries `[n, heads, key_dim]` and returns `[n, heads * value_dim]`. The query
heads of a group share their keys. Their queries become rows of one product, so no key is repeated,
except in the reference. A `Step` says what the new tokens may see; it is the same for every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from quickbeam.models.kv_store import KVStore

SPLIT, WIDE_SPLIT = 384, 128  # positions between the cuts of an exact sum (`attend_grouped`)
# a CPU reads a number of keys that is a multiple of this: oneDNN makes a kernel for every new
# shape, which takes longer than the product
BLOCK = 64


@dataclass
class Layer:
    """What attention needs to know of one layer besides its keys and values.

    `index`: the layer's number; `scaling`: the factor of its scores; `window`: tokens of its
    sliding window; `softcap`: the cap of its scores; `sinks`: a logit for each head, `[heads]`.
    None means that the layer has no such thing.
    """

    index: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass
class Step:
    """One forward of `n` new tokens of a sequence.

    The new tokens follow the store's committed tokens, and `base` tokens of the same tree that an
    earlier pass has run.

    `positions`: `[base + n]` on the device, of all tokens of the tree. `visible`: `[n, base + n]`
    bool, which of them each new token sees; None for causal (a chain). `exact`: whether a token's
    bits must not depend on what else is in the tree (`attend_grouped`). Masks are made once for
    each window, and shared by all layers.
    """

    store: KVStore
    positions: torch.Tensor
    visible: torch.Tensor | None = None
    exact: bool = False
    base: int = 0
    wide: bool = False  # see `attend_grouped`
    _masks: dict[tuple[str, int | None], torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = len(self.positions)
        self.n = total - self.base
        self.start = self.store.length
        self.block = BLOCK if self.store.device.type == "cpu" else 1
        # masks hide the rows that hold no token yet
        self.end = -(-(self.start + total) // self.block) * self.block
        self.store.reserve(self.end)
        self.rows = self.store.rows(range(self.start + self.base, self.start + total))
        # rows before it hold committed tokens only
        self.tail = self.start & ~1 if self.store.pairwise else self.start
        self.every = cuts(self.wide)
        self.split = self.start // self.every * self.every if self.exact else 0
        self.causal = self.visible is None
        if self.causal and total > 1:
            self.visible = torch.ones(self.n, total, dtype=torch.bool).tril_(self.base)

    def first(self, window: int | None) -> int:
        """Return the first row to read: no new token sees a row before it."""
        if window is None or self.start < window:
            return 0
        block = self.every if self.exact else self.block
        return (self.start - window + 1) // block * block

    def hidden(self, window: int | None, first: int) -> torch.Tensor | None:
        """Return the additive mask of the keys from row `first` on; None where all are seen.

        The mask is `[n, end - first]`, 0 or -inf, with keys in row order.
        """
        total = len(self.positions)
        orders = torch.arange(first, self.end)
        if self.store.pairwise:
            orders ^= 1
        device = self.positions.device
        orders = orders.to(device)
        new = orders >= self.start
        node = (orders - self.start).clamp_(0, total - 1)
        tree = (
            torch.ones(1, 1, dtype=torch.bool, device=device)
            if self.visible is None
            else self.visible.to(device)
        )
        seen = torch.where(new, tree[:, node] & (orders < self.start + total), True)
        if window is not None:
            at = torch.where(new, self.positions[node], orders)
            seen = seen & (at > self.positions[self.base :, None] - window)
        if bool(seen.all()):
            return None
        dtype = self.store.key[0].dtype
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(
            ~seen, float("-inf")
        )

    def mask(self, window: int | None, first: int) -> torch.Tensor | None:
        """Return the mask `hidden`, made once for each window."""
        key = ("all" if first < self.tail else "tail", window)
        if key not in self._masks:
            self._masks[key] = self.hidden(window, first)
        return self._masks[key]

    def narrow(self, window: int | None) -> bool:
        """Whether the window may hide committed tokens from some new token."""
        return window is not None and self.start + len(self.positions) > window

    @property
    def new_positions(self) -> torch.Tensor:
        """Positions of the new tokens alone, `[n]`."""
        return self.positions[self.base :]

    def write(self, layer: Layer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values `[kv_heads, n, dim]` of the new tokens to the store."""
        self.store.write(layer.index, self.rows, key, value)

    def run(self, attend: Attend, query: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Return the attention of the new tokens."""
        return attend(query, self, layer)


class Steps:
    """Steps of several sequences, whose rows lie side by side.

    Attention runs one sequence after the other. CPUs take this way, since gathered attention
    (`gathered.py`) measured 5 to 46 % slower there behind 1,000 tokens.
    """

    def __init__(self, steps: list[Step]) -> None:
        self._steps, self._sizes = steps, [step.n for step in steps]
        self.n = sum(self._sizes)
        self.new_positions = torch.cat([step.new_positions for step in steps])

    def write(self, layer: Layer, key: torch.Tensor, value: torch.Tensor) -> None:
        """As `Step.write`."""
        for step, k, v in zip(
            self._steps,
            key.split_with_sizes(self._sizes, 1),
            value.split_with_sizes(self._sizes, 1),
            strict=True,
        ):
            step.write(layer, k, v)

    def run(self, attend: Attend, query: torch.Tensor, layer: Layer) -> torch.Tensor:
        """As `Step.run`."""
        parts = zip(self._steps, query.split_with_sizes(self._sizes), strict=True)
        return torch.cat([step.run(attend, part.contiguous(), layer) for step, part in parts])


def cuts(wide: bool) -> int:
    """Return how many positions lie between two cuts of an exact step's sums."""
    return WIDE_SPLIT if wide else SPLIT


Attend = Callable[[torch.Tensor, Step, Layer], torch.Tensor]


def group(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape queries `[n, heads, d]` to `[kv_heads, heads // kv_heads * n, d]`.

    The queries of the heads that share keys become rows, head-major.
    """
    n, heads, dim = query.shape
    return (
        query.view(n, kv_heads, heads // kv_heads, dim)
        .permute(1, 2, 0, 3)
        .reshape(kv_heads, heads // kv_heads * n, dim)
    )


def ungroup(out: torch.Tensor, n: int) -> torch.Tensor:
    """Reshape `[kv_heads, group * n, d]` back to `[n, heads * d]`."""
    kv_heads, rows, dim = out.shape
    return out.view(kv_heads, rows // n, n, dim).permute(2, 0, 1, 3).reshape(n, -1)


def attend_grouped(query: torch.Tensor, step: Step, layer: Layer) -> torch.Tensor:
    """Attend by two batched products, as CPUs do.

    Committed tokens are read without a mask, unless the layer's window hides some. The tree's part
    is masked.

    With `step.exact` (bfloat16), a token's bits don't depend on what else is in the tree. So a tree
    gives the same bits as one token at a time. A hidden key has weight zero and adds nothing. What
    remains is the order in which the other keys are added. oneDNN's bfloat16 kernels keep one
    float32 sum for each result. They add keys in pairs, the second of a pair first. The store's
    pairwise layout turns that into the tokens' own order, whatever hidden keys lie between.

    Beyond 512 keys, the kernels cut a sum at places that depend on the number of keys. So this
    function cuts sums itself, at multiples of `SPLIT` positions, and trees don't grow across a cut
    (`Model.depth_limit`). The sum of the weights is taken in float64, where the order doesn't show
    after rounding. `bit_exact.py` checks all this on the machine at hand.

    AMX's kernels keep two sums for each tile, each of every other key, so no layout gives an order.
    There (`step.wide`), the values behind the last cut are added in float64, too, and cuts are
    closer (`WIDE_SPLIT`). What stands before the last cut is added in pieces, because the number of
    queries decides how AMX's kernels cut a sum of many keys.
    """
    store, n = step.store, step.n
    key, value = store.key[layer.index], store.value[layer.index]
    first = step.first(layer.window)
    narrow = step.narrow(layer.window)
    masked_from = first if narrow else max(step.tail, first)
    mask = step.mask(layer.window if narrow else None, masked_from)
    grouped = group(query, key.shape[0])
    score = torch.bmm(grouped, key[:, first : step.end].transpose(1, 2)).float()
    scaling = layer.scaling
    if layer.softcap is not None:
        score = torch.tanh(score * (scaling / layer.softcap))
        scaling = layer.softcap
    if mask is not None:
        score.view(key.shape[0], -1, n, score.shape[2])[..., masked_from - first :].add_(mask)
    peak = score.amax(-1, keepdim=True)
    sinks = None
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(key.shape[0], -1, 1).repeat_interleave(n, 1)
        peak = torch.maximum(peak, sinks / scaling)
    weight = score.sub_(peak).mul_(scaling).exp_()
    total = weight.sum(-1, keepdim=True, dtype=torch.float64 if step.exact else torch.float32)
    if sinks is not None:
        total = total + (sinks - peak * scaling).exp()
    weight = weight.to(value.dtype)
    cut = max(step.split, first)
    weight_behind, behind = weight[:, :, cut - first :], value[:, cut : step.end]
    out = (
        torch.bmm(weight_behind.double(), behind.double())
        if step.wide
        else torch.bmm(weight_behind, behind)
    )
    for begin in range(first, cut, SPLIT if step.wide else max(cut, 1)):
        end = min(begin + SPLIT, cut) if step.wide else cut
        out = (
            torch.bmm(weight[:, :, begin - first : end - first], value[:, begin:end]).float() + out
        )
    return ungroup((out / total).to(value.dtype), n)


def attend_sdpa(query: torch.Tensor, step: Step, layer: Layer) -> torch.Tensor:
    """Attend by PyTorch's fused kernel, with a mask over all keys.

    Accelerators take this way, and so do prompts in chunks. Layers with a softcap or sinks take
    `attend_grouped`.
    """
    if layer.softcap is not None or layer.sinks is not None:
        return attend_grouped(query, step, layer)
    store, n = step.store, step.n
    key, value = store.key[layer.index], store.value[layer.index]
    # a prompt's first chunk needs no mask at all
    if step.causal and step.start == step.base == 0 and not step.narrow(layer.window):
        key, value = key[None, :, step.rows], value[None, :, step.rows]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            is_causal=n > 1,
            scale=layer.scaling,
            enable_gqa=query.shape[1] > key.shape[1],
        )
        return out[0].transpose(0, 1).reshape(n, -1)
    first = step.first(layer.window)
    mask = step.mask(layer.window if step.narrow(layer.window) else None, first)
    grouped = group(query, key.shape[0])
    if mask is not None:
        mask = mask.repeat(grouped.shape[1] // n, 1)
    out = F.scaled_dot_product_attention(
        grouped[None],
        key[None, :, first : step.end],
        value[None, :, first : step.end],
        attn_mask=mask,
        scale=layer.scaling,
    )
    return ungroup(out[0], n)


def attend_plain(query: torch.Tensor, step: Step, layer: Layer) -> torch.Tensor:
    """Attend as a reference: keys repeated for every head, a full mask, softmax in float32."""
    store = step.store
    key, value = (
        store.key[layer.index][:, : step.end].float(),
        store.value[layer.index][:, : step.end].float(),
    )
    repeats = query.shape[1] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    score = query.transpose(0, 1).float() @ key.transpose(1, 2) * layer.scaling
    if layer.softcap is not None:
        score = torch.tanh(score / layer.softcap) * layer.softcap
    mask = step.hidden(layer.window, 0)
    if mask is not None:
        score = score + mask
    if layer.sinks is not None:
        score = torch.cat([score, layer.sinks.float().view(-1, 1, 1).expand(-1, step.n, 1)], -1)
    weight = torch.softmax(score, -1)[..., : value.shape[1]]
    return (weight @ value).transpose(0, 1).reshape(step.n, -1).to(query.dtype)
