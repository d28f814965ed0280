"""How often a drafter's proposals are accepted, held against how likely it said that was.

DySpec (2410.11744) grows its trees by the hypothesis that the two are about the same. The diagonal
is not the ceiling. Of a perfect drafter every first child is accepted, likely or not: a draw
(`--coupling residual`), as it is accepted with min(1, target / draft probability), and a likeliest
token, the noise of its place counted in where there is any (temperature 0, and coupled), as the
target emits just that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import NormalDist, StatisticsError, correlation
from typing import TYPE_CHECKING, NamedTuple

import torch

from quickbeam.bench.agreement import Agreement, watch
from quickbeam.bench.questions import Question
from quickbeam.bench.run import Skipped
from quickbeam.engine.trace import StepRecord
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams
from quickbeam.tree import TokenTree

if TYPE_CHECKING:
    from quickbeam.llm import LLM

log = logging.getLogger(__name__)

DEPTHS = 8  # how deep acceptance is told layer by layer
Z = NormalDist().inv_cdf(0.975)  # two-sided 95 %


class Tried(NamedTuple):
    """A drafted node that had its turn: its parent was accepted, and its earlier siblings were
    rejected."""

    probability: float  # see `draft_probabilities`
    accepted: bool
    depth: int  # 1 right below the root
    first: bool  # of its siblings


def draft_probabilities(tree: TokenTree, node: int) -> Iterator[float]:
    """d of each child of `node` in order: its probability under the drafter's law with earlier
    siblings struck out, renormalised.

    A draw has just this law, and DySpec's worth of slots (Alg. 1) is made of it. Where children are
    the likeliest tokens (temperature 0 and coupled), it is made alike of what they were chosen by,
    so that the curves compare: the probability of the child's token where none of its earlier
    siblings' is right. They are chosen by the drafter's law at temperature 1, above temperature 0
    with the noise of the place counted in (`trees/perturbed.py`).

    The tree holds what the children were chosen by, before anything is struck out. What is left
    once siblings are struck out is summed over the law where the tree keeps it (draws), as 1 less
    nearly 1 would be mostly rounding.
    """
    earlier, left = list[int](), 1.0
    for token, child in tree.children[node].items():
        law, probability = tree.law[child], tree.probability[child]
        if law is not None and earlier:
            left = float(
                law.index_fill(0, torch.tensor(earlier, device=law.device), 0.0).sum(
                    dtype=torch.float64
                )
            )
        yield min(1.0, probability / left) if left > 0 else 1.0
        earlier.append(token)
        left -= probability


def tried(record: StepRecord) -> Iterator[Tried]:
    """The nodes of a step that had their turn, root to leaf. What lies beyond the answer's end
    (below an end-of-sequence token) is left out: the target was never meant to go on there."""
    tree, path = record.tree, record.path
    for node, accepted in zip(path[: len(record.emitted)], [*path[1:], None], strict=False):
        for i, (child, probability) in enumerate(
            zip(tree.children[node].values(), draft_probabilities(tree, node), strict=True)
        ):
            yield Tried(probability, child == accepted, tree.depth[child], i == 0)
            if child == accepted:
                break


@dataclass
class Tally:
    """An observer of answers that keeps what was tried. `tokens`: those that the `steps`
    emitted."""

    steps: int = 0
    tokens: int = 0
    tried: list[Tried] = field(default_factory=list)

    def __call__(self, record: StepRecord) -> None:
        self.steps += 1
        self.tokens += len(record.emitted)
        self.tried += tried(record)


@dataclass(frozen=True)
class Bin:
    """What was tried with a draft probability from `low` up to `high`, which the last bin includes.
    `interval`: Wilson's, 95 %."""

    low: float
    high: float
    count: int
    accepted: int
    probability: float | None  # on average; None, like the others, where there was nothing
    acceptance: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Depth:
    """The tried first children at a depth. Their parents were accepted and had children: below the
    root that is a selection."""

    depth: int
    count: int
    accepted: int
    acceptance: float | None


@dataclass(frozen=True)
class Summary:
    """One temperature. A figure is None where nothing was measured for it.

    - `calibration_gap`: |mean draft probability - acceptance| of the bins, averaged by count (the
      expected calibration error).
    - `correlation`: Pearson's, of draft probability and acceptance (0 or 1) over all that was
      tried.
    - `mean_accepted_tokens` (MAT): tokens over steps, as `bench` has it.
    - `first_acceptance`: of all tried first children, whatever their depth; see `agreement.py` for
      a figure without a selection.
    """

    temperature: float
    steps: int
    tokens: int
    tried: int
    accepted: int
    mean_accepted_tokens: float | None
    calibration_gap: float | None
    correlation: float | None
    first_acceptance: float | None
    bins: list[Bin]
    by_depth: list[Depth]


