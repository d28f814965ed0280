"""Where the time of a native pass goes, by its parts.

Also how near its matrix products come to the bandwidth of the machine's memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quickbeam.bench.passes import Figures
from quickbeam.doctor.machine import gigabytes_per_second, read_by_sum
from quickbeam.target.native import library
from quickbeam.target.native.operands import Packed, Rows
from quickbeam.target.native.program import Program

MEGABYTES = 512  # more than caches hold
INPUTS = 2048  # columns of the product's weight


class Bandwidth(NamedTuple):
    """Gigabytes a second that all threads together read from memory.

    `sum` is measured with a sum of float32 numbers. `product` is measured with the native kernels'
    product of one row; it is 0 where there are no native kernels.
    """

    sum: float
    product: float

    @property
    def best(self) -> float:
        return max(self)


def measure_bandwidth(megabytes: int = MEGABYTES, repeats: int = 9) -> Bandwidth:
    """Measure how fast a buffer of `megabytes` is read from memory.

    The median of `repeats` readings counts, as for passes.
    """
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
    """Milliseconds of one native pass and of its parts, each part run by itself.

    `rest` is what the parts leave of the whole pass: norms, rotary angles, writing keys and values
    to their pages, Python. `gigabytes_per_second` is how fast the weights are read, over the time
    of the whole pass. `share` is that rate over the memory bandwidth.
    """

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
    """Return the breakdowns by context and width.

    `figures` must have the parts (`products`, `attention`) beside `native`. `weight_bytes` is what
    a pass reads.
    """
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
