"""`quickbeam --version`.

This module imports neither PyTorch nor the packages of other commands, so that it answers at once.
"""

from __future__ import annotations

from quickbeam import __version__
from quickbeam.models.native.choice import outlook


def version() -> str:
    """Return the version, and the kernels that a model on a CPU will use.

    Raises `InvalidInput` as `outlook` does.
    """
    return f"{__version__}\nkernels: {outlook()}"
