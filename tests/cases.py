"""Which combinations of parameters every change is tested with."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def spread(*values: Sequence[Any]) -> list[Any]:
    """All combinations. A few in which each value occurs, evenly mixed, are run by `make test`; the others are `long`."""
    most = max(map(len, values)) if all(values) else 0
    return few(
        itertools.product(*values),
        [tuple(some[(i + i // len(some) * place) % len(some)] for place, some in enumerate(values)) for i in range(most)],
    )


def few(every: Any, kept: Collection[Any]) -> list[Any]:
    """All of them; those that are not `kept` are `long`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in every]
    kept = [case if isinstance(case, tuple) else (case,) for case in kept]
    assert all(case in cases for case in kept), kept
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.long) for case in cases]
