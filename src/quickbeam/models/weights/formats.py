"""Which number formats a model and its weights may have, and where."""

from __future__ import annotations

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.native import library
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.quantised import BFLOAT16, FLOAT32, INT4, INT8

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
AUTO = "auto"  # the dtype that a checkpoint's own configuration names


def wanted_dtype(name: str | torch.dtype) -> torch.dtype | None:
    """Return the dtype that a model is loaded in, for a name or a dtype: None for `auto`.

    Raises `InvalidInput`, which names the accepted ones.
    """
    name = str(name).removeprefix("torch.") if isinstance(name, torch.dtype) else name
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
            f"device {name!r} can't be used: give 'cpu', or 'cuda' where there is a GPU "
            f"({str(error).splitlines()[0]})"
        ) from error
    return device


def check_weights(name: str) -> str:
    """Return `name` if it is a format of weights. Raises `InvalidInput` for another name."""
    if name not in (BFLOAT16, INT8, INT4):
        raise InvalidInput(f"unknown weights {name!r}; known: {BFLOAT16}, {INT8}, {INT4}")
    return name


def refuse_place(name: str, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise `InvalidInput` if a device or a number format can't have quantised weights.

    Quantised weights need the CPU and bfloat16. `dtype` None stands for the default.
    """
    if name == BFLOAT16:
        return
    if device.type != "cpu":
        raise InvalidInput(
            f"weights={name!r} are for the CPU, the model is on {device.type}: "
            "leave weights out, or take device='cpu'"
        )
    if dtype not in (torch.bfloat16, None):
        dtype_name = str(dtype).removeprefix("torch.")
        raise InvalidInput(
            f"weights={name!r} go with rows of bfloat16, not {dtype_name}: leave dtype out, or "
            "weights"
        )


def refuse_memory(device: torch.device, dtype: torch.dtype | None, kernels: Kernels | None) -> None:
    """Raise `InvalidInput` if no model's weights could be streamed under these settings.

    CUDA can stream weights. A CPU needs `kernels` to, and a `dtype` that the kernels run (or
    none).
    """
    if device.type == "cuda":
        return
    if device.type != "cpu":
        raise InvalidInput(
            f"memory is for a CPU or CUDA, not for {device.type}: leave memory out, "
            "or take device='cpu'"
        )
    if dtype not in (torch.bfloat16, torch.float32, None):
        raise InvalidInput(
            "memory goes with bfloat16 or float32, not "
            f"{str(dtype).removeprefix('torch.')}: leave dtype out, or memory"
        )
    if kernels is None:
        raise InvalidInput(
            f"memory needs the native kernels, and {library.describe()} are used "
            "here; leave memory out"
        )


def weights_format(name: str, dtype: torch.dtype) -> str:
    """Return the format of the weights that products read, where `name` is asked for.

    `dtype`: the model's. Weights that keep every bit have the same.
    """
    return FLOAT32 if dtype is torch.float32 and name == BFLOAT16 else name


def head_format(name: str) -> str:
    """Return the format of a model's head if its other weights are `name`.

    Errors of the head are errors of the logits, so the head has at least 8 bits.
    """
    return INT8 if name == INT4 else name
