"""The block drafter's network: one pass drafts several positions at once.

It is DSpark's (2607.05147), with DFlash (2602.06036) as the case without a Markov head, and JetSpec
(2606.18394) as the one whose block is causal. DFlash2 (`qwen3_dflash2.py` in vLLM) has convolutions
of the rows around each sublayer, and a selector among a row's likeliest tokens.

Hidden states of some of the target's layers ("taps") are fused into one vector for each committed
token before the anchor, which is the last committed token. These vectors are keys and values of
earlier positions, in every layer; they are never rows. The rows are the anchor's embedding and
those of a mask token, at the positions from the anchor on. They see all vectors and one another.

In a layer with a window w, the row at position i sees vectors and rows at positions above i - w.
Such a layer is causal, and one without is not, unless the configuration says of all layers what
they are. That is how vLLM (`_resolve_layer_attention` in `qwen3_dflash.py`) and SGLang (pull
request 34524) run the published drafters.

A distribution depends on its depth and on the token before it alone: it is the softmax of U_k +
W2 · W1[previous token], U_k being the head's logits of the row h_k for depth k. With a selector it
is that of U_k + W2 · (W1[previous token] ⊙ P h_k), of the `top_k` largest of U_k. So the search of
a tree needs no further pass. Modules are named as the published checkpoints name their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.eagle_model import DrafterNetwork, RMSNorm
from quickbeam.drafters.folder import embed_scale, write_folder

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a layer's number, `query` `[n, heads, head_dim]`, and `key` and `value` `[n, kv_heads,
head_dim]` of the blocks' rows, one block after the other, to `[n, heads * head_dim]`."""


