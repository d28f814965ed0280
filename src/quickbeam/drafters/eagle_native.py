"""The feature drafter's network in the native kernels (see `eagle_model.py`).

One call runs its layer and the router, another one its head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quickbeam.drafters.eagle_model import EagleHead, Norm
from quickbeam.drafters.shortlist.native import NativeRouter, rows_format
from quickbeam.models.linear import NativeLinear
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import KVShape, Rows, plain_rows
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.native.quantised import AnyPacked, Packer, QuantisedPacked
from quickbeam.models.pages import PagePool


class Ran(NamedTuple):
    """What a pass of the layer returns, one row each.

    - `out`: `[n, d]` bfloat16, stands in for the next hidden state.
    - `feature`: `[n, d]` bfloat16, what the head reads.
    - `routed`: `[wanted, clusters]` float32, the router's scores of the wanted rows. None if the
      router was not asked.
    """

    out: torch.Tensor
    feature: torch.Tensor
    routed: torch.Tensor | None


class NativeEagle:
    """An `EagleHead` in the native kernels, with the pages of its keys and values.

    It takes the network over and packs its weights in 8 bits (`rows_format`). Raises `ValueError`
    for an odd width.
    """

    def __init__(self, network: EagleHead, kernels: Kernels) -> None:
        self.network, config = network, network.config
        self._kernels, self._width = kernels, config.hidden_size
        self.shape = KVShape(config.kv_heads, config.head_dim, config.head_dim)
        self.pool = PagePool([self.shape], kernels)
        self._fc = self._pack(network.fc)
        self._lift = self._pack(network.lift) if config.lift else None
        self._qkv, self._out, self._down = (
            self._pack(network.qkv),
            self._pack(network.out),
            self._pack(network.down),
        )
        gate, up = network.gate_up.weight.chunk(2)
        self._gate_up = self._packer(network.gate_up.weight).pack(
            [gate, up], network.gate_up.bias, gated=True
        )
        self._programs: dict[tuple[bool, NativeRouter | None], Program] = {}
        self._keys: Program | None = None  # that of `remember`
        self._angles = (torch.empty(0, 1), torch.empty(0, 1))
        self._head: Program | None = None

    @staticmethod
    def fits(network: EagleHead) -> bool:
        """Whether the kernels can compute everything in this network."""
        config = network.config
        sizes = (config.hidden_size, config.intermediate_size, config.head_dim, config.target_size)
        plain = type(network.embedding) is torch.nn.Embedding  # other classes may scale the rows
        return plain and config.activation == "silu" and all(size % 2 == 0 for size in sizes)

    def _packer(self, weight: torch.Tensor) -> Packer:
        return Packer(self._kernels, rows_format(weight))

    def _pack(self, linear: torch.nn.Linear) -> AnyPacked:
        return self._packer(linear.weight).pack([linear.weight], linear.bias)

    def run(
        self,
        states: torch.Tensor,
        committed: bool,
        rows: Rows,
        last_position: int,
        router: NativeRouter | None,
    ) -> Ran:
        """Run the layer once, and the `router` where one is given.

        `states`: for `committed` rows the target's hidden states `[n, len(layers) * target_size]`,
        for other rows the outputs of their parents' rows `[n, d]`. `last_position`: the largest
        position of `rows`.
        """
        key = committed, router
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._make(committed, router)
        n, wanted = rows.rows, rows.batch.wanted
        out, feature = torch.empty(2, n, self._width, dtype=torch.bfloat16)
        given = {"states": states.contiguous(), "out": out, "feature": feature}
        routed = None
        if router is not None:
            routed = given["routed"] = torch.empty(wanted, router.clusters)
        program.run(rows, given, self._angles_to(last_position))
        return Ran(out, feature, routed)

    def remember(self, states: torch.Tensor, rows: Rows, last_position: int) -> None:
        """Write the keys and values of committed rows, and compute nothing else of them.

        The arguments are those of `run`.
        """
        if self._keys is None:
            self._keys = Program(self._kernels)
            self._enter(self._keys, True, None)
        self._keys.run(rows, {"states": states.contiguous()}, self._angles_to(last_position))

    def logits(self, feature: torch.Tensor) -> torch.Tensor:
        """Return the logits `[n, draft vocabulary]` float32 of the whole head.

        `feature`: `[n, d]` bfloat16, what the head reads.
        """
        if self._head is None:
            packed = self._pack_head(self.network.head)
            self._head = Program(self._kernels)
            self._head.linear(
                packed,
                self._head.given("feature", self._width),
                self._head.given("logits", packed.outputs, True),
            )
            self._outputs = packed.outputs
        logits = torch.empty(len(feature), self._outputs)
        self._head.run(
            plain_rows(len(feature)), {"feature": feature.contiguous(), "logits": logits}
        )
        return logits

    def _pack_head(self, head: Any) -> AnyPacked:
        """Return the head's packed rows, in the format that `rows_format` names.

        If the target keeps them quantised, its own rows are used. If it keeps more bits, this is a
        copy.
        """
        if not isinstance(head, NativeLinear):
            return self._pack(head)
        if isinstance(head.packed, QuantisedPacked):
            return head.packed
        rows = head.packed.rows()
        return self._packer(rows).pack([rows], head.packed.bias)

    def _make(self, committed: bool, router: NativeRouter | None) -> Program:
        network, config, program, d = (
            self.network,
            self.network.config,
            Program(self._kernels),
            self._width,
        )
        query, residual = self._enter(program, committed, router)
        attended, normed = program.buffer(self._out.inputs), program.buffer(d)
        inner = program.buffer(config.intermediate_size)
        out, feature = program.given("out", d), program.given("feature", d)
        program.attend(query, attended, config.heads, self.shape, 0, config.head_dim**-0.5)
        program.linear(self._out, attended, residual, library.ADD)
        self._norm(program, residual, normed, network.mlp_norm)
        program.linear(self._gate_up, normed, inner, library.GATED)
        program.linear(self._down, inner, residual, library.ADD)
        if config.final_norm:
            self._norm(program, residual, feature, network.norm)
        else:
            program.copy(residual, feature)
        if config.norm_output:
            self._norm(program, residual, out, network.norm)
        else:
            program.copy(residual, out)
        return program

    def _enter(
        self, program: Program, committed: bool, router: NativeRouter | None
    ) -> tuple[Buffer, Buffer]:
        """Add everything before the attention: keys and values are written, and the router runs.

        Returns the buffers of the queries and of the residual.
        """
        network, config, d = self.network, self.network.config, self._width
        wide = config.join == "attention"
        state, residual = program.buffer(d, True), program.buffer(d, True)
        token, normed, joined = program.buffer(d), program.buffer(d), program.buffer(2 * d)
        qkv, query = program.buffer(self._qkv.outputs, True), program.buffer(self._out.inputs)
        given = len(config.layers) * config.target_size if committed else d
        states = program.given("states", given)
        embedding: Any = network.embedding
        program.embed(embedding.weight.detach(), token)
        if committed:
            states = self._fuse(program, states, given)
        if committed and wide:
            program.linear(self._fc, states, state)
        else:
            program.copy(states, state)
        if router is not None:
            router.add(program, state, token, program.given("routed", router.clusters, True))
        if wide:
            self._norm(program, token, joined, network.input_norm)
            self._norm(program, state, joined, network.hidden_norm, d)
            if config.norm_before_residual:
                self._norm(program, state, residual, network.hidden_norm)
            else:
                program.copy(state, residual)
            if self._lift is not None:
                program.linear(self._lift, joined, residual, library.ADD)
            program.linear(self._qkv, joined, qkv)
        else:
            program.copy(token, joined)
            program.copy(state, joined, column=d)
            program.linear(self._fc, joined, residual)
            if config.input_norm:
                self._norm(program, residual, normed, network.input_norm)
            else:
                program.copy(residual, normed)
            program.linear(self._qkv, normed, qkv)
        program.heads(qkv, query, config.heads, self.shape, 0)
        return query, residual

    def _fuse(self, program: Program, states: Buffer, width: int) -> Buffer:
        """Add the norms of the target's hidden states, where the configuration has them."""
        config, network = self.network.config, self.network
        if config.feature_norms:
            normed = program.buffer(width)
            norms: Any = network.feature_norms
            for i, norm in enumerate(norms):
                at = i * config.target_size
                program.norm(
                    states,
                    normed,
                    norm.weight,
                    norm.eps,
                    width=config.target_size,
                    of=at,
                    column=at,
                )
            states = normed
        if config.fused_norm:
            normed = program.buffer(width)
            self._norm(program, states, normed, network.fused_norm)
            states = normed
        return states

    @staticmethod
    def _norm(
        program: Program, source: Buffer, target: Buffer, norm: Norm, column: int = 0
    ) -> None:
        program.norm(source, target, norm.weight, norm.eps, column=column)

    def _angles_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        if position >= len(self._angles[0]):
            cosine, sine = self.network.rotary(
                torch.empty(1, dtype=torch.float32),
                torch.arange((position // 1024 + 1) * 1024)[None],
            )
            half = cosine.shape[-1] // 2
            self._angles = (cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous())
        return self._angles
