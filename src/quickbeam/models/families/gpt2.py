"""GPT-2: learned positions, weights that are stored transposed."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, activation, decoder, layer_norm, tensors
from quickbeam.models.stack import Attention, FeedForward, Layer, Stack


def gpt2(c: Config) -> Stack:
    c.must("add_cross_attention", False)
    for name in ("n_inner", "n_ctx", "task_specific_params", "reorder_and_upcast_attn"):
        c.get(name)  # sizes that the weights have, defaults of pipelines, and rounding alone
    for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"):
        c.get(f"summary_{name}")  # of another head

    def layer(i: int) -> Layer:
        at, epsilon, dim = (
            f"transformer.h.{i}",
            c.layer_norm_epsilon,
            c.hidden_size // c.num_attention_heads,
        )
        scaling = dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scaling /= i + 1

        def linear(name: str):  # type: ignore[no-untyped-def]
            return tensors(f"{at}.{name}", bias=True, transposed=True)

        heads = c.num_attention_heads
        return Layer(
            Attention(linear("attn.c_attn"), linear("attn.c_proj"), heads, heads, dim, scaling),
            FeedForward(
                linear("mlp.c_fc"), linear("mlp.c_proj"), activation(c.activation_function), False
            ),
            layer_norm(f"{at}.ln_1", epsilon),
            layer_norm(f"{at}.ln_2", epsilon),
        )

    return decoder(
        c,
        layer,
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        inside="transformer.h",
        norm=layer_norm("transformer.ln_f", c.layer_norm_epsilon),
    )
