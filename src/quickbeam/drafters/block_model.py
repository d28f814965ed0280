"""The block drafter's network: one pass drafts several positions at once.

It is DSpark's (2607.05147), with DFlash (2602.06036) as the case without a Markov head, and JetSpec
(2606.18394) as the one whose block is causal. DFlash2 (`qwen3_dflash2.py` in vLLM) has convolutions
of the rows around each sublayer, and a selector among a row's likeliest tokens.

Hidden states of some of the target's layers are fused into one vector for each committed token
before the anchor, which is the last committed token. These vectors are keys and values of earlier
positions, in every layer; they are never rows. The rows are the anchor's embedding and
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

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.folder import embed_scale, write_folder
from quickbeam.drafters.network import DrafterNetwork, StackBuilder
from quickbeam.models.stack import (
    NO_HEAD,
    BlockConv,
    FeedForward,
    Fusion,
    HiddenInput,
    Layer,
    Stack,
)

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a layer's number, `query` `[n, heads, head_dim]`, and `key` and `value` `[n, kv_heads,
head_dim]` of the blocks' rows, one block after the other, to `[n, heads * head_dim]`."""


def block_stack(config: BlockConfig) -> tuple[Stack, StackBuilder]:
    """Describe a block drafter. Returns also the builder with the shapes of its weights."""
    b, d = StackBuilder(config.eps), config.hidden_size
    fc = b.linear(len(config.aux_layers) * config.target_size, ("fc", d))
    fusion = Fusion(fc, config.target_size, after=b.norm("hidden_norm", d))
    norm = b.norm("norm", d)
    layers = tuple(_layer(b, config, i) for i in range(config.depth))
    hidden_input = HiddenInput(d, reads_tokens=False)
    stack = Stack("", "", layers, norm, NO_HEAD, hidden_input=hidden_input, fusion=fusion)
    return stack, b


def _layer(b: StackBuilder, config: BlockConfig, i: int) -> Layer:
    """Describe a layer: as Qwen3's, or as Gemma 4's without a window."""
    d, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    kv_size = config.kv_heads * size
    at = f"layers.{i}"
    self_attn, mlp = f"{at}.self_attn", f"{at}.mlp"
    heads = [(f"{self_attn}.q_proj", config.heads * size), (f"{self_attn}.k_proj", kv_size)]
    if not config.values_are_keys:
        heads.append((f"{self_attn}.v_proj", kv_size))
    window, causal = config.attention(i)
    attention = b.attention(
        config,
        b.linear(d, *heads),
        f"{self_attn}.o_proj",
        window,
        scaling=1.0 if config.gemma else size**-0.5,
        norms=(b.norm(f"{self_attn}.q_norm", size), b.norm(f"{self_attn}.k_norm", size)),
        value_norm=config.gemma,
        values_are_keys=config.values_are_keys,
        bidirectional=not causal,
    )
    feed_forward = FeedForward(
        b.linear(d, (f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)),
        b.linear(inner, (f"{mlp}.down_proj", d)),
        "gelu_tanh" if config.gemma else "silu",
        gated=True,
    )
    before = b.norm(f"{at}.input_layernorm", d)
    after = b.norm(f"{at}.post_attention_layernorm", d)
    if not config.gemma:
        convs = None
        if config.conv_taps:
            convs = _conv(b, config, f"{at}.attention_conv"), _conv(b, config, f"{at}.mlp_conv")
        return Layer(attention, feed_forward, before, after, convs=convs)
    return Layer(
        attention,
        feed_forward,
        before,
        b.norm(f"{at}.pre_feedforward_layernorm", d),
        after,
        b.norm(f"{at}.post_feedforward_layernorm", d),
        scalar=f"{at}.layer_scalar",
    )


