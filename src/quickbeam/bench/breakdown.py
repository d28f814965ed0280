"""Where the time of a native pass goes, and how near its products come to what the machine's memory
gives."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quickbeam.bench.passes import Figures
from quickbeam.doctor.machine import gigabytes_per_second, read_by_sum
from quickbeam.target.native import library
from quickbeam.target.native.operands import Packed, Rows
from quickbeam.target.native.program import Program

MEGABYTES = 512  # more than caches hold
INPUTS = 2048  # of the product's weight


class Bandwidth(NamedTuple):
    """Gigabytes a second that all threads read together: with a sum of float32 numbers, and with
    the kernels' own product of one row (0 where there are none)."""

    sum: float
    product: float

    @property
    def best(self) -> float:
        return max(self)


def measure_bandwidth(megabytes: int = MEGABYTES, repeats: int = 9) -> Bandwidth:
    """Reads a buffer of that size from memory; the median of the repeats counts, as for passes."""
    by_sum = read_by_sum(megabytes, repeats)
    if (kernels := library.kernels()) is None:
        return Bandwidth(by_sum, 0.0)
    weight = torch.zeros(max(1, megabytes * 500_000 // INPUTS), INPUTS, dtype=torch.bfloat16)
    packed, program = Packed(kernels, [weight]), Program(kernels)
    del weight
    program.linear(packed, program.buffer(INPUTS), program.buffer(packed.outputs))
    rows = Rows([0], [0])
    return Bandwidth(
        by_sum, gigabytes_per_second(packed.data.nbytes, lambda: program.run(rows), repeats)
    )


class Breakdown(NamedTuple):
    """Milliseconds of one native pass and of its parts, each run by itself; `rest` is what they
    leave of the whole: norms, rotary angles, keys and values to their pages, Python. `share`: of
    the memory's bandwidth that the weights reach in the time of the whole pass."""

    milliseconds: float
    products: float
    attention: float
    gigabytes_per_second: float
    share: float

    @property
    def rest(self) -> float:
        return self.milliseconds - self.products - self.attention


def break_down(
    figures: Figures, weight_bytes: int, bandwidth: Bandwidth
) -> dict[int, dict[int, Breakdown]]:
    """By context and width, from figures with the parts beside `native`."""
    found: dict[int, dict[int, Breakdown]] = {}
    for context, by_width in figures["native"].items():
        for width, ms in by_width.items():
            products, attention = (
                figures[part][context][width] for part in ("products", "attention")
            )
            rate = weight_bytes / ms / 1e6
            found.setdefault(context, {})[width] = Breakdown(
                ms, products, attention, rate, rate / bandwidth.best
            )
    return found
