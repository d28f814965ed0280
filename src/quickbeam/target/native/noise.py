"""The long loops of `quickbeam/noise.py`, run by the compiled kernels.

Their results are those of its NumPy loops.
"""

from __future__ import annotations

import numpy as np

from quickbeam.noise import CHUNK, CUT, Array, Loops, Noise, Peaks, Places, Row, Wanted
from quickbeam.target.native.library import Kernels, Luck, Place


class NativeLoops(Loops):
    """`Loops` that `kernels` run."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def philox(self, counter: Array, key: tuple[int, int]) -> Array:
        words = np.empty_like(counter)
        self._kernels.philox(counter.ctypes.data, counter.shape[1], *key, words.ctypes.data)
        return words

    def peaks(self, noise: Noise, position: int) -> Peaks:
        chunks = -(-noise.vocab // CHUNK)
        largest, whose = np.empty(chunks), np.empty(chunks, dtype=np.int64)
        self._kernels.peaks(
            position, noise.choice, *noise.key, chunks, largest.ctypes.data, whose.ctypes.data
        )
        return largest, whose

    def largest(self, noise: Noise, scores: Array, position: int, scale: float) -> int:
        scores = np.ascontiguousarray(scores, dtype=np.float32)
        return int(
            self._kernels.largest(
                scores.ctypes.data, len(scores), self._luck(noise, position), scale
            )
        )

    @staticmethod
    def _luck(noise: Noise, position: int) -> Luck:
        peaks, owners = noise.peaks(position)
        return Luck(peaks.ctypes.data, owners.ctypes.data, position, noise.choice, *noise.key)

    def perturb(
        self, noise: Noise, rows: Array, tokens: Array | None, places: Places, wanted: Wanted
    ) -> list[Row]:
        found = list[Row]()
        column, chance = np.empty(wanted.most, dtype=np.int64), np.empty(wanted.most)
        size, names, chunks = (
            rows.shape[1],
            None if tokens is None else tokens.ctypes.data,
            -(-noise.vocab // CHUNK),
        )
        start, step = rows.ctypes.data, rows.strides[0]
        for i, (position, least, floor) in enumerate(zip(*places, strict=True)):
            law = (
                Place(self._luck(noise, position), least, floor),
                wanted.temperature,
                max(CUT, floor / 4),
                wanted.most,
            )
            kept = self._kernels.perturb(
                start + i * step, size, names, chunks, *law, column.ctypes.data, chance.ctypes.data
            )
            found.append((column[:kept].tolist(), chance[:kept].tolist()))
        return found
