"""What a request asks of its answer.

This module knows nothing of logits: `sampling.py` turns these parameters into a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from quickbeam.errors import InvalidInput
from quickbeam.grammar.spec import Grammar

COUPLED, RESIDUAL = COUPLINGS = ("coupled", "residual")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and where an answer ends.

    Raises `InvalidInput` for values that can't be used.

    Logits are changed in this order:

    - `logit_bias` is added to them; minus infinity bans a token.
    - `repetition_penalty` (as in CTRL) applies to tokens of prompt and output: positive logits are
      divided by it, negative ones multiplied.
    - `presence_penalty` and `frequency_penalty` apply to tokens of the output: the first is
      subtracted once, the second once for each occurrence.
    - `min_tokens`, `bad_words` and `grammar` ban tokens.
    - `temperature` divides the logits. Temperature 0 takes the most probable token.
    - `top_k` (0: off), `top_p` and `min_p` rule unlikely tokens out.

    The other parameters:

    - `max_tokens`: the most tokens that the answer may have.
    - `stop`: strings that end the answer. They are cut from it, or kept with
      `include_stop_str_in_output`.
    - `stop_token_ids`: ids that end the answer, besides the model's end-of-sequence ids. With
      `ignore_eos` the latter don't end it.
    - `seed`: the same request with the same seed has the same answer. With None a seed is drawn,
      and the completion reports it.
    - `n`: how many independent answers a prompt gets.
    - `logprobs`: with k >= 0, report the log-probability of each emitted token under the model's
      own distribution, and the k most probable alternatives.
    - `min_tokens`: how many tokens come before the answer may end. Until then ids that would end it
      are banned, and stop strings are ignored.
    - `bad_words`: strings that are not generated. The last token of such a string is banned where
      the output ends with the tokens before it (`bad_word_ids`).
    - `grammar`: what the answer has to follow, unless `max_tokens` or a stop cuts it short.
      End-of-sequence ids are allowed where the grammar may end.
    - `coupling`: where randomness comes from above temperature 0. `coupled` uses the noise of a
      place (`noise.py`), so that no draft changes the answer. `residual` draws with random numbers
      that belong to the draft, as the papers do, so that the answer depends on the method too.
    - `skip_special_tokens`: whether special tokens are left out of the text.

    If these parameters leave no token at some place, the answer ends with an error.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    min_tokens: int = 0
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    coupling: str = COUPLED
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        checks = {
            "max_tokens": (_integer(self.max_tokens, 1), "an integer of at least 1"),
            "temperature": (
                _finite(self.temperature) and self.temperature >= 0,
                "finite, at least 0 (0: the most probable token)",
            ),
            "top_k": (_integer(self.top_k, 0), "an integer of at least 0 (0: off)"),
            "top_p": (
                _finite(self.top_p) and 0 < self.top_p <= 1,
                "above 0 and at most 1 (1: off)",
            ),
            "min_p": (_finite(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1 (0: off)"),
            "repetition_penalty": (
                _finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number above 0 (1: off)",
            ),
            "presence_penalty": (
                _moderate(self.presence_penalty),
                "a number between -1e30 and 1e30 (0: off)",
            ),
            "frequency_penalty": (
                _moderate(self.frequency_penalty),
                "a number between -1e30 and 1e30 (0: off)",
            ),
            "logit_bias": (
                _biases(self.logit_bias),
                "a mapping of token ids to numbers of at most 1e30 (minus infinity bans a token)",
            ),
            "stop": (
                _sequence(self.stop) and all(isinstance(s, str) and s for s in self.stop),
                "non-empty strings",
            ),
            "stop_token_ids": (
                _sequence(self.stop_token_ids) and all(_integer(i, 0) for i in self.stop_token_ids),
                "token ids",
            ),
            "logprobs": (
                self.logprobs is None or _integer(self.logprobs, 0, 100),
                "an integer between 0 and 100, or None",
            ),
            "seed": (
                self.seed is None or _integer(self.seed, -(2**63), 2**64 - 1),
                "an integer of at most 64 bits, or None",
            ),
            "skip_special_tokens": (isinstance(self.skip_special_tokens, bool), "True or False"),
            "n": (_integer(self.n, 1, 128), "an integer between 1 and 128"),
            "min_tokens": (
                _at_most(self.min_tokens, self.max_tokens),
                f"an integer between 0 and max_tokens={self.max_tokens!r}",
            ),
            "bad_words": (
                _sequence(self.bad_words) and all(isinstance(s, str) and s for s in self.bad_words),
                "non-empty strings",
            ),
            "include_stop_str_in_output": (
                isinstance(self.include_stop_str_in_output, bool),
                "True or False",
            ),
            "grammar": (
                self.grammar is None or isinstance(self.grammar, Grammar),
                "a Grammar, as Grammar.json_schema(…) makes one",
            ),
            "coupling": (self.coupling in COUPLINGS, f"one of {', '.join(COUPLINGS)}"),
        }
        for name, (good, accepted) in checks.items():
            if not good:
                raise InvalidInput(f"{name}={getattr(self, name)!r}: must be {accepted}")

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


def _moderate(value: object) -> bool:
    """Whether `value` is a number that float32 logits can take."""
    return _finite(value) and isinstance(value, Real) and abs(float(value)) <= 1e30


def _integer(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def _at_most(value: object, other: object) -> bool:
    """Whether `value` is an integer from 0 to `other`.

    If `other` is not an integer itself, its own check reports that, and only the lower bound counts
    here.
    """
    return _integer(value, 0) and (
        not isinstance(other, Integral) or _integer(value, 0, int(other))
    )


def _sequence(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _biases(bias: object) -> bool:
    return isinstance(bias, Mapping) and all(
        _integer(token, 0)
        and isinstance(value, Real)
        and (value == -math.inf or abs(float(value)) <= 1e30)
        for token, value in bias.items()
    )
