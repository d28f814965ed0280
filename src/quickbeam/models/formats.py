"""Which formats weights may have, and where."""

from __future__ import annotations

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.native.quantised import BFLOAT16, INT4, INT8


def check_weights(name: str) -> str:
    """Return `name` if it is a known format of weights.

    Raises `InvalidInput`, which names the known ones, if it is not.
    """
    if name not in (BFLOAT16, INT8, INT4):
        raise InvalidInput(f"unknown weights {name!r}; known: {BFLOAT16}, {INT8}, {INT4}")
    return name


def refuse_place(name: str, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise `InvalidInput` if a device or a number format can't have quantised weights.

    They need the CPU and bfloat16. `dtype` None stands for the default.
    """
    if name == BFLOAT16:
        return
    if device.type != "cpu":
        raise InvalidInput(
            f"weights={name!r} are for the CPU, the model is on {device.type}: "
            "leave weights out, or take device='cpu'"
        )
    if dtype not in (torch.bfloat16, None):
        kind = str(dtype).removeprefix("torch.")
        raise InvalidInput(
            f"weights={name!r} go with rows of bfloat16, not {kind}: leave dtype out, or weights"
        )


def head_format(name: str) -> str:
    """Return the format of a model's head if its other weights are `name`.

    Errors of the head are errors of the logits, so the head has at least 8 bits.
    """
    return INT8 if name == INT4 else name
