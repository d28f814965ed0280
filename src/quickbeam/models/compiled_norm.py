"""A norm on the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quickbeam.models.native.program import Buffer, Program
from quickbeam.models.stack import Norm
from quickbeam.models.stack_tensors import norm_weight


class CompiledNorm:
    """A norm's numbers in float32."""

    def __init__(self, norm: Norm, parameter: Callable[[str], torch.Tensor]) -> None:
        self.weight = norm_weight(norm, parameter)
        self.bias = None if norm.bias is None else parameter(norm.bias).detach().float().clone()
        self.epsilon, self.centred = norm.epsilon, norm.centred

    def add(self, program: Program, source: Buffer, target: Buffer, **more: Any) -> None:
        """Add the norm to a program. `more`: as of `Program.norm`."""
        program.norm(
            source,
            target,
            self.weight,
            self.epsilon,
            bias=self.bias,
            centred=self.centred,
            **more,
        )


def add_norm(program: Program, source: Buffer, target: Buffer, norm: CompiledNorm | None) -> None:
    """Add a norm to a program, or a copy where there is none."""
    if norm is None:
        program.copy(source, target)
    else:
        norm.add(program, source, target)
