"""Products with weights of 8 or 4 bits in plain PyTorch: what the native kernels compute, bit for
bit (`native/quantised.h`, `native/quantise.h`).

Rows of inputs are quantised in groups of 32: whole numbers from -127 to 127 and one scale. Weights
of `int8` have one scale per output, those of `int4` (0 to 15) a scale and a lowest value per output
and group. The sum within a group is exact in float32; those of the groups are scaled and added one
after the other, by `fused` operations.

For the formats of `ByEight`, whose groups have whole numbers for scales and share a scale by eight,
rows share one by eight groups, too. There a small group's numbers are finer by a power of two, and
totals are counted in 16 of the finest steps.
"""

from typing import NamedTuple

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from quickbeam.errors import InvalidInput
from quickbeam.models.native.library import FORMATS
from quickbeam.models.native.quantised import GROUP, INT8, NOT_FINITE, BlockRows

LEAST = 2.0**-100  # a group whose largest number is smaller counts as zeros
LARGEST_HALF = 65504.0
# steps between a group's smallest and largest weight, which `_int4` tries one after the other
LEVELS = (8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 15.5, 16.0, 17.0)
# A tensor: PyTorch computes a number divided by a tensor as the number times the reciprocal, which
# rounds twice.
TOP = torch.tensor(127.0)


# what the values of `iq4_nl` and `iq4_xs` stand for
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# where halves of float16 numbers stand in a block: scales, which must be finite
HALVES = {"int4": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2)}
HALVES |= {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "tq1_0": (52,), "tq2_0": (64,)}
# what the half precision scale of the formats with a grid is taken times
FACTORS = dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s"), 0.125)
FACTORS |= {"iq3_xxs": 0.25}


def put_halves(name, data, halves):
    """Write scales (and lowest values), `[blocks, 2]` float16, into blocks `[blocks, bytes]`."""
    if name == "iq1_m":  # four bits of it in each of four places
        parts = halves[:, :1].view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        data[:, 49::2] = data[:, 49::2] & 15 | parts.astype(np.uint8) << 4
        return
    for i, at in enumerate(HALVES.get(name, (0,))):
        data[:, at : at + 2] = halves[:, i : i + 1].view(np.uint8)


