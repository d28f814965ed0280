"""The acceptance rules: which drafted tokens to keep so that the output has the target's own
distribution. Knows nothing of models.

**Equality.** The token that a place emits is known once the target's logits there are: its
likeliest at temperature 0, else that of `Sampler.emitted`, by the noise of the place. A drafted
token is accepted where it is that token (drafter-invariant sampling, 2408.07978). The answer is
then a function of model, prompt, parameters and seed. So trees may be chosen with the noise in
hand.

**Residual.** The papers' own rule, for children that were drawn with noise of their own. Noise that
the answer is drawn with must not be used for them: what they are would then tell what the target is
going to emit, and this rule counts on their being independent.

At a node with target distribution `p` and children y1..yk, where yi was proposed from a
distribution Qi that depends only
on tokens drawn before it:

    R = p for i in 1..k: accept yi with probability min(1, R[yi] / Qi[yi]); otherwise R =
    normalise(max(R - Qi, 0)) no child accepted: emit a token drawn from R

(DySpec, Algorithm 3; SpecInfer and Sequoia use the same rule.) A deterministic proposal has all of
Qi on yi. A drawn one has Qi = the drafter's distribution with the tokens of all earlier siblings
struck out, renormalised: drawn without replacement.

Where all children are deterministic, the rule comes down to: draw the token from p, and follow the
child that holds it if there is one. Done that way, each emitted token takes one random number
whatever the tree was, so a seed gives plain decoding's own answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from quickbeam.sampling import draw, uniform
from quickbeam.tree import TokenTree


class Verdict(NamedTuple):
    path: list[int]  # the accepted nodes, the root first
    token: int  # emitted after the last of them, by the target itself


def verify_equal(tree: TokenTree, emitted: Callable[[int], int]) -> Verdict:
    """Follow the emitted tokens down the tree. `emitted(node)` is the token that stands after
    `node`; only accepted nodes are asked for."""
    path = [0]
    while True:
        token = emitted(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def verify_residual(
    tree: TokenTree, law: Callable[[int], torch.Tensor], generator: torch.Generator
) -> Verdict:
    """Accept along one path so that the emitted tokens have the target's distribution, whatever was
    drafted.

    `law(node)` is the target's distribution `[vocab]` of the token after `node`; only accepted
    nodes are asked for. The tree's draft distributions are `[vocab]` too, and may lie on another
    device. `generator` gives one uniform number for each token emitted; where there are drawn
    children, one for each child tried and one for the token that ends the path.
    """
    path = [0]
    while True:
        p = law(path[-1])
        if all(tree.law[child] is None for child in tree.children[path[-1]].values()):
            token = draw(p, generator)
            if (accepted := tree.child(path[-1], token)) is None:
                return Verdict(path, token)
            path.append(accepted)
            continue
        child, residual = _first_accepted(tree, path[-1], p, generator)
        if child is None:
            # R runs out of mass only where R = Q up to rounding and rounding rejected the child: p
            # itself is as good an answer.
            return Verdict(path, draw(residual if residual.any() else p, generator))
        path.append(child)


def _first_accepted(
    tree: TokenTree, node: int, p: torch.Tensor, generator: torch.Generator
) -> tuple[int | None, torch.Tensor]:
    """The first accepted child of `node`, or None, and what is left of R `[vocab]`, not normalised.

    The tokens of all earlier siblings have R = 0: a certain one is struck out when rejected, and a
    drawn one is rejected only where R[y] < Q[y]. So a rejected certain proposal costs a subtraction
    from the mass of R, and R itself is brought up to date only when needed.
    """
    children = tree.children[node]
    if not children:
        return None, p
    tokens = torch.tensor(list(children), device=p.device)
    # R = residual / mass, with the tokens of earlier siblings at 0
    residual, mass = p, float(p.sum(dtype=torch.float64))
    left = residual[tokens].tolist()
    for i, (token, child) in enumerate(children.items()):
        law = tree.law[child]
        q = None if law is None else _normalised(law.to(p).index_fill(0, tokens[:i], 0.0))
        chance = 1.0 if q is None else float(q[token])
        # a draw that its law rules out can only come from rounding: it counts as a certain proposal
        if not chance > 0:
            q, chance = None, 1.0
        if uniform(generator) * chance * mass < left[i]:
            return child, residual
        if q is None:
            mass -= left[i]
        else:
            residual = _normalised(residual.index_fill(0, tokens[:i], 0.0))
            residual = _normalised((residual - q).clamp_(min=0.0))
            mass, left = 1.0, residual[tokens].tolist()
    return None, residual.index_fill(0, tokens, 0.0)


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """Weights as a law; zeros stay zeros."""
    return weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
