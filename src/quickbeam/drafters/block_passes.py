"""The passes of a block drafter, by PyTorch's operators and by the native kernels.

Both read committed tokens, whose keys and values stay, and run blocks, whose keys and values are
overwritten by what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.native import Angles, NativeHead, NativeLayer, NativePacker, add_norm
from quickbeam.models.base import Model
from quickbeam.models.gathered import Behind, GatheredStep, RowPool, RowStore
from quickbeam.models.kv import Layer, SequenceCache
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.operands import KVShape, RowList
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.pages import PagedStore, PagePool


class TorchBlocks:
    """A `BlockNetwork` on any device: the reference."""

    def __init__(self, network: BlockNetwork, model: Model) -> None:
        self.network, config = network, network.config
        shape = KVShape(config.kv_heads, config.head_dim, config.head_dim)
        self.pool = RowPool([shape] * config.depth, model.dtype, model.device)
        scale = config.head_dim**-0.5
        self._layers = [Layer(i, scale, None, None, None) for i in range(config.depth)]
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
        for i, layer in enumerate(self._layers):
            key, value = self.network.key_value(i, fused, step.positions)
            step.write(layer, key.transpose(0, 1), value.transpose(0, 1))

    @property
    def logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What gives U of rows that draft: `[n, d]` to `[n, vocab]`."""
        return self.network.head

    def run(self, caches: Sequence[SequenceCache], anchors: Sequence[int]) -> torch.Tensor:
        """Run a block behind each sequence's committed tokens, and return the rows that draft.

        They are `[b, drafted, d]`.
        """
        blocks = list[Behind]()
        for cache in caches:
            assert isinstance(cache, RowStore)
            blocks.append(Behind(cache, range(len(self._visible)), visible=self._visible))
        step = GatheredStep(blocks, self.pool)

        def attend(
            i: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            step.write(self._layers[i], key.transpose(0, 1), value.transpose(0, 1))
            return step.attend(query, self._layers[i])

        rows = self.network(anchors, [cache.length for cache in caches], attend)
        return self.network.drafting(rows)


class NativeBlocks:
    """A `BlockNetwork` in the native kernels, with the pages of its keys and values.

    It packs the network's weights (`NativePacker`, which `name` is for). One program reads
    committed tokens, another one runs blocks.
    """

    def __init__(self, network: BlockNetwork, kernels: Kernels, name: str | None = None) -> None:
        self.network, self._kernels, config = network, kernels, network.config
        shape = KVShape(config.kv_heads, config.head_dim, config.head_dim)
        self.pool, pack = PagePool([shape] * config.depth, kernels), NativePacker(kernels, name)
        self._pack, self._layers, self._keys = pack, list[NativeLayer](), list[Any]()
        layers: Any = network.layers
        for layer, offset in zip(layers, self.pool.offsets, strict=True):
            of, mlp = layer.self_attn, layer.mlp
            q, k, v, out = (of[f"{name}_proj"].weight for name in "qkvo")
            up = pack(mlp["gate_proj"].weight, mlp["up_proj"].weight, gated=True)
            weights = pack(q, k, v), pack(out), up, pack(mlp["down_proj"].weight)
            norms = of["q_norm"], of["k_norm"]
            norm = layer.post_attention_layernorm
            self._layers.append(NativeLayer(*weights, norm, shape, offset, norms))
            self._keys.append(pack(k, v))
        self._reading, self._running = self._make_reading(), self._make_running()
        self._angles = Angles(network.rotary)

    @staticmethod
    def sizes(network: BlockNetwork) -> tuple[int, ...]:
        """Return the widths that have to be even."""
        config = network.config
        return config.hidden_size, config.intermediate_size, config.head_dim, config.target_size

    def read(self, caches: Sequence[SequenceCache], hidden: Sequence[torch.Tensor]) -> None:
        """See `TorchBlocks.read`."""
        listed = RowList()
        for cache, rows in zip(caches, hidden, strict=True):
            assert isinstance(cache, PagedStore)
            cache.add_chain(listed, [0] * len(rows), ())
        states = torch.cat(list(hidden)).contiguous()
        table = self._angles.up_to(max(listed.positions))
        self._reading.run(listed.rows(), {"states": states}, table)

    @cached_property
    def logits(self) -> NativeHead:
        """See `TorchBlocks.logits`. Packed where it is needed: shortlists have their own."""
        return NativeHead(self._pack.head(self.network.head), self._kernels)

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
        table = self._angles.up_to(max(listed.positions))
        self._running.run(listed.rows(), {"rows": rows}, table)
        return rows.view(len(caches), drafted, -1)

    def _make_reading(self) -> Program:
        network, program = self.network, Program(self._kernels)
        fc = self._pack(network.fc.weight)
        fused, normed = program.buffer(fc.outputs, True), program.buffer(fc.outputs)
        program.linear(fc, program.given("states", fc.inputs), fused)
        add_norm(program, fused, normed, network.hidden_norm)
        for layer, keys in zip(self._layers, self._keys, strict=True):
            both = program.buffer(keys.outputs, True)
            program.linear(keys, normed, both)
            layer.take_apart(program, both, 0)
        return program

    def _make_running(self) -> Program:
        network, program = self.network, Program(self._kernels)
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