def random_blocks(name, rows, inputs, seed=0, factor=1.0):
    """Blocks of random bits, with scales of many sizes. `factor`: what these are taken times."""
    of, random = FORMATS[name], np.random.default_rng(seed)
    data = random.integers(0, 256, (rows * inputs // of.inputs, of.bytes), dtype=np.uint8)
    scales = random.normal(0, 0.05, (len(data), 2)) * 2.0 ** random.integers(-6, 3, (len(data), 2))
    scales *= factor
    if FORMATS[name].file_type is None:  # of checkpoints
        data[:, :4] = scales[:, :1].astype(np.float32).view(np.uint8)
        data[:, 4:][(data[:, 4:] & 127 == 127) & name.startswith("fp8")] = 126  # no NaN
    elif name == "mxfp4":
        data[:, 0] = random.integers(110, 125, len(data))
        data[:3, 0] = 0, 1, 2  # numbers below the smallest normal one
    else:
        put_halves(name, data, scales.astype(np.float16))
    return BlockRows(torch.from_numpy(data.reshape(rows, -1)), name)


class Quantised(NamedTuple):
    """A quantised weight: `values` `[outputs, groups, 32]` int8; `scales` `[outputs]` float32 for
    `int8`; for `int4` `scales` and `lows`, which are added, `[outputs, groups]` float16."""

    values: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor | None = None

    @property
    def dense(self):
        weights = self.values * self.scales.float().view(len(self.values), -1, 1)
        return (weights if self.lows is None else weights + self.lows.float()[..., None]).flatten(1)


def in_groups(x):
    """Return `[n, inputs]` in groups, `[n, groups, 32]` float32, padded with zeros."""
    return F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)


def quantise(weight, name):
    """Quantise a weight `[outputs, inputs]`, rounded to bfloat16 first, to `int8` or `int4`."""
    if not bool(weight.isfinite().all()):
        raise InvalidInput(NOT_FINITE)
    groups = in_groups(weight.to(torch.bfloat16))
    if name == INT8:
        top = groups.abs().amax((1, 2)).clamp_min(LEAST)
        return Quantised((groups * (TOP / top)[:, None, None]).round().to(torch.int8), top / 127)
    return _int4(groups)


def _int4(groups):
    """Quantise groups `[outputs, groups, 32]` by the number of steps in `LEVELS` whose scale and
    lowest value, fitted by least squares, leave the smallest squared error."""
    low, high = groups.aminmax(dim=2)
    groups, span = groups - low[..., None], high - low
    above = _in_turn(groups)
    best = torch.full_like(low, torch.inf)
    by, slope, base = (torch.zeros_like(low) for _ in range(3))
    for levels in LEVELS:
        tried = torch.where(span < LEAST, 0, torch.tensor(levels) / span)
        values = (groups * tried[..., None]).round().clamp_max(15)
        level = _in_turn(values)
        across = _in_turn(groups * values)
        square = _in_turn(values * values)
        spread = GROUP * square - level * level
        fit = torch.where(spread > 0, (GROUP * across - above * level) / spread, 0)
        rest = (above - fit * level) / GROUP
        off = groups - (fit[..., None] * values + rest[..., None])
        error = _in_turn(off * off)
        better = error < best
        best, by = torch.where(better, error, best), torch.where(better, tried, by)
        slope, base = torch.where(better, fit, slope), torch.where(better, rest, base)
    values = (groups * by[..., None]).round().clamp_max(15).to(torch.int8)
    return Quantised(values, _half(slope), _half(base + low))


def _in_turn(groups):
    """Return the sums of `[..., 32]`, one number added after the other as in the kernels."""
    total = torch.zeros_like(groups[..., 0])
    for i in range(GROUP):
        total = total + groups[..., i]
    return total


def _half(x):
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half()


def quantise_rows(x):
    """Return the whole numbers `[n, groups, 32]` and scales `[n, groups]` of rows `[n, inputs]`. A
    group with a number that is not finite has the scale NaN."""
    groups = in_groups(x.to(torch.bfloat16))
    top = groups.abs().amax(2)
    finite = top.isfinite()
    used = finite & (top >= LEAST)
    top = torch.where(used, top, 1)
    values = torch.where(used[..., None], groups * (TOP / top)[..., None], 0).round()
    return values, torch.where(used, top / 127, torch.where(finite, 0, torch.nan))


class RowsByEight(NamedTuple):
    """Rows `[n, inputs]` that are quantised by eight groups.

    - `values`: `[n, eights, 8, 32]` whole numbers.
    - `raised`: `[n, eights, 8]`, what sums of a group's values are taken times.
    - `scales`: `[n, eights]`; NaN where a number is not finite.
    """

    values: torch.Tensor
    raised: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, x):
        groups = in_groups(x.to(torch.bfloat16)).unflatten(1, (-1, 8))
        sizes = groups.abs().amax(3)
        top = sizes.amax(2)
        finite = top.isfinite()
        used = finite & (top >= LEAST)
        top = torch.where(used, top, 1)
        finer = sum((sizes * 2.0**k <= top[..., None]).float() for k in range(1, 8))
        by = (TOP / top)[..., None] * 2**finer
        values = torch.where(used[..., None, None], groups * by[..., None], 0).round()
        scales = torch.where(used, top / 127, torch.where(finite, 0, torch.nan)) / 128
        return cls(values, 2 ** (7 - finer), scales)

    @property
    def dense(self):
        return (self.values * (self.raised * self.scales[..., None])[..., None]).flatten(1)


