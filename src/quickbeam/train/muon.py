"""Muon, an optimizer of matrices (Jordan, 2024), for all matrices of a shape at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from quickbeam.train.target import fast_bfloat16

MOMENTUM, EPS = 0.95, 1e-7
ROUNDS, A, B, C = 5, 3.4445, -4.7750, 2.0315  # of Newton and Schulz


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """Return about U V^T of each matrix U S V^T of `x` `[n, rows, columns]`; rows <= columns.

    Five rounds of Newton-Schulz, in bfloat16 where that is fast.
    """
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    x = x.bfloat16() if fast_bfloat16(x.device) else x
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


class Muon(torch.optim.Optimizer):
    """The steps of `torch.optim.Muon`, which makes 25 launches a matrix, in few launches.

    Those of its `adjust_lr_fn="match_rms_adamw"` (2502.16982, §2.2): a step has the size of one of
    AdamW. There is no weight decay. The states of the two are the same.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step. Every parameter has a gradient."""
        for group in self.param_groups:
            wide = defaultdict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]](list)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - MOMENTUM)
                update, tall = p.grad.lerp(momentum, MOMENTUM), p.shape[0] > p.shape[1]
                pair = (p.mT, update.mT) if tall else (p, update)
                wide[tuple(pair[0].shape)].append(pair)
            for shape, pairs in wide.items():
                updates = orthogonalized(torch.stack([update for _, update in pairs]))
                for (p, _), update in zip(pairs, updates, strict=True):
                    p.add_(update, alpha=-0.2 * group["lr"] * shape[1] ** 0.5)
