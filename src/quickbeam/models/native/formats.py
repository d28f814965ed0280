"""The formats of weights, one table. `formats.h` says how each lies in memory."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """How a weight's numbers are stored.

    `bits`: of a number, its share of the scales counted. `made`: who makes it: a checkpoint, a
    `.gguf` file, or the option `--weights`. Blocks of `inputs` numbers take `bytes` where they are
    read (`BlockRows`). `file_type`: their number in `.gguf` files; None for what none holds.
    """

    bits: float
    made: str
    file_type: int | None = None
    inputs: int = 1
    bytes: int = 0


def _blocks(file_type: int | None, inputs: int, size: int, made: str = "GGUF") -> Format:
    return Format(8 * size / inputs, made, file_type, inputs, size)


QUANTISED = "AWQ, GPTQ, compressed-tensors"
FLOAT8 = "FP8, compressed-tensors"


# In the order of the kernels. A group of 32 `int4` weights is stored as a block of Q4_1 is.
FORMATS: dict[str, Format] = {
    "bfloat16": Format(16, "checkpoint"),
    "int8": Format(8, "--weights"),
    "int4": _blocks(3, 32, 20, "--weights, GGUF (Q4_1)"),
    "float32": Format(32, "checkpoint"),
    "q4_0": _blocks(2, 32, 18),
    "q5_0": _blocks(6, 32, 22),
    "q5_1": _blocks(7, 32, 24),
    "q8_0": _blocks(8, 32, 34),
    "q4_k": _blocks(12, 256, 144),
    "q5_k": _blocks(13, 256, 176),
    "q6_k": _blocks(14, 256, 210),
    "iq4_nl": _blocks(20, 32, 18),
    "mxfp4": _blocks(39, 32, 17),
    "w4g32": _blocks(None, 32, 21, QUANTISED),
    "w4g128": _blocks(None, 128, 69, QUANTISED),
    "w8g32": _blocks(None, 32, 37, QUANTISED),
    "w8g128": _blocks(None, 128, 133, QUANTISED),
    "fp8g32": _blocks(None, 32, 36, FLOAT8),
    "fp8g128": _blocks(None, 128, 132, FLOAT8),
}
NAMES = tuple(FORMATS)  # an operation names a format by its index
