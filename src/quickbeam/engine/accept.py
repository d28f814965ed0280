"""From the logits of a pass to accepted tokens, for one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from quickbeam.grammar.masks import DeadEnd
from quickbeam.models.base import Passed
from quickbeam.noise import Noise
from quickbeam.sampling import Sampler, draw, most_probable
from quickbeam.tree import TokenTree
from quickbeam.verify import Verdict, verify_equal, verify_residual


class Randomness(NamedTuple):
    """Where a sequence's randomness comes from.

    It is the `noise` of its places, or, if that is None, the `generator` for the residual rule.
    """

    noise: Noise | None
    generator: torch.Generator


def first_token(
    sampler: Sampler, logits: torch.Tensor, randomness: Randomness, position: int
) -> int:
    """Return the token after a prompt, from raw logits `[vocab]`. Its place is `position`.

    Raises `QuickbeamError` for NaN logits and `DeadEnd` if no token may come next.
    """
    if sampler.params.greedy:
        return sampler.best(logits)
    if randomness.noise is not None:
        return sampler.emitted(logits, randomness.noise, position)
    return draw(sampler.probs(logits), randomness.generator)


def accept(
    sampler: Sampler, tree: TokenTree, passed: Passed, randomness: Randomness, position: int
) -> Verdict:
    """Choose a path of the tree losslessly (`verify.py`).

    `position` is that of the token after the root. Distributions are made only for the nodes that
    verification visits.

    Raises `DeadEnd` if no token may come after the root. If that happens deeper in the tree, the
    path ends before that node: the answer may be over by then.
    """
    reached = 0

    def below_root(node: int) -> list[int]:
        nonlocal reached
        reached = node
        return tree.tokens(node)

    try:
        noise = None if sampler.params.greedy else randomness.noise
        if noise is not None or sampler.params.greedy:
            emitted = _emitted(sampler, tree, passed, noise, position, below_root)
            return verify_equal(tree, emitted)
        return verify_residual(
            tree,
            lambda node: sampler.probs(passed.logits[node], below_root(node)),
            randomness.generator,
        )
    except DeadEnd:
        if not reached:
            raise
        return Verdict(tree.path(reached)[:-1], tree.token[reached])


def _emitted(
    sampler: Sampler,
    tree: TokenTree,
    passed: Passed,
    noise: Noise | None,
    position: int,
    below_root: Callable[[int], list[int]],
) -> Callable[[int], int]:
    """Return what gives the token after a node: the one of the noise, or without it the best."""
    logits, params, known = passed.logits, sampler.params, None
    on_cpu = logits.device.type == "cpu"
    if noise is None:

        def one(node: int) -> int:
            return sampler.best(logits[node], below_root(node))

        if not params.adjusts_logits:
            known = passed.best  # the kernels have found them already
            if known is None and not on_cpu:
                known = most_probable(logits, refuse=False)
    else:

        def one(node: int) -> int:
            place = position + tree.depth[node]
            return sampler.emitted(logits[node], noise, place, below_root(node))

        if not params.adjusts_logits and not params.filters:
            if on_cpu:
                emitted = sampler.emitter(logits, noise)
                return lambda node: emitted(node, position + tree.depth[node])
            known = sampler.emitted_all(logits, noise, [position + depth for depth in tree.depth])
    if known is None:
        return one
    # Off the CPU one transfer serves the whole tree. -1 stands for logits that are not finite: an
    # error only where verification comes to the node.
    return lambda node: known[node] if known[node] >= 0 else one(node)
