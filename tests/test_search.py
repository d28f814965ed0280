"""The search of `auto` against a plain one, which works everything out anew."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from drafters import finish, zipf_drafter
from quickbeam.drafters.base import Context, DraftProbs
from quickbeam.drafters.ngram import MAX_N
from quickbeam.drafters.texts import Texts
from quickbeam.methods.acceptance import (
    GUESSED,
    LIFT,
    REMEMBERED,
    REPEATED,
    AcceptanceModel,
    drafted_features,
    free_features,
)
from quickbeam.methods.auto import Auto
from quickbeam.methods.children import ROUNDING, likeliest_children
from quickbeam.methods.free import GUESSES, LONGEST, MIN_MATCH
from quickbeam.methods.search import CHILD_SHARE, FRACTION

VOCAB = 12


class PlainSearch:
    """Paths are tuples of tokens. `rates`: by path, in the order of discovery."""

    def __init__(self, method, context, size, max_depth, model):
        self.context, self.max_depth, self.model = context, max_depth, model
        self.last_logits = method.last_logits
        self.size = size if max_depth > 0 else 0
        self.rates = {}
        self.source, self.features, self.probability = {}, {}, {}
        self.asked, self.continued = set[tuple[int, ...]](), set[tuple[int, ...]]()
        self.rank()

    def value(self, path):
        value = 1.0
        for end in range(1, len(path) + 1):
            value *= self.rates[path[:end]]
        return value

    def children(self, path):
        return [child for child in self.rates if child[:-1] == path]

    def left(self, path):
        return 1 - sum(self.rates[child] for child in self.children(path))

    def rank(self):
        order = list(self.rates)
        likeliest = sorted(order, key=lambda path: (-self.value(path), order.index(path)))
        self.best = likeliest[: self.size]
        cost = self.context.node_cost
        for kept, path in enumerate(self.best):
            if self.context.node_costs is not None and self.value(path) <= cost(kept + 1):
                del self.best[kept:]
                break
        self.bound = cost(len(self.best) + 1)
        if self.best:
            last = self.value(self.best[-1])
            self.bound = last if len(self.best) == self.size else min(last, self.bound)

    def admits(self, value, nodes):
        return value > self.bound and value > self.context.node_cost(nodes)

    def enter(self, path, source, rate, features, probability=None):
        self.rates[path] = rate
        self.source[path], self.features[path] = source, [features]
        self.probability[path] = probability

    def continue_text(self, path, tokens, length, source="ngram", kind=REPEATED):
        for i, token in enumerate(tokens[: self.max_depth - len(path)]):
            child = (*path, token)
            if child not in self.rates:
                features = free_features(kind, length + i)
                rate = self.model.rate(features) * self.left(path)
                if not self.admits(self.value(path) * rate, len(path) + 1):
                    return
                self.enter(child, source, rate, features)
                self.continued.add(child)
            path = child

    def remember(self, path):
        texts = self.context.texts
        if match := texts.match([*self.context.ids, *path]):
            tokens = texts.continuation(match, LONGEST)
            self.continue_text(path, tokens, match.length, "answers", REMEMBERED)

    def add_free(self):
        index, ids = self.context.states["ngram"], self.context.ids
        if not self.continued:
            self.continued.add(())
            if match := index.match(ids):
                tokens = index.continuation(match, LONGEST)
                self.continue_text((), tokens, index.extent(match, LONGEST))
            self.remember(())
            left = self.left(())
            for rank, token in self.last_logits.ranked(self.context, GUESSES):
                features = free_features(GUESSED, rank)
                rate = left * self.model.rate(features)
                first = left * self.model.rate(free_features(GUESSED, 1))
                if not self.admits(rate, 1) or not self.admits(first, 1):
                    break
                if (token,) not in self.rates:
                    self.enter((token,), "last_logits", rate, features)
            self.rank()
        for path in [path for path in self.best if path not in self.continued]:
            self.continued.add(path)
            if match := index.match([*ids, *path], MIN_MATCH):
                tokens = index.continuation(match, LONGEST, path[-MAX_N:])
                self.continue_text(path, tokens, match.length)
            self.remember(path)
        self.rank()

    def ask(self, drafter, paths):
        self.asked.update(paths)
        least = [ROUNDING * self.bound / (LIFT * self.value(path)) for path in paths]
        probs = torch.stack([drafter.probs([*self.context.ids, *path]) for path in paths])
        depths = [len(path) for path in paths]
        rows = likeliest_children(self.context, DraftProbs(probs), depths, self.size, least)
        for path, row in zip(paths, rows, strict=True):
            self.enter_children(path, *row)

    def enter_children(self, path, tokens, probabilities):
        share = 1.0
        if children := self.children(path):
            drafter_rates = dict.fromkeys(children, 0.0)
            for child in children:
                token, known = child[-1], self.features[child]
                rate = self.rates[child]
                if token in tokens:
                    rank = tokens.index(token)
                    self.probability[child] = probabilities[rank]
                    features = drafted_features(rank, probabilities[rank])
                    drafter_rates[child] = min(self.model.rate(features), 1 - 1e-6)
                if tokens:
                    known[0] = known[0].after_drafter(first_choice=tokens[0] == token)
                    rate = self.model.rate(known[0])
                if drafter_rates[child]:
                    known.append(features)
                self.rates[child] = max(rate, drafter_rates[child])
            share = max(0.0, self.left(path)) / max(1e-6, 1 - sum(drafter_rates.values()))
        for rank, (token, probability) in enumerate(zip(tokens, probabilities, strict=True)):
            if (*path, token) in self.rates:
                continue
            features = drafted_features(rank, probability)
            rate = self.model.rate(features) * share
            if not self.admits(self.value(path) * rate, len(path) + 1 + rank):
                break
            self.enter((*path, token), "drafter", rate, features, probability)

    def to_ask(self):
        paths = [
            path
            for path in self.best[: self.size - 1]
            if self.value(path) * CHILD_SHARE > self.bound
            and path[:-1] in self.asked
            and path not in self.asked
            and len(path) < self.max_depth
        ]
        return [path for path in paths if self.value(path) >= FRACTION * self.value(paths[0])]

    def run(self, drafter, call):
        """Return the tree. `call`: what the gain of a call has to exceed."""
        asked = 0.0
        paths: list[tuple[int, ...]] = [()] if self.size > 0 else []
        self.add_free()
        while paths:
            worths = [self.value(path) * max(0.0, self.left(path)) for path in paths]
            per_asked = self.model.accepted_per_asked
            gain = sum(max(0.0, worth * per_asked - self.bound) for worth in worths)
            if self.context.node_costs is not None and gain <= call:
                break
            self.ask(drafter, paths)
            asked += sum(worths)
            self.rank()
            self.add_free()
            paths = self.to_ask()
        self.calls_asked = asked
        nodes = [(), *self.best]
        return [
            (nodes.index(path[:-1]), path[-1], self.source[path], self.value(path))
            for path in self.best
        ]

    def learn(self, path):
        """Learn from the nodes of the accepted `path`, the root first."""
        nodes = [(), *self.best]
        for i, node in enumerate(path):
            for child in self.best:  # in the order of the nodes
                if child[:-1] == nodes[node]:
                    accepted = i + 1 < len(path) and nodes[path[i + 1]] == child
                    for features in self.features[child]:
                        self.model.observe(features, accepted)
        if self.context.node_costs is not None and self.calls_asked:
            added = sum(self.source[nodes[node]] == "drafter" for node in path[1:])
            self.model.observe_calls(added, self.calls_asked)


@examples(60, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.sampled_from([0.0, 0.1, 0.4]),
)
def test_trees_are_those_of_a_plain_search(seed, first_cost, call):
    """Of answers that repeat themselves, tree by tree, with what both learned from earlier ones."""
    rng, drafter = random.Random(seed), zipf_drafter(VOCAB, seed)
    method, model = Auto(drafter), AcceptanceModel()
    phrase = [rng.randrange(VOCAB) for _ in range(rng.randint(5, 9))]
    other = [rng.randrange(VOCAB) for _ in range(40)]
    context = Context([*other, *phrase, other[0], *phrase[:-1]], torch.zeros(VOCAB))
    context.texts = Texts(1 << 10)
    for _ in range(4):
        context.texts.add([*phrase, *rng.choices(range(VOCAB), k=20)])
    context.begin(method.sources)
    for _ in range(6):
        context.logits = torch.tensor([rng.gauss(0, 3) for _ in range(VOCAB)])
        size, max_depth = rng.choice([2, 8, 32]), rng.choice([0, 1, 4, 20])
        context.node_costs = None
        if first_cost:
            context.node_costs = [first_cost * (1 + n / 8) for n in range(size + 1)]
        plain = PlainSearch(method, context, size, max_depth, model)
        expected = plain.run(drafter, call)

        def answer(requests):
            (request,) = requests
            return drafter.answer(requests) if request.gain > call else [None]

        tree, learn = finish(method.propose(context, size + 1, max_depth), answer)
        nodes = zip(tree.parent, tree.token, tree.source, tree.value, strict=True)
        for node, (parent, token, source, value) in zip(list(nodes)[1:], expected, strict=True):
            assert node == (parent, token, source, pytest.approx(value, rel=1e-12))
        path = tree.path(rng.randrange(len(tree)))
        learn(tree, path)
        plain.learn(path)
        assert method.model._sums == model._sums
        assert method.model.accepted_per_asked == pytest.approx(model.accepted_per_asked)
        accepted = [tree.token[node] for node in path[1:]]
        context.extend([*accepted, rng.choice([phrase[0], rng.randrange(VOCAB)])])
