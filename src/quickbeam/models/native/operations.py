"""Operations of a program that only some models have: latent attention, experts, gates.

`program.py` has those that all have.
"""

from __future__ import annotations

from typing import Any

import torch

from quickbeam.models.native import library
from quickbeam.models.native.operands import KVShape
from quickbeam.models.native.program import Buffer, Program, in_float32, place
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


def latent(
    program: Program,
    queries: Buffer,
    rest: Buffer,
    small: Buffer,
    query: Buffer,
    heads: int,
    shape: KVShape,
    offset: int,
    *,
    turned: int,
    column: int,
    angles: int,
    interleaved: bool,
) -> None:
    """The same as `heads` for a latent attention, from float32 buffers.

    `queries`: head by head. `rest`: of each head, what doesn't turn of its key, and its value.
    `small`: from `column` on, what turns of all heads' keys. `turned`: how many dimensions, the
    last of a head.
    """
    program.add(
        library.LATENT,
        queries,
        query,
        key=rest.index,
        key_stride=rest.width,
        value=small.index,
        value_stride=small.width,
        value_head=column,
        heads=heads,
        **place(shape, offset),
        rotary=turned,
        angles=angles,
        interleaved=interleaved,
    )


def experts(
    program: Program,
    experts: library.Experts,
    format: int,
    source: Buffer,
    scores: Buffer,
    routes: Buffer,
    inner: Buffer,
    target: Buffer,
    *,
    activation: str,
    limit: float = 0.0,
    slope: float = 1.0,
) -> None:
    """A feed-forward of experts, to a float32 target.

    `format`: of their weights but the last ones. `scores`: the router's float32 results. `routes`:
    float32, two numbers for each of a row's experts. `inner`: like the source, what a row's experts
    have inside, one beside the other.
    """
    program.add(
        library.EXPERTS,
        source,
        target,
        inputs=source.width,
        outputs=target.width,
        format=format,
        key=scores.index,
        value=routes.index,
        best=inner.index,
        experts=experts,
        first_expert=-1,
        last_expert=experts.count + 1,
        activation=library.ACTIVATIONS.index(activation),
        softcap=limit,
        scaling=slope,
    )


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


def learned_positions(program: Program, weight: torch.Tensor, target: Buffer) -> None:
    """Add the positions' rows of `weight` (`[positions, d]`) to a float32 target."""
    program.add(
        library.EMBED,
        None,
        target,
        weight=weight,
        inputs=weight.shape[1],
        scaling=1.0,
        source_float=weight.dtype is torch.float32,
        epilogue=library.ADD,
    )
