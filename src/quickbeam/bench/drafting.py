"""What growing a tree costs apart from the drafter's calls, by policy, budget and temperature.

Needs no model.
"""

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

# mean probability of the likeliest token at temperature 1: about that of useful drafters
SURE = 0.55
LAWS = 64  # different distributions; a node's path picks one
TAKEN = 2  # tokens by which an answer grows each step
SWEEP = 32_000_000  # numbers of 4 bytes; a call that reads them leaves nothing else in the caches


class MadeUp(Drafter):
    """A drafter without a model, whose distributions over `vocab` tokens are made beforehand.

    They are the softmax of random logits, scaled so that the probability of the likeliest token is
    `SURE` on average. Some distributions are nearly certain and some hardly decided, and all have a
    long tail. At another draft temperature they are the softmax of the same logits at that
    temperature.

    With `cold`, each call leaves the processor's caches without any of our data, as a pass of a
    real drafter does. `calls` and `seconds` add up over all calls.
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
        """Return copies of the distributions for the requested nodes.

        A node's distribution depends only on the context's last token and on the tokens of the
        node's path.
        """
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
    """What growing trees cost with one policy, temperature and budget.

    `milliseconds` is the median over steps, without the drafter's calls. `calls` and `nodes` are
    means per step.
    """

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
    """Grow trees with every policy at every temperature and budget.

    Each combination grows `repeats` trees, after two that don't count. From one step to the next
    the context grows by `TAKEN` tokens. `depth` is the greatest depth of a tree.
    """
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
