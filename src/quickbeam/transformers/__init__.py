"""The decoding loop of transformers' `generate`, with drafts: `model.generate(…,
custom_generate=quickbeam.transformers.generate)`.

`loop` is that loop, `params` maps what the call asks to `SamplingParams`, `engines` makes an engine
of a model that is loaded already.
"""

from __future__ import annotations

from quickbeam.transformers.loop import generate, generator

__all__ = ["generate", "generator"]
