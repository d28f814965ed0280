"""States of recurrent layers along draft trees: a node's state follows from its parent's.

A layer runs once a level of all trees together: a node's row, and the state behind its parent. A
text runs as one chunk. So a node's result is that of its path, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from quickbeam.models.cache.kv import Pool, SequenceStates


class LayerState(NamedTuple):
    """The last tokens that a layer's convolution reads, and what its recurrence keeps if it has
    one; with a first dimension of `b` rows, or without."""

    conv: torch.Tensor
    recurrent: torch.Tensor | None

    def copied(self) -> LayerState:
        """Return these in memory of their own."""
        recurrent = None if self.recurrent is None else self.recurrent.clone()
        return LayerState(self.conv.clone(), recurrent)


State = dict[int, LayerState]  # by the layer's number


class TorchStates(SequenceStates):
    """The states of one sequence, and of the nodes that have run since the last commit.

    The nodes' are workspace, and are not counted by the pool.
    """

    def __init__(self, pool: Pool, zeros: State) -> None:
        super().__init__(pool)
        self._zeros, self._nodes = zeros, dict[tuple[int, int], LayerState]()

    def begin(self, base: int) -> None:
        """Prepare a pass over nodes from `base` on."""
        if not base:
            self._nodes.clear()

    def behind(self, layer: int, node: int) -> LayerState:
        """Return a layer's state behind a node; -1 stands for the committed tokens."""
        if node >= 0:
            return self._nodes[layer, node]
        return self._zeros[layer] if self._state is None else self._state.data[layer]

    def put(self, layer: int, node: int, state: LayerState) -> None:
        self._nodes[layer, node] = state

    def commit(self, path: Sequence[int], length: int) -> None:
        """As the base class. Raises `ValueError` for a part of a text that was no tree."""
        last = path[-1]
        if any((layer, last) not in self._nodes for layer in self._zeros):
            raise ValueError(f"no pass ran up to node {last} alone: commit all of them")
        assert self._next is not None
        self._next.data = {layer: self._nodes[layer, last].copied() for layer in self._zeros}
        self._step(length + len(path))
        self._nodes.clear()

    def release(self) -> None:
        super().release()
        self._nodes.clear()


class RecurrentCall(NamedTuple):
    """Rows that a layer runs in one call, each with its state before, and the node behind it.

    Either all rows are one text, with one state, or each is a node by itself. `rows`: on the
    device.
    """

    rows: torch.Tensor
    before: list[tuple[TorchStates, int]]
    behind: list[tuple[TorchStates, int]]


def recurrent_calls(
    parts: Sequence[tuple[TorchStates, Sequence[int] | None, int, int]], device: torch.device
) -> list[RecurrentCall]:
    """Return the calls of a pass: the texts, then level by level all trees.

    `parts`: of each its states, its nodes' parents (None for a text), how many of its nodes earlier
    passes have run, and how many there are. Their rows follow one another.
    """
    calls, levels, first = [], dict[int, list[tuple[int, TorchStates, int, int]]](), 0
    for states, parents, base, count in parts:
        states.begin(base)
        rows = count - base
        if parents is None:
            at = torch.arange(first, first + rows, device=device)
            calls.append(RecurrentCall(at, [(states, -1)], [(states, count - 1)]))
        else:
            depth = list[int]()
            for node, parent in enumerate(parents):
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
                if node >= base:
                    row = (first + node - base, states, parent, node)
                    levels.setdefault(depth[-1], []).append(row)
        first += rows
    for _, level in sorted(levels.items()):
        at = torch.tensor([row for row, *_ in level], device=device)
        before = [(states, parent) for _, states, parent, _ in level]
        calls.append(RecurrentCall(at, before, [(states, node) for _, states, _, node in level]))
    return calls


def run_along_paths(
    calls: Sequence[RecurrentCall],
    layer: int,
    recurrence: Callable[..., tuple[torch.Tensor, LayerState]],
    *rows: torch.Tensor,
) -> torch.Tensor:
    """Run a layer's recurrence over a pass's rows, each from the state behind its parent.

    `rows`: what it reads, `[n, ...]` each. `recurrence(state, *rows)` gets `b` states and `b` texts
    of m rows, `[b, m, ...]` each, and returns results `[b, m, width]` and the states behind the
    last rows. Returns `[n, width]`.
    """
    results = list[torch.Tensor]()
    for call in calls:
        before = [states.behind(layer, node) for states, node in call.before]
        matrices = [state.recurrent for state in before if state.recurrent is not None]
        state = LayerState(
            torch.stack([state.conv for state in before]),
            torch.stack(matrices) if matrices else None,
        )
        texts = [torch.unflatten(part[call.rows], 0, (len(before), -1)) for part in rows]
        result, state = recurrence(state, *texts)
        results.append(result.flatten(0, 1))
        for i, (states, node) in enumerate(call.behind):
            matrix = None if state.recurrent is None else state.recurrent[i]
            states.put(layer, node, LayerState(state.conv[i], matrix))
    out = torch.empty(len(rows[0]), results[0].shape[-1], device=rows[0].device)
    for call, result in zip(calls, results, strict=True):
        out[call.rows] = result
    return out