class ByEight(NamedTuple):
    """A weight whose groups share scales by eight, 256 inputs.

    - `values`: `[outputs, eights, n, 256 / n]` whole numbers; n: 8 groups, or 16 halves of groups.
    - `times`: `[outputs, eights, n]` whole numbers.
    - `by`: `[outputs, eights]` float32.
    - `lowest`, `lowest_by`: likewise, or None: what is taken off each value.
    """

    values: torch.Tensor
    times: torch.Tensor
    by: torch.Tensor
    lowest: torch.Tensor | None = None
    lowest_by: torch.Tensor | None = None

    @classmethod
    def of(cls, rows):
        """Take blocks apart (`BlockRows`)."""
        name, size = rows.name, FORMATS[rows.name].bytes
        data = rows.data.view(len(rows), -1, size)

        def half(at):
            return data[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()

        if name == "iq4_xs":
            values = data[..., 8:].unflatten(-1, (8, 16))
            levels = torch.tensor(IQ4_NL)[torch.cat([values & 15, values >> 4], -1).long()]
            low = torch.stack([data[..., 4:8] & 15, data[..., 4:8] >> 4], -1).flatten(2)
            high = (data[..., 2:4, None] >> torch.arange(0, 8, 2) & 3).flatten(2)
            return cls(levels, (low | high << 4).int() - 32, half(0))
        if name == "q2_k":
            values = two_bits(data[..., 16:80]).unflatten(2, (16, 16))
            return cls(values, data[..., :16] & 15, half(80), data[..., :16] >> 4, half(82))
        if name == "q3_k":
            values = two_bits(data[..., 32:96])
            values = values | (data[..., :32, None] >> torch.arange(8) & 1).mT.flatten(2) << 2
            low = torch.cat([data[..., 96:104] & 15, data[..., 96:104] >> 4], -1)
            high = data[..., 104:108, None] >> torch.arange(0, 8, 2) & 3
            times = (low | high.mT.flatten(2) << 4).int() - 32
            return cls(values.unflatten(2, (16, 16)).int() - 4, times, half(108))
        if name == "q6_k":
            low, high = data[..., :128].unflatten(-1, (2, 2, 32)), data[..., 128:192]
            high = high.unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6]).view(4, 1)
            values = torch.cat([low & 15, low >> 4], -2) | (high & 3) << 4
            times = data[..., 192:208].contiguous().view(torch.int8)
            return cls(values.flatten(2).unflatten(2, (16, 16)).int() - 32, times, half(208))
        if name.startswith(("iq1", "iq2", "iq3", "tq")):
            times = whole_scales(name, data)
            by = super_scales(name, data) * FACTORS.get(name, 1)
            scales = (times * by[..., None]).repeat_interleave(256 // times.shape[2], 2)
            kind = gguf.GGMLQuantizationType[name.upper()]
            dense = torch.from_numpy(gguf.dequantize(rows.data.numpy(), kind))
            values = dense.view_as(scales) / scales
            assert torch.equal(values, values.round())
            return cls(values.unflatten(2, (times.shape[2], -1)), times, by)
        low = data[..., size - 128 :].unflatten(-1, (4, 1, 32))
        values = torch.cat([low & 15, low >> 4], -2).flatten(2, 3)
        if name == "q5_k":
            values = values | (data[..., 16:48, None] >> torch.arange(8) & 1).mT << 4
        first, second, third = (data[..., at : at + 4] for at in (4, 8, 12))
        times = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
        lowest = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
        return cls(values, times, half(0), lowest, half(2))

    @property
    def dense(self):
        numbers = self.values * (self.times * self.by[..., None])[..., None]
        if self.lowest is not None:
            numbers = numbers - (self.lowest * self.lowest_by[..., None])[..., None]
        return numbers.flatten(1)

    def product(self, x):
        """Multiply rows `[n, inputs]`. Returns `[n, outputs]` float32."""
        rows = RowsByEight.of(x)
        y = x.new_zeros(len(x), len(self.values), dtype=torch.float32)
        pieces = self.values.shape[2] // 8
        for i in range(rows.values.shape[1]):
            parts = rows.values[:, i].unflatten(2, (pieces, -1)).flatten(1, 2)
            total = torch.zeros_like(y)
            for k in range(8 * pieces):
                sums = parts[:, k] @ self.values[:, i, k].float().T
                raised = rows.raised[:, i, k // pieces, None]
                total = fused(sums * raised, self.times[:, i, k].float(), total)
            total = total * self.by[:, i]
            if self.lowest is not None:
                raised = rows.raised[:, i].repeat_interleave(pieces, 1)
                counted = (parts.sum(2) * raised / 16).round()
                lowest = counted @ self.lowest[:, i].float().T
                total = fused(lowest, -16 * self.lowest_by[:, i], total)
            y = fused(total, rows.scales[:, i, None], y)
        return y


def whole_scales(name, data):
    """The whole numbers that groups, or their halves, of blocks `[..., bytes]` have for scales:
    of IQ1, IQ2, IQ3 and TQ, `[..., 8]` or `[..., 16]`."""

    def halves(first, last):
        return torch.stack([data[..., first:last] & 15, data[..., first:last] >> 4], -1).flatten(2)

    if name.startswith("tq"):
        return torch.ones_like(data[..., :8])
    if name == "iq1_m":
        words = data[..., 48:56].contiguous().view(torch.int16)
        stored = (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(2)
    else:
        stored = {
            "iq1_s": lambda: data[..., 35::2] >> 4 & 7,
            "iq2_xxs": lambda: data[..., 9::8] >> 4,
            "iq2_xs": lambda: halves(66, 74),
            "iq2_s": lambda: halves(74, 82),
            "iq3_xxs": lambda: data[..., 69::4] >> 4,
            "iq3_s": lambda: halves(106, 110),
        }[name]()
    return 2 * stored + 1


def super_scales(name, data):
    """The half precision scales of the same blocks, `[...]` float32."""
    if name == "iq1_m":
        bits = ((data[..., 49::2] >> 4).int() << torch.arange(0, 16, 4)).sum(-1)
        return bits.to(torch.int16).view(torch.float16).float()
    (at,) = HALVES.get(name, (0,))
    return data[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def two_bits(data):
    """Return values of 2 bits `[..., 256]` of bytes `[..., 64]`: each half of the bytes holds 128
    values, the first 32 in its lowest bits."""
    parts = data.unflatten(-1, (2, 1, 32)) >> torch.arange(0, 8, 2).view(4, 1) & 3
    return parts.flatten(-3)


def fused(a, b, c):
    """Return a * b + c of float32, rounded once.

    The product is exact in float64. Their sum there is rounded to odd, as another rounding to the
    nearest would be one too many: where it is not exact, its last bit is made 1.
    """
    left = a.double() * b.double()
    total = left + c.double()
    taken = total - left
    rest = (left - (total - taken)) + (c.double() - taken)
    bits = total.view(torch.int64)
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    inexact = (rest.abs() > 0) & (bits & 1 == 0)
    return torch.where(inexact, bits + away, bits).view(torch.float64).float()


def product(x, weight):
    """Multiply rows `[n, inputs]` by a weight, group by group. Returns `[n, outputs]` float32."""
    values, scales = quantise_rows(x)
    y = x.new_zeros(len(x), len(weight.values), dtype=torch.float32)
    for group in range(values.shape[1]):
        sums, by = values[:, group] @ weight.values[:, group].float().T, scales[:, group, None]
        if weight.lows is None:
            y = fused(sums, by, y)
            continue
        y = fused(sums * by, weight.scales[:, group].float(), y)
        y = fused(values[:, group].sum(1, keepdim=True) * by, weight.lows[:, group].float(), y)
    return y if weight.lows is not None else y * weight.scales
