"""What drafters share that read the target's hidden states: EAGLE's and block drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from quickbeam.drafters.base import DrafterState, HeadUse
from quickbeam.drafters.largest import largest
from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.drafters.unread import Unread
from quickbeam.models.angles import STEP
from quickbeam.models.base import Model
from quickbeam.models.kv import SequenceCache
from quickbeam.models.linear import NativeLinear
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels, kernels
from quickbeam.models.native.operands import KVShape, plain_rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import AnyPacked, Packer, QuantisedPacked
from quickbeam.tree import TokenTree

CHUNK = 512  # the most rows of committed tokens that one pass runs
# How many of the likeliest tokens of the last logits a shortlist takes up. They hint at the tokens
# that follow the root.
OFFERED = 16


State = TypeVar("State", bound="FeatureState")


class FeatureState(DrafterState):
    """What such a drafter keeps of one sequence.

    - `cache`: keys and values of committed tokens. `unread`: hidden states of committed tokens that
      have none yet.
    - `shortlist`: what its head scores, or None. `counted`: how the head was used.
    - `tree`: the tree that is being grown. `calls`: how many passes were run.
    """

    def __init__(
        self, cache: SequenceCache, ids: Sequence[int], shortlist: ShortlistState | None
    ) -> None:
        self.cache, self.ids, self.calls = cache, list(ids), 0
        self.unread, self.shortlist, self.counted = Unread(), shortlist, HeadUse()
        self._unseen: list[int] = []  # committed tokens that the shortlist has yet to read
        self.tree: TokenTree | None = None

    @property
    def used(self) -> HeadUse:
        """The counters of the head."""
        scored = 0 if self.shortlist is None else self.shortlist.scored
        return replace(self.counted, tokens=self.counted.tokens + scored)

    @property
    def waiting(self) -> int:
        return len(self.unread)

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        self._unseen.extend(tokens)

    def offer(self, logits: torch.Tensor) -> None:
        """Let the shortlist read new tokens, and those that the last `logits` `[vocab]` favour."""
        if self.shortlist is not None:
            began = perf_counter()
            self.shortlist.extend([*self._unseen, *largest(logits[None], OFFERED)[0][0]])
            self.counted.seconds += perf_counter() - began
        self._unseen.clear()

    def append_hidden(self, hidden: torch.Tensor) -> None:
        self.unread.append(hidden)

    def commit(self, count: int) -> None:
        """Commit the next `count` rows, and drop the hidden states that they were computed from."""
        self.unread.drop(count)
        self.cache.commit(range(count))

    def share(self, chunk: int, tokens: int) -> Any:
        """Return the rows of these tokens, or None if they were not read yet."""
        whole = (chunk + 1) * tokens <= self.cache.length
        return self.cache.share(chunk, tokens) if whole else None

    def adopt(
        self, chunks: Sequence[Any], tokens: int, hidden: Sequence[torch.Tensor] = ()
    ) -> None:
        if chunks:
            self.cache.adopt(chunks, tokens)
        self.unread.reset(hidden)

    def unread_hidden(self, chunk: int, tokens: int) -> torch.Tensor | None:
        begin = chunk * tokens - self.cache.length
        if not 0 <= begin <= len(self.unread) - tokens:
            return None
        return self.unread.first(begin + tokens)[begin:].clone()

    def release(self) -> None:
        self.cache.release()
        self.unread.reset()
        self.tree = self.shortlist = None


def in_parts(
    states: Sequence[State], readable: Callable[[State], int]
) -> Iterator[list[tuple[State, int]]]:
    """Yield states and how many of their rows a pass reads, together at most `CHUNK`.

    `readable`: how many rows a state has left. The caller commits them before the next pass.
    """
    while left := [state for state in states if readable(state) > 0]:
        part, room = list[tuple[State, int]](), CHUNK
        for state in left:
            count = min(readable(state), CHUNK)
            if part and count > room:
                break
            room -= count
            part.append((state, count))
        yield part


def score(
    states: Sequence[FeatureState],
    features: Sequence[torch.Tensor],
    routed: Sequence[torch.Tensor | None],
    head: Callable[[torch.Tensor], torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the logits of each state's `features` `[n, d]`, and the tokens of the columns.

    The tokens are None where all of the `head` was scored. One product of it serves all sequences
    without a shortlist. Those with one take a product each, of the clusters in `routed`.
    """
    began, sizes = perf_counter(), [len(feature) for feature in features]
    whole = [i for i, state in enumerate(states) if state.shortlist is None]
    scored: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    if whole:
        logits = head(torch.cat([features[i] for i in whole]))
        parts = logits.split_with_sizes([sizes[i] for i in whole])
        scored = {i: (part, None) for i, part in zip(whole, parts, strict=True)}
    seconds = (perf_counter() - began) / max(1, len(whole))
    for i, (state, feature, clusters) in enumerate(zip(states, features, routed, strict=True)):
        began, counted = perf_counter(), state.counted
        counted.calls += 1
        if state.shortlist is None:
            counted.seconds, counted.tokens = (
                counted.seconds + seconds,
                counted.tokens + logits.shape[-1],
            )
            continue
        assert clusters is not None
        scored[i] = state.shortlist.score(feature, clusters)
        counted.seconds += perf_counter() - began
    return [scored[i] for i in range(len(states))]


