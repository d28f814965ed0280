"""A whole `Stack` as PyTorch modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.models.rotary import Angles, angles_of
from quickbeam.models.stack import Experts, Layer, PerLayerInput, PerLayerInputs, Rotary, Stack
from quickbeam.models.torch.attention import AttentionLayer, PassInputs, attention_on
from quickbeam.models.torch.feed_forward import (
    ExpertsLayer,
    FeedForwardLayer,
    GroupedProduct,
    ParallelExpertsLayer,
)
from quickbeam.models.torch.packed_weight import PackedProduct
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.parts import ACTIVATIONS, Product, Reader, soft_cap
from quickbeam.models.torch.recurrent import recurrent_layer
from quickbeam.models.torch.rows import PassRows
from quickbeam.models.torch.states import State
from quickbeam.models.weights.parameters import Parameters

PRODUCTS = (Product, GroupedProduct, PackedProduct)


class Embedding(nn.Module):
    """Token ids `[...]` to rows of `weight` `[vocab, d]` times `embed_scale`, `[..., d]`."""

    def __init__(self, weight: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.weight = weight
        self.embed_scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, self.weight)
        return rows if self.embed_scale == 1 else rows * self.embed_scale


class PerLayerEmbeddings(nn.Module):
    """Computes an input for each layer from the tokens' ids (`stack.PerLayerInputs`)."""

    def __init__(self, per_layer: PerLayerInputs, layers: int, reader: Reader) -> None:
        super().__init__()
        self.per_layer = per_layer
        self.layers = layers
        self.table = reader.table(per_layer.table)
        self.projection = reader.product(per_layer.projection)
        self.norm = reader.norm(per_layer.norm)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `[n, layers, width]` for `tokens` `[n]`, whose embeddings are `x` `[n, d]`."""
        shape = (self.layers, self.per_layer.width)
        embedded = F.embedding(tokens, self.table).float() * self.per_layer.scale
        embedded = torch.unflatten(embedded, -1, shape)
        projected = self.projection(x) * self.per_layer.factor
        projected = torch.unflatten(projected, -1, shape)
        result: torch.Tensor = (self.norm(projected) + embedded) * self.per_layer.mixed
        return result


class PerLayerInputLayer(nn.Module):
    """What a layer adds for its input of `PerLayerEmbeddings` (`stack.PerLayerInput`)."""

    def __init__(self, per_layer: PerLayerInput, reader: Reader) -> None:
        super().__init__()
        self.gate = reader.product(per_layer.gate)
        self.out = reader.product(per_layer.out)
        self.activation = ACTIVATIONS[per_layer.activation]
        self.after = reader.norm(per_layer.after)

    def forward(self, x: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        """Return what is added to the residual stream `x` `[n, d]`.

        `layer_input`: `[n, width]`.
        """
        gate = self.activation(self.gate(x))
        added: torch.Tensor = self.after(self.out(gate * layer_input))
        return added


class Block(nn.Module):
    """Layer `index` of a stack (`stack.Layer`): the residual stream `[n, d]` to the next one."""

    def __init__(self, layer: Layer, index: int, reader: Reader) -> None:
        super().__init__()
        self.layer = layer
        self.attention: nn.Module | None = None
        self.recurrent: nn.Module | None = None
        self.experts: nn.Module | None = None
        self.feed_forward: nn.Module | None = None
        self.parallel_experts: nn.Module | None = None
        self.per_layer: nn.Module | None = None
        if layer.attention is not None:
            self.attention = AttentionLayer(layer.attention, index, reader)
        if layer.recurrent is not None:
            self.recurrent = recurrent_layer(layer.recurrent, index, reader)
        if isinstance(layer.feed_forward, Experts):
            self.experts = ExpertsLayer(layer.feed_forward, reader)
        elif layer.feed_forward is not None:
            self.feed_forward = FeedForwardLayer(layer.feed_forward, reader)
        if layer.parallel_experts is not None:
            self.parallel_experts = ParallelExpertsLayer(layer.parallel_experts, reader)
        if layer.per_layer is not None:
            self.per_layer = PerLayerInputLayer(layer.per_layer, reader)
        self.scalar = reader.optional_vector(layer.scalar)
        self.attention_before = reader.norm(layer.attention_before)
        self.attention_after = reader.norm(layer.attention_after)
        self.feed_forward_before = reader.norm(layer.feed_forward_before)
        self.feed_forward_after = reader.norm(layer.feed_forward_after)

    def forward(
        self, x: torch.Tensor, inputs: PassInputs, layer_input: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `[n, d]`. `layer_input`: that of `PerLayerEmbeddings`, `[n, width]`."""
        layer = self.layer
        # mix tokens
        source = self.attention_before(x)
        mixed = torch.zeros_like(x)
        if self.attention is not None:
            mixed = mixed + self.attention_after(self.attention(source, inputs)) * layer.residual
        if self.recurrent is not None:
            mixed = mixed + self.attention_after(self.recurrent(source, inputs)) * layer.residual

        # the feed-forward, which may have the same input as attention
        if layer.parallel:
            if layer.feed_forward_before is not None:
                source = self.feed_forward_before(x)
            x = x + mixed
        else:
            x = x + mixed
            source = self.feed_forward_before(x)
        result: torch.Tensor | None = None
        if self.experts is not None:
            result = self.experts(source, inputs.rows)
        elif self.feed_forward is not None:
            result = self.feed_forward(source)
        if self.parallel_experts is not None:
            result = self.parallel_experts(x, inputs.rows, result)
        if result is not None:
            x = x + self.feed_forward_after(result) * layer.residual

        if self.per_layer is not None:
            x = x + self.per_layer(x, layer_input)
        return x if self.scalar is None else x * self.scalar


