"""The long loops of `quickbeam/noise.py`, run by the compiled kernels.

Their results are those of its NumPy loops.
"""

from __future__ import annotations

from ctypes import addressof, c_char, c_double, c_int64
from typing import Any, NamedTuple

import numpy as np

from quickbeam.noise import CHUNK, CUT, HELD, Array, Loops, Noise, Peaks, Places, Row, Wanted
from quickbeam.target.native.library import Kernels, Luck


def address(array: Array) -> int:
    """Return where an array's numbers begin: what `array.ctypes.data` is, found sooner."""
    try:
        return addressof(c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # it is read-only, or empty
        return int(array.ctypes.data)


class Held(NamedTuple):
    """The largest numbers of a place's chunks and their tokens, as the kernels read them.

    `memory` has the numbers of all `chunks`, then the tokens. `luck` points at both.
    """

    memory: Any
    chunks: int
    luck: Luck


class NativeLoops(Loops):
    """`Loops` that `kernels` run."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def philox(self, counter: Array, key: tuple[int, int]) -> Array:
        words = np.empty_like(counter)
        self._kernels.philox(counter.ctypes.data, counter.shape[1], *key, words.ctypes.data)
        return words

    def peaks(self, noise: Noise, position: int) -> Peaks:
        held = self._held(noise, position)
        return np.frombuffer(held.memory, count=held.chunks), np.frombuffer(
            held.memory, dtype=np.int64, offset=8 * held.chunks
        )

    def largest(self, noise: Noise, scores: Array, position: int, scale: float) -> int:
        if scores.dtype != np.float32 or not scores.flags.c_contiguous:
            scores = np.ascontiguousarray(scores, dtype=np.float32)
        luck = self._held(noise, position).luck
        return int(self._kernels.largest(address(scores), len(scores), luck, scale))

    def _held(self, noise: Noise, position: int) -> Held:
        """Return what the loops need of a place. It is made once; behind a pass, each tensor or
        array that is made would take longer than the numbers do."""
        found: Held | None = noise.held.get(position)
        if found is None:
            chunks = -(-noise.vocab // CHUNK)
            memory = (c_double * (2 * chunks))()
            at, owners = addressof(memory), addressof(memory) + 8 * chunks
            self._kernels.peaks(position, noise.choice, *noise.key, chunks, at, owners)
            luck = Luck(at, owners, position, noise.choice, *noise.key)
            found = noise.held[position] = Held(memory, chunks, luck)
            while len(noise.held) > HELD:
                noise.held.popitem(last=False)
        return found

    def perturb(
        self, noise: Noise, rows: Array, tokens: Array | None, places: Places, wanted: Wanted
    ) -> list[Row]:
        found = list[Row]()
        column, chance = (c_int64 * wanted.most)(), (c_double * wanted.most)()
        size, names = rows.shape[1], None if tokens is None else address(tokens)
        start, step = address(rows), rows.strides[0]
        for i, (position, least, floor) in enumerate(zip(*places, strict=True)):
            held = self._held(noise, position)
            place = held.chunks, held.luck, least, floor, wanted.temperature, max(CUT, floor / 4)
            kept = self._kernels.perturb(
                start + i * step, size, names, *place, wanted.most, column, chance
            )
            found.append((column[:kept], chance[:kept]))
        return found
