"""How often drafted tokens are accepted, compared with the drafter's probability for them.

DySpec (2410.11744) grows its trees on the hypothesis that acceptance probability and draft
probability are about the same. This measurement shows how far that holds.

Acceptance may lie above the draft probability. With a perfect drafter every first child is
accepted, whether its draft probability is high or low. A drawn child (`--coupling residual`) is
accepted with probability min(1, target / draft probability), which is 1 then. In the other cases
(temperature 0, and coupled sampling) the first child is the likeliest token of the drafter's
distribution, with the noise of the place counted in where there is any. A perfect drafter's
likeliest token is the one that the target emits.
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

DEPTHS = 8  # depths that have an acceptance figure of their own
Z = NormalDist().inv_cdf(0.975)  # two-sided 95 %


class Tried(NamedTuple):
    """A drafted node that verification tried.

    Its parent was accepted, and its earlier siblings were rejected.
    """

    probability: float  # see `draft_probabilities`
    accepted: bool
    depth: int  # 1 right below the root
    first: bool  # whether it is the first of its siblings


def draft_probabilities(tree: TokenTree, node: int) -> Iterator[float]:
    """Yield the draft probability of each child of `node`, in the order of the children.

    It is the probability of the child's token under the drafter's distribution, after the tokens of
    earlier siblings are struck out and the rest is renormalised.

    A drawn child was drawn from exactly this distribution. DySpec computes the value of its slots
    (Algorithm 1) from the same probabilities. At temperature 0 and in coupled sampling, children
    are the likeliest tokens. The figure is then computed in the same way from the distribution that
    they were chosen by, so that the curves compare: it is the probability of the child's token,
    given that no earlier sibling's token is right. That distribution is the drafter's at
    temperature 1. Above temperature 0 it has the noise of the place counted in
    (`trees/perturbed.py`).

    `tree.probability` holds probabilities from before anything is struck out. Where the tree keeps
    the whole distribution (`tree.law`, for draws), the mass that is left is summed over it, because
    1 minus a sum of nearly 1 would be mostly rounding error.
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
    """Yield the nodes of a step that verification tried, from the root down.

    Nodes beyond the end of the answer (below an end-of-sequence token) are left out, because the
    target was never meant to go on there.
    """
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
    """An observer of answers that collects the nodes that were tried.

    `steps` counts the steps, and `tokens` the tokens that they emitted.
    """

    steps: int = 0
    tokens: int = 0
    tried: list[Tried] = field(default_factory=list)

    def __call__(self, record: StepRecord) -> None:
        self.steps += 1
        self.tokens += len(record.emitted)
        self.tried += tried(record)


@dataclass(frozen=True)
class Bin:
    """The nodes tried with a draft probability from `low` up to `high`.

    Only the last bin includes its `high`. `probability` and `acceptance` are means over the bin.
    `interval` is the 95 % Wilson interval of the acceptance. All three are None for an empty bin.
    """

    low: float
    high: float
    count: int
    accepted: int
    probability: float | None
    acceptance: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Depth:
    """How many of the first children tried at one depth were accepted.

    Their parents were accepted and had children. From depth 2 on, such places are a selection.
    """

    depth: int
    count: int
    accepted: int
    acceptance: float | None


@dataclass(frozen=True)
class Summary:
    """The figures of one temperature. A figure is None where nothing was measured for it.

    - `calibration_gap`: the expected calibration error, which is |mean draft probability -
      acceptance| of each bin, averaged over the bins by count.
    - `correlation`: Pearson's, between draft probability and acceptance (0 or 1), over all nodes
      tried.
    - `mean_accepted_tokens` (MAT): tokens over steps, as in `quickbeam bench`.
    - `first_acceptance`: the acceptance rate of all first children tried, at any depth. They are a
      selection of places; `agreement.py` has a figure without one.
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
    """What a run has produced so far.

    `complete` is True once every question has been asked at every temperature. `agreement` is
    filled where one of the temperatures is 0.
    """

    tallies: dict[float, Tally]  # by temperature
    agreement: Agreement = field(default_factory=Agreement)
    prompts: int = 0
    complete: bool = False
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def tried(self) -> list[Tried]:
        """The nodes tried at all temperatures."""
        return [one for tally in self.tallies.values() for one in tally.tried]


def measure(
    llm: LLM, questions: Sequence[Question], params: Sequence[SamplingParams], results: Results
) -> Iterator[None]:
    """Ask the first turn of each question with each of `params`, and fill `results`.

    Yields after every answer. `llm` is loaded with the method and the budget to measure.
    `results.tallies` must have an entry for every temperature of `params`. With a seed, question
    number i is sampled with seed + i. A prompt that can't be answered (`InvalidInput`, because it
    exceeds the context, say) is left out and noted in `results.skipped`.
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
    """Return the figures of one temperature, with `bins` bins of equal width."""
    places = by_bin(tally.tried, bins)
    accepted = [float(one.accepted) for one in tally.tried]
    gaps = [abs(one.count * (one.probability or 0.0) - one.accepted) for one in places]
    try:
        related = correlation([one.probability for one in tally.tried], accepted)
    except StatisticsError:  # fewer than two nodes, or one side is constant
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
    """Sort nodes by draft probability into `bins` bins of equal width. Empty bins are kept."""
    groups: list[list[Tried]] = [[] for _ in range(bins)]
    for one in found:
        groups[min(int(one.probability * bins), bins - 1)].append(one)
    return [_bin(i / bins, (i + 1) / bins, group) for i, group in enumerate(groups)]


def by_depth(found: Sequence[Tried]) -> list[Depth]:
    """Return the acceptance of first children at each of the depths 1 to `DEPTHS`."""
    layers: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for one in found:
        if one.first and one.depth <= DEPTHS:
            layers[one.depth - 1].append(one.accepted)
    return [
        Depth(depth, len(layer), sum(layer), _share(sum(layer), len(layer)))
        for depth, layer in enumerate(layers, 1)
    ]


def wilson(accepted: int, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of the share accepted / count (E. B. Wilson, 1927).

    It holds for few trials too, and for shares near 0 and 1. Raises `ValueError` unless `count` is
    above 0.
    """
    if count <= 0:
        raise ValueError(f"count={count}: must be above 0")
    share, scale = accepted / count, 1 + Z * Z / count
    centre = (share + Z * Z / (2 * count)) / scale
    half = Z * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count)) / scale
    # rounding must not leave the share outside its interval
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