def _conv(b: StackBuilder, config: BlockConfig, at: str) -> BlockConv:
    """Describe the convolutions around a sublayer, whose module is `at`."""
    d, taps, group = config.hidden_size, config.conv_taps, config.conv_group
    shared = b.linear(d, (f"{at}.kernel_projection", 2 * taps * (d // group)))
    base = b.weight(f"{at}.base_kernel", 2, taps, d)
    return BlockConv(shared, base, taps, group, config.block_size)


# names of W1 and W2: of a Markov head, and of a selector
MARKOV_HEAD = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
SELECTOR = (
    "candidate_selector.predecessor_codebook.weight",
    "candidate_selector.successor_codebook.weight",
)
GATES = "candidate_selector.hidden_projection"
CONFIDENCE = "confidence_head.proj"


class BlockNetwork(DrafterNetwork):
    """The network of a block drafter. `d` is `hidden_size`, r is `markov_rank`."""

    def __init__(
        self, config: BlockConfig, embedding: nn.Module | None = None, head: nn.Module | None = None
    ) -> None:
        stack, b = block_stack(config)
        d, rank, vocab = config.hidden_size, config.markov_rank, config.vocab_size
        scored = config.draft_vocab_size or vocab
        if config.top_k:
            b.weight(SELECTOR[0], vocab, rank)
            b.weight(SELECTOR[1], vocab, rank)
            b.linear(d, (GATES, rank))
        elif rank:
            b.weight(MARKOV_HEAD[0], vocab, rank)
            b.weight(MARKOV_HEAD[1], scored, rank)
        if config.confidence:
            b.linear(d + rank, (CONFIDENCE, 1), bias=True)
        super().__init__(config, stack, b.shapes, embedding, head)
        for layer in stack.layers:
            if layer.scalar is not None:
                self.put(layer.scalar, torch.ones(1), trained=False)
        if config.own_mask:
            self.register_buffer("mask_embedding", torch.zeros(d))
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(d, scored, bias=False)
            # from a row of the head to the target's token: what is added to the row's number
            self.register_buffer("d2t", torch.zeros(scored, dtype=torch.int64))

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

    def inputs(self, anchors: torch.Tensor) -> torch.Tensor:
        """Return what the rows of the blocks of b `anchors` read, `[b * block_size, d]`."""
        masks = self.mask(anchors.device).expand(len(anchors), self.config.block_size - 1, -1)
        return torch.cat([self.embedded(anchors)[:, None], masks], 1).flatten(0, 1)

    def mask(self, device: torch.device) -> torch.Tensor:
        """Return the input of all rows but the anchor's, `[d]`."""
        if self.config.own_mask:
            scale: float = self.config.embedding_scale
            return self.get_buffer("mask_embedding") * scale
        return self.embedded(torch.full((), self.config.mask_token, device=device))

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
        if not self.config.markov_rank:
            nothing = next(self.parameters()).new_zeros(self.config.vocab_size, 0)
            return nothing, nothing
        names = SELECTOR if self.config.top_k else MARKOV_HEAD
        first, second = (self.get_parameter(name) for name in names)
        tokens = self.tokens
        if tokens is None:
            return first, second
        return first, second.new_zeros(first.shape).index_copy(0, tokens, second)

    def gates(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the selector's P h of rows `[n, d]`, in float32: `[n, r]`."""
        return F.linear(rows, self.get_parameter(f"{GATES}.weight")).float()

    def bias(self, previous: torch.Tensor) -> torch.Tensor | None:
        """Return what the tokens before, `[n]`, add to U of all outputs: `[n, outputs]`.

        Returns None without a Markov head. What a selector adds depends on the rows, too.
        """
        if not self.config.markov_rank or self.config.top_k:
            return None
        first, second = (self.get_parameter(name) for name in MARKOV_HEAD)
        return F.linear(F.embedding(previous, first), second)

    def confidence(self, rows: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Return logits `[n]` of the probability that a drafted token is accepted.

        `rows`: `[n, d]`, those that draft. `previous`: `[n]`, the tokens before. None: no head.
        """
        if not self.config.confidence:
            return None
        weight, bias = self.confidence_weights()
        if self.config.markov_rank:
            rows = torch.cat([rows, F.embedding(previous, self.markov()[0])], -1)
        return F.linear(rows, weight[None], bias)[..., 0]

    def confidence_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of the confidence head, `[d + r]`, and its bias, `[1]`."""
        weight = self.get_parameter(f"{CONFIDENCE}.weight")
        return weight[0], self.get_parameter(f"{CONFIDENCE}.bias")

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `config.json` and `model.safetensors` in DSpark's layout."""
        write_folder(folder, self.config.record(), self.state_dict(), dtype)
