"""The long loops of `noise.py` by the compiled kernels. They give what its plain ways do."""

from __future__ import annotations

import numpy as np

from quickbeam.noise import CUT, USUAL, Array, Loops, Noise, Places, Row, Wanted
from quickbeam.target.native.library import Kernels, Place


class NativeLoops(Loops):
    """`Loops` by `kernels`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def philox(self, counter: Array, key: tuple[int, int]) -> Array:
        words = np.empty_like(counter)
        self._kernels.philox(counter.ctypes.data, counter.shape[1], *key, words.ctypes.data)
        return words

    def perturb(self, noise: Noise, rows: Array, tokens: Array | None, places: Places, wanted: Wanted) -> list[Row]:
        found = list[Row]()
        column, chance = np.empty(wanted.most, dtype=np.int64), np.empty(wanted.most)
        into = column.ctypes.data, chance.ctypes.data
        size, names = rows.shape[1], None if tokens is None else tokens.ctypes.data
        start, step = rows.ctypes.data, rows.strides[0]
        for i, (position, least, floor) in enumerate(zip(*places, strict=True)):
            peaks, owners = noise.peaks(position)
            place = Place(peaks.ctypes.data, owners.ctypes.data, position, least, floor)
            cut = max(CUT, floor / 4) * USUAL**-wanted.temperature
            law = wanted.temperature, cut, noise.choice, *noise.key, wanted.most
            kept = self._kernels.perturb(start + i * step, size, names, len(peaks), place, *law, *into)
            found.append((column[:kept].tolist(), chance[:kept].tolist()))
        return found
