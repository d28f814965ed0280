"""From answers to figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quickbeam.bench.base import Answer
from quickbeam.bench.run import Results, Trial


@dataclass(frozen=True)
class Summary:
    """One method over some prompts. A figure is None where nothing was measured for it.

    - `tokens_per_second`: decoded tokens over decode seconds, both summed over the prompts; prefill
      and its token are apart.
    - `speedup`: (decode seconds / decoded tokens) of the reference over the same of the method,
      each summed over the prompts. Where the outputs are identical that is the ratio of total
      decode times; where they are not, a longer answer is not held against a method.
    - `mean_accepted_tokens` (MAT): decoded tokens over target passes, 1.0 for plain decoding.
    - `identical`: answers equal to the reference's, token for token; None where outputs are not
      compared (`Results.compared`).
    - `draft_ms`, `verify_ms`, `overhead_ms`: milliseconds a step, on average.
    - `drafter_calls`: of a step, on average; `drafter_ms`: what they took of `draft_ms`; `head_ms`:
      what of that grows with the vocabulary scored (routing, the head, its softmax).
    - `break_even_ms`: what one call of the drafter could take before the method were no faster than
      the reference, all else being equal; below zero where calls for nothing would be too dear.
    - `prefill_ms`: of a prompt, on average. `nodes`: of a step's tree, the root included, on
      average.
    - `accepted`: drafted tokens that were accepted in a step, on average, by source; None where a
      method doesn't tell.
    - `shortlist`: tokens scored in a call, on average; `recall`: the share of the text's tokens
      that were scored where they were drafted for, None where all of the vocabulary was.
    """

    prompts: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    speedup: float | None
    mean_accepted_tokens: float | None
    identical: int | None
    draft_ms: float | None
    verify_ms: float | None
    overhead_ms: float | None
    drafter_calls: float | None
    drafter_ms: float | None
    head_ms: float | None = None
    shortlist: float | None = None
    recall: float | None = None
    break_even_ms: float | None = None
    prefill_ms: float | None = None
    nodes: float | None = None
    accepted: dict[str, float] | None = None


def summarise(trials: Sequence[Trial], method: str, reference: str, compared: bool) -> Summary:
    """The figures of `method` over `trials`. `compared`: whether its outputs ought to be the
    reference's."""
    answers = [trial.answers[method] for trial in trials]
    expected = [trial.answers[reference] for trial in trials]
    tokens, steps, seconds = _totals(answers)
    heads = [answer.head for answer in answers]
    draft, verify = (
        _sum(answer.draft_seconds for answer in answers),
        _sum(answer.verify_seconds for answer in answers),
    )
    calls, calling = (
        _sum(answer.drafter_calls for answer in answers),
        _sum(answer.drafter_seconds for answer in answers),
    )
    pace, reference_pace = (
        _ratio(seconds, tokens),
        _ratio(_totals(expected)[2], _totals(expected)[0]),
    )
    # seconds that the reference would take longer
    spare = None if reference_pace is None else tokens * reference_pace - seconds
    return Summary(
        prompts=len(trials),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=_ratio(tokens, seconds),
        speedup=_ratio(reference_pace, pace),
        mean_accepted_tokens=_ratio(tokens, steps),
        identical=sum(a.token_ids == b.token_ids for a, b in zip(answers, expected, strict=True))
        if compared
        else None,
        draft_ms=_ratio(draft, steps, 1000),
        verify_ms=_ratio(verify, steps, 1000),
        overhead_ms=None
        if draft is None or verify is None
        else _ratio(seconds - draft - verify, steps, 1000),
        drafter_calls=_ratio(calls, steps),
        drafter_ms=_ratio(calling, steps, 1000),
        break_even_ms=None
        if spare is None or calling is None
        else _ratio(spare + calling, calls, 1000),
        head_ms=_ratio(_sum(head.seconds if head else None for head in heads), steps, 1000),
        shortlist=_ratio(
            _sum(head.tokens if head else None for head in heads),
            _sum(head.calls if head else None for head in heads),
        ),
        recall=_ratio(
            _sum(head.held if head else None for head in heads),
            _sum(head.wanted if head else None for head in heads),
        ),
        prefill_ms=_ratio(_sum(answer.prefill_seconds for answer in answers), len(answers), 1000),
        nodes=_ratio(_sum(answer.nodes for answer in answers), steps),
        accepted=_accepted(answers, steps),
    )


def summaries(results: Results) -> dict[str, Summary]:
    """Every method over all prompts."""
    return _summaries(results, results.trials)


def by_category(results: Results) -> dict[str, dict[str, Summary]]:
    """Category, then method, in order of appearance."""
    return {category: _summaries(results, trials) for category, trials in grouped(results).items()}


def grouped(results: Results) -> dict[str, list[Trial]]:
    """By category, in order of appearance."""
    groups: dict[str, list[Trial]] = {}
    for trial in results.trials:
        groups.setdefault(trial.question.category, []).append(trial)
    return groups


def _summaries(results: Results, trials: Sequence[Trial]) -> dict[str, Summary]:
    return {
        name: summarise(trials, name, results.reference, name in results.compared)
        for name in results.methods
    }


def _accepted(answers: Sequence[Answer], steps: int) -> dict[str, float] | None:
    """Of a step, by source; None where some answer doesn't tell, or there was no step."""
    found: dict[str, float] = {}
    for answer in answers:
        if answer.accepted is None:
            return None
        for name, count in answer.accepted.items():
            found[name] = found.get(name, 0.0) + count
    return {name: count / steps for name, count in found.items()} if steps else None


def _totals(answers: Sequence[Answer]) -> tuple[int, int, float]:
    return (
        sum(a.decoded for a in answers),
        sum(a.steps for a in answers),
        sum(a.seconds for a in answers),
    )


def _sum(parts: Iterable[float | None]) -> float | None:
    told = list(parts)
    return None if not told or None in told else sum(part for part in told if part is not None)


def _ratio(part: float | None, whole: float | None, scale: float = 1.0) -> float | None:
    return scale * part / whole if part is not None and whole else None
