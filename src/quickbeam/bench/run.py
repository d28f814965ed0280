"""Every method answers every prompt, side by side in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

    - `compared`: the methods whose answers ought to equal the reference's. It includes the
      reference, or is empty.
    - `differences`: answers that don't equal it (see `difference`).
    - `skipped`: prompts that a method refused; they count for none.
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
    """
    order, params, reference = list(runners), results.params, runners[results.reference]
    for number, question in enumerate(questions):
        first, where = number % len(order), {"question_id": question.question_id}
        seeded = params if params.seed is None else replace(params, seed=params.seed + number)
        answers: dict[str, Completion] = {}
        try:
            ids = reference.encode([{"role": "user", "content": question.turns[0]}])
            for name in order[first:] + order[:first]:
                answers[name] = runners[name].answer(ids, seeded)
                if answers[name].finish_reason == "interrupted":
                    raise KeyboardInterrupt
                progress("answers", (number + len(answers) / len(order)) / len(questions))
        except InvalidInput as error:
            log.warning("question %s is left out: %s", question.question_id, error)
            results.skipped.append({**where, "reason": str(error)})
        else:
            expected = answers[results.reference]
            for name in results.compared:
                apart = difference(expected.token_ids, answers[name].token_ids)
                if apart is not None:
                    shared = expected.token_ids[: apart["position"]]
                    apart["gap"] = gap(reference, ids, shared, seeded)
                    results.differences.append({"method": name, **where, **apart})
            results.trials.append(Trial(question, answers))
        results.complete = number == len(questions) - 1
        yield


def difference(expected: Sequence[int], tokens: Sequence[int]) -> dict[str, Any] | None:
    """Return the first place where two answers differ and their tokens (None: it had ended), or
    None."""
    for position in range(max(len(expected), len(tokens))):
        one, other = ([*ids[position : position + 1], None][0] for ids in (expected, tokens))
        if one != other:
            return {"position": position, "reference_token": one, "token": other}
    return None


def gap(
    runner: MethodRunner, ids: Sequence[int], answered: Sequence[int], params: SamplingParams
) -> float | None:
    """Return the best token's score after the prompt and `answered`, less the second best's.

    Scores are logits, above temperature 0 with the noise of the place. Where the gap is near 0,
    rounding decides; None where only one token is possible.
    """
    place = len(ids) + len(answered)
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
        noise, tokens = Noise(params.seed, 0, len(scores)), np.arange(len(scores))
        scores = scores + noise.of(tokens, np.full(len(scores), place))
    second, best = np.sort(scores)[-2:].tolist()
    return float(best - second) if np.isfinite(second) else None
