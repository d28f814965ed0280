"""The passes of a block drafter, by PyTorch's operators and by the native kernels.

Both read committed tokens, whose keys and values stay, and run blocks, whose keys and values are
overwritten by what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.feature import TorchPasses
from quickbeam.drafters.native import NativeLayer, NativePasses, add_norm
from quickbeam.models.base import Model
from quickbeam.models.gathered import Behind, GatheredStep, RowStore
from quickbeam.models.kv import SequenceCache
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.pages import PagedStore


class TorchBlocks(TorchPasses):
    """A `BlockNetwork` on any device: the reference."""

    def __init__(self, network: BlockNetwork, model: Model) -> None:
        config = network.config
        super().__init__(network, config.depth, model)
        visible = torch.ones(config.block_size, config.block_size, dtype=torch.bool)
        self._visible = (visible.tril() if config.causal else visible).numpy()

    def read(self, caches: Sequence[SequenceCache], hidden: Sequence[torch.Tensor]) -> None:
        """Write keys and values of the next tokens of each sequence, which are not committed yet.

        `hidden`: the target's hidden states `[n, len(taps) * target_size]` of each sequence.
        """
        parts = list[Behind]()
        for cache, rows in zip(caches, hidden, strict=True):
            assert isinstance(cache, RowStore)
            parts.append(Behind(cache, range(len(rows))))
        step, fused = GatheredStep(parts, self.pool), self.network.fuse(torch.cat(list(hidden)))
        for i in range(self.network.config.depth):
            self.write(step, i, *self.network.key_value(i, fused, step.positions))

    def run(self, caches: Sequence[SequenceCache], anchors: Sequence[int]) -> torch.Tensor:
        """Run a block behind each sequence's committed tokens, and return the rows that draft.

        They are `[b, drafted, d]`.
        """
        blocks = list[Behind]()
        for cache in caches:
            assert isinstance(cache, RowStore)
            blocks.append(Behind(cache, range(len(self._visible)), visible=self._visible))
        step = GatheredStep(blocks, self.pool)

        def attend(i: int, query: torch.Tensor, *key_value: torch.Tensor) -> torch.Tensor:
            self.write(step, i, *key_value)
            return self.attend(step, i, query)

        rows = self.network(anchors, [cache.length for cache in caches], attend)
        return self.network.drafting(rows)  # type: ignore[no-any-return]


class NativeBlocks(NativePasses):
    """A `BlockNetwork` in the native kernels. It packs the network's weights.

    One program reads committed tokens, another one runs blocks.
    """

    def __init__(self, network: BlockNetwork, kernels: Kernels, name: str | None = None) -> None:
        super().__init__(network, network.config.depth, kernels, name)
        pack, self._layers, self._keys = self.pack, list[NativeLayer](), list[Any]()
        layers: Any = network.layers
        for layer, offset in zip(layers, self.pool.offsets, strict=True):
            of, mlp = layer.self_attn, layer.mlp
            q, k, v, out = (of[f"{name}_proj"].weight for name in "qkvo")
            up = pack(mlp["gate_proj"].weight, mlp["up_proj"].weight, gated=True)
            weights = pack(q, k, v), pack(out), up, pack(mlp["down_proj"].weight)
            norms = of["q_norm"], of["k_norm"]
            norm = layer.post_attention_layernorm
            self._layers.append(NativeLayer(*weights, norm, self.shape, offset, norms))
            self._keys.append(pack(k, v))
        self._reading, self._running = self._make_reading(), self._make_running()

    def read(self, caches: Sequence[SequenceCache], hidden: Sequence[torch.Tensor]) -> None:
        """See `TorchBlocks.read`."""
        listed = RowList()
        for cache, rows in zip(caches, hidden, strict=True):
            assert isinstance(cache, PagedStore)
            cache.add_chain(listed, [0] * len(rows), ())
        states = torch.cat(list(hidden)).contiguous()
        self.run_program(self._reading, listed, {"states": states})

    def run(self, caches: Sequence[SequenceCache], anchors: Sequence[int]) -> torch.Tensor:
        """See `TorchBlocks.run`."""
        config, listed = self.network.config, RowList()
        size, drafted = config.block_size, config.drafted
        for cache, anchor in zip(caches, anchors, strict=True):
            assert isinstance(cache, PagedStore)
            first = cache.length
            cache.reserve(first + size)
            places = range(first, first + size)
            # what a row sees ends with itself, or with the block
            seen = [place + 1 for place in places] if config.causal else [first + size] * size
            tokens = [anchor, *[config.mask_token] * (size - 1)]
            wanted = range(size - drafted, size)
            listed.add(cache.table, tokens, places, places, seen, [()] * size, wanted)
        rows = torch.empty(len(caches) * drafted, config.hidden_size, dtype=torch.bfloat16)
        self.run_program(self._running, listed, {"rows": rows})
        return rows.view(len(caches), drafted, -1)

    def _make_reading(self) -> Program:
        network, program = self.network, Program(self.kernels)
        fc = self.pack(network.fc.weight)
        fused, normed = program.buffer(fc.outputs, True), program.buffer(fc.outputs)
        program.linear(fc, program.given("states", fc.inputs), fused)
        add_norm(program, fused, normed, network.hidden_norm)
        for layer, keys in zip(self._layers, self._keys, strict=True):
            both = program.buffer(keys.outputs, True)
            program.linear(keys, normed, both)
            layer.take_apart(program, both, 0)
        return program

    def _make_running(self) -> Program:
        network, program = self.network, Program(self.kernels)
        width, embedding = network.config.hidden_size, network.embedding
        x, normed = program.buffer(width, True), program.buffer(width)
        weight: Any = embedding.weight
        program.embed(weight.detach(), x)
        layers: Any = network.layers
        for layer, of in zip(self._layers, layers, strict=True):
            add_norm(program, x, normed, of.input_layernorm)
            layer.finish(program, layer.project(program, normed), x)
        rows: Buffer = program.given("rows", width)
        add_norm(program, x, rows, network.norm, gather=True)
        return program
