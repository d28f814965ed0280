"""Operations of a program that only some models have: products in parts, gates, chosen blocks.

`program.py` has those that all have.
"""

from __future__ import annotations

from typing import Any

import torch

from quickbeam.models.native import library
from quickbeam.models.native.program import Buffer, Program, in_float32
from quickbeam.models.native.quantised import Packed, SplitPacked


def product(
    program: Program,
    packed: Any,
    source: Buffer,
    target: Buffer,
    epilogue: int = library.STORE,
    *,
    column: int = 0,
    **more: Any,
) -> None:
    """A product with weights of one format, or of several (`SplitPacked`), one after the other.

    The other arguments are those of `Program.linear`; weights of several formats take no `best`.
    """
    if not isinstance(packed, SplitPacked):
        program.linear(packed, source, target, epilogue, column=column, **more)
    elif not packed.gated:
        for part in packed.parts:
            program.linear(part, source, target, epilogue, column=column, **more)
            column += part.outputs
    else:
        gates, rest = (program.buffer(part.outputs, True) for part in packed.parts)
        for part, made in zip(packed.parts, (gates, rest), strict=True):
            program.linear(part, source, made)
        gate(program, rest, gates, target, 1, rest.width, **more)


def gate(
    program: Program,
    source: Buffer,
    gates: Buffer,
    target: Buffer,
    groups: int,
    width: int,
    *,
    of: int = 0,
    gates_of: int = 0,
    activation: str = "silu",
    scaling: float = 1.0,
    weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    norm_last: bool = False,
    one: bool = False,
) -> None:
    """Write `activation(gates * scaling) * source` to the target.

    There are `groups` of `width` columns.

    `weight`: of an RMS norm of each group, before the gates or with `norm_last` after them;
    `[width]`, or `[groups * width]`. `gates_of`: the first column of the gates, float32. `one`:
    each group has one gate.
    """
    program.add(
        library.GATE,
        source,
        target,
        key=gates.index,
        key_stride=gates.width,
        key_head=gates_of,
        heads=groups,
        inputs=width,
        outputs=1 if one else width,
        source_offset=of,
        activation=library.ACTIVATIONS.index(activation),
        scaling=scaling,
        weight=in_float32(weight),
        norm_stride=0 if weight is None or weight.numel() == width else width,
        epsilon=epsilon,
        norm_last=norm_last,
    )


def chosen(program: Program, packed: Packed, source: Buffer, target: Buffer) -> None:
    """A product with only those blocks of outputs that the call names (`blocks` of `run`).

    Their results stand side by side in the target, whose `target_stride` has to be `set` first.
    The weight's outputs are a multiple of `BLOCK`.
    """
    if packed.order is not None:
        source = program.reordered(packed.order, source)
    program.add(
        library.CHOSEN,
        source,
        target,
        weight=packed.data,
        bias=packed.bias,
        inputs=packed.inputs,
        outputs=packed.outputs,
        format=packed.format,
    )
