"""Options of a single call, the setting of an answer, parts of a drafter's vocabulary, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from quickbeam.errors import InvalidInput, did_you_mean
from quickbeam.params import (
    COUPLED,
    Rules,
    SamplingParams,
    check_values,
    is_text,
    optional,
    whole,
)

FULL, FREQUENCY, CLUSTERS, ROUTER, BESIDE = "full", "frequency", "clusters", "router", "+context"
# the parts of the vocabulary that a drafter may score (`drafters/vocabulary.py`)
VOCABS = (FULL, FREQUENCY, FREQUENCY + BESIDE, "context", CLUSTERS, ROUTER)
# `frequency+context` where the drafter comes with a list of frequent tokens, else `full`
SHORTENED = "shortened"
# nodes of a draft tree, the root included; auto: as many as pay, by measured cost
Budget: TypeAlias = int | Literal["auto"]
UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
# arguments of chat templates that callers know from elsewhere
OF_TEMPLATES = ("tools", "enable_thinking", "continue_final_message", "chat_template")
# the values of options whose wrong types nothing else would name
RULES: Rules = {
    "method": (optional(is_text), "the name of a method, as 'auto' or 'ar', or None"),
    "vocab": (optional(is_text), f"one of {', '.join(VOCABS)}, or None"),
    "shortlist": (optional(whole(1)), "an integer of at least 1, or None"),
}


class Options(TypedDict, total=False):
    """The options that a call may set for itself; `LLM` explains them."""

    method: str | None
    budget: Budget | None
    vocab: str | None
    shortlist: int | None


class CallArgs(Options, total=False):
    """What a call of `generate` may set."""

    progress: bool | None


class ChatArgs(CallArgs, total=False):
    """What a call of `chat` may set."""

    template: dict[str, Any] | None


class Setting(NamedTuple):
    """All that an answer's drafts depend on, apart from the budget.

    Acceptance rates and costs are learned separately for each setting.

    - `method`, `vocab`, `shortlist`: as in `LLM`.
    - `temperature_class`: a class of temperatures, from 0 to 4. It is negative where children are
      drawn (`coupling="residual"`).
    - `constrained`: whether a grammar constrains the answer.
    """

    method: str
    vocab: str
    shortlist: int | None
    temperature_class: int = 0
    constrained: bool = False


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for an unknown option, and for a value of the wrong type."""
    for option in options.keys() - Options.__annotations__.keys():
        known = Options.__annotations__
        what = f"known: {', '.join(known)}{did_you_mean(option, known)}"
        if option in SamplingParams.__dataclass_fields__:
            what = f"give it in SamplingParams({option}=…)"
        elif option in OF_TEMPLATES:
            what = f"give it to `chat` as template={{'{option}': …}}"
        raise InvalidInput(f"unknown option '{option}'; {what}")
    check_values(options, {name: RULES[name] for name in options.keys() & RULES.keys()})


def temperature_class(params: SamplingParams) -> int:
    """Return the class of temperatures that `Setting.temperature_class` holds."""
    level = min(math.ceil(params.temperature / 0.4), 4)
    return level if params.coupling == COUPLED else -level


def plain_vocab(vocab: str) -> str:
    """Return the one of `VOCABS` that `vocab` means; an unknown word comes back as it is."""
    base = vocab.removesuffix(BESIDE)
    if base in (vocab, FREQUENCY) or base not in VOCABS:
        return vocab
    return ROUTER if base == CLUSTERS else base  # the others score the context anyway


def check_vocab(vocab: str, size: int | None = None) -> None:
    """Raise `InvalidInput` for an unknown name, or a `size` where the full vocabulary is scored."""
    if plain_vocab(vocab) not in (*VOCABS, SHORTENED):
        raise InvalidInput(
            f"unknown vocabulary {vocab!r} of the drafter; known: {', '.join(VOCABS)}"
            f"{did_you_mean(vocab, VOCABS)}"
        )
    if plain_vocab(vocab) == FULL and size is not None:
        raise InvalidInput(
            f"a shortlist of {size} tokens, where the drafter scores its full "
            "vocabulary: take --vocab router or another"
        )


def parse_bytes(size: int | str, name: str) -> int:
    """Return the bytes that a number or a text such as `2GB` or `512 MiB` means.

    Raises `InvalidInput`, which calls the size `name`, for other texts and for less than one byte.
    """
    text = str(size).strip().upper()
    number = text.rstrip("KMGTIB ")
    unit = text[len(number) :].strip()
    try:
        value = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise InvalidInput(f"{name}={size!r}: must be a size of memory, as 2GB, 512MiB or bytes")
    return value
