"""The noise of a position by compiled kernels, whose results are those of `quickbeam/noise.py`."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from ctypes import c_double, c_int64

import numpy as np
import torch

from quickbeam.models.native.library import Kernels, NoiseRow
from quickbeam.noise import CHUNK, CUT, KEPT, Array, ArrayLike, Noise, NoisePosition, Peaks, Row


def laid(numbers: ArrayLike, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers as a contiguous tensor of this dtype, copied only where they are not."""
    given = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(np.array(numbers))
    return (given if given.dtype is dtype else given.to(dtype)).contiguous()


class NativeNoise(Noise):
    """`Noise` whose long loops `kernels` run."""

    def __init__(self, kernels: Kernels, seed: int, choice: int, vocab: int) -> None:
        super().__init__(seed, choice, vocab)
        self._kernels, self._chunks = kernels, -(-vocab // CHUNK)
        # by position, and the memory of each: the largest numbers of all chunks, then e^-number of
        # each, then their tokens
        self.rows = OrderedDict[int, tuple[NoiseRow, ctypes.Array[c_double]]]()

    def _philox(self, counter: Array) -> Array:
        words = np.empty_like(counter)
        self._kernels.philox(counter.ctypes.data, counter.shape[1], *self.key, words.ctypes.data)
        return words

    def _find_peaks(self, position: int) -> Peaks:
        self._row(position)
        numbers = np.array(self.rows[position][1])  # a copy: the memory may come to hold another
        return numbers[: self._chunks], numbers[2 * self._chunks :].view(np.int64)

    def largest(self, scores: ArrayLike, position: int, scale: float = 1.0) -> int:
        scores = laid(scores, torch.float32)
        row = self._row(position)
        return int(self._kernels.largest(scores.data_ptr(), scores.shape[0], row, scale))

    def _row(self, position: int) -> NoiseRow:
        """Return the largest numbers of a position, computed unless they are kept.

        Read them before the next call, which may put another position's into the same memory.
        """
        if position not in self.rows:
            full = len(self.rows) == KEPT
            row, memory = self.rows.popitem(last=False)[1] if full else self._empty_row()
            row.position = position
            self._kernels.find_peaks(row)
            self.rows[position] = row, memory
        return self.rows[position][0]

    def _empty_row(self) -> tuple[NoiseRow, ctypes.Array[c_double]]:
        memory = (c_double * (3 * self._chunks))()
        parts = [ctypes.addressof(memory) + 8 * self._chunks * i for i in range(3)]
        return NoiseRow(*parts, self._chunks, 0, self.choice, *self.key), memory

    def perturb(
        self,
        rows: ArrayLike,
        tokens: ArrayLike | None,
        noise_positions: Sequence[NoisePosition],
        temperature: float,
        most: int,
    ) -> list[Row]:
        likeliest = list[Row]()
        columns, probs = (c_int64 * most)(), (c_double * most)()
        rows, names = laid(rows, torch.float32), None
        if tokens is not None:
            tokens = laid(tokens, torch.int64)
            names = tokens.data_ptr()
        at, size = rows.data_ptr(), rows.shape[1]
        for position, low, floor in noise_positions:
            how = self._row(position), low, floor, temperature, max(CUT, floor / 4)
            count = self._kernels.perturb(at, size, names, *how, most, columns, probs)
            likeliest.append((columns[:count], probs[:count]))
            at += 4 * size
        return likeliest

    def forget(self) -> None:
        super().forget()
        self.rows.clear()
