"""Runs the router in parallel with the drafter's layer, whose output it doesn't need."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from quickbeam.errors import InvalidInput

T = TypeVar("T")
WAYS = ("none", "thread", "stream")


class Overlap:
    """Starts work whose result is wanted later. `how`:

    - "stream": in a second CUDA stream. The first stream waits for it when the result is taken.
      This is the default on CUDA.
    - "thread": in another thread.
    - "none": at once. This is the default elsewhere: on a CPU the layer keeps all cores busy, and
      handing work over costs more than it hides.

    The results are the same in each case. Raises `InvalidInput` for an unknown way, and for one
    that the device doesn't have.
    """

    def __init__(self, device: torch.device, how: str | None = None) -> None:
        how = how or ("stream" if device.type == "cuda" else "none")
        if how not in WAYS:
            raise InvalidInput(f"unknown overlap {how!r}; known: {', '.join(WAYS)}")
        if how == "stream" and device.type != "cuda":
            raise InvalidInput(
                f"overlap 'stream' needs CUDA, the drafter is on {device}: take 'thread' or 'none'"
            )
        self.how, self._device = how, device
        self._stream = torch.cuda.Stream(device) if how == "stream" else None  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(1, "quickbeam-router") if how == "thread" else None

    def start(self, work: Callable[[], T], *reads: torch.Tensor) -> Callable[[], T]:
        """Begin `work` and return a function that gives its result.

        `reads`: the tensors that `work` reads.
        """
        if self._threads is not None:
            return self._threads.submit(work).result
        if self._stream is None:
            found = work()
            return lambda: found
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            made = work()
        for tensor in reads:
            tensor.record_stream(self._stream)

        def result() -> T:
            main.wait_stream(self._stream)  # type: ignore[arg-type]
            for tensor in made if isinstance(made, tuple) else (made,):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(main)
            return made

        return result
