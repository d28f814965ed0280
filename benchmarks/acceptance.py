"""How often drafted tokens are accepted, by draft probability.

    python benchmarks/acceptance.py --limit 24 --temperatures 0,0.6,1

A drafted token counts where verification tried it: its parent was accepted and its earlier siblings
were not. Its draft probability is that of its token under the distribution that it was chosen by,
after earlier siblings are struck out. The calibration gap is |mean probability - share accepted| of
a bin, averaged over the bins by count. Steps begin where a draft was refused, so these tokens are a
selection; `trees.py --budgets 2` has the drafter's agreement at every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import StatisticsError, correlation, mean
from typing import Any, NamedTuple

import torch

from common import arguments, finish, load, numbers, params_of, prompts, script
from quickbeam.engine.trace import StepRecord
from quickbeam.tree import TokenTree


class TriedToken(NamedTuple):
    probability: float
    accepted: bool
    first: bool  # whether it is the first of its siblings


def draft_probabilities(tree: TokenTree, node: int) -> Iterator[float]:
    """Yield the draft probability of each child of `node`, in the order of the children.

    Where the tree keeps the whole distribution (`tree.probs`), the mass that is left is summed over
    it, because 1 minus a sum of nearly 1 would be mostly rounding error.
    """
    earlier, left = list[int](), 1.0
    for token, child in tree.children[node].items():
        probs, probability = tree.probs[child], tree.probability[child]
        if probs is not None and earlier:
            struck = probs.index_fill(0, torch.tensor(earlier, device=probs.device), 0.0)
            left = float(struck.sum(dtype=torch.float64))
        yield min(1.0, probability / left) if left > 0 else 1.0
        earlier.append(token)
        left -= probability


def tried(record: StepRecord) -> Iterator[TriedToken]:
    """Yield the tokens of a step that verification tried, none beyond the end of the answer."""
    tree, path = record.tree, record.path
    for node, accepted in zip(path[: len(record.emitted)], [*path[1:], None], strict=False):
        children = tree.children[node].values()
        probabilities = draft_probabilities(tree, node)
        for i, (child, probability) in enumerate(zip(children, probabilities, strict=True)):
            yield TriedToken(probability, child == accepted, i == 0)
            if child == accepted:
                break


def summarise(records: list[StepRecord], bins: int) -> dict[str, Any]:
    nodes = [one for record in records for one in tried(record)]
    groups: list[list[TriedToken]] = [[] for _ in range(bins)]
    for one in nodes:
        groups[min(int(one.probability * bins), bins - 1)].append(one)
    gap = sum(abs(sum(one.probability - one.accepted for one in group)) for group in groups)
    try:
        related = correlation(
            [one.probability for one in nodes], [float(one.accepted) for one in nodes]
        )
    except StatisticsError:  # fewer than two nodes, or one side is constant
        related = None
    firsts = [one.accepted for one in nodes if one.first]
    return {
        "tried": len(nodes),
        "accepted": sum(one.accepted for one in nodes),
        "mean_accepted_tokens": mean(len(record.emitted) for record in records),
        "first_acceptance": mean(firsts) if firsts else None,
        "calibration_gap": gap / len(nodes) if nodes else None,
        "correlation": related,
        "bins": [
            {
                "low": i / bins,
                "count": len(group),
                "probability": mean(one.probability for one in group) if group else None,
                "acceptance": mean(one.accepted for one in group) if group else None,
            }
            for i, group in enumerate(groups)
        ],
    }


def main() -> None:
    parser = arguments(__doc__, limit=24)
    parser.add_argument("--method", default="dyspec")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--coupling", default="coupled", choices=("coupled", "residual"))
    parser.add_argument("--temperatures", default="0,0.6,1", help="comma-separated")
    parser.add_argument("--bins", type=int, default=10)
    given = parser.parse_args()
    llm, rows, figures = load(given, given.method, budget=given.budget), [], []
    asked = prompts(llm, given)
    for temperature in numbers(given.temperatures):
        records: list[StepRecord] = []
        params = replace(params_of(given), temperature=temperature, coupling=given.coupling)
        for number, ids in enumerate(asked):
            own = replace(params, seed=given.seed + number)
            for _ in llm.stream(ids, own, observer=records.append):
                pass
        one = summarise(records, given.bins)
        figures.append({"temperature": temperature, **one})
        shown = {name.replace("_", " "): value for name, value in one.items() if name != "bins"}
        texts = {k: f"{v:.3f}" if isinstance(v, float) else v for k, v in shown.items()}
        rows.append({"temperature": f"{temperature:g}", **texts})
    finish(given, rows, model=llm.name, temperatures=figures)


if __name__ == "__main__":
    script(main)
