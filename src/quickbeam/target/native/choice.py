"""Which kernels a process asks for, by its environment, and what it will get. Imports no PyTorch,
compiles and loads nothing.

`QUICKBEAM_KERNELS`: `auto` (the default: native kernels where they can be had), `native` (an error
where they can't), `eager` (PyTorch's). `QUICKBEAM_ISA`: an instruction set of `build.SETS` instead
of the machine's best.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from quickbeam.errors import InvalidInput
from quickbeam.target.native import build

WAYS = ("auto", "native", "eager")


class Wish(NamedTuple):
    """What the environment says. `isa`: empty for the machine's best."""

    way: str
    isa: str

    @property
    def must(self) -> bool:
        """Native kernels or an error."""
        return self.way == "native" or bool(self.isa)


def wish() -> Wish:
    """Raises `InvalidInput` for words that are not known."""
    way, isa = os.environ.get("QUICKBEAM_KERNELS") or "auto", os.environ.get("QUICKBEAM_ISA") or ""
    if way not in WAYS:
        raise InvalidInput(f"QUICKBEAM_KERNELS={way!r}: must be one of {', '.join(WAYS)}")
    known = [*build.SETS, build.EMULATED]
    if isa and isa not in known:
        raise InvalidInput(f"QUICKBEAM_ISA={isa!r}: must be one of {', '.join(known)}")
    return Wish(way, isa)


def candidates(wish: Wish) -> tuple[list[str], str]:
    """Instruction sets to try, best first, and why there is none where the list is empty. Raises
    `InvalidInput` for one that this machine doesn't run."""
    if wish.way == "eager":
        return [], "QUICKBEAM_KERNELS=eager"
    sets = build.machine_sets()
    if not wish.isa:
        return sets, "none for this platform (Linux on x86-64 has them)"
    if not build.runs(wish.isa):
        raise InvalidInput(
            f"QUICKBEAM_ISA={wish.isa}: this machine runs {', '.join(sets) or 'none of them'}"
        )
    return [wish.isa], ""


def refuse(wish: Wish, reason: str) -> None:
    """Raises `InvalidInput` where nothing but native kernels would do."""
    if wish.must and wish.way != "eager":
        raise InvalidInput(
            f"native kernels can't be had: {reason}; leave QUICKBEAM_KERNELS and "
            "QUICKBEAM_ISA out for PyTorch's"
        )


def outlook() -> str:
    """In words: the kernels that a model on a CPU will use, or why there are none. Raises
    `InvalidInput` for a wish that can't be met."""
    asked = wish()
    names, reason = candidates(asked)
    for name in names:
        if build.cached(name).is_file():
            return f"native ({name})"
        if build.compiler() is not None:
            return f"native ({name}), compiled on first use"
        reason = str(build.no_compiler())
    refuse(asked, reason)
    return f"PyTorch's ({reason})"
