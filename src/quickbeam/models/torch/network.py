"""A whole `Stack` as PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.models.base import ImageRows
from quickbeam.models.rotary import angles_of
from quickbeam.models.stack import (
    BlockConv,
    Experts,
    Fusion,
    HiddenInput,
    Layer,
    PerLayerInput,
    PerLayerInputs,
    Rotary,
    Stack,
)
from quickbeam.models.torch.attention import AttentionLayer, CosSin, PassInputs, attention_on
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


class Convolutions(nn.Module):
    """The convolutions around a sublayer (`stack.BlockConv`), of rows `[n, d]` in whole blocks."""

    def __init__(self, conv: BlockConv, reader: Reader) -> None:
        super().__init__()
        self.conv = conv
        self.shared, self.base = reader.product(conv.shared), reader.vector(conv.base)

    def coefficients(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those before and after the sublayer: `[blocks, block, taps, d]` each.

        They are of a row itself, then of the rows before it.
        """
        conv = self.conv
        shared = torch.unflatten(self.shared(x), -1, (2, conv.taps, -1))
        every = self.base + shared.repeat_interleave(conv.group, -1)
        before, after = torch.unflatten(every, 0, (-1, conv.block)).unbind(2)
        return before, after

    def convolved(self, x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """Return the rows `[n, d]` convolved within their blocks."""
        conv = self.conv
        blocks = torch.unflatten(x, 0, (-1, conv.block))
        out = torch.zeros_like(blocks)
        for behind in range(min(conv.block, conv.taps)):
            rows = blocks[:, : conv.block - behind]
            out[:, behind:] += coefficients[:, behind:, behind] * rows
        return out.flatten(0, 1)


class FusionLayer(nn.Module):
    """One vector of several hidden states (`stack.Fusion`): `[n, layers * width]` to `[n, d]`."""

    def __init__(self, fusion: Fusion, reader: Reader) -> None:
        super().__init__()
        self.width, self.linear = fusion.width, reader.product(fusion.linear)
        self.norms = nn.ModuleList(reader.norm(norm) for norm in fusion.norms)
        self.norm, self.after = reader.norm(fusion.norm), reader.norm(fusion.after)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.norms:
            parts = states.split_with_sizes([self.width] * len(self.norms), -1)
            normed = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
            states = torch.cat(normed, -1)
        fused: torch.Tensor = self.after(self.linear(self.norm(states)))
        return fused


class HiddenInputLayer(nn.Module):
    """The residual stream of tokens and hidden states (`stack.HiddenInput`)."""

    def __init__(self, hidden_input: HiddenInput, reader: Reader) -> None:
        super().__init__()
        self.hidden_input = hidden_input
        self.token_norm = reader.norm(hidden_input.token_norm)
        self.state_norm = reader.norm(hidden_input.state_norm)
        self.join: nn.Module | None = None
        if hidden_input.join is not None:
            self.join = reader.product(hidden_input.join)

    def forward(
        self, embedded: torch.Tensor | None, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stream `[n, d]`, and what the first layer's attention reads, if not that.

        `embedded`: of the tokens, `[n, ...]`, if they are read. `states`: `[n, width]`.
        """
        states = states.float()
        if embedded is None:
            return states, None
        token, state = self.token_norm(embedded.float()), self.state_norm(states)
        both = torch.cat([state, token] if self.hidden_input.state_first else [token, state], -1)
        if self.join is not None:
            return self.join(both), None
        return (state if self.hidden_input.norm_residual else states), both


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
        self.convs: nn.ModuleList | None = None
        if layer.convs is not None:
            self.convs = nn.ModuleList(Convolutions(conv, reader) for conv in layer.convs)
        self.scalar = reader.optional_vector(layer.scalar)
        self.attention_before = reader.norm(layer.attention_before)
        self.attention_after = reader.norm(layer.attention_after)
        self.feed_forward_before = reader.norm(layer.feed_forward_before)
        self.feed_forward_after = reader.norm(layer.feed_forward_after)

    def forward(
        self,
        x: torch.Tensor,
        inputs: Any,
        own: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the residual stream `[n, d]` behind the layer.

        `inputs`: as of `AttentionLayer`. `own`: the layer's own input, `[n, width]`, where it has
        one. `source`: what attention reads in place of the normed stream.
        """
        layer = self.layer
        # what mixes tokens
        if source is None:
            source = self.attention_before(x)
        mixed = torch.zeros_like(x)
        if (attention := self.attention) is not None:
            attended = self._between(0, source, lambda rows: attention(rows, inputs))
            mixed = mixed + self.attention_after(attended) * layer.residual
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
            result = self._between(1, source, self.feed_forward)
        if self.parallel_experts is not None:
            result = self.parallel_experts(x, inputs.rows, result)
        if result is not None:
            x = x + self.feed_forward_after(result) * layer.residual

        if self.per_layer is not None:
            x = x + self.per_layer(x, own)
        return x if self.scalar is None else x * self.scalar

    def _between(
        self, number: int, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return what a sublayer makes of its rows, between its convolutions if it has some."""
        if self.convs is None:
            return run(x)
        convs: Any = self.convs[number]
        before, after = convs.coefficients(x)
        convolved: torch.Tensor = convs.convolved(run(convs.convolved(x, before)), after)
        return convolved


class LayerStack(nn.Module):
    """The layers of a `Stack` and its last norm, with their weights on `device`.

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
        self.fusion: nn.Module | None = None
        if stack.fusion is not None:
            self.fusion = FusionLayer(stack.fusion, reader)
        self.hidden_input: nn.Module | None = None
        if stack.hidden_input is not None:
            self.hidden_input = HiddenInputLayer(stack.hidden_input, reader)
        self.norm = reader.norm(stack.norm)
        self.blocks = nn.ModuleList()
        for index, layer in enumerate(stack.layers):
            self.blocks.append(Block(layer, index, reader))
            parameters.release(stack.inside, index)
        self.angles = {
            one.rotary: angles_of(parameters.config, one.rotary, one.rotary_dim)
            for one in stack.attentions
            if one.rotary is not None
        }

    def angles_at(self, positions: torch.Tensor) -> dict[Rotary, CosSin]:
        """Return the angles of rows at `positions` `[n]`, of all kinds of layers."""
        return {rotary: angles.at(positions) for rotary, angles in self.angles.items()}

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what rows read of a target's hidden states `[..., aux_layers * d]`, in float32."""
        fused: torch.Tensor = hidden.float() if self.fusion is None else self.fusion(hidden)
        return fused

    def drafter_stream(
        self, embedded: torch.Tensor | None, states: torch.Tensor, inputs: Any
    ) -> torch.Tensor:
        """Return the residual stream of a drafter's rows behind the last layer, `[n, d]`.

        `embedded`, `states`: what `HiddenInputLayer` takes. `inputs`: as of `AttentionLayer`.
        """
        assert self.hidden_input is not None
        x, source = self.hidden_input(embedded, states)
        return self.streams(x, inputs, source=source)[-1]

    def streams(
        self,
        x: torch.Tensor,
        inputs: Any,
        own: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the residual stream behind each layer, `[n, d]`.

        `x`: that before the first. `inputs`: as of `AttentionLayer`. `own`: each layer's own input,
        `[n, layers, width]`. `source`: what the first layer's attention reads, if not the stream.
        """
        streams = []
        for i, block in enumerate(self.blocks):
            x = block(x, inputs, None if own is None else own[:, i], source if i == 0 else None)
            streams.append(x)
        return streams


class Network(LayerStack):
    """A whole `Stack`: embedding, layers and head."""

    def __init__(
        self,
        parameters: Parameters,
        stack: Stack,
        device: torch.device,
        dtype: torch.dtype,
        packed: bool = False,
    ) -> None:
        reader = Reader(parameters, device, dtype, packed)
        super().__init__(parameters, stack, device, dtype, packed)
        self.embedding = Embedding(reader.table(stack.embedding), stack.scale)
        self.positions: nn.Parameter | None = None
        if stack.positions is not None:
            self.positions = reader.table(stack.positions)
        self.per_layer: nn.Module | None = None
        if stack.per_layer is not None:
            self.per_layer = PerLayerEmbeddings(stack.per_layer, len(stack.layers), reader)
        self.embedding_norm = reader.norm(stack.embedding_norm)
        self.head = reader.dense_product(stack.head)
        if torch.equal(self.head.weight, self.embedding.weight):  # one tensor in the checkpoint
            self.head.weight = self.embedding.weight
        parameters.release(stack.inside, None)

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights of all products."""
        products = (module for module in self.modules() if isinstance(module, PRODUCTS))
        return sum(product.weight.nbytes for product in products)

    def forward(
        self,
        rows: PassRows,
        pool: RowPool,
        watched: Sequence[int] = (),
        images: Sequence[ImageRows] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the residual stream after all layers, `[n, d]`, and after those of `watched`.

        An i in `watched` means after i layers. One more than the number of layers means after the
        final norm. `images`: in place of some rows' embeddings.
        """
        x = self._embed(rows.tokens, rows.positions, images)
        own = None if self.per_layer is None else self.per_layer(rows.tokens, x)
        inputs = PassInputs(rows, pool, self.angles_at(rows.positions), attention_on(pool.device))
        streams = self.streams(x, inputs, own)
        last = streams[-1]
        if len(self.blocks) + 1 in watched:
            streams.append(self.norm(last))
        return last, [streams[layer - 1] for layer in watched]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[n, vocab]` float32 for the residual stream after all layers, `[n, d]`."""
        logits = self.head(self.norm(x)) * self.stack.head_scale
        return soft_cap(logits, self.stack.softcap)

    def _embed(
        self, tokens: torch.Tensor, positions: torch.Tensor, images: Sequence[ImageRows]
    ) -> torch.Tensor:
        embedded = F.embedding(tokens, self.embedding.weight).float() * self.stack.scale
        for image in images:
            embedded[image.first : image.end] = image.rows.to(embedded)
        x: torch.Tensor = self.embedding_norm(embedded)
        if self.positions is None:
            return x
        indices = positions + self.stack.first_position
        return x + F.embedding(indices, self.positions).float()
