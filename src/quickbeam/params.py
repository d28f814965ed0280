"""What a request asks of its answer.

This module knows nothing of logits: `sampling.py` turns these parameters into a distribution.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from quickbeam.errors import InvalidInput
from quickbeam.grammar.spec import Grammar

COUPLED, RESIDUAL = COUPLINGS = ("coupled", "residual")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and where an answer ends.

    Raises `InvalidInput` for values that can't be used.

    Logits are changed in this order: `logit_bias` is added; `repetition_penalty`,
    `presence_penalty` and `frequency_penalty` apply; `min_tokens`, `bad_words` and `grammar` ban
    tokens; `temperature` divides; `top_k`, `top_p` and `min_p` rule unlikely tokens out. If they
    leave no token at some place, the answer ends with an error.
    """

    max_tokens: int = 256
    """Longest answer, in tokens. 0, with `prompt_logprobs`: none."""
    temperature: float = 0.0
    """0 takes the most probable token."""
    top_k: int = 0
    """Keep this many tokens. 0: off."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this mass. 1: off."""
    min_p: float = 0.0
    """Drop tokens below this share of the best one's probability. 0: off."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output rarer (as in CTRL): positive logits are divided by
    it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for every occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata={"metavar": "ID=VALUE"})
    """Added to the logit of this token; -inf bans it."""
    stop: Sequence[str] = field(default=(), metadata={"metavar": "TEXT"})
    """End before this text."""
    stop_token_ids: Sequence[int] = field(default=(), metadata={"metavar": "N"})
    """End at this token, besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = field(default=None, metadata={"metavar": "K"})
    """Report the log-probability of each emitted token under the model's own distribution, and of
    the K likeliest alternatives."""
    seed: int | None = None
    """Makes a sampled answer repeatable. Without one a seed is drawn, and the answer reports it."""
    n: int = field(default=1, metadata={"option": False})
    """How many independent answers a prompt gets."""
    min_tokens: int = 0
    """Tokens before the answer may end. Until then ids that would end it are banned, and stop
    strings are ignored."""
    bad_words: Sequence[str] = field(default=(), metadata={"metavar": "TEXT"})
    """Text that is not generated. Its last token is banned where the output ends with the tokens
    before it."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the answer."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    coupling: str = field(default=COUPLED, metadata={"choices": COUPLINGS})
    """Where randomness comes from above temperature 0. coupled: the answer depends on
    the seed alone, not on the draft; residual: the papers' rule."""
    grammar: Grammar | None = field(default=None, metadata={"option": False})
    """What the answer has to follow, unless a limit or a stop cuts it short. It may end where the
    grammar may end."""
    prompt_logprobs: int | None = field(default=None, metadata={"option": False})
    """As `logprobs`, for each token of the prompt but the first. The prompt is then read anew,
    whatever the prefix cache holds."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name, (good, accepted) in RULES.items():
            if not good(getattr(self, name), self):
                what = accepted.format(self)
                given = reprlib.repr(getattr(self, name))  # short, whatever it is
                raise InvalidInput(f"{name}={given}: must be {what}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken (temperature 0)."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p rule unlikely tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits of a node."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def bans(self) -> bool:
        """Whether `min_tokens` or `bad_words` ban tokens at some places of the output."""
        return self.min_tokens > 0 or bool(self.bad_words)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before the temperature is applied.

        If `greedy` holds and this does not, the model's own argmax is the answer's token.
        """
        return bool(self.logit_bias) or self.penalises or self.bans or self.grammar is not None


def _finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _moderate(value: Any, _: object = None) -> bool:
    """Whether `value` is a number that float32 logits can take."""
    return _finite(value) and abs(float(value)) <= 1e30


def _integer(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def _few(value: object, _: object) -> bool:
    return value is None or _integer(value, 0, 100)


def _at_most(value: object, other: object) -> bool:
    """Whether `value` is an integer from 0 to `other`.

    If `other` is not an integer itself, its own check reports that, and only the lower bound counts
    here.
    """
    return _integer(value, 0, int(other) if isinstance(other, Integral) else math.inf)


def _sequence(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _texts(value: Any, _: object) -> bool:
    return _sequence(value) and all(isinstance(text, str) and text for text in value)


def _flag(value: object, _: object) -> bool:
    return isinstance(value, bool)


def _biases(bias: object, _: object) -> bool:
    return isinstance(bias, Mapping) and all(
        _integer(token, 0)
        and isinstance(value, Real)
        and (value == -math.inf or abs(float(value)) <= 1e30)
        for token, value in bias.items()
    )


MODERATE = "a number between -1e30 and 1e30 (0: off)"
FEW = "an integer between 0 and 100, or None"
BIASES = "a mapping of token ids to numbers of at most 1e30 (minus infinity bans a token)"
RULES: dict[str, tuple[Callable[[Any, SamplingParams], bool], str]] = {
    "max_tokens": (
        lambda value, given: _integer(value, int(given.prompt_logprobs is None)),
        "an integer of at least 1, or 0 with prompt_logprobs",
    ),
    "temperature": (
        lambda value, _: _finite(value) and 0 <= value <= 1e30,
        "finite, at least 0 and at most 1e30 (0: the most probable token)",
    ),
    "top_k": (lambda value, _: _integer(value, 0), "an integer of at least 0 (0: off)"),
    "top_p": (lambda value, _: _finite(value) and 0 < value <= 1, "above 0 and at most 1 (1: off)"),
    "min_p": (lambda value, _: _finite(value) and 0 <= value <= 1, "between 0 and 1 (0: off)"),
    "repetition_penalty": (
        lambda value, _: _finite(value) and 1e-6 <= value <= 1e6,
        "a finite number above 0, from 1e-6 to 1e6 (1: off)",
    ),
    "presence_penalty": (_moderate, MODERATE),
    "frequency_penalty": (_moderate, MODERATE),
    "logit_bias": (_biases, BIASES),
    "stop": (_texts, "non-empty strings"),
    "stop_token_ids": (
        lambda value, _: _sequence(value) and all(_integer(token, 0) for token in value),
        "token ids",
    ),
    "logprobs": (_few, FEW),
    "prompt_logprobs": (_few, FEW),
    "seed": (
        lambda value, _: value is None or _integer(value, -(2**63), 2**64 - 1),
        "an integer of at most 64 bits, or None",
    ),
    "skip_special_tokens": (_flag, "True or False"),
    "n": (lambda value, _: _integer(value, 1, 128), "an integer between 1 and 128"),
    "min_tokens": (
        lambda value, given: _at_most(value, given.max_tokens),
        "an integer between 0 and max_tokens={0.max_tokens!r}",
    ),
    "bad_words": (_texts, "non-empty strings"),
    "include_stop_str_in_output": (_flag, "True or False"),
    "grammar": (
        lambda value, _: value is None or isinstance(value, Grammar),
        "a Grammar, as Grammar.json_schema(…) makes one",
    ),
    "coupling": (lambda value, _: value in COUPLINGS, f"one of {', '.join(COUPLINGS)}"),
}
"""What each parameter must be: the check of its value, beside all others, and its words."""
