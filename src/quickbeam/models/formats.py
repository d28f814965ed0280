"""Which formats numbers and weights may have, and where."""

from __future__ import annotations

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.native.quantised import BFLOAT16, INT4, INT8

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
AUTO = "auto"  # the dtype that a checkpoint's own configuration names


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name. Raises `InvalidInput` naming the known ones."""
    if name not in DTYPES:
        raise InvalidInput(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def wanted_dtype(name: str) -> torch.dtype | None:
    """Return the dtype that a model is loaded in, for a name: None for `auto`.

    Raises `InvalidInput` naming the known ones.
    """
    if name not in (AUTO, *DTYPES):
        raise InvalidInput(f"unknown dtype {name!r}; known: {AUTO}, {', '.join(DTYPES)}")
    return DTYPES.get(name)


def pick_device(name: str | None) -> torch.device:
    """Return the device `name`, or for None CUDA where there is one, else the CPU.

    Raises `InvalidInput` for a device that can't be used.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(
            f"device {name!r} can't be used: {str(error).splitlines()[0]}"
        ) from error
    return device


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
