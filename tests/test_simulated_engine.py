"""The budget in a simulated engine: no fixed number of nodes is much faster.
pytest tests/test_simulated_engine.py"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from cases import few
from drafters import KnownDrafter, context_of
from quickbeam.drafters.base import DraftProbs, DraftRequest
from quickbeam.engine.budget import Budget, worth_asking
from quickbeam.engine.comparison import ASKED, PLAIN
from quickbeam.engine.cost import CostModel
from quickbeam.methods.base import Grown, Growth
from quickbeam.methods.dyspec import DySpec
from quickbeam.tree import TokenTree

METHOD, DRAFTER = "a method", "a drafter"


def simulated(
    budget: int | Budget,
    cost: CostModel,
    call: Callable[[int], float],
    honest: float,
    count: int,
    steps: int,
) -> float:
    """Tokens a second of `count` sequences side by side, over the last two thirds of the steps. A
    drafted token is the model's with the probability that the drafter gives it, times `honest`."""
    ranks, distributions, rng = torch.arange(1, 101).log(), {}, random.Random(1)

    def probs(context: Sequence[int]) -> torch.Tensor:
        key = tuple(context[-2:])
        if key not in distributions:
            own = random.Random(str(key))
            distributions[key] = (
                (-own.uniform(0.8, 4.0) * ranks).softmax(0).roll(own.randrange(100))
            )
        return distributions[key]

    def walk(tree: TokenTree, ids: list[int]) -> list[int]:
        path = [0]
        while True:
            wanted = (
                rng.choices(range(100), probs(ids).tolist())[0] if rng.random() < honest else 100
            )
            ids.append(wanted)
            child = tree.child(path[-1], wanted)
            if child is None:
                return path
            path.append(child)

    drafter = KnownDrafter(probs)
    policy, texts, sizes = DySpec(drafter), [[i] for i in range(count)], dict[int, int]()
    tokens, seconds = 0, 0.0
    for step in range(steps):
        took, emitted, asking, mode, rate = 0.0, 0, False, ASKED, 0.0
        if isinstance(budget, Budget):
            budget.begin(dict.fromkeys(range(count), 0), sizes)
            comparison = budget.comparison(METHOD, [ASKED, PLAIN], DRAFTER)
            mode, rate = comparison.mode, budget.rate(comparison)
            explore = comparison.explores(budget.cost.call(DRAFTER) / budget.plain, 0.0)
        growths, wishes, trees = dict[int, Growth](), dict[int, DraftRequest](), dict[int, Grown]()

        def send(i: int, distributions: DraftProbs | None) -> None:
            wishes.pop(i, None)  # noqa: B023 (called in this round only)
            try:
                wishes[i] = growths[i].send(distributions)  # noqa: B023
            except StopIteration as end:
                trees[i] = end.value  # noqa: B023

        for i, ids in enumerate(texts):
            context, nodes = context_of(ids, 0.0), budget
            if isinstance(budget, Budget):
                marginal = budget.marginal_cost(METHOD, rate)
                context.marginal_cost = replace(marginal, explore=explore and i == 0)
                nodes = 1 if mode == PLAIN else budget.limit
            growths[i] = policy.grow(context, nodes, 20)
            send(i, None)
        while wishes:
            due, answered = list(wishes), [True] * len(wishes)
            if isinstance(budget, Budget):
                gains = [wishes[i].gain for i in due]
                answered = worth_asking(gains, lambda n: budget.cost.call(DRAFTER, n), rate)
            asked = [i for i, worth in zip(due, answered, strict=True) if worth]
            for i in set(due) - set(asked):
                send(i, None)
            if asked:
                took, asking = took + call(len(asked)), True
                if isinstance(budget, Budget):
                    budget.cost.observe_call(DRAFTER, len(asked), call(len(asked)))
                for i, found in zip(asked, drafter.answer([wishes[i] for i in asked]), strict=True):
                    send(i, found)
        if isinstance(budget, Budget) and count > 1:
            values = [
                [
                    value * (trees[i].accepted_per_expected or 0.0)
                    for value in trees[i].tree.value[1:]
                ]
                for i in range(count)
            ]
            for i, kept in enumerate(budget.share(values, count, rate)):
                trees[i] = trees[i]._replace(tree=trees[i].tree.first(kept + 1))
        took += cost.alone(sum(len(grown.tree) for grown in trees.values()))
        for i, grown in trees.items():
            path = walk(grown.tree, texts[i])
            grown.learn(grown.tree, path)
            emitted += len(path)
            sizes[i] = len(grown.tree)
        if isinstance(budget, Budget):
            budget.observe(comparison, emitted, took, asking)
        if step >= steps // 3:
            tokens, seconds = tokens + emitted, seconds + took
    return tokens / seconds


@pytest.mark.parametrize(
    ("node", "call", "honest"),
    few(
        [
            (*costs, honest)
            for costs in [(0.2, 0.5), (0.02, 0.5), (0.02, 2.0), (1.0, 0.1), (0.2, 20.0)]
            for honest in (1.0, 0.3)
        ],
        [(0.2, 0.5, 1.0), (0.02, 0.5, 0.3), (0.02, 2.0, 0.3), (1.0, 0.1, 0.3), (0.2, 20.0, 1.0)],
    ),
)
def test_no_fixed_budget_is_much_faster(node: float, call: float, honest: float) -> None:
    """A pass takes 10 and `node` for each further node, a call `call`."""
    cost = CostModel({1: 10.0, 64: 10 + 63 * node})

    def run(budget: int | Budget, steps: int) -> float:
        return simulated(budget, cost, lambda _: call, honest, 1, steps)

    best = max(run(budget, 240) for budget in (1, 2, 3, 4, 6, 8, 12, 16, 32))
    assert run(Budget(cost), 480) > 0.95 * best


@pytest.mark.parametrize(
    ("count", "call", "honest"),
    few(
        [
            (*load, honest)
            for load in [(4, 0.3), (12, 0.3), (12, 2.0), (40, 0.3)]
            for honest in (1.0, 0.3)
        ],
        [(4, 0.3, 1.0), (12, 0.3, 0.3), (12, 2.0, 1.0)],
    ),
)
def test_no_fixed_budget_is_much_faster_for_many(count: int, call: float, honest: float) -> None:
    """32 rows cost little more than one; beyond, each costs a tenth of a pass over one. Answering
    more in a call costs a little more."""
    cost = CostModel({1: 10.0, 32: 11.0, 1024: 1003.0})

    def run(budget: int | Budget, steps: int) -> float:
        return simulated(
            budget, cost, lambda sequences: call * (1 + 0.1 * (sequences - 1)), honest, count, steps
        )

    best = max(run(budget, 45) for budget in (1, 2, 3, 4, 6, 8, 12))
    assert run(Budget(cost), 150) > 0.95 * best
