"""Measures what drafters gain on a loaded model, for `--drafter auto` and `quickbeam doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quickbeam.drafters.candidates import Candidate
from quickbeam.engine.stream import Stream
from quickbeam.methods import preset
from quickbeam.params import SamplingParams

Answer = Callable[[str, str], tuple[int, float]]  # a prompt and a method to tokens and seconds

# our own, and none of a benchmark: prose, code, and an answer that repeats words of its prompt
PROMPTS = (
    "Write a letter to a friend about your first week in a new town, and what the market sells.",
    "Write a Python function that reads a CSV file of names and birthdays and returns the names of "
    "those who have their birthday this month.",
    "Sort this shopping list by the alphabet: two onions, a loaf of bread, some milk, ten apples.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SECONDS = 1.0  # after which an answer is ended
PAYS = 1.05  # the least gain for which a drafter is taken: less is within the noise


class Trial(NamedTuple):
    """What a candidate gained.

    `gain`: tokens a second with it over those without a drafter; 0 for a candidate that can't draft
    for the model, for the reason in `refusal`.
    """

    candidate: Candidate
    gain: float
    refusal: str = ""

    def __str__(self) -> str:
        name, reason = self.candidate
        result = self.refusal or f"{self.gain:.2f} times as fast as without a drafter"
        return f"{name} ({reason}): {result}"


def timed(begin_answer: Callable[[], Stream]) -> tuple[int, float]:
    """Begin an answer and end it after `SECONDS`. Return its tokens and seconds.

    The seconds include reading the prompt, which a drafter may have to do as well.
    """
    begin = time.perf_counter()
    stream = begin_answer()
    try:
        for _ in stream:
            if time.perf_counter() - begin > SECONDS:
                break
        return len(stream.token_ids), time.perf_counter() - begin
    finally:
        stream.close()


def measure_gain(named: str, answer: Answer) -> float:
    """Return the tokens a second of a method that drafts with the model's drafter, over those
    without a drafter.

    Without a drafter, the method is the one that stands in for `named`, or recycling.
    The two answer in turns, so that other load on the machine slows down both. A first answer of
    each is not counted. It takes at most about `2 * (len(PROMPTS) + 1) * SECONDS`.
    """
    methods = (preset(named).without or "recycling", named)
    tokens = dict.fromkeys(methods, 0)
    seconds = dict.fromkeys(methods, 0.0)
    for method in methods:
        answer(PROMPTS[0], method)
    for prompt in PROMPTS:
        for method in methods:
            answer_tokens, answer_seconds = answer(prompt, method)
            tokens[method] += answer_tokens
            seconds[method] += answer_seconds
    plain, drafted = (tokens[method] / max(seconds[method], 1e-9) for method in methods)
    return drafted / max(plain, 1e-9)


def best_trial(trials: Sequence[Trial], method: str) -> Trial | None:
    """Return the trial that gained most; None where none pays.

    A method that can't do without a drafter takes any drafter that can draft.
    """
    named = preset(method)
    needs_drafter = named.uses_drafter and named.without is None
    least = 0.0 if needs_drafter else PAYS
    paying = [trial for trial in trials if not trial.refusal and trial.gain >= least]
    return max(paying, key=lambda trial: trial.gain, default=None)
