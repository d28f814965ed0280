"""The harness: every method answers every prompt, side by side in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quickbeam.bench.base import Answer, Message, Runner
from quickbeam.bench.questions import Question
from quickbeam.errors import InvalidInput
from quickbeam.noise import Noise
from quickbeam.params import RESIDUAL, SamplingParams
from quickbeam.sampling import Sampler

log = logging.getLogger(__name__)

WARM_UP = (
    "Write the numbers from one to twenty in words, on one line. Then write the same line "
    "twice more."
)
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Trial:
    """One prompt, answered by all methods."""

    question: Question
    turn: int
    answers: Mapping[str, Answer]


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the reference's that ought to be the same.

    `position` counts the answer's tokens from 0; a token is None where that answer had ended.
    `gap`: the best less the second best of what the token there is chosen by, after the prompt and
    the tokens both agree on: near 0, rounding decides. At temperature 0 these are the target's
    logits. Above it they are log-probabilities with the noise of the place added; where only one
    token is possible, the gap is infinite.
    """

    method: str
    question_id: int | str
    category: str
    turn: int
    position: int
    reference_token: int | None
    token: int | None
    gap: float


@dataclass(frozen=True)
class Skipped:
    """A prompt no method was counted on, because one of them refused it."""

    question_id: int | str
    turn: int
    reason: str


@dataclass
class Results:
    """All that a run has produced so far; `complete` once every question has been asked.
    `compared`: the methods whose outputs ought to be the reference's own, itself among them, or
    none."""

    methods: list[str]
    reference: str
    compared: list[str]
    params: SamplingParams
    complete: bool = False
    trials: list[Trial] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def reference_of(methods: Sequence[str]) -> str:
    """The method the others are compared with: `ar` where it runs (also with a switch of its own,
    `residual` last), otherwise the first."""
    plain = [name for name in methods if name.split("+")[0] == "ar"]
    return (
        min(plain, key=lambda name: (RESIDUAL in name.split("+"), len(name)))
        if plain
        else methods[0]
    )


def begin(
    runners: Mapping[str, Runner], params: SamplingParams, reference: str | None = None
) -> Results:
    """Results to be filled with answers to `params`. `reference`: that of `reference_of` where none
    is named."""
    reference = reference or reference_of(list(runners))
    compared = [name for name, runner in runners.items() if runner.comparable(params)]
    return Results(list(runners), reference, compared if reference in compared else [], params)


def warm_up(
    runners: Mapping[str, Runner],
    params: SamplingParams,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Let every method answer a prompt that isn't counted: first calls compile, pack and
    allocate."""
    short = replace(params, max_tokens=min(params.max_tokens, WARM_UP_TOKENS))
    for runner in runners.values():
        runner.answer(runner.encode([{"role": "user", "content": WARM_UP}]), short)
        on_answer()


def run(
    questions: Sequence[Question],
    runners: Mapping[str, Runner],
    results: Results,
    all_turns: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> Iterator[Question]:
    """Ask the questions one by one, filling `results`; yields each question when it is done.

    The methods take turns at going first. All see the same ids: the conversation so far holds the
    reference's answers. A prompt that a method refuses (`InvalidInput`: beyond the context, say) is
    left out for all, with the turns after it. With a seed, prompt number i of the run is sampled
    with seed + i by every method.
    """
    order, params = list(runners), results.params
    reference = runners[results.reference]
    for number, question in enumerate(questions):
        first = number % len(order)
        messages: list[Message] = []
        for turn, text in enumerate(question.turns if all_turns else question.turns[:1]):
            messages.append({"role": "user", "content": text})
            asked = len(results.trials) + len(results.skipped)
            seeded = params if params.seed is None else replace(params, seed=params.seed + asked)
            answers: dict[str, Answer] = {}
            try:
                ids = reference.encode(messages)
                for name in order[first:] + order[:first]:
                    answers[name] = runners[name].answer(ids, seeded)
                    on_answer()
            except InvalidInput as error:
                log.warning(
                    "question %s, turn %d is left out: %s", question.question_id, turn + 1, error
                )
                results.skipped.append(Skipped(question.question_id, turn, str(error)))
                break
            trial = Trial(question, turn, {name: answers[name] for name in order})
            results.differences += _differences(trial, results, reference, ids, seeded)
            results.trials.append(trial)
            messages.append({"role": "assistant", "content": answers[results.reference].text})
        results.complete = number == len(questions) - 1
        yield question


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two answers differ, None where they are equal. An answer that ends
    early differs where it ended."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _differences(
    trial: Trial, results: Results, runner: Runner, ids: Sequence[int], params: SamplingParams
) -> Iterator[Difference]:
    """Those of the compared methods. `runner`: the reference's; `params`: those of the trial, with
    its seed."""
    expected = trial.answers[results.reference].token_ids
    gaps: dict[int, float] = {}
    for name in results.compared:
        answer = trial.answers[name]
        position = first_difference(expected, answer.token_ids)
        if position is None:
            continue
        if position not in gaps:
            gaps[position] = _gap(runner, ids, expected[:position], params)
        yield Difference(
            method=name,
            question_id=trial.question.question_id,
            category=trial.question.category,
            turn=trial.turn,
            position=position,
            reference_token=expected[position] if position < len(expected) else None,
            token=answer.token_ids[position] if position < len(answer.token_ids) else None,
            gap=gaps[position],
        )


def _gap(
    runner: Runner, ids: Sequence[int], answered: Sequence[int], params: SamplingParams
) -> float:
    """See `Difference`: what the token after the prompt and these tokens of the answer was chosen
    by."""
    text = [*ids, *answered]
    logits = runner.last_logits(text).float().cpu()
    sampler = Sampler(params, ids, len(logits))
    sampler.extend(answered)
    scores = sampler.process(logits).double().numpy()
    if not params.greedy:
        assert params.seed is not None
        # Without filters: log-probabilities but for a constant, and no small one is lost.
        scores = (
            sampler.law(logits).double().log().numpy()
            if params.filters
            else scores / max(params.temperature, 1e-30)
        )
        scores = scores + Noise(params.seed, 0, len(scores)).of(
            np.arange(len(scores)), np.full(len(scores), len(text))
        )
    second, best = np.sort(scores)[-2:].tolist()
    return float(best - second)