def usable_kernels(model: Model, embedding: nn.Module, sizes: Sequence[int]) -> Kernels | None:
    """Return the native kernels if they can run a drafter of these widths beside `model`.

    Embeddings of other classes than PyTorch's may scale their rows.
    """
    plain = type(embedding) is nn.Embedding and all(size % 2 == 0 for size in sizes)
    fits = plain and model.device.type == "cpu" and model.dtype is torch.bfloat16
    return kernels() if fits else None


class NativePacker:
    """Packs a drafter's weights: in 8 bits, as a wrong draft costs only its time.

    `name`: another format. A weight with numbers that are not finite stays bfloat16.
    """

    def __init__(self, kernels: Kernels, name: str | None = None) -> None:
        self.kernels, self._name = kernels, name

    def __call__(
        self, *weights: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
    ) -> AnyPacked:
        """Pack weights that are stacked one below the other, or with `gated` a gate's and the
        rest's."""
        name = self._name or rows_format(torch.cat(weights))
        return Packer(self.kernels, name).pack(list(weights), bias, gated)

    def head(self, head: Any) -> AnyPacked:
        """Pack a head. If the target keeps it quantised, its own rows are used."""
        if not isinstance(head, NativeLinear):
            return self(head.weight, bias=head.bias)
        if isinstance(head.packed, QuantisedPacked):
            return head.packed
        return self(head.packed.rows(), bias=head.packed.bias)


class NativeHead:
    """A head in the native kernels: `[n, d]` bfloat16 to `[n, vocab]` float32."""

    def __init__(self, packed: AnyPacked, kernels: Kernels) -> None:
        self._program, self.outputs = Program(kernels), packed.outputs
        source = self._program.given("feature", packed.inputs)
        self._program.linear(packed, source, self._program.given("logits", packed.outputs, True))

    def __call__(self, feature: torch.Tensor) -> torch.Tensor:
        logits = torch.empty(len(feature), self.outputs)
        rows = plain_rows(len(feature))
        self._program.run(rows, {"feature": feature.contiguous(), "logits": logits})
        return logits


class NativeLayer:
    """A Llama-like layer's packed weights: attention, then a gated feed-forward.

    - `qkv`: queries, keys and values one below the other. `up`: gated.
    - `norm`: before the feed-forward. `head_norms`: of queries and keys, or none.
    - `offset`: of the layer in a page.
    """

    def __init__(
        self,
        qkv: AnyPacked,
        out: AnyPacked,
        up: AnyPacked,
        down: AnyPacked,
        norm: Any,
        shape: KVShape,
        offset: int = 0,
        head_norms: Sequence[Any] | None = None,
    ) -> None:
        self.qkv, self._out, self._up, self._down = qkv, out, up, down
        self._norm, self._shape, self._offset = norm, shape, offset
        self._norms = None if head_norms is None else [one.weight for one in head_norms]
        self._epsilon = 0.0 if head_norms is None else head_norms[0].eps
        self.heads = out.inputs // shape.value_dim

    def project(self, program: Program, source: Buffer) -> Buffer:
        """Add the products of normed rows; keys and values are written. Return the queries."""
        qkv = program.buffer(self.qkv.outputs, True)
        program.linear(self.qkv, source, qkv)
        return self.take_apart(program, qkv, self.heads)

    def take_apart(self, program: Program, qkv: Buffer, heads: int) -> Buffer:
        """Write keys and values that stand behind `heads` queries, and return the queries."""
        query = program.buffer(self._out.inputs)
        program.heads(
            qkv, query, heads, self._shape, self._offset, norms=self._norms, epsilon=self._epsilon
        )
        return query

    def finish(self, program: Program, query: Buffer, residual: Buffer) -> None:
        """Add attention and feed-forward, both of which are added to `residual`."""
        attended, normed = program.buffer(self._out.inputs), program.buffer(residual.width)
        inner, shape = program.buffer(self._down.inputs), self._shape
        scaling = shape.key_dim**-0.5
        program.attend(query, attended, self.heads, shape, self._offset, scaling)
        program.linear(self._out, attended, residual, library.ADD)
        add_norm(program, residual, normed, self._norm)
        program.linear(self._up, normed, inner, library.GATED)
        program.linear(self._down, inner, residual, library.ADD)


def add_norm(program: Program, source: Buffer, target: Buffer, norm: Any, **more: Any) -> None:
    """Add a module's RMS norm to a program. `more`: as of `Program.norm`."""
    program.norm(source, target, norm.weight, norm.eps, **more)


class Angles:
    """Cosines and sines of a rotary module by position, as far as they were needed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._table = (torch.empty(0, 1), torch.empty(0, 1))

    def up_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both, `[positions, half]` each, at least up to `position`."""
        if position >= len(self._table[0]):
            positions = torch.arange((position // STEP + 1) * STEP)
            both = self._module(torch.empty(1), positions)
            cosine, sine = (part[:, : part.shape[1] // 2].contiguous() for part in both)
            self._table = cosine, sine
        return self._table
