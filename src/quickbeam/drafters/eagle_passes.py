"""The passes of an EAGLE drafter, by PyTorch's operators and by the native kernels.

The parts of a pass are all chains of committed tokens, or all draft trees, whose roots' rows are
those of the last committed tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.drafters.feature import TorchPasses
from quickbeam.drafters.folder import embed_scale
from quickbeam.drafters.native import NativePacker
from quickbeam.drafters.shortlist.native import NativeRouter, Router
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.models.base import Batch, Chain, Model
from quickbeam.models.compile.compiled_stack import NativeLinear
from quickbeam.models.compile.native_model import list_rows
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import KVShape
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.rotary import STEP
from quickbeam.models.torch.graphs import Passes, SideStream
from quickbeam.models.torch.rows import PassRows, list_pass, uncommitted


class EagleOutput(NamedTuple):
    """What a pass returns, one row each; the first two are empty where nothing was wanted.

    - `out`: `[n, d]`, stands in for the next hidden state. `feature`: `[n, d]`, for the head.
    - `routed`: `[wanted, clusters]`, the router's scores of the wanted rows. None if not asked.
    """

    out: torch.Tensor
    feature: torch.Tensor
    routed: torch.Tensor | None = None


NOTHING = EagleOutput(torch.empty(0), torch.empty(0))


class TorchEagle(TorchPasses):
    """An `EagleHead` on any device: the reference.

    On CUDA a pass is one graph. A router runs in it beside the layer, on a second stream.
    """

    def __init__(self, network: EagleHead, model: Model) -> None:
        super().__init__(network, [(network.config.window, False)], model)
        self._passes = Passes(self._compute, self.pool)
        self._side = SideStream(model.device) if self._passes.padding() else None

    def run(self, batch: Batch, hidden: torch.Tensor, shortlist: Shortlist | None) -> EagleOutput:
        """Run the layer once, and the router of `shortlist` where one is given.

        `hidden`: what each row reads besides its token. In chains that is the target's hidden state
        after the token before, `[n, len(layers) * target_size]`, in trees the output of the
        parent's row, `[n, d]`.
        """
        committed = isinstance(batch.parts[0], Chain)
        router = None if shortlist is None else shortlist.router
        listed = list_pass(
            [*map(uncommitted, batch.parts)],
            self.pool,
            batch.tokens,
            batch.wanted,
            padding=self._passes.padding(),
        )
        out, feature, routed = self._passes.run(listed, [hidden], (committed, router))
        return EagleOutput(
            out[: batch.rows],
            feature[: batch.rows],
            None if router is None else routed[: len(batch.wanted)],
        )

    def _compute(
        self, rows: PassRows, hidden: torch.Tensor, committed: bool, router: Router | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute a pass. Nothing here reads from the device or depends on its numbers."""
        network = self.network
        if committed:
            hidden = network.fuse(hidden)
        embedded = network.embedding(rows.tokens)
        routed = hidden.new_empty(0, dtype=torch.float32)
        if router is not None:
            with nullcontext() if self._side is None else self._side.fork():
                routed = router(hidden[rows.wanted], embedded[rows.wanted])

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self.write(rows, 0, key, value)
            return self.attend(rows, 0, query)

        out = network(hidden, embedded, rows.positions, attend)
        feature = network.feature(out)
        if router is not None and self._side is not None:
            self._side.join()
        return out, feature, routed


class NativeEagle:
    """An `EagleHead` in the native kernels. It packs the network's weights.

    `name`: as of `NativePacker`.
    """

    def __init__(self, network: EagleHead, kernels: Kernels, name: str | None) -> None:
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
        self._program = cache(self._make)

    @cached_property
    def logits(self) -> NativeLinear:
        """The whole head, packed where it is needed: shortlists have rows of their own."""
        return self.pack.head(self.network.head)

    def run(self, batch: Batch, hidden: torch.Tensor, shortlist: Shortlist | None) -> EagleOutput:
        """See `TorchEagle.run`."""
        listed, committed = list_rows(batch), isinstance(batch.parts[0], Chain)
        router = None if shortlist is None else shortlist.native_router
        wanted = len(listed.wanted)
        size, given = (batch.rows, self.network.config.hidden_size), {"states": hidden.contiguous()}
        out, feature, routed = NOTHING
        if wanted:
            out, feature = torch.empty(2, *size, dtype=torch.bfloat16)
            given |= {"out": out, "feature": feature}
        if router is not None:
            routed = given["routed"] = torch.empty(wanted, router.clusters)
        if (last := max(listed.positions)) >= len(self._angles[0]):
            self._angles = self.network.angles.at(torch.arange((last // STEP + 1) * STEP))
        self._program(committed, bool(wanted), router).run(listed, given, self._angles)
        return EagleOutput(out, feature, routed)

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
        scores = config.head_dim**-0.5, config.window
        program.attend(query, attended, config.heads, self._shape, 0, *scores)
        program.linear(self._out, attended, residual, library.ADD)
        add_norm(program, residual, before, network.mlp_norm)
        program.linear(self._up, before, inner, library.GATED)
        program.linear(self._down, inner, residual, library.ADD)
        outputs = {"feature": config.final_norm, "out": config.norm_output}
        for name, norm in outputs.items():
            if norm:
                add_norm(program, residual, program.external(name, d), network.norm)
            else:
                program.copy(residual, program.external(name, d))
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
        width = len(config.layers) * config.target_size if committed else d
        states = program.external("states", width)
        embedding: Any = network.embedding
        weight, rows = embedding.weight, program.buffer(d, True)
        weight = weight.detach() if isinstance(weight, torch.Tensor) else weight
        program.embed(weight, rows, embed_scale(embedding))
        program.copy(rows, token)
        if committed:
            states = self._norm_states(program, states)
        if committed and wide:
            program.linear(self._fc, states, state)
        else:
            program.copy(states, state)
        if router is not None:
            router.add(program, state, token, program.external("routed", router.clusters, True))
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
                add_norm(program, source, states, norm, width=width, source_column=at, column=at)
        if config.fused_norm:
            source, states = states, program.buffer(states.width)
            add_norm(program, source, states, network.fused_norm)
        return states


def add_norm(program: Program, source: Buffer, target: Buffer, norm: Any, **more: Any) -> None:
    """Add a module's RMS norm to a program. `more`: as of `Program.norm`."""
    program.norm(source, target, norm.weight, norm.eps, **more)
