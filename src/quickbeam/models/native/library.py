"""The compiled kernels as Python sees them: their structures and functions.

The environment decides which library this process uses (see `choice`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    Structure,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from quickbeam.machine import memory_nodes
from quickbeam.models.native import build, choice
from quickbeam.models.native.choice import KernelRequest

logger = logging.getLogger(__name__)

VERSION = 29
EMBED, NORM, LINEAR, HEADS, ATTEND, COPY, SELECTED, EXPERTS, RECUR = range(9)
GATE, LATENT, REORDER, CONVOLVE, ADD_ROWS = range(9, 14)
STORE, ADD, GATED, ACTIVATE, BEST = range(5)
CONVOLUTION, DELTA_RULE, STATE_SPACE = range(3)  # of recurrences
# "clamped" is for experts alone, "sigmoid" for gates, "xielu" for products without a gate
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped", "sigmoid", "xielu")
# of routers: what the weights of the selected experts are
SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "mixer")
# how a checkpoint holds the values of a weight (blocks.h)
BY_OUTPUT, WORDS_OF_INPUTS, WORDS_OF_OUTPUTS = range(3)


class Format(NamedTuple):
    """How a weight's elements are stored; `formats.h` says how they lie in memory.

    `number`: what operations call it. A block of `inputs` elements takes `bytes` in a file
    (`BlockRows`); 1 input stands for no blocks. `file_type`: its number in `.gguf` files; None
    where these don't have it. `grid`: whether its values are read with a grid (`grids.py`).
    """

    number: int
    inputs: int
    bytes: int
    file_type: int | None = None
    grid: bool = False


FORMATS: dict[str, Format] = {  # by name
    "bfloat16": Format(0, 1, 2),
    "int8": Format(1, 1, 1),
    "int4": Format(2, 32, 20, 3),  # as a block of Q4_1
    "float32": Format(3, 1, 4),
    "q4_0": Format(4, 32, 18, 2),
    "q5_0": Format(5, 32, 22, 6),
    "q5_1": Format(6, 32, 24, 7),
    "q8_0": Format(7, 32, 34, 8),
    "q2_k": Format(8, 256, 84, 10),
    "q3_k": Format(9, 256, 110, 11),
    "q4_k": Format(10, 256, 144, 12),
    "q5_k": Format(11, 256, 176, 13),
    "q6_k": Format(12, 256, 210, 14),
    "iq4_nl": Format(13, 32, 18, 20),
    "iq4_xs": Format(14, 256, 136, 23),
    "mxfp4": Format(15, 32, 17, 39),
    "iq1_s": Format(16, 256, 50, 19, grid=True),
    "iq1_m": Format(17, 256, 56, 29, grid=True),
    "iq2_xxs": Format(18, 256, 66, 16, grid=True),
    "iq2_xs": Format(19, 256, 74, 17, grid=True),
    "iq2_s": Format(20, 256, 82, 22, grid=True),
    "iq3_xxs": Format(21, 256, 98, 18, grid=True),
    "iq3_s": Format(22, 256, 110, 21, grid=True),
    "tq1_0": Format(23, 256, 54, 34),
    "tq2_0": Format(24, 256, 66, 35),
    # of AWQ, GPTQ and compressed-tensors
    "w4g32": Format(25, 32, 21),
    "w4g128": Format(26, 128, 69),
    "w8g32": Format(27, 32, 37),
    "w8g128": Format(28, 128, 133),
    "fp8g32": Format(29, 32, 36),
    "fp8g128": Format(30, 128, 132),
}


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class Op(Structure):
    """The structure `Op` of program.cpp."""

    _fields_ = (
        *_fields(c_int32, "kind epilogue source target best source_float target_float wanted"),
        *_fields(c_int64, "source_stride source_offset target_stride target_offset"),
        *_fields(c_void_p, "weight bias"),
        *_fields(c_int64, "inputs outputs heads kv_heads head_dim value_dim"),
        *_fields(c_void_p, "query_norm key_norm"),
        *_fields(c_int64, "offset window"),
        ("sinks", c_void_p),
        *_fields(c_float, "epsilon scaling softcap"),
        *_fields(c_int32, "key value format"),
        *_fields(
            c_int64,
            "key_stride key_head value_stride value_head norm_stride rotary angles query_scale",
        ),
        *_fields(
            c_int32, "activation centred interleaved norm_last value_norm values_are_keys borrowed"
        ),
        *_fields(c_int32, "bidirectional causal"),
        ("experts", c_void_p),
        *_fields(c_int64, "first_expert last_expert"),
        ("grid", c_void_p),
    )


class Expert(Structure):
    """The structure `Expert` of experts.h."""

    _fields_ = _fields(c_void_p, "up down up_bias down_bias")


class Experts(Structure):
    """The structure `Experts` of experts.h."""

    _fields_ = (
        *_fields(c_void_p, "expert correction scale"),
        *_fields(c_int64, "count top inner shared groups top_groups best_of_group"),
        *_fields(c_int32, "scores renormalised gated down_format shared_up shared_down"),
        *_fields(c_float, "plus least factor jitter"),
        ("read", c_int64),
    )


class StoredWeight(Structure):
    """The structure `StoredWeight` of blocks.h."""

    _fields_ = (
        *_fields(c_int32, "format stored"),
        ("flip", c_uint8),
        ("values", c_void_p),
        *_fields(c_int64, "outputs inputs"),
        *_fields(c_void_p, "order scales zeros"),
    )


class Span(Structure):
    """The structure `Span` of attention.h."""

    _fields_ = (("row", c_int64), ("rows", c_int64), ("pages", c_void_p), ("nodes", c_void_p))


class Recurrence(Structure):
    """The structure `Recurrence` of recurrent.h."""

    _fields_ = (
        *_fields(
            c_int64,
            "kind state input inputs channels taps column gate gate_out activated heads "
            "key_heads alike key_dim value_dim query key value factors kept kept_count decay rate",
        ),
        *_fields(c_void_p, "weight bias slope shift skip"),
        *_fields(c_float, "least most step_scale"),
    )


class Nodes(Structure):
    """The structure `Nodes` of recurrent.h."""

    _fields_ = (
        *_fields(c_void_p, "state next boundary inputs parent"),
        *_fields(c_int64, "boundary_node base nodes"),
    )


class Batch(Structure):
    """The structure `Batch` of attention.h."""

    _fields_ = (
        *_fields(c_int64, "rows spans wanted"),
        *_fields(c_void_p, "span token position order prefix path_from path want cosine sine"),
        ("angle_stride", c_int64),
    )


class Call(Structure):
    """The structure `Call` of program.cpp."""

    _fields_ = (
        ("batch", Batch),
        *_fields(c_void_p, "buffer block"),
        ("blocks", c_int64),
        ("nodes", c_void_p),
    )


class MemoryNodes(Structure):
    """The structure `MemoryNodes` of nodes.h.

    `processors`: the numbers of each node's processors.
    """

    _fields_ = (
        ("count", c_int64),
        *_fields(c_void_p, "before masks"),
        ("bytes", c_int64),
    )

    def __init__(self, processors: Sequence[Sequence[int]]) -> None:
        sizes = [len(numbers) for numbers in processors]
        self._before = np.cumsum([0, *sizes], dtype=np.int64)
        self._masks = np.zeros((len(sizes), max(map(max, processors)) // 64 + 1), dtype=np.uint64)
        for node, numbers in enumerate(processors):
            for number in numbers:
                self._masks[node, number // 64] |= np.uint64(1 << number % 64)
        super().__init__(
            len(sizes), self._before.ctypes.data, self._masks.ctypes.data, self._masks[0].nbytes
        )


class NoiseRow(Structure):
    """The structure `NoiseRow` of noise.h."""

    _fields_ = (
        *_fields(c_void_p, "peak ease owner"),
        *_fields(c_int64, "chunks position choice"),
        *_fields(c_uint32, "key0 key1"),
    )


_ROW = (c_void_p, c_int64, c_void_p, POINTER(NoiseRow))
_IN_ROWS = (c_void_p, c_int64, c_int64, c_int64, c_void_p)
# arguments and result of each function of the library, by its name without `qb_`
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "run": ((c_void_p, c_int64, POINTER(Call), c_int64), None),
    "touch": ((c_void_p, c_int64, c_int64, POINTER(MemoryNodes), c_int64), None),
    "pack": ((c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64), None),
    "block_bytes": ((c_int32, c_int64), c_int64),
    "quantise": ((c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64), c_int64),
    "repack": ((c_int32, *2 * (c_void_p,), *3 * (c_int64,), c_void_p, c_int64), None),
    "to_blocks": ((POINTER(StoredWeight), c_void_p), c_int64),
    "dense": ((c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p), None),
    "put": ((c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p), None),
    "unpack": ((c_void_p, c_int64, c_int64, c_int64, c_void_p), None),
    "move": ((c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64), None),
    "read": ((c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64), None),
    "fold": ((c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p), None),
    "philox": ((c_void_p, c_int64, c_uint32, c_uint32, c_void_p), None),
    "find_peaks": ((POINTER(NoiseRow),), None),
    "largest": ((c_void_p, c_int64, POINTER(NoiseRow), c_double), c_int64),
    "perturb": ((*_ROW, *4 * (c_double,), c_int64, c_void_p, c_void_p), c_int64),
    "ranked": ((c_void_p, c_int64, c_void_p, c_int64, c_float, c_void_p, c_void_p), c_int64),
    "candidates": ((*_IN_ROWS, c_float, c_void_p, c_void_p), c_int64),
    "follow": ((c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p), None),
}


@functools.cache
def share_openmp() -> None:
    """Let the kernels find PyTorch's OpenMP runtime.

    Its builds for ARM keep the runtime's names to PyTorch's own libraries.
    """
    if sys.platform != "linux" or hasattr(ctypes.CDLL(None), "omp_get_thread_num"):
        return
    maps = Path("/proc/self/maps").read_text("utf-8", "replace")
    loaded = set(re.findall(r"/.*/lib(?:gomp|i?omp5?)[-.].*", maps))
    folder = Path(torch.__file__).resolve().parent
    folders_of_torch = (f"{folder}/", f"{folder}.libs/")  # other packages may have a runtime, too
    runtimes = sorted(loaded, key=lambda path: not path.startswith(folders_of_torch))
    if runtimes:
        ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)


class Kernels:
    """The functions of one library (`SIGNATURES`). `name`: its instruction set.

    `nodes`: the memory nodes that threads are shared out over; None on a machine with one.

    Raises `build.CannotBuild` if the library can't be loaded, if it was made for another version,
    or if the system does not let this process use the instruction set.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        try:
            share_openmp()
            library = ctypes.CDLL(str(path))  # calls release the GIL
        except OSError as error:
            raise build.CannotBuild(f"the library can't be loaded: {error}") from error
        for query in ("qb_version", "qb_size_of_op", "qb_page", "qb_allowed"):
            getattr(library, query).restype = c_int64
        if library.qb_version() != VERSION or library.qb_size_of_op() != ctypes.sizeof(Op):
            raise build.CannotBuild(f"{path} was made for another version of quickbeam")
        if not library.qb_allowed():
            raise build.CannotBuild(f"the system does not let this process use {name}")
        self.page = int(library.qb_page())
        processors = memory_nodes()
        self.nodes = MemoryNodes(processors) if len(processors) > 1 else None
        for function_name, (arguments, result) in SIGNATURES.items():
            function = getattr(library, f"qb_{function_name}")
            function.argtypes = arguments
            function.restype = result
            setattr(self, function_name, function)


