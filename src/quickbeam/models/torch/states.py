"""States of recurrent layers: each node of a draft tree has a slot, and so has a text's last token.

A row reads the state behind the token before it, and writes its own. Which slots these are is
listed on the host (`list_states`). So a pass of one size is the same operations for all trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quickbeam.models.base import inference
from quickbeam.models.cache.kv import Pool, SequenceStates
from quickbeam.models.stack import Recurrent, ShortConv, Stack

NO_TOKENS = 0  # the slot of an empty text's state: zeros, which nobody writes
# The slot that stands for the state of the row before, of one text. It is kept for no other pass.
# Rows of padding write to it.
SCRATCH = 1
FIRST_BYTES = 2**30  # of states that are allocated at once on CUDA


class StateShape(NamedTuple):
    """The shape of a layer's state.

    `channels`, `history`: the convolution reads so many elements of so many tokens before its own.
    `matrix`: `[heads, key_dim, value_dim]`; None for a layer without matrices.
    """

    channels: int
    history: int
    matrix: tuple[int, int, int] | None

    @classmethod
    def of(cls, recurrent: Recurrent) -> StateShape:
        matrix = None
        if not isinstance(recurrent, ShortConv):
            matrix = (recurrent.heads, recurrent.key_dim, recurrent.value_dim)
        return cls(recurrent.channels, recurrent.taps - 1, matrix)


def state_shapes(stack: Stack) -> dict[int, StateShape]:
    """Return the shapes of the states of a stack's recurrent layers, by the layers' indices."""
    shapes = dict[int, StateShape]()
    for index, layer in enumerate(stack.layers):
        if layer.recurrent is not None:
            shapes[index] = StateShape.of(layer.recurrent)
    return shapes


class LayerStates(NamedTuple):
    """A layer's states in all slots, float32.

    `conv`: the last tokens that the convolution reads, the newest last,
    `[slots, history, channels]`. `matrix`: `[slots, heads, key_dim, value_dim]`; None for a layer
    without.
    """

    conv: torch.Tensor
    matrix: torch.Tensor | None


class StateSlots:
    """The states of all recurrent layers in slots.

    `layers`: by the layers' indices. `history`: how many tokens before its own a convolution reads,
    which is the same in all layers. `slot_bytes`: bytes of a slot. `generation` changes when the
    tensors are replaced by larger ones. Raises `ValueError` where layers have other histories.
    """

    @inference
    def __init__(self, shapes: Mapping[int, StateShape], device: torch.device) -> None:
        histories = {shape.history for shape in shapes.values()}
        if len(histories) > 1 or 0 in histories:
            raise ValueError(
                f"convolutions that read {sorted(histories)} tokens before their own: all of a "
                "model's have to read the same number, 1 at least"
            )
        self.history = max(histories, default=0)
        self.generation = 0
        self.layers = dict[int, LayerStates]()
        for index, shape in shapes.items():
            matrix: torch.Tensor | None = None
            if shape.matrix is not None:
                matrix = torch.zeros(2, *shape.matrix, device=device)
            conv = torch.zeros(2, shape.history, shape.channels, device=device)
            self.layers[index] = LayerStates(conv, matrix)
        self._device = device
        self._capacity = 2
        self._free = list[int]()
        tensors = [tensor for layer in self.layers.values() for tensor in layer]
        both = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self.slot_bytes = both // 2

    def allocate(self) -> int:
        """Return a free slot. What is in it means nothing."""
        if not self._free:
            self._add_slots()
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)

    @inference
    def _add_slots(self) -> None:
        """Allocate larger tensors: half as large again at least, as all states are copied."""
        capacity = self._capacity + max(2, self._capacity // 2)
        if self._device.type == "cuda":
            capacity = max(capacity, FIRST_BYTES // self.slot_bytes)
        added = capacity - self._capacity
        for index, (conv, matrix) in self.layers.items():
            larger_conv = torch.cat([conv, conv.new_zeros(added, *conv.shape[1:])])
            larger_matrix: torch.Tensor | None = None
            if matrix is not None:
                larger_matrix = torch.cat([matrix, matrix.new_zeros(added, *matrix.shape[1:])])
            self.layers[index] = LayerStates(larger_conv, larger_matrix)
        self._free += reversed(range(self._capacity, capacity))
        self._capacity = capacity
        self.generation += 1


class TorchStates(SequenceStates):
    """The states of one sequence, and of the nodes that have run since the last commit.

    The pool does not count the slots of nodes.
    """

    def __init__(self, pool: Pool, slots: StateSlots) -> None:
        super().__init__(pool)
        self._slots = slots
        self._node_slots = dict[int, int]()

    def begin(self, base: int) -> None:
        """Prepare a pass over the nodes from `base` on."""
        if not base:
            self._release_nodes()

    def slot(self, node: int) -> int:
        """Return the slot of the state behind a node; -1 stands for the committed tokens."""
        if node >= 0:
            return self._node_slots[node]
        if self._state is None:
            return NO_TOKENS
        committed: int = self._state.data
        return committed

    def allocate(self, node: int) -> int:
        """Return the slot to which the state behind a node is written."""
        if node not in self._node_slots:
            self._node_slots[node] = self._slots.allocate()
        return self._node_slots[node]

    def commit(self, path: Sequence[int], length: int) -> None:
        """See the base class. Raises `ValueError` for a part of a text that ran as one chunk."""
        last = path[-1]
        if last not in self._node_slots:
            raise ValueError(f"no pass ran up to node {last} alone: commit all of them")
        assert self._next is not None
        committed = self._node_slots[last]
        # the next state has the node's slot, which is written already
        self._node_slots[last] = self._next.data
        self._next.data = committed
        self._step(length + len(path))
        self._release_nodes()

    def release(self) -> None:
        super().release()
        self._release_nodes()

    def _release_nodes(self) -> None:
        for slot in self._node_slots.values():
            self._slots.release(slot)
        self._node_slots.clear()


class ListedStates(NamedTuple):
    """Which states the n rows of a sequence read and write, int64.

    `read`, `written`: slots, `[n]`. `history`: the tokens before each row, the oldest first,
    `[n, history]`: i from 0 on is row i of the pass, and -1 - i below it is token i of the
    convolution's states, counted through all slots.
    """

    read: np.ndarray
    written: np.ndarray
    history: np.ndarray


def list_text(states: TorchStates, base: int, first: int, out: ListedStates) -> None:
    """List the states of a text, whose rows are `first` and those behind it. Only its last is kept.

    `base`: how many of its tokens an earlier pass has run.
    """
    states.begin(base)
    count, history = out.history.shape
    entry = states.slot(base - 1)
    out.read[:] = SCRATCH
    out.read[0] = entry
    out.written[:] = SCRATCH
    out.written[-1] = states.allocate(base + count - 1)
    # the tokens that rows read, counted from the text's first row
    token = np.arange(count)[:, None] + np.arange(-history, 0)
    in_state = -1 - (entry * history + history + token)
    out.history[:] = np.where(token < 0, in_state, first + token)


def list_tree(
    states: TorchStates, parents: Sequence[int], base: int, first: int, out: ListedStates
) -> None:
    """List the states of nodes from `base` on, whose rows are `first` and those behind it.

    `parents`: of all nodes, those before `base` included.
    """
    states.begin(base)
    tokens_of_state = np.arange(out.history.shape[1])
    for row, node in enumerate(range(base, len(parents))):
        parent = parents[node]
        out.read[row] = states.slot(parent)
        out.written[row] = states.allocate(node)
        if parent >= base:
            out.history[row, :-1] = out.history[parent - base, 1:]
            out.history[row, -1] = first + parent - base
        else:
            entry = out.read[row] * len(tokens_of_state)
            out.history[row] = -1 - (entry + tokens_of_state)
