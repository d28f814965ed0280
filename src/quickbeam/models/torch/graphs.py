"""Passes as CUDA graphs: one launch a pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quickbeam.models.torch.rows import ListedRows, PassRows, PassSizes

MOST_GRAPHS = 64  # that are kept, those used last
WARM_UPS = 2  # runs before a graph is captured, in which libraries set themselves up


class Captured(NamedTuple):
    """A pass of one size as a graph: `numbers` are what it reads, `results` what it writes."""

    graph: Any
    numbers: torch.Tensor
    results: Sequence[torch.Tensor]


class Graphs:
    """Runs `compute`, a pass whose work depends on nothing but its sizes, as graphs.

    A graph is captured at the first use of a size. All share one pool of memory.
    """

    def __init__(
        self, compute: Callable[[PassRows], Sequence[torch.Tensor]], device: torch.device
    ) -> None:
        self._compute, self._device = compute, device
        self._captured = OrderedDict[PassSizes, Captured]()
        self._generation = 0
        graph_pool: Any = torch.cuda.graph_pool_handle
        self._memory = graph_pool()

    def clear(self) -> None:
        """Forget all graphs, as what they read has been replaced."""
        self._captured.clear()

    def run(self, listed: ListedRows, generation: int) -> Sequence[torch.Tensor]:
        """Return copies of what `compute` gives for these rows.

        `generation`: of the pool. Another one has other tensors, and makes graphs useless.
        """
        if generation != self._generation:
            self.clear()
            self._generation = generation
        host = torch.from_numpy(listed.numbers).pin_memory()
        if listed.sizes not in self._captured:
            self._captured[listed.sizes] = self._capture(listed, host)
        self._captured.move_to_end(listed.sizes)
        if len(self._captured) > MOST_GRAPHS:
            self._captured.popitem(last=False)
        captured = self._captured[listed.sizes]
        captured.numbers.copy_(host, non_blocking=True)
        captured.graph.replay()
        return [result.clone() for result in captured.results]

    def _capture(self, listed: ListedRows, host: torch.Tensor) -> Captured:
        numbers = host.to(self._device)
        rows = PassRows.of(numbers, listed.sizes, listed.page)
        new_stream: Any = torch.cuda.Stream
        stream = new_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute(PassRows.of(numbers, listed.sizes, listed.page))
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            results = self._compute(rows)
        return Captured(graph, numbers, results)