_loaded = dict[str, Kernels]()
_selected = dict[KernelRequest, tuple[Kernels | None, str]]()


def load(name: str, progress: Callable[[str], None] = logger.info) -> Kernels:
    """Return the kernels of an instruction set, compiled first if they are not there yet.

    `progress` is called before it compiles. Raises `build.CannotBuild`.
    """
    if name not in _loaded:
        _loaded[name] = Kernels(name, build.build(name, progress))
    return _loaded[name]


def _select(progress: Callable[[str], None] = logger.info) -> tuple[Kernels | None, str]:
    """Return the kernels that the environment asks for, or None and the reason."""
    request = choice.requested()
    if request not in _selected:
        names, reason = choice.candidates(request)
        for name in names:
            try:
                _selected[request] = load(name, progress), ""
                break
            except build.CannotBuild as error:
                reason = str(error)
                logger.info("no kernels for %s: %s", name, reason)
        else:
            choice.refuse(request, reason)
            if names:  # the machine could have had them
                logger.warning("%s; %s", reason, build.WITHOUT)
            _selected[request] = None, reason
    return _selected[request]


def kernels(progress: Callable[[str], None] = logger.info) -> Kernels | None:
    """Return the kernels that this process uses on a CPU; None stands for PyTorch's own operators.

    The environment decides (see `choice`). `progress` is called before they are compiled. Raises
    `InvalidInput` for a request that can't be met.
    """
    selected, _ = _select(progress)
    return selected


def describe(device: str = "cpu", dtype: str = "bfloat16") -> str:
    """Say in words which kernels a model uses on a device, or why it uses PyTorch's.

    Raises as `kernels` does.
    """
    if device != "cpu" or dtype not in ("bfloat16", "float32"):
        return f"PyTorch's ({dtype} on {device})"
    selected, reason = _select()
    return f"native ({selected.name})" if selected is not None else f"PyTorch's ({reason})"
