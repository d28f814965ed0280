"""Muon, an optimizer of matrices (Jordan, 2024), for all matrices of a shape at once.

The rows of a large matrix are made orthogonal block by block, as in MuonBP (2510.16981). That takes
less time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from quickbeam.drafters.loss import fast_bfloat16

MOMENTUM = 0.95
EPS = 1e-7
STEP_SIZE = 0.2  # the root mean square of an AdamW step, as a part of its learning rate
BLOCK_ROWS = 144  # that are made orthogonal together, at most
# Rounds of Newton and Schulz. After the first ones their product is multiplied out, since rounding
# grows with every round.
ROUNDS = (3, 2)
# x becomes p x, with p = A + B g + C g g and g = x x^T
A = 3.4445
B = -4.7750
C = 2.0315


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """Return about U V^T of each matrix U S V^T of `x` `[n, rows, columns]`; rows <= columns.

    This takes five rounds of Newton-Schulz, in bfloat16 where that is fast. All p are polynomials
    of the first g. So the g of the next round is p g p, and several rounds are one product with
    `x`, which takes half the time where rows are few beside columns.
    """
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    x = x.bfloat16() if fast_bfloat16(x.device) else x
    for rounds in ROUNDS:
        gram = x @ x.mT
        product = polynomial = _polynomial(gram)
        for _ in range(rounds - 1):
            gram = polynomial @ gram @ polynomial
            polynomial = _polynomial(gram)
            product = polynomial @ product
        x = product @ x
    return x


def _polynomial(gram: torch.Tensor) -> torch.Tensor:
    result = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
    result.diagonal(dim1=1, dim2=2).add_(A)
    return result


def _block_rows(rows: int) -> int:
    """Return the rows of a block: as many as fit into `BLOCK_ROWS`, in blocks of the same size."""
    return next(size for size in range(BLOCK_ROWS, 0, -1) if rows % size == 0)


class WideUpdate(NamedTuple):
    """A matrix and its update, both transposed where there are more rows than columns."""

    matrix: torch.Tensor
    update: torch.Tensor


class Muon(torch.optim.Optimizer):
    """The steps of `torch.optim.Muon`, which makes 25 launches a matrix, in few launches.

    Each block of rows has the step of a matrix of its own (columns, where those are fewer).

    The steps are those of its `adjust_lr_fn="match_rms_adamw"` (2502.16982, §2.2): a step has the
    size of one of AdamW. There is no weight decay. The states of the two optimizers are the same.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step. Every parameter has a gradient."""
        for group in self.param_groups:
            by_shape = defaultdict[tuple[int, ...], list[WideUpdate]](list)
            for parameter in group["params"]:
                pair = self._wide_update(parameter)
                by_shape[tuple(pair.matrix.shape)].append(pair)
            for (rows, columns), pairs in by_shape.items():
                wide = torch.stack([pair.update for pair in pairs])
                blocks = wide.view(-1, _block_rows(rows), columns)
                updates = orthogonalized(blocks).view_as(wide)
                alpha = -STEP_SIZE * group["lr"] * columns**0.5
                for pair, update in zip(pairs, updates, strict=True):
                    pair.matrix.add_(update, alpha=alpha)

    def _wide_update(self, parameter: torch.nn.Parameter) -> WideUpdate:
        """Move a parameter's momentum, and return the parameter with its update."""
        state = self.state[parameter]
        gradient = parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(momentum, MOMENTUM)
        rows, columns = parameter.shape
        if rows > columns:
            return WideUpdate(parameter.mT, update.mT)
        return WideUpdate(parameter, update)