class BlockConvolutions(nn.Module):
    """A causal convolution of a block's rows before a sublayer, and one of its results after it.

    A coefficient of a row is the sum of one that each column has, `base_kernel` `[2, taps, d]`, and
    one of `kernel_projection` of what the sublayer reads, which `group` columns share.
    """

    def __init__(self, d: int, taps: int, group: int) -> None:
        super().__init__()
        self._group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, d))
        self.kernel_projection = nn.Linear(d, 2 * taps * (d // group), bias=False)

    def coefficients(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both convolutions' of rows `[b, n, d]`: `[b, n, taps, d]` each, of a row's own
        values, then of those of the rows before it."""
        both, taps = self.base_kernel, self.base_kernel.shape[1]
        shared = self.kernel_projection(x).unflatten(-1, (2, taps, -1))
        first, last = (both + shared.repeat_interleave(self._group, -1)).unbind(2)
        return first, last


def convolved(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return what `BlockConvolutions.coefficients` make of rows `[b, n, d]`."""
    (n, taps), out = coefficients.shape[1:3], torch.zeros_like(x)
    for i in range(min(n, taps)):
        out[:, i:] += coefficients[:, i:, i] * x[:, : n - i]
    return out


class BlockLayer(nn.Module):
    """A decoder layer with norms of queries and keys, as Qwen3's."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        d, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        self._size = size
        self.input_layernorm = RMSNorm(d, config.eps)
        self.post_attention_layernorm = RMSNorm(d, config.eps)
        rows = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        heads: dict[str, nn.Module] = {
            k: nn.Linear(d, n * size, bias=False) for k, n in rows.items()
        }
        heads["o_proj"] = nn.Linear(config.heads * size, d, bias=False)
        norms = {name: RMSNorm(size, config.eps) for name in ("q_norm", "k_norm")}
        self.self_attn = nn.ModuleDict(heads | norms)
        up = {name: nn.Linear(d, inner, bias=False) for name in ("gate_proj", "up_proj")}
        self.mlp = nn.ModuleDict(up | {"down_proj": nn.Linear(inner, d, bias=False)})
        if config.conv_taps:
            self.attention_conv = BlockConvolutions(d, config.conv_taps, config.conv_group)
            self.mlp_conv = BlockConvolutions(d, config.conv_taps, config.conv_group)

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[n, heads, head_dim]` of rows `[n, d]`, before the rotary angles."""
        query = self.self_attn["q_proj"](x).unflatten(-1, (-1, self._size))
        return self.self_attn["q_norm"](query)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, mix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Run the layer on rows `[b, n, d]`. `mix`: its attention, of normed rows `[b * n, d]`."""
        x = x + self.sublayer("attention", self.input_layernorm(x), mix)
        return x + self.sublayer("mlp", self.post_attention_layernorm(x), self.feed_forward)

    def key_value(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, before the rotary angles, and values: `[n, kv_heads, head_dim]` each."""
        key, value = (
            self.self_attn[name](x).unflatten(-1, (-1, self._size)) for name in ("k_proj", "v_proj")
        )
        return self.self_attn["k_norm"](key), value

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self.mlp["gate_proj"](x))
        return self.mlp["down_proj"](gate * self.mlp["up_proj"](x))  # type: ignore[no-any-return]

    def sublayer(
        self, name: str, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return what a sublayer makes of normed rows `[b, n, d]`, between its convolutions."""
        conv: BlockConvolutions | None = getattr(self, f"{name}_conv", None)
        if conv is None:
            return run(x.flatten(0, 1)).view_as(x)
        first, last = conv.coefficients(x)
        return convolved(run(convolved(x, first).flatten(0, 1)).view_as(x), last)


class GemmaBlockLayer(BlockLayer):
    """A decoder layer as Gemma 4's without a window."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self._eps = config.eps
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.register_buffer("layer_scalar", torch.ones(1))
        if config.values_are_keys:
            del self.self_attn["v_proj"]

    def forward(self, x: torch.Tensor, mix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        mixed = self.sublayer("attention", self.input_layernorm(x), mix)
        x = x + self.post_attention_layernorm(mixed)
        fed = self.sublayer("mlp", self.pre_feedforward_layernorm(x), self.feed_forward)
        x = x + self.post_feedforward_layernorm(fed)
        return x * self.get_buffer("layer_scalar")

    def key_value(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.self_attn["k_proj"](x).unflatten(-1, (-1, self._size))
        value = key
        if "v_proj" in self.self_attn:
            value = self.self_attn["v_proj"](x).unflatten(-1, (-1, self._size))
        return self.self_attn["k_norm"](key), F.rms_norm(value, (self._size,), eps=self._eps)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.gelu(self.mlp["gate_proj"](x), approximate="tanh")
        return self.mlp["down_proj"](gate * self.mlp["up_proj"](x))  # type: ignore[no-any-return]


class BlockNetwork(DrafterNetwork):
    """The network of a block drafter. `d` is `hidden_size`."""

    def __init__(
        self, config: BlockConfig, embedding: nn.Module | None = None, head: nn.Module | None = None
    ) -> None:
        super().__init__(embedding, head)
        self.config, d = config, config.hidden_size
        self.fc = nn.Linear(len(config.taps) * config.target_size, d, bias=False)
        self.hidden_norm, self.norm = RMSNorm(d, config.eps), RMSNorm(d, config.eps)
        kind = GemmaBlockLayer if config.gemma else BlockLayer
        self.layers = nn.ModuleList(kind(config) for _ in range(config.depth))
        if config.own_mask:
            self.register_buffer("mask_embedding", torch.zeros(d))
        scored = config.draft_vocab_size or config.vocab_size
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(d, scored, bias=False)
            # from a row of the head to the target's token: what is added to the row's number
            self.register_buffer("d2t", torch.zeros(scored, dtype=torch.int64))
        if config.top_k:
            books = ("predecessor_codebook", "successor_codebook")
            chosen: dict[str, nn.Module] = {
                name: nn.Embedding(config.vocab_size, config.markov_rank) for name in books
            }
            chosen["hidden_projection"] = nn.Linear(d, config.markov_rank, bias=False)
            self.candidate_selector = nn.ModuleDict(chosen)
        elif config.markov_rank:
            first = nn.Embedding(config.vocab_size, config.markov_rank)
            second = nn.Linear(config.markov_rank, scored, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": first, "markov_w2": second})
        if config.confidence:
            proj = nn.Linear(d + config.markov_rank, 1)
            self.confidence_head = nn.ModuleDict({"proj": proj})

    @property
    def head(self) -> Any:
        return super().head if self.config.draft_vocab_size is None else self.lm_head

    @property
    def tokens(self) -> torch.Tensor | None:
        """The target's token for each output of its own head; None for the target's head."""
        if self.config.draft_vocab_size is None:
            return None
        offsets = self.get_buffer("d2t")
        return torch.arange(len(offsets), device=offsets.device) + offsets

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the vectors `[n, d]` of committed tokens from the target's hidden states.

        `hidden`: `[n, len(taps) * target_size]`.
        """
        return self.hidden_norm(self.fc(hidden))  # type: ignore[no-any-return]

    def key_value(
        self, layer: int, fused: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys, rotated, and values: `[n, kv_heads, head_dim]` each."""
        key, value = self._layer(layer).key_value(fused)
        return self.rotated(key, positions), value

    def forward(
        self,
        anchors: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Run a block behind each of the `anchors`, and return the rows `[b, block_size, d]`.

        `anchors`: b tokens, at these `positions` of their texts. `attend` lets the rows see the
        committed tokens before their anchor, and one another, as `BlockConfig.attention` says.
        """
        config, device = self.config, self.fc.weight.device
        count = len(anchors)
        offsets = torch.arange(config.block_size, device=device)
        places = (torch.as_tensor(positions, device=device)[:, None] + offsets).flatten()
        masks = self.mask().expand(count, config.block_size - 1, -1)
        x = torch.cat([self.embedded(torch.as_tensor(anchors, device=device))[:, None], masks], 1)
        for i in range(config.depth):
            layer = self._layer(i)

            def mixed(normed: torch.Tensor, i: int = i, layer: BlockLayer = layer) -> torch.Tensor:
                query = self.rotated(layer.query(normed), places)
                attended = attend(i, query, *self.key_value(i, normed, places))
                return layer.self_attn["o_proj"](attended)  # type: ignore[no-any-return]

            x = layer(x, mixed)
        return self.norm(x)  # type: ignore[no-any-return]

    def mask(self) -> torch.Tensor:
        """Return the input of all rows but the anchor's, `[d]`."""
        if self.config.own_mask:
            scale: float = self.config.embedding_scale
            return self.get_buffer("mask_embedding") * scale
        # a graph takes no number from the host
        return self.embedded(torch.full((), self.config.mask_token, device=self.fc.weight.device))

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the target's embedding, as they are stored, times the scale."""
        weight, scale = getattr(self.embedding, "weight", None), self.config.embedding_scale
        if isinstance(weight, torch.Tensor):
            rows = F.embedding(tokens, weight)
        else:
            rows, scale = self.embedding(tokens), scale / embed_scale(self.embedding)
        scaled: torch.Tensor = rows if scale == 1 else rows * scale
        return scaled

    def markov(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W1 and W2, `[vocab, r]` each; r is 0 without a Markov head and a selector.

        W2 is zero for tokens that its own head doesn't have.
        """
        vocab, tokens = self.config.vocab_size, self.tokens
        if not self.config.markov_rank:
            return (self.fc.weight.new_zeros(vocab, 0),) * 2
        of, names = (
            (self.candidate_selector, ("predecessor_codebook", "successor_codebook"))
            if self.config.top_k
            else (self.markov_head, ("markov_w1", "markov_w2"))
        )
        first, second = (of[name].get_parameter("weight") for name in names)
        if tokens is None:
            return first, second
        return first, second.new_zeros(first.shape).index_copy(0, tokens, second)

    def gates(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the selector's P h of rows `[n, d]`, in float32: `[n, r]`."""
        return self.candidate_selector["hidden_projection"](rows).float()  # type: ignore[no-any-return]

    def bias(self, previous: torch.Tensor) -> torch.Tensor | None:
        """Return what the tokens before, `[n]`, add to U of all tokens: `[n, vocab]`.

        Returns None without a Markov head. What a selector adds depends on the rows, too.
        """
        if not self.config.markov_rank or self.config.top_k:
            return None
        head = self.markov_head
        return head["markov_w2"](head["markov_w1"](previous))  # type: ignore[no-any-return]

    def confidence(self, rows: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Return logits `[n]` of the probability that a drafted token is accepted.

        `rows`: `[n, d]`, those that draft. `previous`: `[n]`, the tokens before. None: no head.
        """
        if not self.config.confidence:
            return None
        if self.config.markov_rank:
            rows = torch.cat([rows, F.embedding(previous, self.markov()[0])], -1)
        head: Any = self.confidence_head
        return head["proj"](rows)[..., 0]  # type: ignore[no-any-return]

    def _layer(self, i: int) -> BlockLayer:
        return self.layers[i]  # type: ignore[return-value]

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `config.json` and `model.safetensors` in DSpark's layout."""
        write_folder(folder, self.config.record(), self.state_dict(), dtype)
