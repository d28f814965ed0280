"""Grids: which weights the numbers in blocks of IQ1, IQ2 and IQ3 stand for.

A number of a block names a row of its format's grid, which holds the magnitudes of 8 weights (of
IQ3: 4). The grids are data of the format, and come from the Python package `gguf`.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from quickbeam.models.native.library import FORMATS


@functools.cache
def grid_of(name: str) -> torch.Tensor | None:
    """Return the grid of the format `name`, `[rows, 8]` uint8 (of IQ3 `[rows, 4]`).

    An element is the rank of a magnitude among all of the grid: 0 stands for the smallest. None for
    a format without a grid.
    """
    if not FORMATS[name].grid:
        return None
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    _, ranks = np.unique(kind.grid, return_inverse=True)
    return torch.from_numpy(ranks.reshape(kind.grid_shape).astype(np.uint8))
