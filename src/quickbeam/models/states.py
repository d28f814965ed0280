"""The states of recurrent layers: one for each sequence, beside its pages of keys and values.

A state is never changed: a pass reads that of the committed tokens, and what is committed makes
another one from it. So sequences and the prefix cache share states as they share full pages, and a
pass that fails has changed nothing. `HeldStates` and `StatefulCache` know no back end; `States` are
those of the native kernels, `hf_recurrent.py` has PyTorch's.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from quickbeam.models.kv import Page, Pool, SequenceCache
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.tree import TokenTree


class StateShape(NamedTuple):
    """How many float32 numbers a sequence's state has, and the inputs of one node (`Nodes`)."""

    state: int
    inputs: int


class StatePage(Page):
    """A state, in a form that only the pool knows. `size`: how many pages of memory it takes."""

    __slots__ = ("size",)

    def __init__(self, data: Any, size: int) -> None:
        super().__init__(data)
        self.size = size


class StatePool(Pool):
    """A pool that also gives out states, `state_pages` pages each."""

    def has_states(self, numbers: int, size: int) -> None:
        """Give states of so many numbers of `size` bytes. `page_bytes` must be known."""
        self._unused_states = list[Page]()
        self.state_pages = -(-size * numbers // max(1, self.page_bytes))

    @abstractmethod
    def make_state(self) -> Any:
        """Return room for a state."""

    def state_for(self) -> Page:
        """Return a state for one user, which is still to be written. Raises `NoRoom`."""
        self._make_room(self.state_pages)
        if self._unused_states:
            return self._give(self._unused_states.pop())
        return self._give(StatePage(self.make_state(), self.state_pages))

    def recycle(self, page: Page) -> None:
        (self._unused_states if isinstance(page, StatePage) else self._unused).append(page)


class HeldStates:
    """The states that one sequence holds.

    `length` everywhere: how many tokens are committed.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._state: Page | None = None  # behind the committed tokens; None: zeros
        self._next: Page | None = None  # what a pass, or a commit, may write
        self._kept: tuple[int, Page] | None = None  # the last state at a border of pages

    def missing(self, length: int, tokens: int) -> int:
        """Return how many pages of the pool `reserve` would take."""
        return self._pool.state_pages * (self._next is None)

    def reserve(self, length: int, tokens: int) -> None:
        """Make room for the states of a pass over tokens up to `tokens`. Raises `NoRoom`."""
        if self._next is None:
            self._next = self._pool.state_for()

    @abstractmethod
    def commit(self, path: Sequence[int], length: int) -> None:
        """Make the state behind the nodes of `path`. `length`: without them."""

    def _step(self, length: int) -> None:
        """Take the next state, which is written, for that behind `length` tokens."""
        self._leave(self._state)
        self._state, self._next = self._next, None
        if self._state is not None:
            self._hold(self._state, length)

    def _hold(self, state: Page, length: int) -> None:
        if self._pool.snapshots and not length % self._pool.page:
            state.users += 1
            self._keep(length, state)

    def _keep(self, tokens: int, page: Page) -> None:
        if self._kept is not None:
            self._leave(self._kept[1])
        self._kept = tokens, page

    def _leave(self, page: Page | None) -> None:
        if page is not None:
            self._pool.leave(page)

    def snapshot(self, tokens: int) -> Page | None:
        """Return the state behind the first `tokens` tokens where it is kept."""
        return self._kept[1] if self._kept is not None and self._kept[0] == tokens else None

    def adopt(self, state: Page | None, tokens: int) -> None:
        """Begin an empty sequence with a state of `tokens` tokens, which others may hold too."""
        if state is None:
            return
        state.users += 1
        self._state = state
        self._hold(state, tokens)

    def fork(self, other: HeldStates, tokens: int) -> None:
        """Give another sequence, which is empty, this one's state."""
        other.adopt(self._state, tokens)

    def release(self) -> None:
        """Give everything back to the pool."""
        kept = None if self._kept is None else self._kept[1]
        held = [self._state, self._next, kept]
        self._state = self._next = self._kept = None
        for page in held:
            self._leave(page)


class StatefulCache(SequenceCache):
    """A sequence that has states beside its pages if the model has recurrent layers."""

    _states: HeldStates | None = None

    def missing(self, tokens: int) -> int:
        found = super().missing(tokens)
        return found if self._states is None else found + self._states.missing(self.length, tokens)

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        if self._states is not None:
            self._states.reserve(self.length, tokens)

    def commit(self, path: Sequence[int]) -> None:
        if self._states is not None:
            self._states.commit(path, self.length)
        super().commit(path)

    def snapshot(self, tokens: int) -> Page | None:
        return None if self._states is None else self._states.snapshot(tokens)

    def adopt(
        self, chunks: Sequence[Sequence[Page]], tokens: int, snapshot: Page | None = None
    ) -> None:
        super().adopt(chunks, tokens)
        if self._states is not None:
            self._states.adopt(snapshot, self.length)

    def fork(self) -> SequenceCache:
        other = super().fork()
        if self._states is not None:
            assert isinstance(other, StatefulCache) and other._states is not None
            self._states.fork(other._states, self.length)
        return other

    def release(self) -> None:
        super().release()
        if self._states is not None:
            self._states.release()

    def truncate(self, length: int) -> None:
        """See `SequenceCache.truncate`. With recurrent layers, only to 0 or to all tokens."""
        if self._states is not None and length != self.length:
            if length:
                raise ValueError(
                    f"a sequence of {self.length} tokens with recurrent layers can't go back to "
                    f"{length}: only to 0"
                )
            self._states.release()
        super().truncate(length)


class NativePool(StatePool):
    """A pool of states for the native kernels, flat float32 tensors.

    `state_shape`: None for a model without recurrent layers. `recurrences`: an array of
    `library.Recurrence`, of all layers; whoever makes the program sets it.
    """

    kernels: Kernels
    state_shape: StateShape | None = None
    recurrences: Any = None
    zeros: torch.Tensor  # the state of an empty sequence

    def shape_states(self, shape: StateShape) -> None:
        """Give states of this shape. `page_bytes` must be known."""
        self.has_states(shape.state, 4)
        self.state_shape, self.zeros = shape, torch.zeros(shape.state)

    def make_state(self) -> torch.Tensor:
        assert self.state_shape is not None
        return torch.zeros(self.state_shape.state)


class States(HeldStates):
    """The states of one sequence that the native kernels run.

    The inputs of a tree's nodes are workspace, as the rows of a pass are, and are not counted by
    the pool.
    """

    _pool: NativePool

    def __init__(self, pool: NativePool) -> None:
        super().__init__(pool)
        self._border: Page | None = None  # as the next state, behind the last whole page of tokens
        assert pool.state_shape is not None
        self._inputs = torch.empty(0, pool.state_shape.inputs)
        self._nodes, self._parents = library.Nodes(), array("q")
        self._chain = False  # whether the last pass wrote the state behind all its nodes

    def _crosses(self, length: int, tokens: int) -> bool:
        """Whether a border of pages lies inside the tokens from `length` to `tokens`."""
        page = self._pool.page
        return self._pool.snapshots and tokens // page > length // page

    def missing(self, length: int, tokens: int) -> int:
        border = self._border is None and self._crosses(length, tokens)
        return super().missing(length, tokens) + self._pool.state_pages * border

    def reserve(self, length: int, tokens: int) -> None:
        super().reserve(length, tokens)
        if self._border is None and self._crosses(length, tokens):
            self._border = self._pool.state_for()

    def chain(self, length: int, count: int) -> int:
        """Prepare a pass over `count` tokens of a text. Returns the address of its `Nodes`."""
        border = self._border_within(length, count)
        return self._prepare(None, None, 0, count, True, border)

    def tree(self, tree: TokenTree, base: int) -> int:
        """Prepare a pass over a tree's nodes from `base` on. Returns the address of its `Nodes`."""
        count = len(tree)
        if len(self._inputs) < count:
            grown = torch.empty(count + count // 2, self._inputs.shape[1])
            grown[:base] = self._inputs[:base]
            self._inputs = grown
        self._parents = array("q", tree.parent)
        chain = all(parent == node - 1 for node, parent in enumerate(tree.parent))
        at = self._inputs.data_ptr()
        return self._prepare(at, self._parents.buffer_info()[0], base, count, chain, 0)

    def _prepare(
        self,
        inputs: int | None,
        parents: int | None,
        base: int,
        count: int,
        chain: bool,
        border: int,
    ) -> int:
        state = self._pool.zeros if self._state is None else self._state.data
        assert self._next is not None
        nodes, self._chain = self._nodes, chain
        nodes.state, nodes.next = state.data_ptr(), self._next.data.data_ptr() if chain else None
        at_border = self._border.data.data_ptr() if border and self._border is not None else None
        nodes.border, nodes.border_node = at_border, border - 1
        nodes.inputs, nodes.parent, nodes.base, nodes.nodes = inputs, parents, base, count
        return ctypes.addressof(nodes)

    def _border_within(self, length: int, count: int) -> int:
        """Return how many of `count` tokens behind `length` come before the last border of pages
        that is neither before nor after all of them; 0 for none."""
        border = (length + count) // self._pool.page * self._pool.page - length
        return border if self._pool.snapshots and 0 < border < count else 0

    def commit(self, path: Sequence[int], length: int) -> None:
        """Make the state behind the nodes of `path`. `length`: without them.

        Raises `ValueError` for a part of a text that was no tree.
        """
        count, nodes = len(path), self._nodes
        whole = self._chain and count == nodes.nodes
        border = self._border_within(length, count)
        if not whole and not nodes.inputs:
            raise ValueError(f"the pass ran {nodes.nodes} tokens of a text: commit all of them")
        assert self._next is not None
        if not whole or (border and not nodes.border):
            start = nodes.state
            if border:
                assert self._border is not None
                start = self._fold(start, path[:border], self._border)
            self._fold(start, path[border:], self._next)
        if border:
            assert self._border is not None
            self._keep(length + border, self._border)
            self._border = None
        self._step(length + count)
        nodes.inputs = nodes.nodes = 0  # what was run is spent
        self._chain = False

    def _fold(self, state: int, path: Sequence[int], target: Page) -> int:
        numbers, pool = array("q", path), self._pool
        pool.kernels.fold(
            pool.recurrences,
            len(pool.recurrences),
            state,
            self._nodes.inputs,
            numbers.buffer_info()[0],
            len(numbers),
            target.data.data_ptr(),
        )
        return int(target.data.data_ptr())

    def release(self) -> None:
        border, self._border = self._border, None
        self._leave(border)
        super().release()
        self._inputs = torch.empty(0, self._inputs.shape[1])
