"""Hunyuan, dense: queries and keys are normed after they are turned."""

from __future__ import annotations

from quickbeam.models.families.reading import Config, attention, before, decoder, gated, head_norms
from quickbeam.models.stack import Layer, Stack


def hunyuan(c: Config) -> Stack:
    def layer(i: int) -> Layer:
        norms = head_norms(c, i, ("query_layernorm", "key_layernorm"))
        mixer = attention(c, i, c.attention_bias, norms=norms, norm_last=True)
        return before(c, i, mixer, gated(c, i))

    return decoder(c, layer)
