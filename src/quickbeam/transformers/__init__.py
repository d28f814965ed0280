"""Speculative decoding in transformers' `generate`.

Use it as `model.generate(…, custom_generate=quickbeam.transformers.generate)`. `loop` holds the
decoding loop, `params` maps the call's settings to `SamplingParams`, and `engines` makes an engine
from a model that is loaded already.
"""

from __future__ import annotations

from quickbeam.transformers.loop import generate, generator

__all__ = ["generate", "generator"]
