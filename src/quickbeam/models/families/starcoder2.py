"""StarCoder2: layer norms, biases everywhere, a feed-forward without a gate."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, attention, decoder, layer_norm, plain
from quickbeam.models.stack import Layer, Stack


def starcoder2(c: Config) -> Stack:
    def layer(i: int) -> Layer:
        at, epsilon = f"model.layers.{i}", c.norm_epsilon
        return Layer(
            attention(c, i, c.use_bias, window=c.get("sliding_window")),
            plain(c, f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", c.use_bias),
            layer_norm(f"{at}.input_layernorm", epsilon),
            layer_norm(f"{at}.post_attention_layernorm", epsilon),
        )

    return decoder(c, layer, norm=layer_norm("model.norm", c.norm_epsilon))
