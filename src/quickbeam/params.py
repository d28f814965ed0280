"""What a request asks of its answer; `sampling.py` turns it into a distribution."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from quickbeam.errors import InvalidInput
from quickbeam.grammar.spec import Grammar

COUPLED, RESIDUAL = COUPLINGS = ("coupled", "residual")


@dataclass(frozen=True, repr=False)
class SamplingParams:
    """How tokens are selected and where an answer ends.

    Raises `InvalidInput` for values that can't be used.

    Logits are changed in this order: `logit_bias` is added; `repetition_penalty`,
    `presence_penalty` and `frequency_penalty` apply; `min_tokens`, `bad_words` and `grammar` ban
    tokens; `temperature` divides; `top_k`, `top_p` and `min_p` rule unlikely tokens out. If they
    leave no token at some position, the answer ends with an error.
    """

    max_tokens: int = field(
        default=256, metadata={"common": True, "help": "Longest answer, in tokens."}
    )
    """Longest answer, in tokens. 0, with `prompt_logprobs`: none."""
    temperature: float = field(default=0.0, metadata={"common": True})
    """How random the choice of tokens is. 0: the most probable token is taken."""
    top_k: int = 0
    """Choose among this many of the most probable tokens. 0: off."""
    top_p: float = 1.0
    """Choose among the most probable tokens that have this probability together. 1: off."""
    min_p: float = 0.0
    """Leave out tokens below this share of the most probable one's probability. 0: off."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output rarer (as in CTRL): positive logits are divided by
    it, negative ones multiplied. 1: off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the output holds. 0: off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time that the output holds it. 0: off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata={"option": False})
    """Added to the logit of this token; -inf bans it."""
    stop: Sequence[str] = field(default=(), metadata={"metavar": "TEXT"})
    """End the answer before this text."""
    stop_token_ids: Sequence[int] = field(default=(), metadata={"metavar": "N"})
    """End the answer at this token id, besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = field(default=None, metadata={"metavar": "K"})
    """Report the log-probability of each emitted token under the model's own distribution, and of
    the K likeliest alternatives."""
    seed: int | None = field(default=None, metadata={"common": True})
    """Makes a sampled answer repeatable. Without one a seed is drawn, and the answer reports it."""
    n: int = field(default=1, metadata={"option": False})
    """How many independent answers a prompt gets."""
    min_tokens: int = 0
    """Shortest answer, in tokens. Until then ids that would end it are banned, and stop
    strings are ignored."""
    bad_words: Sequence[str] = field(default=(), metadata={"metavar": "TEXT"})
    """Text that is not generated. Its last token is banned where the output ends with the tokens
    before it."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the answer."""
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

    prediction: str = field(default="", metadata={"option": False})
    """A text that the answer is expected to be much like, as a file to be edited is. It is drafted
    first, by `auto`. It changes how long an answer takes and no token of it."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "stop_token_ids":
                object.__setattr__(self, name, (value,))
            elif isinstance(value, Iterator):  # which could be read only once
                object.__setattr__(self, name, tuple(value))
        least = 1 if self.prompt_logprobs is None else 0
        most = self.max_tokens
        accepted = "an integer of at least 1 (0: only with log-probabilities of the prompt)"
        rules = {
            "max_tokens": (integer(least), accepted),
            **RULES,
            "min_tokens": (integer(0, most), f"an integer between 0 and max_tokens={most!r}"),
        }
        check_values(vars(self), rules)

    def __repr__(self) -> str:
        """Return the call that makes these parameters. Defaults are left out."""
        default = SamplingParams()
        changed = list[str]()
        for option in fields(self):
            text = repr(getattr(self, option.name))
            if text != repr(getattr(default, option.name)):
                changed.append(f"{option.name}={text}")
        return f"SamplingParams({', '.join(changed)})"

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken (temperature 0)."""
        return self.temperature == 0

    @property
    def repeats_drafts(self) -> bool:
        """Whether the seed repeats an answer only where its drafts are repeated, too.

        So they must not depend on what was learned from other answers.
        """
        return self.seed is not None and not self.greedy and self.coupling != COUPLED

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
        """Whether `min_tokens` or `bad_words` ban tokens at some positions of the output."""
        return self.min_tokens > 0 or bool(self.bad_words)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before the temperature is applied.

        If `greedy` holds and this does not, the model's own argmax is the answer's token.
        """
        return bool(self.logit_bias) or self.penalises or self.bans or self.grammar is not None


Rule = Callable[[Any], bool]
Rules = Mapping[str, tuple[Rule, str]]


def check_values(values: Mapping[str, Any], rules: Rules) -> None:
    """Raise `InvalidInput` for the first value that can't be used.

    `rules`: by the name of a value, the check that it must pass, and what it must be in words.
    """
    for name, (is_valid, accepted) in rules.items():
        if not is_valid(values[name]):
            text = reprlib.repr(values[name])  # short, whatever it is
            raise InvalidInput(f"{name}={text}: must be {accepted}")


def number(low: float, high: float, kind: Any = Real) -> Rule:
    return lambda value: (
        isinstance(value, kind) and not isinstance(value, bool) and bool(low <= value <= high)
    )


def integer(low: int, high: float = math.inf) -> Rule:
    return number(low, high, Integral)


def optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def each(rule: Rule) -> Rule:
    return lambda values: (
        isinstance(values, Iterable)
        and not isinstance(values, str | bytes | Mapping)
        and all(map(rule, values))
    )


def is_text(text: Any) -> bool:
    """Whether `text` is a string that is not empty and has no surrogates."""
    if not isinstance(text, str) or not text:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_bias(item: tuple[Any, Any]) -> bool:
    token, value = item
    return integer(0)(token) and (value == -math.inf or number(-1e30, 1e30)(value))


MODERATE = (number(-1e30, 1e30), "a number between -1e30 and 1e30 (0: off)")
FEW = (optional(integer(0, 100)), "an integer between 0 and 100, or None")
TEXTS = (each(is_text), "a text or a list of texts, none of them empty, of whole characters")
FLAG = (lambda value: isinstance(value, bool), "True or False")
RULES: Rules = {
    "temperature": (number(0, 1e30), "a number between 0 and 1e30 (0: the most probable token)"),
    "top_k": (integer(0), "an integer of at least 0 (0: off)"),
    "top_p": (number(5e-324, 1), "a number above 0 and at most 1 (1: off)"),
    "min_p": (number(0, 1), "a number between 0 and 1 (0: off)"),
    "repetition_penalty": (number(1e-6, 1e6), "a number between 1e-6 and 1e6 (1: off)"),
    "presence_penalty": MODERATE,
    "frequency_penalty": MODERATE,
    "logit_bias": (lambda bias: isinstance(bias, Mapping) and all(map(_is_bias, bias.items())),
        "a mapping of token ids to numbers between -1e30 and 1e30 (minus infinity bans a token)"),
    "stop": TEXTS,
    "stop_token_ids": (each(integer(0)), "a list of token ids"),
    "logprobs": FEW,
    "prompt_logprobs": FEW,
    "seed": (optional(integer(-(2**63), 2**64 - 1)), "an integer of at most 64 bits, or None"),
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "n": (integer(1, 128), "an integer between 1 and 128"),
    "bad_words": TEXTS,
    "include_stop_str_in_output": FLAG,
    "grammar": (optional(lambda value: isinstance(value, Grammar)), "a Grammar, as "
        "Grammar.json_schema(…) makes one"),
    "coupling": (lambda value: value in COUPLINGS, f"one of {', '.join(COUPLINGS)}"),
    "prediction": (lambda value: value == "" or is_text(value), "a text of whole characters"),
}  # fmt: skip
"""What each parameter must be: the check of its value, and its words."""
