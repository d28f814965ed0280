"""The passes of a Gemma 4 assistant, by transformers' own class and by the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from quickbeam.drafters.native import CompiledDrafter, NativeHead, NativePacker
from quickbeam.models.base import Model
from quickbeam.models.gathered import RowPool, RowStore
from quickbeam.models.kv import SequenceCache
from quickbeam.models.native.operands import RowList
from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.pages import PagedStore, PagePool
from quickbeam.models.stack import Attention, Linear, Stack, Tensor
from quickbeam.models.stack_tensors import Parameters


class Part(NamedTuple):
    """Rows of one sequence: `joined` `[n, 2 * width]`, embeddings and hidden states side by side.

    All stand behind the target's committed tokens in `cache`, see these, and not one another.
    """

    cache: SequenceCache
    joined: torch.Tensor


Passes = Callable[[Sequence[Part]], tuple[torch.Tensor, torch.Tensor]]
"""Of parts, `out` `[rows, width]`, which stands in for the next hidden state, and `feature`
`[rows, d]`, which the head reads."""

JOIN, SPLIT = "pre_projection.weight", "post_projection.weight"


class TorchAssistant:
    """transformers' class `network` on any device: the reference.

    `sources`: the layer of the target whose keys and values layers of a kind read.
    """

    def __init__(self, network: Any, model: Model, sources: Mapping[str, int]) -> None:
        assert isinstance(model.pool, RowPool)
        self._network, self._pool, self._sources = network, model.pool, sources

    def __call__(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        feature = torch.cat([self._run(one) for one in parts])
        return self._network.post_projection(feature), feature

    def _run(self, part: Part) -> torch.Tensor:
        network, cache, n = self._network, part.cache, len(part.joined)
        assert isinstance(cache, RowStore)
        rows = torch.from_numpy(cache.rows(np.arange(cache.length))).to(self._pool.device)
        # each row is a sequence of its own, since rows of one would count positions
        read = {
            kind: tuple(
                of[i][rows].transpose(0, 1).expand(n, -1, -1, -1)
                for of in (self._pool.key, self._pool.value)
            )
            for kind, i in self._sources.items()
        }
        x = network.pre_projection(part.joined[:, None])
        masks = network.create_attention_masks(x, None, read)
        positions = torch.full((n, 1), cache.length, device=x.device)
        out = network.model(
            inputs_embeds=x,
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=read,
            use_cache=False,
        )
        return out.last_hidden_state[:, 0]  # type: ignore[no-any-return]


def borrowing(stack: Stack, kinds: Sequence[str], sources: Mapping[str, int]) -> Stack:
    """Return an assistant's stack: its layers read the target's keys and values.

    `stack`: as if the layers had their own. `kinds`: of the layers. In the place of the head is
    what joins the input.
    """

    def attention(of: Attention, kind: str) -> Attention:
        assert of.norms is not None
        own = Linear(of.qkv.weights[:1], of.qkv.biases[:1])
        norms, source = (of.norms[0], of.norms[0]), sources[kind]
        # transformers' mask is inclusive: it reaches `window` tokens back from the last one
        window = None if of.window is None else of.window + 1
        changed: dict[str, Any] = {"qkv": own, "norms": norms, "source": source, "window": window}
        return replace(of, **changed, values_are_keys=False)

    layers = []
    for layer, kind in zip(stack.layers, kinds, strict=True):
        assert layer.attention is not None
        layers.append(replace(layer, attention=attention(layer.attention, kind)))
    return replace(stack, layers=tuple(layers), head=Linear((Tensor(JOIN),)))


class CompiledAssistant(CompiledDrafter):
    """An assistant's layers. `states`: `[rows, 2 * width]`, what is joined."""

    def _embed(self, program: Program, target: Buffer) -> None:
        states = program.given("states", self._head.inputs, self._float32)
        program.linear(self._head, states, target)


class NativeAssistant:
    """An assistant in the native kernels, which read the pages of the target's pool.

    `stack`: as of `borrowing`. `weights`: the format of its weights.
    """

    def __init__(self, parameters: Parameters, stack: Stack, model: Model, weights: str) -> None:
        assert isinstance(model.pool, PagePool)
        self._compiled = CompiledAssistant(parameters, stack, model.pool, weights)
        self._compiled.watch([len(stack.layers) + 1])
        kernels = model.pool.kernels
        packed = NativePacker(kernels, weights)(parameters(SPLIT))
        self._split, self._dtype = NativeHead(packed, kernels), parameters.dtype

    def __call__(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        listed = RowList()
        for cache, joined in parts:
            assert isinstance(cache, PagedStore)
            # a row sees all committed tokens, and nothing of it is written
            n, length = len(joined), cache.length
            nothing = [0] * n
            listed.add(
                cache.table, nothing, [length] * n, nothing, [length] * n, [()] * n, range(n)
            )
        self._compiled.states = torch.cat([one.joined for one in parts]).contiguous()
        self._compiled(listed.rows(), max(listed.positions))
        feature = self._compiled.hidden
        return self._split(feature).to(self._dtype), feature
