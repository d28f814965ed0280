"""The figures that answers are summed up in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quickbeam.bench.base import Answer
from quickbeam.bench.run import Results, Trial


@dataclass(frozen=True)
class Summary:
    """The figures of one method over some prompts.

    A figure is None where nothing was measured for it.

    - `tokens_per_second`: decoded tokens over decode seconds, both summed over the prompts. Prefill
      and the token that it emits are not counted.
    - `speedup`: decode seconds per decoded token of the reference, over those of the method.
      Seconds and tokens are summed over the prompts. Where the outputs are identical, this is the
      ratio of total decode times. Where they are not, a longer answer does not count against a
      method.
    - `mean_accepted_tokens` (MAT): decoded tokens over target passes, 1.0 for plain decoding.
    - `identical`: how many answers equal the reference's, token for token. None where outputs are
      not compared (`Results.compared`).
    - `draft_ms`, `verify_ms`, `overhead_ms`: milliseconds per step, on average.
    - `drafter_calls`: calls of the drafter per step, on average. `drafter_ms`: the part of
      `draft_ms` that they took. `head_ms`: the part of `drafter_ms` that grows with the vocabulary
      scored (routing, the head, its softmax).
    - `break_even_ms`: the time of one call of the drafter at which the method would be as fast as
      the reference, all else being equal. Below zero where the method would be slower even if calls
      took no time.
    - `prefill_ms`: per prompt, on average.
    - `nodes`: nodes of a step's tree, the root included, on average.
    - `accepted`: accepted drafted tokens per step by source, on average. None where a method
      doesn't count them.
    - `shortlist`: tokens scored in a call, on average.
    - `recall`: the share of the text's tokens that were scored at the node where they were drafted
      for. None where all of the vocabulary was scored.
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
    """Return the figures of `method` over `trials`.

    `compared` says whether its outputs ought to equal the reference's.
    """
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
    # seconds that the reference would take longer for as many tokens
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
    """Return the figures of every method over all prompts."""
    return _summaries(results, results.trials)


def by_category(results: Results) -> dict[str, dict[str, Summary]]:
    """Return figures by category, then by method, in order of appearance."""
    return {category: _summaries(results, trials) for category, trials in grouped(results).items()}


def grouped(results: Results) -> dict[str, list[Trial]]:
    """Return the trials by category, in order of appearance."""
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
    """Accepted drafted tokens per step, by source.

    None where some answer doesn't count them, or there was no step.
    """
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
