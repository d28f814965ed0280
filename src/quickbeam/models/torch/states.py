"""States of recurrent layers along draft trees: a node's state follows from its parent's.

A layer runs the nodes of one depth of all trees together, each from the state behind its parent. A
text runs as one chunk. So a node's result is that of its path, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from quickbeam.models.cache.kv import Pool, SequenceStates


class LayerState(NamedTuple):
    """The state of a layer, or of `b` rows in the layer.

    `conv`: the last tokens that the convolution reads, `[channels, taps - 1]`, or
    `[b, channels, taps - 1]`. `recurrent`: the matrix of each head,
    `[heads, key_dim, value_dim]`, or `[b, heads, key_dim, value_dim]`; None for a layer without.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.conv.nbytes + (0 if self.recurrent is None else self.recurrent.nbytes)

    def clone(self) -> LayerState:
        recurrent = None if self.recurrent is None else self.recurrent.clone()
        return LayerState(self.conv.clone(), recurrent)


State = dict[int, LayerState]  # by the layer's index


class TorchStates(SequenceStates):
    """The states of one sequence, and of the nodes that have run since the last commit.

    The pool does not count the states of nodes.
    """

    def __init__(self, pool: Pool, zeros: State) -> None:
        super().__init__(pool)
        self._zeros = zeros
        self._nodes = dict[tuple[int, int], LayerState]()  # by layer and node

    def begin(self, base: int) -> None:
        """Prepare a pass over the nodes from `base` on."""
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
        """See the base class. Raises `ValueError` for a part of a text that ran as one chunk."""
        last = path[-1]
        if any((layer, last) not in self._nodes for layer in self._zeros):
            raise ValueError(f"no pass ran up to node {last} alone: commit all of them")
        assert self._next is not None
        self._next.data = {layer: self._nodes[layer, last].clone() for layer in self._zeros}
        self._step(length + len(path))
        self._nodes.clear()

    def release(self) -> None:
        super().release()
        self._nodes.clear()


class RecurrentPart(NamedTuple):
    """The nodes of one sequence in a pass.

    `parents`: each node's parent; None for a text. `depths`: each node's depth. `base`: how many
    nodes an earlier pass has run.
    """

    states: TorchStates
    parents: Sequence[int] | None
    depths: Sequence[int]
    base: int


class StateStep(NamedTuple):
    """A step of the recurrence: it reads the state behind `before`, and writes that of `node`."""

    states: TorchStates
    before: int
    node: int


class RecurrentCall(NamedTuple):
    """Rows that a layer runs in one call.

    Either all rows are one text, with one step, or each row is a node with a step. `rows`: on the
    device, int64.
    """

    rows: torch.Tensor
    steps: Sequence[StateStep]


def recurrent_calls(parts: Sequence[RecurrentPart], device: torch.device) -> list[RecurrentCall]:
    """Return the calls of a pass: each text, then the nodes of each depth of all trees.

    The rows of `parts` follow one another.
    """
    calls = list[RecurrentCall]()
    rows_of_depth = dict[int, list[int]]()
    steps_of_depth = dict[int, list[StateStep]]()
    first = 0  # the first row of a part
    for part in parts:
        part.states.begin(part.base)
        count = len(part.depths)
        end = first + count - part.base
        if part.parents is None:
            rows = torch.arange(first, end, device=device)
            calls.append(RecurrentCall(rows, [StateStep(part.states, -1, count - 1)]))
        else:
            for row, node in zip(range(first, end), range(part.base, count), strict=True):
                depth = part.depths[node]
                step = StateStep(part.states, part.parents[node], node)
                rows_of_depth.setdefault(depth, []).append(row)
                steps_of_depth.setdefault(depth, []).append(step)
        first = end
    for depth in sorted(rows_of_depth):
        rows = torch.tensor(rows_of_depth[depth], device=device)
        calls.append(RecurrentCall(rows, steps_of_depth[depth]))
    return calls


def run_along_paths(
    calls: Sequence[RecurrentCall],
    layer: int,
    recurrence: Callable[..., tuple[torch.Tensor, LayerState]],
    *rows: torch.Tensor,
) -> torch.Tensor:
    """Run a layer's recurrence over a pass's rows, each from the state behind its parent.

    `rows`: the inputs of the recurrence, `[n, ...]` each. `recurrence(state, *rows)` gets `b`
    states and `b` texts of m rows, `[b, m, ...]` each. It returns results `[b, m, width]` and the
    states behind the last rows. Returns `[n, width]`.
    """
    results = list[torch.Tensor]()
    for call in calls:
        before = [step.states.behind(layer, step.before) for step in call.steps]
        matrices = [state.recurrent for state in before if state.recurrent is not None]
        state = LayerState(
            conv=torch.stack([state.conv for state in before]),
            recurrent=torch.stack(matrices) if matrices else None,
        )
        texts = [torch.unflatten(tensor[call.rows], 0, (len(before), -1)) for tensor in rows]
        result, state = recurrence(state, *texts)
        results.append(result.flatten(0, 1))
        for i, step in enumerate(call.steps):
            matrix = None if state.recurrent is None else state.recurrent[i]
            step.states.put(layer, step.node, LayerState(state.conv[i], matrix))
    out = torch.empty(len(rows[0]), results[0].shape[-1], device=rows[0].device)
    for call, result in zip(calls, results, strict=True):
        out[call.rows] = result
    return out
