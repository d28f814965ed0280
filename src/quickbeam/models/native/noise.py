"""The noise of a position by the compiled kernels, with the results of `quickbeam/noise.py`."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from ctypes import c_double, c_int64

import numpy as np
import torch

from quickbeam.models.native.library import Kernels, NoiseRow
from quickbeam.noise import CHUNK, CUT, KEPT, Array, ArrayLike, Noise, NoisePosition, Peaks, Row


def as_contiguous(values: ArrayLike, dtype: torch.dtype) -> torch.Tensor:
    """Return values as a contiguous tensor of this dtype, copied only where they are not."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
    return (tensor if tensor.dtype is dtype else tensor.to(dtype)).contiguous()


class NativeNoise(Noise):
    """`Noise` whose long loops `kernels` run."""

    def __init__(self, kernels: Kernels, seed: int, choice: int, vocab: int) -> None:
        super().__init__(seed, choice, vocab)
        self._kernels, self._chunks = kernels, -(-vocab // CHUNK)
        # by position, and the memory of each: the peaks of all chunks, then e^-peak of each, then
        # the peaks' tokens
        self.rows = OrderedDict[int, tuple[NoiseRow, ctypes.Array[c_double]]]()

    def _philox(self, counter: Array) -> Array:
        words = np.empty_like(counter)
        self._kernels.philox(counter.ctypes.data, counter.shape[1], *self.key, words.ctypes.data)
        return words

    def _find_peaks(self, position: int) -> Peaks:
        self._row(position)
        _, memory = self.rows[position]
        values = np.array(memory)  # a copy: the memory may come to hold another position's
        peaks, tokens = values[: self._chunks], values[2 * self._chunks :].view(np.int64)
        return peaks, tokens

    def largest(self, scores: ArrayLike, position: int, scale: float = 1.0) -> int:
        scores = as_contiguous(scores, torch.float32)
        row = self._row(position)
        return int(self._kernels.largest(scores.data_ptr(), scores.shape[0], row, scale))

    def _row(self, position: int) -> NoiseRow:
        """Return the peaks of a position's noise, computed unless they are kept.

        Read them before the next call, which may put another position into the same memory.
        """
        if position not in self.rows:
            if len(self.rows) == KEPT:
                _, (row, memory) = self.rows.popitem(last=False)
            else:
                row, memory = self._empty_row()
            row.position = position
            self._kernels.find_peaks(row)
            self.rows[position] = row, memory
        return self.rows[position][0]

    def _empty_row(self) -> tuple[NoiseRow, ctypes.Array[c_double]]:
        memory = (c_double * (3 * self._chunks))()
        peaks = ctypes.addressof(memory)
        size = 8 * self._chunks
        row = NoiseRow(
            peaks, peaks + size, peaks + 2 * size, self._chunks, 0, self.choice, *self.key
        )
        return row, memory

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
        rows, token_address = as_contiguous(rows, torch.float32), None
        if tokens is not None:
            tokens = as_contiguous(tokens, torch.int64)
            token_address = tokens.data_ptr()
        address, size = rows.data_ptr(), rows.shape[1]
        for position, low, least in noise_positions:
            count = self._kernels.perturb(
                address,
                size,
                token_address,
                self._row(position),
                low,
                least,
                temperature,
                max(CUT, least / 4),
                most,
                columns,
                probs,
            )
            likeliest.append((columns[:count], probs[:count]))
            address += 4 * size
        return likeliest

    def forget(self) -> None:
        super().forget()
        self.rows.clear()
