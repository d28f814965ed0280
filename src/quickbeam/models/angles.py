"""Rotary angles of a `Stack`, from the modules of the model.

So every way of scaling them that doesn't change with the text's length is right.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from quickbeam.models.stack import Rotary, Stack
from quickbeam.models.stack_tensors import query_factors

STEP = 1024  # a table grows by so many positions


def angles(
    rotary: Rotary, module: nn.Module, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of `positions` `[n]`, `[n, half]` float32 each."""
    kind = () if rotary.kind is None else (rotary.kind,)
    both = module(torch.empty(1, dtype=torch.float32), positions[None], *kind)
    if rotary.once:
        cosine, sine = (part[0] for part in both)
    elif rotary.repeated:
        cosine, sine = (part[0, :, ::2] for part in both)
    else:
        cosine, sine = (part[0, :, : part.shape[-1] // 2] for part in both)
    return cosine, sine


class AngleTable:
    """Cosines and sines of all kinds of layers side by side, by position.

    `columns`: where each kind of angles begins. `end`: where all end; there the cosines have the
    queries' factor.
    """

    def __init__(self, model: PreTrainedModel, stack: Stack) -> None:
        self._modules = [(rotary, model.get_submodule(rotary.module)) for rotary in stack.rotaries]
        self._scale = stack.query_scale
        turned = [one for one in stack.attentions if one.rotary is not None]
        halves = {one.rotary: one.turned // 2 for one in turned if one.rotary is not None}
        self.columns, self.end = dict[Rotary, int](), 0
        for rotary, half in halves.items():
            self.columns[rotary], self.end = self.end, self.end + half
        self._table = (torch.empty(0, 1), torch.empty(0, 1))

    def up_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[positions, columns]` each, at least up to `position`."""
        if position >= len(self._table[0]):
            positions = torch.arange((position // STEP + 1) * STEP)
            parts = [angles(rotary, module, positions) for rotary, module in self._modules]
            factors = torch.ones(len(positions), 1)
            if self._scale is not None:
                factors = query_factors(self._scale, positions)[:, None]
            cosine, sine = (torch.cat([*(part[k] for part in parts), factors], 1) for k in (0, 1))
            self._table = cosine.contiguous(), sine.contiguous()
        return self._table
