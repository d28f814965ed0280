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
    """One prompt, answered by all methods. `turn` counts the question's turns from 0."""

    question: Question
    turn: int
    answers: Mapping[str, Answer]


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs from the reference's, which it ought to equal.

    - `position`: counts the answer's tokens from 0.
    - `reference_token`, `token`: None where that answer had ended.
    - `gap`: the score of the best token at that position less that of the second best, after the
      prompt and the tokens that both answers share. Where it is near 0, rounding decides. At
      temperature 0 the scores are the target's logits. Above it they are log-probabilities with the
      noise of the place added. The gap is infinite where only one token is possible.
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
    """A prompt that counts for no method, because one of them refused it."""

    question_id: int | str
    turn: int
    reason: str


@dataclass
class Results:
    """What a run has produced so far.

    `complete` is True once every question has been asked. `compared` names the methods whose
    outputs ought to equal the reference's. It includes the reference, or is empty.
    """

    methods: list[str]
    reference: str
    compared: list[str]
    params: SamplingParams
    complete: bool = False
    trials: list[Trial] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def reference_of(methods: Sequence[str]) -> str:
    """Return the method that the others are compared with.

    It is `ar` where that is among `methods`, and otherwise the first method. An `ar` with switches
    counts, too; one without `residual` and with a short name is preferred.
    """
    plain = [name for name in methods if name.split("+")[0] == "ar"]
    return (
        min(plain, key=lambda name: (RESIDUAL in name.split("+"), len(name)))
        if plain
        else methods[0]
    )


def begin(
    runners: Mapping[str, Runner], params: SamplingParams, reference: str | None = None
) -> Results:
    """Return empty results, to be filled with answers to `params`.

    Without `reference` it is that of `reference_of`.
    """
    reference = reference or reference_of(list(runners))
    compared = [name for name, runner in runners.items() if runner.comparable(params)]
    return Results(list(runners), reference, compared if reference in compared else [], params)


def warm_up(
    runners: Mapping[str, Runner],
    params: SamplingParams,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Let every method answer a prompt that isn't counted.

    The first calls of a method compile, pack and allocate.
    """
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
    """Ask the questions one by one, and fill `results`. Yields each question when it is done.

    The methods take turns at going first. All get the same ids: the conversation so far holds the
    reference's answers. A prompt that a method refuses (`InvalidInput`, because it exceeds the
    context, say) is left out for all, with the turns after it. With a seed, every method samples
    prompt number i of the run with seed + i.
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
    """Return the first position where two answers differ, or None where they are equal.

    Where one answer is the beginning of the other, it is the position where that one ended.
    """
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _differences(
    trial: Trial, results: Results, runner: Runner, ids: Sequence[int], params: SamplingParams
) -> Iterator[Difference]:
    """The differences of the compared methods in one trial.

    `runner` is the reference's. `params` are those of the trial, with its seed.
    """
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
    """The gap of `Difference` for the token after the prompt `ids` and the tokens `answered`."""
    text = [*ids, *answered]
    logits = runner.last_logits(text).float().cpu()
    sampler = Sampler(params, ids, len(logits))
    sampler.extend(answered)
    scores = sampler.process(logits).double().numpy()
    if not params.greedy:
        assert params.seed is not None
        # Without filters these are log-probabilities up to a constant, and none underflows.
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
