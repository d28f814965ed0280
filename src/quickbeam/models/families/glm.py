"""GLM-4 (0414, and the 9B before it): neighbouring dimensions turn together, half of each head."""

from __future__ import annotations

from quickbeam.models.families.reading import (
    Config,
    activation,
    attention,
    before,
    decoder,
    halves,
    rms,
    tensors,
)
from quickbeam.models.stack import FeedForward, Layer, Rotary, Stack


def glm(c: Config, after: bool = False) -> Stack:
    def layer(i: int) -> Layer:
        at, rotary = f"model.layers.{i}", Rotary("model.rotary_emb", interleaved=True)
        fed = FeedForward(
            halves(f"{at}.mlp.gate_up_proj"),
            tensors(f"{at}.mlp.down_proj"),
            activation(c.hidden_act),
            True,
        )
        mixer = attention(c, i, c.attention_bias, out_bias=False, rotary=rotary)
        more = {
            "attention_after": rms(c, f"{at}.post_self_attn_layernorm"),
            "feed_forward_after": rms(c, f"{at}.post_mlp_layernorm"),
        }
        return before(c, i, mixer, fed, **(more if after else {}))

    return decoder(c, layer)


def glm4(c: Config) -> Stack:
    """Norms before and after."""
    return glm(c, after=True)
