"""Every method answers every prompt, side by side in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from quickbeam.bench.methods import MethodItem, MethodRunner, Question
from quickbeam.engine.result import Completion
from quickbeam.errors import InvalidInput
from quickbeam.noise import Noise
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler

log = logging.getLogger(__name__)
WARM_UP = "Write the numbers from one to twenty in words. Then write the same line twice more."
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Trial:
    """One prompt, answered by all methods."""

    question: Question
    answers: Mapping[str, Completion]


@dataclass
class Results:
    """What a run has produced so far.

    - `reference`: the method that the others are compared with.
    - `compared`: the methods whose answers ought to equal the reference's. It includes the
      reference, or is empty.
    - `differences`: answers that don't equal the reference's (see `difference`).
    - `skipped`: prompts that a method refused; they are left out for every method.
    """

    methods: list[str]
    reference: str
    compared: list[str]
    params: SamplingParams
    complete: bool = False
    trials: list[Trial] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)


def begin(items: Sequence[MethodItem], params: SamplingParams) -> Results:
    """Return empty results. The reference is `ar` where that is among `items`, else the first."""
    names = [item.name for item in items]
    reference = "ar" if "ar" in names else names[0]
    compared = [item.name for item in items if item.comparable(params)]
    return Results(names, reference, compared if reference in compared else [], params)


def warm_up(runners: Mapping[str, MethodRunner], params: SamplingParams) -> None:
    """Let every method answer a prompt that isn't counted: first calls compile and allocate."""
    short = replace(params, max_tokens=min(params.max_tokens, WARM_UP_TOKENS))
    for runner in runners.values():
        runner.answer(runner.encode([{"role": "user", "content": WARM_UP}]), short)


def run(
    questions: Sequence[Question],
    runners: Mapping[str, MethodRunner],
    results: Results,
    progress: Callable[[str, float], object] = lambda stage, done: None,
) -> Iterator[None]:
    """Ask the first turns of questions, and yield after each.

    The methods take turns at going first. All get the same ids. A prompt that a method refuses is
    left out for all. With a seed, every method samples prompt number i of the run with seed + i.
    `progress` gets the stage, and the share (0 to 1) that is done.
    """
    names = list(runners)
    reference = runners[results.reference]
    for number, question in enumerate(questions):
        first = number % len(names)
        params = results.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + number)
        answers: dict[str, Completion] = {}
        try:
            ids = reference.encode([{"role": "user", "content": question.turns[0]}])
            for name in names[first:] + names[:first]:
                answers[name] = runners[name].answer(ids, params)
                if answers[name].finish_reason == "interrupted":
                    raise KeyboardInterrupt
                progress("answers", (number + len(answers) / len(names)) / len(questions))
        except InvalidInput as error:
            log.warning("question %s is left out: %s", question.question_id, error)
            skipped = {"question_id": question.question_id, "reason": str(error)}
            results.skipped.append(skipped)
        else:
            expected = answers[results.reference].token_ids
            for name in results.compared:
                differing = difference(expected, answers[name].token_ids)
                if differing is not None:
                    shared = expected[: differing["position"]]
                    results.differences.append(
                        {
                            "method": name,
                            "question_id": question.question_id,
                            **differing,
                            "gap": gap(reference, ids, shared, params),
                        }
                    )
            results.trials.append(Trial(question, answers))
        results.complete = number == len(questions) - 1
        yield


def difference(expected: Sequence[int], tokens: Sequence[int]) -> dict[str, Any] | None:
    """Return the first position at which two answers differ, and their tokens there.

    A token is None where its answer has ended. Returns None for equal answers.
    """
    for position, (token, other) in enumerate(zip_longest(expected, tokens)):
        if token != other:
            return {"position": position, "reference_token": token, "token": other}
    return None


def gap(
    runner: MethodRunner, ids: Sequence[int], answered: Sequence[int], params: SamplingParams
) -> float | None:
    """Return the best token's score after the prompt and `answered`, less the second best's.

    Scores are logits, above temperature 0 with the noise of the position. Where the gap is near 0,
    rounding decides. None: only one token is possible.
    """
    logits = runner.last_logits([*ids, *answered]).float().cpu()
    sampler = Sampler(params, ids, len(logits))
    sampler.extend(answered)
    scores = sampler.process(logits).double().numpy()
    if not params.greedy:
        assert params.seed is not None
        if params.filters:
            scores = sampler.probs(logits).double().log().numpy()
        else:  # log-probabilities up to a constant; none underflows
            scores = scores / max(params.temperature, 1e-30)
        tokens = np.arange(len(scores))
        positions = np.full(len(scores), len(ids) + len(answered))
        scores = scores + Noise(params.seed, 0, len(scores)).of(tokens, positions)
    second, best = np.sort(scores)[-2:].tolist()
    return float(best - second) if np.isfinite(second) else None
