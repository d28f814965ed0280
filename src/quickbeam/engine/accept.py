"""From logits to accepted tokens, for one sequence."""

from __future__ import annotations

import torch

from quickbeam.sampling import Sampler, draw, most_probable
from quickbeam.target.batch import Passed
from quickbeam.tree import TokenTree
from quickbeam.verify import Verdict, verify_greedy, verify_sampled


def first_token(sampler: Sampler, logits: torch.Tensor, generator: torch.Generator) -> int:
    """The token after a prompt, from raw logits `[vocab]`."""
    if sampler.params.greedy:
        return sampler.best(logits)
    return draw(sampler.law(logits), generator)


def accept(sampler: Sampler, tree: TokenTree, passed: Passed, generator: torch.Generator) -> Verdict:
    """The lossless choice of a path (`verify.py`). Laws are made for the nodes it visits only."""
    logits = passed.logits

    def below_root(node: int) -> list[int]:
        return [tree.token[i] for i in tree.path(node)[1:]]

    if not sampler.params.greedy:
        return verify_sampled(tree, lambda node: sampler.law(logits[node], below_root(node)), generator)
    if not sampler.params.adjusts_logits:
        if (known := passed.best) is not None:  # the kernels found them on the way; -1 stands for logits that are not finite
            return verify_greedy(tree, lambda node: known[node] if known[node] >= 0 else sampler.best(logits[node]))
        if logits.device.type != "cpu":  # one transfer for the whole tree
            return verify_greedy(tree, most_probable(logits).__getitem__)
    return verify_greedy(tree, lambda node: sampler.best(logits[node], below_root(node)))
