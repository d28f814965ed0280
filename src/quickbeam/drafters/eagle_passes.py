"""The passes of an EAGLE drafter, by PyTorch's operators and by the native kernels.

The rows of a pass are all of committed tokens, or all of nodes. A committed row sees the committed
rows up to itself, a node's row sees all of these and its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.feature import TorchPasses
from quickbeam.drafters.native import NativeHead, NativePacker
from quickbeam.drafters.shortlist.native import NativeRouter
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.models.angles import STEP
from quickbeam.models.base import Model
from quickbeam.models.gathered import Behind, GatheredStep
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import KVShape, RowList
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.pages import PagePool


class Rows(NamedTuple):
    """The rows of one sequence in a pass.

    - `hidden`: the target's hidden states `[n, len(layers) * target_size]` of committed tokens, or
      for nodes the outputs `[n, d]` of their parents' rows.
    - `tokens`: the tokens that follow.
    - `wanted`: how many of the last rows have a distribution computed.
    - `paths`: for nodes, the paths of all rows of the tree so far, these last: numbers of the
      tree's rows, itself last. None for committed rows.
    """

    cache: Any
    hidden: torch.Tensor
    tokens: Sequence[int]
    wanted: int
    paths: Sequence[Sequence[int]] | None = None


class Passed(NamedTuple):
    """What a pass returns, one row each; the first two are empty where nothing was wanted.

    - `out`: `[n, d]`, stands in for the next hidden state. `feature`: `[n, d]`, for the head.
    - `routed`: `[wanted, clusters]`, the router's scores of the wanted rows. None if not asked.
    """

    out: torch.Tensor
    feature: torch.Tensor
    routed: torch.Tensor | None = None


NOTHING = Passed(torch.empty(0), torch.empty(0))


class TorchEagle(TorchPasses):
    """An `EagleHead` on any device: the reference."""

    def __init__(self, network: EagleHead, model: Model) -> None:
        super().__init__(network, 1, model)

    def run(self, rows: Sequence[Rows], shortlist: Shortlist | None = None) -> Passed:
        """Run the layer once, and the router of `shortlist` where one is given."""
        network, step = self.network, GatheredStep([_behind(one) for one in rows], self.pool)
        hidden = torch.cat([one.hidden for one in rows])
        if rows[0].paths is None:
            hidden = network.fuse(hidden)
        tokens = [token for one in rows for token in one.tokens]
        embedded = network.embedding(torch.tensor(tokens, device=hidden.device))

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self.write(step, 0, key, value)
            return self.attend(step, 0, query)

        routed, ends = None, np.cumsum([len(one.tokens) for one in rows])
        if shortlist is not None and shortlist.router is not None:
            pairs = zip(rows, ends.tolist(), strict=True)
            wanted = [row for one, end in pairs for row in range(end - one.wanted, end)]
            routed = shortlist.router(hidden[wanted], embedded[wanted])
        out = network(hidden, embedded, step.positions, attend)
        return Passed(out, network.feature(out), routed)


def _behind(rows: Rows) -> Behind:
    cache, paths, n = rows.cache, rows.paths, len(rows.tokens)
    if paths is None:
        return Behind(cache, range(n))
    visible = np.zeros((n, len(paths)), np.bool_)
    for seen, path in zip(visible, paths[-n:], strict=True):
        seen[path] = True
    return Behind(cache, [len(path) - 1 for path in paths], len(paths) - n, visible)


def list_rows(rows: Sequence[Rows], wanted: bool = True) -> RowList:
    """Return the rows as the kernels take them. `wanted`: whether some go through a head."""
    listed = RowList()
    for one in rows:
        n, length = len(one.tokens), one.cache.length
        asked = range(n - one.wanted if wanted else n, n)
        if one.paths is None:
            one.cache.add_chain(listed, one.tokens, asked)
            continue
        one.cache.reserve(length + len(one.paths))
        paths = [[length + row for row in path] for path in one.paths[-n:]]
        orders, positions = [path[-1] for path in paths], [length + len(p) - 1 for p in paths]
        listed.add(one.cache.table, one.tokens, positions, orders, [length] * n, paths, asked)
    return listed


class NativeEagle:
    """An `EagleHead` in the native kernels. It packs the network's weights.

    `name`: as of `NativePacker`.
    """

    def __init__(self, network: EagleHead, kernels: Kernels, name: str | None = None) -> None:
        config, self.network, self.kernels = network.config, network, kernels
        self.pack = NativePacker(kernels, name)
        self._shape = KVShape(config.kv_heads, config.head_dim, config.head_dim)
        self.pool = PagePool([self._shape], kernels)
        self._angles = (torch.empty(0, 1), torch.empty(0, 1))  # cosines and sines, by position

        def pack(linear: torch.nn.Linear, gated: bool = False) -> Any:
            parts = linear.weight.chunk(2) if gated else [linear.weight]
            return self.pack(*parts, bias=linear.bias, gated=gated)

        self._fc, self._lift = pack(network.fc), pack(network.lift) if config.lift else None
        self._qkv, self._out = pack(network.qkv), pack(network.out)
        self._up, self._down = pack(network.gate_up, True), pack(network.down)
        self._programs: dict[tuple[bool, bool, NativeRouter | None], Program] = {}

    @cached_property
    def logits(self) -> NativeHead:
        """The whole head, packed where it is needed: shortlists have rows of their own."""
        return NativeHead(self.pack.head(self.network.head), self.kernels)

    def run(self, rows: Sequence[Rows], shortlist: Shortlist | None = None) -> Passed:
        """See `TorchEagle.run`."""
        listed, committed = list_rows(rows), rows[0].paths is None
        router = None if shortlist is None else shortlist.native_router
        wanted = len(listed.wanted)
        key = committed, bool(wanted), router
        if key not in self._programs:
            self._programs[key] = self._make(*key)
        states = torch.cat([one.hidden for one in rows]).contiguous()
        size = len(listed.tokens), self.network.config.hidden_size
        out, feature = torch.empty(2, *size, dtype=torch.bfloat16) if wanted else NOTHING[:2]
        given = {"states": states, **({"out": out, "feature": feature} if wanted else {})}
        routed = None
        if router is not None:
            routed = given["routed"] = torch.empty(wanted, router.clusters)
        if (last := max(listed.positions)) >= len(self._angles[0]):
            self._angles = self.network.angles.at(torch.arange((last // STEP + 1) * STEP))
        self._programs[key].run(listed, given, self._angles)
        return Passed(out, feature, routed)

    def _make(self, committed: bool, wanted: bool, router: NativeRouter | None) -> Program:
        network, config, program = self.network, self.network.config, Program(self.kernels)
        d = config.hidden_size
        residual, normed = self._join(program, committed, router)
        qkv, query = program.buffer(self._qkv.outputs, True), program.buffer(self._out.inputs)
        program.linear(self._qkv, normed, qkv)
        program.heads(qkv, query, config.heads, self._shape, 0)
        if not wanted:  # keys and values are written, which is all
            return program
        attended, inner = program.buffer(self._out.inputs), program.buffer(self._down.inputs)
        before = program.buffer(d)
        program.attend(query, attended, config.heads, self._shape, 0, config.head_dim**-0.5)
        program.linear(self._out, attended, residual, library.ADD)
        add_norm(program, residual, before, network.mlp_norm)
        program.linear(self._up, before, inner, library.GATED)
        program.linear(self._down, inner, residual, library.ADD)
        outputs = {"feature": config.final_norm, "out": config.norm_output}
        for name, norm in outputs.items():
            if norm:
                add_norm(program, residual, program.given(name, d), network.norm)
            else:
                program.copy(residual, program.given(name, d))
        return program

    def _join(
        self, program: Program, committed: bool, router: NativeRouter | None
    ) -> tuple[Buffer, Buffer]:
        """Add what is before the attention: hidden state and token become one row.

        Returns the buffers of the residual and of what queries, keys and values are made from.
        """
        network, config, d = self.network, self.network.config, self.network.config.hidden_size
        state, residual = program.buffer(d, True), program.buffer(d, True)
        token, normed, joined = program.buffer(d), program.buffer(d), program.buffer(2 * d)
        wide = config.join == "attention"
        states = program.given(
            "states", len(config.layers) * config.target_size if committed else d
        )
        embedding: Any = network.embedding
        program.embed(embedding.weight.detach(), token)
        if committed:
            states = self._norm_states(program, states)
        if committed and wide:
            program.linear(self._fc, states, state)
        else:
            program.copy(states, state)
        if router is not None:
            router.add(program, state, token, program.given("routed", router.clusters, True))
        if not wide:
            program.copy(token, joined)
            program.copy(state, joined, column=d)
            program.linear(self._fc, joined, residual)
            program.copy(residual, normed)
            return residual, normed
        add_norm(program, token, joined, network.input_norm)
        add_norm(program, state, joined, network.hidden_norm, column=d)
        if config.norm_before_residual:
            add_norm(program, state, residual, network.hidden_norm)
        else:
            program.copy(state, residual)
        if self._lift is not None:
            program.linear(self._lift, joined, residual, library.ADD)
        return residual, joined

    def _norm_states(self, program: Program, states: Buffer) -> Buffer:
        """Add the norms of the target's hidden states, where the configuration has them."""
        config, network = self.network.config, self.network
        if config.feature_norms:
            source, states = states, program.buffer(states.width)
            norms: Any = network.feature_norms
            for i, norm in enumerate(norms):
                at, width = i * config.target_size, config.target_size
                add_norm(program, source, states, norm, width=width, of=at, column=at)
        if config.fused_norm:
            source, states = states, program.buffer(states.width)
            add_norm(program, source, states, network.fused_norm)
        return states


def add_norm(program: Program, source: Buffer, target: Buffer, norm: Any, **more: Any) -> None:
    """Add a module's RMS norm to a program. `more`: as of `Program.norm`."""
    program.norm(source, target, norm.weight, norm.eps, **more)
