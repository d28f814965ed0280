"""The two acceptance rules, which decide the drafted tokens that stay.

Both are lossless: each yields the distribution of plain decoding. Equality is the default;
`SamplingParams(coupling="residual")` selects the residual rule. Nothing here knows of models.

**Equality** (`verify_equal`, coupled sampling). The target's logits at a position decide the token
emitted there. At temperature 0 it is the most probable token. Otherwise it is the token of
`Sampler.emitted`, which uses the noise of the position. A drafted token is accepted if it is that
token (drafter-invariant sampling, 2408.07978). The answer then depends only on model, prompt,
parameters and seed. So a draft tree may be chosen in any way, even by looking at the noise.

**Residual rule** (`verify_residual`). This is the rule of the papers. It is for children that were
drawn with other random numbers than the noise that chooses the answer. With that noise, children
would depend on the token that the target emits, which the rule forbids.

At a node with target distribution `p` and children y1..yk, each yi was proposed from a distribution
Qi that depends only on tokens drawn before yi:

    R = p
    for i in 1..k:
        with probability min(1, R[yi] / Qi[yi]): accept yi and go on at its node
        otherwise: R = normalise(max(R - Qi, 0))
    if no child was accepted: emit a token drawn from R, and stop

This is Algorithm 3 of DySpec (2410.11744). SpecInfer and Sequoia use the same rule. For a
deterministic proposal, all of Qi is on yi. For a drawn child, Qi is the drafter's distribution
without the tokens of all earlier siblings, renormalised: children are drawn without replacement.

If all children are deterministic proposals, the rule amounts to this: draw a token from p, and
follow the child that holds it if there is one. `verify_residual` does exactly that in this case.
Each emitted token then takes one random number, whatever the tree was. So a seed gives the answer
of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from quickbeam.sampling import draw, uniform
from quickbeam.tree import TokenTree


class Verdict(NamedTuple):
    path: list[int]  # the accepted nodes, from the root down
    token: int  # the token that the target emits after the last accepted node


def verify_equal(tree: TokenTree, emitted: Callable[[int], int]) -> Verdict:
    """Follow the emitted tokens down the tree from the root, as long as a child holds the next one.

    `emitted(node)` returns the token after `node`. It is called for the root and accepted nodes.
    """
    path = [0]
    while True:
        token = emitted(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def verify_residual(
    tree: TokenTree, probs: Callable[[int], torch.Tensor], generator: torch.Generator
) -> Verdict:
    """Accept one path by the residual rule.

    The emitted tokens have the target's distribution, whatever was drafted.

    `probs(node)` returns the target's distribution `[vocab]` over the token after `node`. It is
    called for accepted nodes only, the root included. The draft distributions in `tree.probs` are
    `[vocab]` too and may be on another device.

    `generator` gives the uniform random numbers. A node without drawn children takes one number. A
    node with drawn children takes one for each child that is tried, and one more for the emitted
    token if none is accepted.
    """
    path = [0]
    while True:
        node = path[-1]
        p = probs(node)
        children = tree.children[node]
        if all(tree.probs[child] is None for child in children.values()):
            token = draw(p, generator)
            accepted = children.get(token)
        else:
            accepted, residual = _first_accepted(tree, node, p, generator)
            if accepted is None:
                # R is all zeros only where R = Q up to rounding and rounding rejected the child.
                # Then p itself serves as well.
                token = draw(residual if residual.any() else p, generator)
        if accepted is None:
            return Verdict(path, token)
        path.append(accepted)


def _first_accepted(
    tree: TokenTree, node: int, p: torch.Tensor, generator: torch.Generator
) -> tuple[int | None, torch.Tensor]:
    """Return the first accepted child of `node`, or None, and R `[vocab]` as it is then."""
    residual = _normalised(p.double())
    earlier = list[int]()  # tokens of the siblings that were rejected
    for token, child in tree.children[node].items():
        q = _proposal(tree.probs[child], token, earlier, residual)
        if uniform(generator) * float(q[token]) < float(residual[token]):
            return child, residual
        residual = _normalised((residual - q).clamp_(min=0.0))
        earlier.append(token)
    return None, residual


def _proposal(
    probs: torch.Tensor | None, token: int, earlier: list[int], like: torch.Tensor
) -> torch.Tensor:
    """Return the distribution that a child was proposed from, after siblings with `earlier` tokens.

    The distribution has the shape, dtype and device of `like`. A drawn token of probability 0,
    which only rounding can draw, is treated as a deterministic proposal.
    """
    if probs is not None:
        removed = torch.tensor(earlier, dtype=torch.long, device=like.device)
        q = probs.to(like.device).to(like.dtype)
        q = _normalised(q.index_fill(0, removed, 0.0))
        if q[token] > 0:
            return q
    index = torch.tensor([token], device=like.device)
    return torch.zeros_like(like).index_fill_(0, index, 1.0)


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """Return `weights` divided by their sum; all zeros stay zeros."""
    return weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
