"""PyTorch's inference mode, entered once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def inference(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run in inference mode, as `torch.inference_mode()` does.

    Where that mode is on already, nothing is done. Functions that call each other would otherwise
    enter it several times a step, and entering it takes longer than some of them do.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
