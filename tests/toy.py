"""A toy target and drafter with known distributions, and the means to hold sampled output against
the exact one: of a method, `chi_square(samples(model, make_tree, …), exact_probs(model))`
must not be tiny."""

import itertools
import random
from collections import Counter
from functools import cache

import numpy as np
import torch
from scipy.stats import chi2

from quickbeam.sampling import uniform
from quickbeam.tree import TokenTree
from quickbeam.verify import Verdict, verify_residual


class ToyModel:
    """Random distributions over a small vocabulary that depend on the last three tokens. The
    drafter's are the target's with noise on the logits. Either gives some tokens no probability at
    all, each its own (`zeros`: how often), as filters and shortlists do."""

    def __init__(self, vocab=6, seed=0, noise=1.0, zeros=0.15):
        self.vocab, self._seed, self._noise, self._zeros = vocab, seed, noise, zeros
        self._made = cache(self._make)

    def target(self, context):
        """`[vocab]` float32."""
        return self._both(context)[0]

    def draft(self, context):
        """`[vocab]` float32."""
        return self._both(context)[1]

    def _both(self, context):
        return self._made(tuple(context[-3:]))

    def _make(self, last):
        rng = np.random.default_rng([self._seed, *last])
        logits = 1.5 * rng.standard_normal(self.vocab)
        target = self._probs(logits, rng)
        return target, self._probs(logits + self._noise * rng.standard_normal(self.vocab), rng)

    def _probs(self, logits, rng):
        weights = np.exp(logits) * (rng.random(self.vocab) >= self._zeros)
        weights[rng.integers(self.vocab)] += 0.1  # at least one token
        return torch.tensor(weights / weights.sum(), dtype=torch.float32)


def path_tokens(tree, node):
    return [tree.token[n] for n in tree.path(node)[1:]]


def random_tree(model, context, rng, budget=12, certain=0.35, prune=0.0):
    """A tree of up to `budget` nodes, certain proposals (a share `certain`) and draws without
    replacement side by side. Where it grows is partly random, partly the estimated worth of a slot.
    `prune`: drop a drawn token whose probability is below it, which no method may do."""
    tree = TokenTree(context[-1])
    worth = [1.0]
    for _ in range(rng.randrange(budget)):
        best = max(range(len(tree)), key=worth.__getitem__)
        node = rng.choice([best, len(tree) - 1, rng.randrange(len(tree))])
        taken = tree.children[node]
        q = model.draft([*context, *path_tokens(tree, node)])
        weights = [0.0 if token in taken else weight for token, weight in enumerate(q.tolist())]
        if rng.random() < certain and len(taken) < model.vocab:
            token = rng.choice([token for token in range(model.vocab) if token not in taken])
            tree.add(node, token, "certain")
            prob = 0.3
        elif sum(weights) > 0:
            token = rng.choices(range(model.vocab), weights)[0]
            prob = weights[token] / sum(weights)
            if prob < prune:
                continue
            tree.add(node, token, "drawn", probs=q)
        else:
            continue
        worth.append(worth[node] * prob)
        worth[node] *= 1 - prob
    return tree


def samples(model, make_tree, verify=verify_residual, count=5000, length=3, seed=0, probs=None):
    """First tokens of `count` answers to [0]. `probs`: the target's (the model's own)."""
    target = probs or model.target
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(count):
        context = [0]
        while len(context) <= length:
            tree = make_tree(context, rng)
            of = lambda node: target([*context, *path_tokens(tree, node)])  # noqa: B023, E731
            verdict = verify(tree, of, generator)
            context += [*path_tokens(tree, verdict.path[-1]), verdict.token]
        counts[tuple(context[1 : length + 1])] += 1
    return counts


def exact_probs(probs, vocab, length=3):
    """The probability of each possible answer of `length` tokens to the prompt [0]."""
    answers = {}
    for answer in itertools.product(range(vocab), repeat=length):
        probability = 1.0
        for i, token in enumerate(answer):
            probability *= float(probs([0, *answer[:i]])[token]) if probability else 0.0
        answers[answer] = probability
    return answers


def chi_square(counts, probs):
    """The p-value of Pearson's test that `counts` were drawn from `probs`; 0 where an impossible
    answer occurred. Cells of an expected count below 5 are merged into one, and that one into the
    next larger cell if it stays below 5."""
    if any(probs.get(answer, 0.0) == 0 for answer in counts):
        return 0.0
    total, mass = counts.total(), sum(probs.values())
    cells, rare = [], [0.0, 0.0]
    for probability, answer in sorted((p, answer) for answer, p in probs.items() if p > 0):
        expected, seen = total * probability / mass, counts[answer]
        if expected < 5 or 0 < rare[0] < 5:
            rare = [rare[0] + expected, rare[1] + seen]
        else:
            cells.append((expected, seen))
    cells += [(rare[0], int(rare[1]))] if rare[0] else []
    if len(cells) < 2:
        raise ValueError(f"{total} answers are too few: fewer than two cells expect 5 of them")
    off = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    return float(chi2.sf(off, len(cells) - 1))


def plain_verify(tree, probs, generator, mistake=""):
    """The acceptance rule word for word, in plain lists; `mistake` puts a known error in, which the
    tests must find. Random numbers are spent as `verify_residual` does."""
    path = [0]
    while True:
        p = residual = probs(path[-1]).double().tolist()
        if not any(tree.probs[child] is not None for child in tree.children[path[-1]].values()):
            token = pick(p, generator)
            if token not in tree.children[path[-1]]:
                return Verdict(path, token)
            path.append(tree.children[path[-1]][token])
            continue
        tried: list[int] = []
        for token, child in tree.children[path[-1]].items():
            q = tree.probs[child]
            certain = [float(t == token) for t in range(len(p))]
            proposal = certain if q is None else q.double().tolist()
            if q is not None and mistake != "siblings stay in Q":
                left = [0.0 if t in tried else weight for t, weight in enumerate(proposal)]
                proposal = normalised(left)
            prob = min(1.0, residual[token] / proposal[token])
            if mistake == "accept with Q":
                prob = proposal[token]
            if uniform(generator) < prob:
                path.append(child)
                break
            tried.append(token)
            if mistake != "R stays p":
                pairs = zip(residual, proposal, strict=True)
                residual = normalised([max(r - weight, 0.0) for r, weight in pairs])
        else:
            bonus = p if mistake == "emit from p" else residual
            return Verdict(path, pick(bonus, generator))


def pick(weights, generator):
    threshold, sums = uniform(generator) * sum(weights), itertools.accumulate(weights)
    return next(token for token, below in enumerate(sums) if below > threshold)


def normalised(weights):
    total = sum(weights)
    return [weight / total for weight in weights] if total else weights
