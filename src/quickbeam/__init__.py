"""Lossless speculative decoding for Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quickbeam.errors import InvalidInput, QuickbeamError

if TYPE_CHECKING:
    from quickbeam.aio import AsyncLLM
    from quickbeam.engine.result import Completion
    from quickbeam.grammar.spec import Grammar
    from quickbeam.llm import LLM
    from quickbeam.params import SamplingParams

__version__ = "0.3.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Grammar",
    "InvalidInput",
    "QuickbeamError",
    "SamplingParams",
    "__version__",
]

# imported on first access: `quickbeam --help` should not wait seconds for torch and transformers
_HOME = {
    "LLM": "quickbeam.llm",
    "AsyncLLM": "quickbeam.aio",
    "SamplingParams": "quickbeam.params",
    "Completion": "quickbeam.engine.result",
    "Grammar": "quickbeam.grammar.spec",
}


def __getattr__(name: str) -> Any:
    # our own module, used as `model.generate(…, custom_generate=quickbeam.hf.generate)`
    if name == "hf":
        return import_module("quickbeam.hf")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
