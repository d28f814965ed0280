"""The noise of a place by the compiled kernels, whose results are those of `quickbeam/noise.py`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from ctypes import addressof, c_double, c_int64

import numpy as np
import torch

from quickbeam.models.native.library import Kernels, Luck
from quickbeam.noise import (
    CHUNK,
    CUT,
    HELD,
    Array,
    Noise,
    Numbers,
    Peaks,
    Row,
)


def laid(numbers: Numbers, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers as a contiguous tensor of this dtype, copied only where they are not."""
    found = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(np.array(numbers))
    return (found if found.dtype is dtype else found.to(dtype)).contiguous()


class Held:
    """The largest numbers of a place's chunks and their tokens, as the kernels read them.

    `memory` has the numbers of all `chunks`, then e^-number of each, then the tokens. `luck` points
    at these, and names the place.
    """

    def __init__(self, noise: Noise) -> None:
        self.chunks = -(-noise.vocab // CHUNK)
        self.memory = (c_double * (3 * self.chunks))()
        parts = [addressof(self.memory) + 8 * self.chunks * i for i in range(3)]
        self.luck = Luck(*parts, self.chunks, 0, noise.choice, *noise.key)


class NativeNoise(Noise):
    """`Noise` whose long loops `kernels` run."""

    def __init__(self, kernels: Kernels, seed: int, choice: int, vocab: int) -> None:
        super().__init__(seed, choice, vocab)
        self._kernels, self.held = kernels, OrderedDict[int, Held]()  # by position

    def _philox(self, counter: Array) -> Array:
        words = np.empty_like(counter)
        self._kernels.philox(counter.ctypes.data, counter.shape[1], *self.key, words.ctypes.data)
        return words

    def _find_peaks(self, position: int) -> Peaks:
        self._luck(position)
        held = self.held[position]
        every = np.array(held.memory)  # a copy: the memory may come to hold another place
        return every[: held.chunks], every[2 * held.chunks :].view(np.int64)

    def largest(self, scores: Numbers, position: int, scale: float = 1.0) -> int:
        scores = laid(scores, torch.float32)
        luck = self._luck(position)
        return int(self._kernels.largest(scores.data_ptr(), scores.shape[0], luck, scale))

    def _luck(self, position: int) -> Luck:
        """Return the largest numbers of a place, computed unless they are kept.

        Read them before the next call, which may put another place into the same memory.
        """
        found = self.held.get(position)
        if found is None:
            full = len(self.held) == HELD
            found = self.held.popitem(last=False)[1] if full else Held(self)
            found.luck.position = position
            self._kernels.find(found.luck)
            self.held[position] = found
        return found.luck

    def perturb(
        self,
        rows: Numbers,
        tokens: Numbers | None,
        positions: Sequence[int],
        least: Sequence[float],
        floors: Sequence[float],
        temperature: float,
        most: int,
    ) -> list[Row]:
        found = list[Row]()
        name, chance = (c_int64 * most)(), (c_double * most)()
        rows, names = laid(rows, torch.float32), None
        if tokens is not None:
            tokens = laid(tokens, torch.int64)
            names = tokens.data_ptr()
        at, size = rows.data_ptr(), rows.shape[1]
        for position, low, floor in zip(positions, least, floors, strict=True):
            place = self._luck(position), low, floor, temperature, max(CUT, floor / 4)
            kept = self._kernels.perturb(at, size, names, *place, most, name, chance)
            found.append((name[:kept], chance[:kept]))
            at += 4 * size
        return found

    def forget(self) -> None:
        super().forget()
        self.held.clear()
