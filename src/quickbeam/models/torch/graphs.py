"""Passes as CUDA graphs: one launch a pass."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.rows import ListedRows, Padding, PassRows, PassSizes

Compute = Callable[..., Sequence[torch.Tensor]]
Options = tuple[Hashable, ...]
# what a graph's operations depend on: sizes, the inputs' shapes without their rows, and options
GraphKey = tuple[PassSizes, tuple[torch.Size, ...], Options]

MOST_GRAPHS = 120  # enough for all sizes up to 65,536 tokens (`padded_sizes`)
WARM_UPS = 2  # runs before a graph is captured, in which libraries set themselves up

_capturing = threading.Lock()  # PyTorch takes one capture at a time in a process


class Captured(NamedTuple):
    """A pass of one size as a graph, which reads `numbers` and `inputs` and writes `results`."""

    graph: Any
    numbers: torch.Tensor
    inputs: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]


class Graphs:
    """Runs passes as graphs. The operations of a pass depend on its sizes and options alone.

    `compute(rows, *inputs, *options)` runs a pass. It gets `PassRows`, tensors with as many rows,
    and options that select operations. A graph is captured at the first use of sizes and options.
    All graphs share one pool of memory, and write their results to the same buffers. So results
    are copied before the next graph runs.
    """

    def __init__(self, compute: Compute, device: torch.device) -> None:
        self._compute = compute
        self._device = device
        self._captured = OrderedDict[GraphKey, Captured]()
        self._generation = 0
        self._buffers = list[torch.Tensor]()  # one for each result, as large as any size needs
        self._memory: Any = None
        new_stream: Any = torch.cuda.Stream
        # the same one for all, or each would keep workspaces of its own
        self._stream = new_stream(device)

    def clear(self) -> None:
        """Forget all graphs, as what they read has been replaced."""
        self._captured.clear()

    def run(
        self,
        listed: ListedRows,
        generation: int,
        inputs: Sequence[torch.Tensor] = (),
        options: Options = (),
    ) -> Sequence[torch.Tensor]:
        """Return copies of the results of `compute` for these rows.

        `generation`: that of the pool. Graphs of an earlier generation are deleted, since the
        pool's tensors have been replaced. `inputs`: on the device, with at most n rows each. The
        rows behind them have the inputs of an earlier call.
        """
        key = listed.sizes, tuple(rows.shape[1:] for rows in inputs), options
        if generation != self._generation:
            self.clear()
            self._generation = generation
        # PyTorch gives this memory to nobody else before the copy from it has run
        host = torch.from_numpy(listed.numbers).pin_memory()
        with torch.cuda.device(self._device):
            if key not in self._captured:
                self._captured[key] = self._capture(listed, host, inputs, options)
            self._captured.move_to_end(key)
            if len(self._captured) > MOST_GRAPHS:
                self._captured.popitem(last=False)
            captured = self._captured[key]
            captured.numbers.copy_(host, non_blocking=True)
            for buffer, rows in zip(captured.inputs, inputs, strict=True):
                buffer[: len(rows)].copy_(rows)
            captured.graph.replay()
            return [result.clone() for result in captured.results]

    def _capture(
        self,
        listed: ListedRows,
        host: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        options: Options,
    ) -> Captured:
        new_graph: Any = torch.cuda.CUDAGraph
        new_memory: Any = torch.cuda.graph_pool_handle
        if not self._captured:  # a pool whose graphs are all gone takes no new ones
            self._memory = new_memory()
        numbers = host.to(self._device)
        count = listed.sizes.rows
        buffers = [rows.new_zeros(count, *rows.shape[1:]) for rows in inputs]
        graph = new_graph()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                rows = PassRows.of(numbers, listed.sizes, listed.page)
                warmed_up = self._compute(rows, *buffers, *options)
            results = self._buffers_for(warmed_up)
            del warmed_up
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # other threads may use the device meanwhile: their calls are no errors
        capture = torch.cuda.graph(
            graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
        )
        with _capturing, capture:
            rows = PassRows.of(numbers, listed.sizes, listed.page)
            computed = self._compute(rows, *buffers, *options)
            for result, tensor in zip(results, computed, strict=True):
                result.copy_(tensor)
        return Captured(graph, numbers, buffers, results)

    def _buffers_for(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return parts of the buffers with the shapes of `like`."""
        if not self._buffers:
            self._buffers = [tensor.new_empty(0) for tensor in like]
        results = list[torch.Tensor]()
        for i, tensor in enumerate(like):
            size = tensor.numel()
            if self._buffers[i].numel() < size:  # earlier graphs go on using the smaller buffer
                self._buffers[i] = tensor.new_empty(size)
            results.append(self._buffers[i][:size].view(tensor.shape))
        return results


class Passes:
    """Runs `compute` over pages of `pool`: as graphs on CUDA, and as it is elsewhere."""

    def __init__(self, compute: Compute, pool: RowPool) -> None:
        self._compute = compute
        self._pool = pool
        self._graphs = Graphs(compute, pool.device) if pool.device.type == "cuda" else None

    def padding(self, block: int = 1) -> Padding | None:
        """Return how sizes of passes are rounded up; None where they stay as they are."""
        return None if self._graphs is None else Padding(block=block)

    def run(
        self, listed: ListedRows, inputs: Sequence[torch.Tensor] = (), options: Options = ()
    ) -> Sequence[torch.Tensor]:
        """See `Graphs.run`. Results have rows of padding behind the others."""
        if self._graphs is None:
            return self._compute(listed.to(self._pool.device), *inputs, *options)
        return self._graphs.run(listed, self._pool.generation, inputs, options)


class SideStream:
    """A second stream, for work that runs beside a pass, also in a graph."""

    def __init__(self, device: torch.device) -> None:
        new_stream: Any = torch.cuda.Stream
        self._device = device
        self._stream = new_stream(device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Return a context whose work runs on the second stream, after all work queued before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make work that is queued from now on wait for the second stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
