"""The operations of what a drafter's rows read besides tokens (`stack.HiddenInput`, `Fusion`)."""

from __future__ import annotations

from quickbeam.models.compile.compiler import StackCompiler
from quickbeam.models.native.program import Buffer
from quickbeam.models.stack import Fusion, HiddenInput


def add_fusion(c: StackCompiler, fusion: Fusion, states: Buffer, target: Buffer) -> None:
    """Add what makes a vector in the float32 `target` of hidden states side by side."""
    if fusion.norms:
        normalised = c.buffer("normalised states", states.width)
        for i, norm in enumerate(fusion.norms):
            first = i * fusion.width
            c.norm(norm, states, normalised, width=fusion.width, source_column=first, column=first)
        states = normalised
    if fusion.norm is not None:
        normalised = c.buffer("normalised together", states.width)
        c.norm(fusion.norm, states, normalised)
        states = normalised
    if fusion.after is None:
        c.product(fusion.linear, states, target)
    else:
        c.product(fusion.linear, states, c.result)
        c.norm(fusion.after, c.result, target)


def add_hidden_input(
    c: StackCompiler, hidden_input: HiddenInput, token: Buffer | None, states: Buffer
) -> Buffer | None:
    """Add the residual stream of tokens and `states`, both float32.

    Returns the buffer that the first layer's attention reads, None where that is the normed stream.
    """
    if token is None:
        c.program.copy(states, c.x)
        return None
    both = c.buffer("token and state", token.width + states.width)
    token_at, state_at = (0, token.width)
    if hidden_input.state_first:
        token_at, state_at = (states.width, 0)
    for norm, source, column in (
        (hidden_input.token_norm, token, token_at),
        (hidden_input.state_norm, states, state_at),
    ):
        if norm is None:
            c.program.copy(source, both, column=column)
        else:
            c.norm(norm, source, both, column=column)
    if hidden_input.join is not None:
        c.product(hidden_input.join, both, c.x)
        return None
    if hidden_input.norm_residual:
        c.norm(hidden_input.state_norm, states, c.x)
    else:
        c.program.copy(states, c.x)
    return both
