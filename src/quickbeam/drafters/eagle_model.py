"""The feature drafter's network: one decoder layer that reads the target's hidden states.

It can be that of EAGLE (2401.15077) or of EAGLE-3 (2503.01840). Row j of a sequence holds the
target's hidden state after token j and the embedding of token j+1; the layer's output predicts
token j+2. Nodes of a draft tree have not been read by the target yet: there the layer's own output
stands in for the hidden state. The network knows nothing of trees and of how keys and values are
kept: it is given attention as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.folder import rope_parameters
from quickbeam.models.angles import Angles

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EagleConfig:
    """The shape of a feature drafter, general enough for the published ones.

    - `layers`: which hidden states of the target it reads (`Features`), each `target_size` wide.
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
    # add the embedding to the residual, after a linear layer (`attention` only; our own addition)
    lift: bool = False
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


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, in the weight's format: autocast gives it bfloat16."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps)


class DrafterNetwork(nn.Module):
    """A network beside a target whose `embedding` and `head` it uses.

    These two are not among its parameters and are not saved.
    """

    config: Any

    def __init__(self, embedding: nn.Module | None, head: nn.Module | None) -> None:
        super().__init__()
        # in a dictionary, so that they don't become parameters of this module
        self._shared = {"embedding": embedding, "head": head}

    @property
    def embedding(self) -> Any:
        return self._shared["embedding"]

    @property
    def head(self) -> Any:
        return self._shared["head"]

    @cached_property
    def angles(self) -> Angles:
        """Of its layers. They stay float32, whatever the module is moved to."""
        return Angles(rope_parameters(self.config.rope), self.config.head_dim)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply the rotary angles of `positions` `[..., n]` to `[..., n, heads, head_dim]`."""
        cos, sin = (angle.to(x.dtype)[..., None, :] for angle in self.angles.at(positions))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class EagleHead(DrafterNetwork):
    """The feature drafter's network, with the target's `embedding` and `head` or its own.

    Below, `d` is `hidden_size`. Tensors have leading dimensions `...`, the last of the sequence.
    """

    def __init__(
        self, config: EagleConfig, embedding: nn.Module | None = None, head: nn.Module | None = None
    ) -> None:
        super().__init__(embedding, head)
        self.config = config
        d, rows = config.hidden_size, (config.heads + 2 * config.kv_heads) * config.head_dim
        wide = config.join == "attention"
        if wide:
            self.fc = nn.Linear(len(config.layers) * config.target_size, d, bias=config.fc_bias)
            self.hidden_norm = RMSNorm(d, config.eps)
            if config.lift:
                self.lift = nn.Linear(d, d, bias=False)
            if config.fused_norm:
                self.fused_norm = RMSNorm(len(config.layers) * config.target_size, config.eps)
        else:
            self.fc = nn.Linear(2 * d, d, bias=config.fc_bias)
        if config.feature_norms:
            self.feature_norms = nn.ModuleList(
                RMSNorm(config.target_size, config.eps) for _ in config.layers
            )
        if wide:
            self.input_norm = RMSNorm(d, config.eps)
        self.qkv = nn.Linear(2 * d if wide else d, rows, bias=config.attention_bias)
        self.out = nn.Linear(config.heads * config.head_dim, d, bias=False)
        self.mlp_norm = RMSNorm(d, config.eps)
        self.gate_up = nn.Linear(d, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, d, bias=False)
        if config.final_norm:
            self.norm = RMSNorm(d, config.eps)
        if config.own_embedding:
            self.own_embedding = nn.Embedding(config.vocab_size, d)
        if config.draft_vocab_size is not None:
            self.own_head = nn.Linear(d, config.draft_vocab_size, bias=False)
            # the target's token for each row of the head
            self.register_buffer("tokens", torch.arange(config.draft_vocab_size))

    @property
    def embedding(self) -> Any:
        return self.own_embedding if self.config.own_embedding else self._shared["embedding"]

    @property
    def head(self) -> Any:
        return self.own_head if self.config.own_head else self._shared["head"]

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the target's hidden states into what the layer reads.

        `hidden`: `[..., n, len(layers) * target_size]`. Returns `[..., n, d]`.
        """
        if self.config.feature_norms:
            parts = hidden.reshape(*hidden.shape[:-1], -1, self.config.target_size).unbind(-2)
            hidden = torch.cat(
                [norm(part) for norm, part in zip(self.feature_norms, parts, strict=True)], -1
            )
        if self.config.fused_norm:
            hidden = self.fused_norm(hidden)
        return self.fc(hidden) if self.config.join == "attention" else hidden

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        attend: Attention,
    ) -> torch.Tensor:
        """Run the layer once and return its output `[..., n, d]`.

        The output stands in for the hidden state of the next row, and `feature` reads it.

        - `hidden`: `[..., n, d]`, what `fuse` returned or an earlier output of this method.
        - `embedded`: `[..., n, d]`, the embeddings of the tokens that follow.
        - `positions`: `[..., n]`.
        - `attend(query, key, value)`: the attention. `query` is `[..., n, heads, head_dim]`; `key`
          and `value` are `[..., n, kv_heads, head_dim]`. Queries and keys are rotated already.
          Returns `[..., n, heads * head_dim]`.
        """
        config = self.config
        if config.join == "attention":
            normed, token = self.hidden_norm(hidden), self.input_norm(embedded)
            x = torch.cat([token, normed], -1)
            residual = normed if config.norm_before_residual else hidden
            if config.lift:
                residual = residual + self.lift(token)
        else:
            x = residual = self.fc(torch.cat([embedded, hidden], -1))
        qkv = self.qkv(x).unflatten(-1, (-1, config.head_dim))
        turned = config.heads + config.kv_heads
        qk = self.rotated(qkv[..., :turned, :], positions)
        query, key = qk[..., : config.heads, :], qk[..., config.heads :, :]
        x = residual + self.out(attend(query, key, qkv[..., turned:, :]))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return self.norm(x) if config.norm_output else x  # type: ignore[no-any-return]

    def feature(self, out: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of an output: the output, normed where there is a norm.

        If the drafter has its own head, `tokens` holds the token of each of its outputs.
        """
        return self.norm(out) if self.config.final_norm and not self.config.norm_output else out
