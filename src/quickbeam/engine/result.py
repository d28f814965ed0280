"""The result of a request: text, tokens and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from quickbeam.drafters.base import HeadUse

# what a record in JSON holds of an answer, and of its statistics
FIELDS = ("text", "token_ids", "finish_reason", "model", "method", "seed")
FIGURES = (
    "new_tokens",
    "steps",
    "mean_accepted_tokens",
    "seconds",
    "prefill_seconds",
    "cached_tokens",
    "draft_seconds",
    "drafter_seconds",
    "drafter_calls",
    "verify_seconds",
    "tokens_per_second",
    "exact",
)

SHOWN = 60  # characters of the text in a completion's `repr`


@dataclass
class SourceCount:
    drafted: int = 0
    accepted: int = 0


@dataclass
class Statistics:
    """How the time of an answer was spent, in seconds.

    `seconds` is decoding only. It starts when target and sources have read the prompt and the first
    token is known. Reading the prompt takes `prefill_seconds`.
    """

    new_tokens: int = 0
    steps: int = 0  # passes of the target over a tree
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    cached_tokens: int = 0  # tokens of the prompt that were taken from the prefix cache
    nodes: int = 0  # nodes of all verified trees, roots included
    experts: float = 0.0  # of each pass, how many a layer of experts read, on average
    preemptions: int = 0  # how often its keys and values were dropped and computed again
    drafter_calls: int = 0
    drafter_seconds: float = 0.0  # the part of `draft_seconds` that these calls took
    head: HeadUse | None = None  # counters of the drafter's head: time, tokens scored
    # whether a row's bits never depend on the other rows of a pass; where they do, the answer may
    # differ in another batch or with other drafts
    exact: bool = False
    sources: dict[str, SourceCount] = field(default_factory=dict)

    @property
    def overhead_seconds(self) -> float:
        return self.seconds - self.draft_seconds - self.verify_seconds

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: the tokens that a step emits on average.

        It is 1.0 for plain decoding, and if no step was needed. Prefill's token is not counted.
        """
        return (self.new_tokens - 1) / self.steps if self.steps else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after prefill's, over `seconds`: decoding only."""
        later = self.new_tokens - 1
        return later / self.seconds if later > 0 and self.seconds > 0 else 0.0


@dataclass
class Logprob:
    """The log-probability of a token under the model's own distribution.

    `top` holds those of the most probable alternatives, by token id.
    """

    token: int
    logprob: float
    top: dict[int, float]


@dataclass(repr=False)
class Completion:
    """One answer. `str` of it is its text.

    - `finish_reason`: `stop` (an end-of-sequence or stop id, or a stop string), `length`,
      `interrupted`, or `error`.
    - `stop_string`: the stop string that ended the answer; None if none did.
    - `seed`: the seed that a sampled answer was drawn with, given or not; None at temperature 0.
    - `logprobs`: one entry a token where they were asked for.
    - `prompt_logprobs`: one entry a token of the prompt where asked for, None for the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    statistics: Statistics
    model: str = ""
    method: str = ""
    logprobs: list[Logprob] | None = None
    seed: int | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    stop_string: str | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 1]}…"
        tokens = len(self.token_ids)
        return f"Completion({text!r}, {tokens} tokens, finish_reason={self.finish_reason!r})"

    def to_json(self) -> dict[str, object]:
        """Return the record that `generate --json` prints."""
        statistics = self.statistics
        record: dict[str, object] = {name: getattr(self, name) for name in FIELDS}
        for name in FIGURES:
            record[name] = getattr(statistics, name)
        record["sources"] = {name: vars(count) for name, count in statistics.sources.items()}
        head = statistics.head
        if head is not None:
            record["head_seconds"] = head.seconds
            record["shortlist_size"] = head.tokens / head.calls if head.calls else 0.0
        if self.logprobs is not None:
            record["logprobs"] = [vars(entry) for entry in self.logprobs]
        return record
