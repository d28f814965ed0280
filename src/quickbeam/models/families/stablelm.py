"""StableLM 2: layer norms, a quarter of each head turns."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, attention, decoder, gated, layer_norm
from quickbeam.models.stack import Layer, Norm, Stack


def stablelm(c: Config) -> Stack:
    def layer(i: int) -> Layer:
        at, epsilon, parallel = f"model.layers.{i}", c.layer_norm_eps, c.use_parallel_residual
        norms = None
        if c.qk_layernorm:  # each head has its own
            counts = {"q": c.num_attention_heads, "k": c.num_key_value_heads}
            norms = tuple(
                Norm(
                    tuple(f"{at}.self_attn.{x}_layernorm.norms.{h}.weight" for h in range(n)),
                    epsilon,
                    centred=True,
                )
                for x, n in counts.items()
            )
        return Layer(
            attention(
                c,
                i,
                c.use_qkv_bias,
                out_bias=False,
                norms=norms,
                head_dim=c.hidden_size // c.num_attention_heads,
            ),
            gated(c, i),
            layer_norm(f"{at}.input_layernorm", epsilon),
            None if parallel else layer_norm(f"{at}.post_attention_layernorm", epsilon),
            parallel=bool(parallel),
        )

    return decoder(c, layer, norm=layer_norm("model.norm", c.layer_norm_eps))
