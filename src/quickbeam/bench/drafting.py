"""What growing a tree costs beside the drafter's calls, by policy, budget and temperature. Needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter

import torch

from quickbeam.draft.base import Context, Drafter, DrafterState, DraftRequest, Laws
from quickbeam.shortlist.shortlist import Shortlist
from quickbeam.trees import DRAFTED
from quickbeam.trees.base import grown

SURE = 0.55  # mean probability of the likeliest token at temperature 1: about what drafters of good use have
LAWS = 64  # different laws; a node's path picks one
SWEEP = 32_000_000  # numbers of 4 bytes that a call reads to leave nothing in the caches


class MadeUp(Drafter):
    """Laws over `vocab` tokens made beforehand: softmax of random logits, scaled until their likeliest tokens have `SURE` on average.

    Some are nearly certain and some hardly decided, all have a long tail. At a temperature they are those logits' at that temperature.
    `cold`: a call leaves the processor's caches as a pass of a real drafter does, without any of ours.
    """

    name = "drafter"

    def __init__(self, vocab: int, temperature: float, cold: bool = False) -> None:
        self.calls, self.seconds = 0, 0.0
        self._sweep = torch.ones(SWEEP) if cold else None
        logits = torch.randn(LAWS, vocab, generator=torch.Generator().manual_seed(0))
        low, high = 0.0, 100.0
        for _ in range(20):
            scale = (low + high) / 2
            low, high = (scale, high) if float((scale * logits).softmax(-1).amax(-1).mean()) < SURE else (low, scale)
        self._laws = (high / (temperature or 1.0) * logits).softmax(-1)

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> DrafterState:
        return DrafterState()

    def answer(self, requests: Sequence[DraftRequest]) -> list[Laws]:
        """Copies. What was read picks no law but the root's."""
        began = perf_counter()
        if self._sweep is not None:
            self._sweep.sum()
        self.calls += 1
        laws = [Laws(self._laws[[self._pick(request, node) for node in request.nodes]]) for request in requests]
        self.seconds += perf_counter() - began
        return laws

    @staticmethod
    def _pick(request: DraftRequest, node: int) -> int:
        return hash((request.context.ids[-1], *(request.tree.token[i] for i in request.tree.path(node)))) % LAWS


@dataclass(frozen=True)
class Drafting:
    """`milliseconds`: of a step, apart from the drafter's calls (the median). `calls`, `nodes`: of a step, on average."""

    policy: str
    temperature: float
    budget: int
    milliseconds: float
    calls: float
    nodes: float


def measure(
    vocab: int, budgets: Sequence[int], temperatures: Sequence[float], repeats: int, cold: bool = False, depth: int = 64
) -> list[Drafting]:
    """Every policy at every temperature and budget, `repeats` trees each, after two that don't count."""
    found = []
    for temperature in temperatures:
        drafter = MadeUp(vocab, temperature, cold)
        for name, make in DRAFTED.items():
            for budget in budgets:
                policy, generator = make(drafter), torch.Generator().manual_seed(0)
                times, calls, nodes = [], [], []
                for step in range(repeats + 2):
                    context = Context([step % vocab], torch.zeros(1), temperature, generator)
                    before, asked, began = drafter.seconds, drafter.calls, perf_counter()
                    tree = grown(policy.grow(context, budget, depth), drafter.answer).tree
                    times.append(1e3 * (perf_counter() - began - (drafter.seconds - before)))
                    calls.append(drafter.calls - asked)
                    nodes.append(len(tree))
                found.append(Drafting(name, temperature, budget, median(times[2:]), mean(calls[2:]), mean(nodes[2:])))
    return found
