"""Which kernels a process asks for through its environment, and which it will get.

This module does not import PyTorch, and it compiles and loads nothing.

`QUICKBEAM_KERNELS` is `auto` (the default: native kernels if they are available, else PyTorch's),
`native` (an error if they are not available) or `eager` (PyTorch's). `QUICKBEAM_ISA` names an
instruction set of `build` to use instead of the machine's best.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from quickbeam.errors import InvalidInput
from quickbeam.models.native import build

MODES = ("auto", "native", "eager")


class KernelRequest(NamedTuple):
    """What the environment asks for.

    `mode`: one of `MODES`. `isa`: an instruction set; empty for the machine's best.
    """

    mode: str
    isa: str


def requested() -> KernelRequest:
    """Read what the environment asks for. Raises `InvalidInput` for unknown values."""
    mode = os.environ.get("QUICKBEAM_KERNELS") or "auto"
    isa = os.environ.get("QUICKBEAM_ISA") or ""
    if mode not in MODES:
        raise InvalidInput(f"QUICKBEAM_KERNELS={mode!r}: must be one of {', '.join(MODES)}")
    sets = [*build.SETS, *build.EMULATED]
    if isa and isa not in sets:
        raise InvalidInput(f"QUICKBEAM_ISA={isa!r}: must be one of {', '.join(sets)}")
    return KernelRequest(mode, isa)


def candidates(request: KernelRequest) -> tuple[list[str], str]:
    """Return the instruction sets to try, the best first, and the reason if there is none.

    Raises `InvalidInput` if the request names a set that this machine doesn't run.
    """
    if request.mode == "eager":
        return [], "QUICKBEAM_KERNELS=eager"
    sets = build.machine_sets()
    if not request.isa:
        return sets, build.NO_SETS
    if not build.runs(request.isa):
        raise InvalidInput(
            f"QUICKBEAM_ISA={request.isa}: this machine runs {', '.join(sets) or 'none of them'}"
        )
    return [request.isa], ""


def refuse(request: KernelRequest, reason: str) -> None:
    """Raise `InvalidInput` if the request asks for native kernels, which are not available.

    `reason`: why they are not.
    """
    if request.mode == "native" or (request.mode == "auto" and request.isa):
        raise InvalidInput(
            f"native kernels can't be had: {reason}; leave QUICKBEAM_KERNELS and "
            "QUICKBEAM_ISA out for PyTorch's"
        )


def describe_kernels() -> str:
    """Say in words which kernels a model on a CPU will use, or why there are none.

    Raises `InvalidInput` for a request that can't be met.
    """
    request = requested()
    names, reason = candidates(request)
    for name in names:
        if build.cached(name).is_file():
            return f"native ({name})"
        if build.compiler() is not None:
            return f"native ({name}), compiled on first use"
        reason = str(build.no_compiler())
    refuse(request, reason)
    return f"PyTorch's ({reason})"
