"""GPT-NeoX and Pythia: each head's query, key and value stand one after the other."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, attention, decoder, layer_norm, plain, tensors
from quickbeam.models.stack import Layer, Linear, Rotary, Stack, Tensor


def gpt_neox(c: Config) -> Stack:
    heads, bias = c.num_attention_heads, c.attention_bias

    def layer(i: int) -> Layer:
        at, epsilon = f"gpt_neox.layers.{i}", c.layer_norm_eps
        name = f"{at}.attention.query_key_value"
        weights, biases = (
            tuple(Tensor(f"{name}.{kind}", part, 3, heads) for part in range(3))
            for kind in ("weight", "bias")
        )
        mixer = attention(
            c,
            i,
            qkv=Linear(weights, biases if bias else ()),
            out=tensors(f"{at}.attention.dense", bias=bias),
            kv_heads=heads,
            head_dim=c.hidden_size // heads,
            rotary=Rotary(),
        )
        return Layer(
            mixer,
            plain(c, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h", True),
            layer_norm(f"{at}.input_layernorm", epsilon),
            layer_norm(f"{at}.post_attention_layernorm", epsilon),
            parallel=bool(c.use_parallel_residual),
        )

    return decoder(
        c,
        layer,
        embedding="gpt_neox.embed_in.weight",
        inside="gpt_neox.layers",
        norm=layer_norm("gpt_neox.final_layer_norm", c.layer_norm_eps),
    )
