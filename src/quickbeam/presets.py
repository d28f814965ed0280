"""The one table of methods: which sources feed which tree policy, and with what budget."""

from __future__ import annotations

from dataclasses import dataclass

from quickbeam.errors import InvalidInput


@dataclass(frozen=True)
class Preset:
    """A combination that `--method` names. `budget`: nodes a step at most, the root included; 0 leaves it to the measured cost model."""

    sources: tuple[str, ...]
    tree: str
    budget: int
    summary: str


PRESETS: dict[str, Preset] = {
    "ar": Preset((), "none", 1, "plain decoding, one token a step: the reference"),
    "pld": Preset(("ngram",), "chain", 0, "prompt lookup: the continuation of the longest n-gram seen before"),
    "logitspec": Preset(
        ("ngram", "last_logits"), "logitspec", 0, "LogitSpec: the last logits guess the token after next, n-grams continue both"
    ),
}


def preset(method: str) -> Preset:
    """Look a method up. Raises `InvalidInput` naming the known ones."""
    if method not in PRESETS:
        raise InvalidInput(f"unknown method {method!r}; known: {', '.join(PRESETS)}")
    return PRESETS[method]
