"""A leaner forward for models of Llama's layout, on the weights of the Hugging Face model.

The arithmetic is that of the modelling code of transformers (equal in float32, tested). The
products are fewer and larger: queries, keys and values in one, gate and up in one. What a tree of
one sequence doesn't need is left out. Rotary angles come from the model's own module, so every way
of scaling them is right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from quickbeam.models.attention import Attend, Layer
from quickbeam.models.gathered import AnyStep
from quickbeam.models.linear import FastLinear

LAYOUTS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class LeanLayer:
    """One decoder layer: norm, attention, norm, gated MLP, two residuals."""

    def __init__(self, layer: Any, info: Layer, head_dim: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.info = info
        self.head_dim = head_dim
        self.norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        self.eps = float(layer.input_layernorm.variance_epsilon)
        self.heads = attention.q_proj.out_features // head_dim
        self.kv_heads = attention.k_proj.out_features // head_dim
        self.qkv = FastLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = FastLinear(attention.o_proj)
        self.qk_norms = (
            (attention.q_norm.weight, attention.k_norm.weight)
            if hasattr(attention, "q_norm")
            else None
        )
        self.gate_up = FastLinear(mlp.gate_proj, mlp.up_proj)
        self.down = FastLinear(mlp.down_proj)
        self.activation = mlp.act_fn
        self.inner = mlp.down_proj.in_features

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: AnyStep, attend: Attend
    ) -> torch.Tensor:
        n, width = x.shape
        qkv = self.qkv.forward(F.rms_norm(x, (width,), self.norms[0], self.eps)).view(
            n, -1, self.head_dim
        )
        rotated = self.heads + self.kv_heads
        if self.qk_norms is not None:
            query = F.rms_norm(qkv[:, : self.heads], (self.head_dim,), self.qk_norms[0], self.eps)
            key = F.rms_norm(
                qkv[:, self.heads : rotated], (self.head_dim,), self.qk_norms[1], self.eps
            )
            qk = torch.cat([query, key], 1)
        else:
            qk = qkv[:, :rotated]
        half = self.head_dim // 2
        turned = torch.cat([qk[..., half:], qk[..., :half]], -1).mul_(sin)
        qk = qk.mul_(cos).add_(turned)
        step.write(self.info, qk[:, self.heads :].transpose(0, 1), qkv[:, rotated:].transpose(0, 1))
        x = x + self.out.forward(step.run(attend, qk[:, : self.heads], self.info))
        gate_up = self.gate_up.forward(F.rms_norm(x, (width,), self.norms[1], self.eps))
        return x + self.down.forward(
            self.activation(gate_up[:, : self.inner]).mul_(gate_up[:, self.inner :])
        )


class LeanModel:
    """Embedding, layers, final norm and head of a causal LM.

    They are taken over from `model`, whose layers are emptied one by one.
    """

    def __init__(self, model: PreTrainedModel, layers: dict[int, Layer], head_dim: int) -> None:
        base = model.model
        self.embedding = base.embed_tokens
        self.rotary = base.rotary_emb
        self.norm = base.norm
        self.eps = float(base.norm.variance_epsilon)
        self.head = FastLinear(model.lm_head)
        self.layers: list[LeanLayer] = []
        for i in range(len(base.layers)):
            self.layers.append(LeanLayer(base.layers[i], layers[i], head_dim))
            base.layers[i] = nn.Identity()  # frees the weights that were packed
        # layers whose hidden states a forward keeps (`Features`)
        self.watched: tuple[int, ...] = ()
        self.hidden = torch.empty(0)
        half = head_dim // 2
        self._sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(self.norm.weight)

    def linears(self) -> list[nn.Module]:
        """Return all linear layers that a forward runs."""
        return [
            self.head,
            *(
                linear
                for layer in self.layers
                for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
            ),
        ]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is of this layout, with nothing but plain linears in it.

        Other linears (adapters, quantised weights) may compute something else. So may a class of
        the same name that came with the model.
        """
        if type(model).__name__ not in LAYOUTS or not type(model).__module__.startswith(
            "transformers."
        ):
            return False
        linears = [model.lm_head]
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears += [
                attention.q_proj,
                attention.k_proj,
                attention.v_proj,
                attention.o_proj,
                mlp.gate_proj,
                mlp.up_proj,
                mlp.down_proj,
            ]
        return type(model.model.embed_tokens) is nn.Embedding and all(
            type(linear) is nn.Linear for linear in linears
        )

    def __call__(
        self, ids: torch.Tensor, step: AnyStep, attend: Attend, wanted: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """Return the logits of the `wanted` rows of `ids` (`[n]`): `[wanted, vocab]`.

        `wanted`: a number means the last so many rows (0: all), a tensor means rows by their
        numbers.
        """
        x = self.embedding(ids)
        cos, sin = self.rotary(x[None], step.new_positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None] * self._sign
        caught: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self.layers, 1):
            x = layer(x, cos, sin, step, attend)
            if i in self.watched:
                caught[i] = x
        rows = slice(-wanted, None) if isinstance(wanted, int) else wanted  # -0 is all
        early = len(self.layers) + 1 not in self.watched
        if early:
            x = x[rows]
        x = F.rms_norm(x, (x.shape[1],), self.norm.weight, self.eps)
        if self.watched:
            caught[len(self.layers) + 1] = x
            self.hidden = torch.cat([caught[layer] for layer in self.watched], -1)
        return self.head.forward(x if early else x[rows])