class Network(nn.Module):
    """A `Stack` with its weights on `device`.

    The memory of `parameters` is released as they are read. `packed`: weights of 4 bits stay
    packed.
    """

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        device: torch.device,
        dtype: torch.dtype,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.stack = stack
        reader = Reader(parameters, device, dtype, packed)
        self.embedding = Embedding(reader.table(stack.embedding), stack.scale)
        self.positions: nn.Parameter | None = None
        if stack.positions is not None:
            self.positions = reader.table(stack.positions)
        self.per_layer: nn.Module | None = None
        if stack.per_layer is not None:
            self.per_layer = PerLayerEmbeddings(stack.per_layer, len(stack.layers), reader)
        self.embedding_norm = reader.norm(stack.embedding_norm)
        self.norm = reader.norm(stack.norm)
        self.head = reader.dense_product(stack.head)
        if torch.equal(self.head.weight, self.embedding.weight):  # one tensor in the checkpoint
            self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList()
        for index, layer in enumerate(stack.layers):
            self.blocks.append(Block(layer, index, reader))
            parameters.release(stack.inside, index)
        parameters.release(stack.inside, None)
        self.angles = dict[Rotary, Angles]()
        for attention in stack.attentions:
            rotary = attention.rotary
            if rotary is not None:
                self.angles[rotary] = angles_of(parameters.config, rotary, attention.rotary_dim)

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights of all products."""
        products = (module for module in self.modules() if isinstance(module, PRODUCTS))
        return sum(product.weight.nbytes for product in products)

    def zero_states(self) -> State:
        """Return the states of an empty sequence, by the indices of recurrent layers."""
        states = State()
        for index, block in enumerate(self.blocks):
            recurrent: Any = block.recurrent
            if recurrent is not None:
                states[index] = recurrent.zeros()
        return states

    def forward(
        self, rows: PassRows, pool: RowPool, watched: Sequence[int] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the residual stream after all layers, `[n, d]`, and after those of `watched`.

        An i in `watched` means after i layers. One more than the number of layers means after the
        final norm.
        """
        x = self._embed(rows.tokens, rows.positions)
        layer_inputs: torch.Tensor | None = None  # [n, layers, width]
        if self.per_layer is not None:
            layer_inputs = self.per_layer(rows.tokens, x)
        angles = {rotary: table.at(rows.positions) for rotary, table in self.angles.items()}
        inputs = PassInputs(rows, pool, angles, attention_on(pool.device))
        streams = dict[int, torch.Tensor]()
        for i, block in enumerate(self.blocks):
            x = block(x, inputs, None if layer_inputs is None else layer_inputs[:, i])
            streams[i + 1] = x
        if len(self.blocks) + 1 in watched:
            streams[len(self.blocks) + 1] = self.norm(x)
        return x, [streams[layer] for layer in watched]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[n, vocab]` float32 for the residual stream after all layers, `[n, d]`."""
        logits = self.head(self.norm(x)) * self.stack.head_scale
        return soft_cap(logits, self.stack.softcap)

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(tokens, self.embedding.weight).float()
        x: torch.Tensor = self.embedding_norm(embedded * self.stack.scale)
        if self.positions is None:
            return x
        indices = positions + self.stack.first_position
        return x + F.embedding(indices, self.positions).float()