@dataclass
class Results:
    """All that a run has produced so far; `complete` once every question has been asked at every
    temperature. `agreement`: where one of them is 0."""

    tallies: dict[float, Tally]  # by temperature
    agreement: Agreement = field(default_factory=Agreement)
    prompts: int = 0
    complete: bool = False
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def tried(self) -> list[Tried]:
        """At all temperatures."""
        return [one for tally in self.tallies.values() for one in tally.tried]


def measure(
    llm: LLM, questions: Sequence[Question], params: Sequence[SamplingParams], results: Results
) -> Iterator[None]:
    """Ask the first turn of each question at the temperature of each of `params`, filling
    `results`; yields after every answer.

    `llm` has the method and the budget. With a seed, question number i is sampled with seed + i. A
    prompt that can't be answered (`InvalidInput`: beyond the context, say) is left out.
    """
    for number, question in enumerate(questions):
        try:
            for request in params:
                seeded = (
                    request
                    if request.seed is None
                    else replace(request, seed=request.seed + number)
                )
                messages = [{"role": "user", "content": question.turns[0]}]
                for _ in llm.chat_stream(
                    messages, seeded, observer=results.tallies[request.temperature]
                ):
                    pass
                if request.greedy:
                    watch(llm, question, seeded, results.agreement)
                yield
            results.prompts += 1
        except InvalidInput as error:
            log.warning("question %s is left out: %s", question.question_id, error)
            results.skipped.append(Skipped(question.question_id, 0, str(error)))
    results.complete = True


def summarise(temperature: float, tally: Tally, bins: int) -> Summary:
    """The figures of one temperature, over `bins` bins of equal width."""
    places = by_bin(tally.tried, bins)
    accepted = [float(one.accepted) for one in tally.tried]
    gaps = [abs(one.count * (one.probability or 0.0) - one.accepted) for one in places]
    try:
        related = correlation([one.probability for one in tally.tried], accepted)
    except StatisticsError:  # fewer than two, or all alike
        related = None
    firsts = [float(one.accepted) for one in tally.tried if one.first]
    return Summary(
        temperature=temperature,
        steps=tally.steps,
        tokens=tally.tokens,
        tried=len(tally.tried),
        accepted=int(sum(accepted)),
        mean_accepted_tokens=_share(tally.tokens, tally.steps),
        calibration_gap=_share(sum(gaps), len(tally.tried)),
        correlation=related,
        first_acceptance=_share(sum(firsts), len(firsts)),
        bins=places,
        by_depth=by_depth(tally.tried),
    )


def by_bin(found: Sequence[Tried], bins: int) -> list[Bin]:
    """Draft probability in `bins` bins of equal width, empty ones too."""
    groups: list[list[Tried]] = [[] for _ in range(bins)]
    for one in found:
        groups[min(int(one.probability * bins), bins - 1)].append(one)
    return [_bin(i / bins, (i + 1) / bins, group) for i, group in enumerate(groups)]


def by_depth(found: Sequence[Tried]) -> list[Depth]:
    """The first children at depths 1 to `DEPTHS`."""
    layers: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for one in found:
        if one.first and one.depth <= DEPTHS:
            layers[one.depth - 1].append(one.accepted)
    return [
        Depth(depth, len(layer), sum(layer), _share(sum(layer), len(layer)))
        for depth, layer in enumerate(layers, 1)
    ]


def wilson(accepted: int, count: int) -> tuple[float, float]:
    """The 95 % score interval of a share (E. B. Wilson, 1927): right for few trials, too, and for
    shares near 0 and 1.

    Raises `ValueError` where `count` is not above 0.
    """
    if count <= 0:
        raise ValueError(f"count={count}: must be above 0")
    share, scale = accepted / count, 1 + Z * Z / count
    centre = (share + Z * Z / (2 * count)) / scale
    half = Z * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count)) / scale
    # the share is in it, rounding or not
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def _bin(low: float, high: float, group: Sequence[Tried]) -> Bin:
    count, accepted = len(group), sum(one.accepted for one in group)
    probability = _share(sum(one.probability for one in group), count)
    return Bin(
        low,
        high,
        count,
        accepted,
        probability,
        _share(accepted, count),
        wilson(accepted, count) if count else None,
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
