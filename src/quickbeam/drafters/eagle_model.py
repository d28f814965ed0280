"""The feature drafter's network: one decoder layer that reads the target's hidden states.

It can be that of EAGLE (2401.15077) or of EAGLE-3 (2503.01840). Row j of a sequence holds the
target's hidden state after token j and the embedding of token j+1; the layer's output predicts
token j+2. Nodes of a draft tree have not been read by the target yet: there the layer's own output
stands in for the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.network import EMBEDDING, DrafterNetwork, LayerInputs, StackBuilder
from quickbeam.models.families.reading import halves
from quickbeam.models.stack import (
    NO_HEAD,
    FeedForward,
    Fusion,
    HiddenInput,
    Layer,
    Norm,
    Stack,
)
from quickbeam.models.torch.network import LayerStack

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of `query` `[..., n, heads, head_dim]`, `key` and `value` `[..., n, kv_heads, head_dim]`, rotated
already, to `[..., n, heads * head_dim]`."""


@dataclass(frozen=True)
class EagleConfig:
    """The shape of a feature drafter, general enough for the published ones.

    - `layers`: which hidden states of the target it reads (`Model.set_aux_layers`), each
      `target_size` wide.
    - `join`: where the hidden states meet the embedding. `attention` (EAGLE-3): in the attention's
      input, each after a norm of its own, once one linear layer has fused the hidden states.
      `input` (EAGLE and EAGLE-2): in one linear layer before an ordinary decoder layer.
    - `draft_vocab_size`: how many tokens its own head has, or None for the target's head.
    - `rope`: further fields of a Llama configuration that shape the rotary angles.
    - `window`: how many of the last rows a row sees, itself among them; None for all.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    target_size: int
    vocab_size: int
    draft_vocab_size: int | None = None
    join: str = "attention"
    eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=dict)
    feature_norms: bool = False  # norm each hidden state before they are fused
    fused_norm: bool = False  # norm the concatenated hidden states (`attention` only)
    norm_before_residual: bool = False  # the residual is the normed hidden state (`attention` only)
    final_norm: bool = True  # a norm before the head
    # the final norm also applies to the output that stands in for the next hidden state
    norm_output: bool = False
    own_embedding: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    window: int | None = None

    @property
    def own_head(self) -> bool:
        return self.draft_vocab_size is not None


def eagle_stack(config: EagleConfig) -> tuple[Stack, StackBuilder]:
    """Describe a feature drafter. Returns also the builder with the shapes of its weights."""
    b, d = StackBuilder(config.eps), config.hidden_size
    fused_size = len(config.layers) * config.target_size
    # hidden states and tokens
    fusion = None
    if config.join == "input":
        join = b.linear(2 * d, ("fc", d), bias=config.fc_bias)
        hidden_input = HiddenInput(d, join=join)
    else:
        norms = [b.norm(f"feature_norms.{i}", config.target_size) for i in _normed(config)]
        fusion = Fusion(
            b.linear(fused_size, ("fc", d), bias=config.fc_bias),
            config.target_size,
            tuple(norms),
            b.norm("fused_norm", fused_size) if config.fused_norm else None,
        )
        hidden_input = HiddenInput(
            d,
            token_norm=b.norm("input_norm", d),
            state_norm=b.norm("hidden_norm", d),
            norm_residual=config.norm_before_residual,
        )
    # the layer
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    inputs = d if config.join == "input" else 2 * d
    qkv = b.linear(inputs, ("qkv", heads), bias=config.attention_bias)
    attention = b.attention(config, qkv, "out", config.window)
    inner = config.intermediate_size
    b.weight("gate_up.weight", 2 * inner, d)
    feed_forward = FeedForward(halves("gate_up"), b.linear(inner, ("down", d)), "silu", True)
    layer = Layer(attention, feed_forward, None, b.norm("mlp_norm", d))
    norm = b.norm("norm", d) if config.final_norm else Norm((), config.eps)
    stack = Stack(EMBEDDING, "", (layer,), norm, NO_HEAD, hidden_input=hidden_input, fusion=fusion)
    return stack, b


def _normed(config: EagleConfig) -> range:
    """Return which hidden states are normed before they are fused."""
    return range(len(config.layers) if config.feature_norms else 0)


class EagleHead(DrafterNetwork):
    """The feature drafter's network, with the target's `embedding` and `head` or its own.

    Below, `d` is `hidden_size`. Tensors have leading dimensions `...`, the last of the sequence.
    `tokens`: where it has its own head, the target's token of each of its outputs.
    """

    def __init__(
        self, config: EagleConfig, embedding: nn.Module | None = None, head: nn.Module | None = None
    ) -> None:
        stack, builder = eagle_stack(config)
        super().__init__(config, stack, builder.shapes, embedding, head)
        if config.own_embedding:
            self.own_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.draft_vocab_size is not None:
            self.own_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("tokens", torch.arange(config.draft_vocab_size))

    @property
    def embedding(self) -> Any:
        return self.own_embedding if self.config.own_embedding else super().embedding

    @property
    def head(self) -> Any:
        return self.own_head if self.config.own_head else super().head

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what rows read of the target's hidden states.

        `hidden`: `[..., n, len(layers) * target_size]`. Returns `[..., n, d]`.
        """
        return self.layers_in_torch().fuse(hidden)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        layers: LayerStack | None = None,
    ) -> torch.Tensor:
        """Run the layer once and return its output `[..., n, d]`.

        The output stands in for the hidden state of the next row, and `feature` reads it.

        - `hidden`: `[..., n, d]`, what `fuse` returned or an earlier output of this method.
        - `embedded`: `[..., n, d]`, the embeddings of the tokens that follow.
        - `positions`: `[..., n]`.
        - `layers`: the network's, in PyTorch; None makes them.
        """
        layers = layers or self.layers_in_torch()
        shape = hidden.shape[:-1]

        def attend_flat(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            query, key, value = (torch.unflatten(x, 0, shape) for x in (query, key, value))
            return attend(query, key, value).flatten(0, -2)

        inputs = LayerInputs(layers.angles_at(positions.flatten()), attend_flat)
        out = layers.drafter_stream(embedded.flatten(0, -2), hidden.flatten(0, -2), inputs)
        if self.config.norm_output:
            out = layers.norm(out)
        return torch.unflatten(out, 0, shape)

    def feature(self, out: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of an output: the output, normed where there is a norm."""
        if not self.config.final_norm or self.config.norm_output:
            return out
        weight: torch.Tensor = self["norm"].weight
        return F.rms_norm(out.to(weight.dtype), out.shape[-1:], weight, self.config.eps)
