"""What growing a tree costs beside the drafter's calls, by policy, budget and temperature. Needs no
model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter

import torch

from quickbeam.draft.base import Context, Drafter, DrafterState, DraftRequest, Laws
from quickbeam.noise import PLAIN, Noise
from quickbeam.params import COUPLED
from quickbeam.shortlist.shortlist import Shortlist
from quickbeam.target.native.library import kernels
from quickbeam.target.native.noise import NativeLoops
from quickbeam.trees import DRAFTED
from quickbeam.trees.base import grown

# mean probability of the likeliest token at temperature 1: about what drafters of good use have
SURE = 0.55
LAWS = 64  # different laws; a node's path picks one
TAKEN = 2  # tokens that an answer goes on by each step
SWEEP = 32_000_000  # numbers of 4 bytes that a call reads to leave nothing in the caches


class MadeUp(Drafter):
    """Laws over `vocab` tokens made beforehand: softmax of random logits, scaled until their
    likeliest tokens have `SURE` on average.

    Some are nearly certain and some hardly decided, all have a long tail. At the draft temperature
    of a context they are those logits' at that temperature. `cold`: a call leaves the processor's
    caches as a pass of a real drafter does, without any of ours.
    """

    name = "drafter"

    def __init__(self, vocab: int, cold: bool = False) -> None:
        self.calls, self.seconds = 0, 0.0
        self._sweep = torch.ones(SWEEP) if cold else None
        logits = torch.randn(LAWS, vocab, generator=torch.Generator().manual_seed(0))
        low, high = 0.0, 100.0
        for _ in range(20):
            scale = (low + high) / 2
            low, high = (
                (scale, high)
                if float((scale * logits).softmax(-1).amax(-1).mean()) < SURE
                else (low, scale)
            )
        self._logits, self._laws = high * logits, dict[float, torch.Tensor]()

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> DrafterState:
        return DrafterState()

    def answer(self, requests: Sequence[DraftRequest]) -> list[Laws]:
        """Copies. What was read picks no law but the root's."""
        began = perf_counter()
        if self._sweep is not None:
            self._sweep.sum()
        self.calls += 1
        laws = [
            Laws(
                self._at(request.context.draft_temperature)[
                    [self._pick(request, node) for node in request.nodes]
                ]
            )
            for request in requests
        ]
        self.seconds += perf_counter() - began
        return laws

    def _at(self, temperature: float) -> torch.Tensor:
        if temperature not in self._laws:
            self._laws[temperature] = (self._logits / temperature).softmax(-1)
        return self._laws[temperature]

    @staticmethod
    def _pick(request: DraftRequest, node: int) -> int:
        return (
            hash(
                (request.context.ids[-1], *(request.tree.token[i] for i in request.tree.path(node)))
            )
            % LAWS
        )


@dataclass(frozen=True)
class Drafting:
    """`milliseconds`: of a step, apart from the drafter's calls (the median). `calls`, `nodes`: of
    a step, on average."""

    policy: str
    temperature: float
    budget: int
    milliseconds: float
    calls: float
    nodes: float


def measure(
    vocab: int,
    budgets: Sequence[int],
    temperatures: Sequence[float],
    repeats: int,
    cold: bool = False,
    depth: int = 64,
    coupling: str = COUPLED,
) -> list[Drafting]:
    """Every policy at every temperature and budget, `repeats` trees each, after two that don't
    count. A step's place is `TAKEN` tokens behind that of the one before."""
    found, drafter, compiled = [], MadeUp(vocab, cold), kernels()
    loops = PLAIN if compiled is None else NativeLoops(compiled)
    for temperature in temperatures:
        for name, make in DRAFTED.items():
            for budget in budgets:
                policy, generator = make(drafter), torch.Generator().manual_seed(0)
                noise = (
                    Noise(0, 0, vocab, loops) if temperature > 0 and coupling == COUPLED else None
                )
                times, calls, nodes = [], [], []
                for step in range(repeats + 2):
                    context = Context(
                        [step % vocab] * (1 + TAKEN * step),
                        torch.zeros(1),
                        temperature,
                        generator,
                        noise=noise,
                    )
                    before, asked, began = drafter.seconds, drafter.calls, perf_counter()
                    tree = grown(policy.grow(context, budget, depth), drafter.answer).tree
                    times.append(1e3 * (perf_counter() - began - (drafter.seconds - before)))
                    calls.append(drafter.calls - asked)
                    nodes.append(len(tree))
                found.append(
                    Drafting(
                        name,
                        temperature,
                        budget,
                        median(times[2:]),
                        mean(calls[2:]),
                        mean(nodes[2:]),
                    )
                )
    return found
