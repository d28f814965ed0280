"""Drafters with known distributions for the tests of methods, and the methods over them."""

import random
from functools import cache, partial

import numpy as np
import torch

from quickbeam.drafters.base import Context, Drafter, DrafterState, DraftProbs
from quickbeam.methods import METHODS, make_method
from quickbeam.tree import TokenTree
from toy import path_tokens

# by name: what makes a method that only a drafter's answers decide, each kind of tree once
DRAFTED = {
    name: partial(make_method, name)
    for name, preset in METHODS.items()
    if preset.uses_drafter and name not in ("frspec", "dynaspec", "auto")
}


class KnownDrafter(Drafter):
    """DraftProbs by a function of the context, and the contract held: each node once a tree, the
    root first, parents before children. `calls` has the nodes of each request since the last root.
    `rounds` and `rows`: calls, and nodes asked for, of all trees."""

    name = "drafter"

    def __init__(self, probs):
        self.probs = probs
        self.calls: list[list[int]] = []
        self.rounds = self.rows = 0
        # by context: its tree, and the nodes that were asked for
        self._asked: dict[int, tuple[TokenTree, set[int]]] = {}

    def begin(self, ids, shortlist=None):
        return DrafterState()

    def answer(self, requests):
        assert requests and len({id(request.context) for request in requests}) == len(requests)
        self.rounds += 1
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        context, tree, nodes, _ = request
        if list(nodes) == [0]:
            self.calls, self._asked[id(context)] = [], (tree, set())
        known, asked = self._asked[id(context)]
        assert nodes and tree is known
        assert all(node == 0 or tree.parent[node] in asked for node in nodes)
        assert len({*asked, *nodes}) == len(asked) + len(nodes)
        asked.update(nodes)
        self.calls.append(list(nodes))
        self.rows += len(nodes)
        return DraftProbs(
            torch.stack([self.probs([*context.ids, *path_tokens(tree, node)]) for node in nodes])
        )


def finish(steps, answer):
    """The proposal of a method, run to its end, with `answer` as the drafter's."""
    answers: DraftProbs | None = None
    while True:
        try:
            request = steps.send(answers)
        except StopIteration as end:
            return end.value
        (answers,) = answer([request])


def propose(method, context, budget, max_depth, call=float("-inf")):
    """The proposal of a method; requests whose gain is no more than `call` are refused."""
    context.begin([source for source in method.sources if source.name not in context.states])
    drafter = next((source for source in method.sources if isinstance(source, Drafter)), None)

    def answer(requests):
        assert drafter is not None and requests[0].context is context
        return drafter.answer(requests) if requests[0].gain > call else [None]

    return finish(method.propose(context, budget, max_depth), answer)


def tree_of(method, context, budget, max_depth, call=float("-inf")):
    return propose(method, context, budget, max_depth, call).tree


def tempered(probs, temperature):
    """What `temperature` makes of the probs `[vocab]` of temperature 1; zeros stay."""
    weights = probs ** (1 / temperature)
    return weights / weights.sum()


def toy_probs(model, temperature=1.0):
    """The target's and the drafter's distributions at a temperature, by the last tokens."""

    def of(probs):
        made = cache(lambda last: tempered(probs(last), temperature))
        return lambda context: made(tuple(context[-3:]))

    return of(model.target), of(model.draft)


def zipf_drafter(vocab=500, seed=0):
    """As small models: sometimes nearly certain, sometimes hardly decided, by the path."""
    ranks = torch.arange(1, vocab + 1).log()

    def probs(context):
        rng = random.Random(f"{seed} {list(context)}")
        return (-rng.uniform(1.0, 3.5) * ranks).softmax(0).roll(rng.randrange(vocab))

    return KnownDrafter(probs)


def methods(probs):
    return {name: make(KnownDrafter(probs)) for name, make in DRAFTED.items()}


def context_of(ids, temperature, generator=None, logits=torch.zeros(1)):  # noqa: B008
    return Context(ids, logits, temperature, generator or torch.Generator().manual_seed(0))


def paths(tree):
    """The tokens below the root that lead to each node, in the order of the nodes."""
    return tuple(tuple(tree.token[n] for n in tree.path(node)[1:]) for node in range(1, len(tree)))


def perturbed_plain(q, noise, position, temperature):
    """The whole distribution `[vocab]` that the noise of a place makes of `q` `[vocab]`."""
    every = noise.of(np.arange(len(q)), np.full(len(q), position))
    return (q.double().log() + temperature * torch.from_numpy(every)).softmax(0)
