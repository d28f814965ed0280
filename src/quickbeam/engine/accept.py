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
        return _verdict(sampler, tree, passed, randomness, position, below_root)
    except DeadEnd:
        if not reached:
            raise
        return Verdict(tree.path(reached)[:-1], tree.token[reached])


def _verdict(
    sampler: Sampler,
    tree: TokenTree,
    passed: Passed,
    randomness: Randomness,
    position: int,
    below_root: Callable[[int], list[int]],
) -> Verdict:
    logits, noise = passed.logits, randomness.noise
    if not sampler.params.greedy:
        if noise is None:
            return verify_residual(
                tree,
                lambda node: sampler.probs(logits[node], below_root(node)),
                randomness.generator,
            )
        plain = not sampler.params.adjusts_logits and not sampler.params.filters
        if plain and logits.device.type == "cpu":
            emitted = sampler.emitter(logits, noise)
            return verify_equal(tree, lambda node: emitted(node, position + tree.depth[node]))
        if plain:
            every = sampler.emitted_all(logits, noise, [position + depth for depth in tree.depth])
            return verify_equal(
                tree,
                lambda node: (
                    every[node]
                    if every[node] >= 0
                    else sampler.emitted(logits[node], noise, position + tree.depth[node])
                ),
            )
        return verify_equal(
            tree,
            lambda node: sampler.emitted(
                logits[node], noise, position + tree.depth[node], below_root(node)
            ),
        )
    if not sampler.params.adjusts_logits:
        # The kernels already found the most probable tokens; off the CPU one transfer serves the
        # whole tree. -1 stands for logits that are not finite: an error only where verification
        # comes to the node.
        known = passed.best
        if known is None and logits.device.type != "cpu":
            known = most_probable(logits, refuse=False)
        if known is not None:
            return verify_equal(
                tree, lambda node: known[node] if known[node] >= 0 else sampler.best(logits[node])
            )
    return verify_equal(tree, lambda node: sampler.best(logits[node], below_root(node)))
