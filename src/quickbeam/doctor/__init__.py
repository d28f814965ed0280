"""Checks for what makes quickbeam slow, inexact or unable to run on this machine.

Each finding says what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from quickbeam import __version__
from quickbeam.doctor.base import PROBLEM, Finding, look

CHECKS = {  # name of a check: the module with its `check_…`. The load comes before checks cause any
    "load": "machine",
    "cpu": "machine",
    "memory": "machine",
    "bandwidth": "machine",
    "threads": "machine",
    "gpu": "software",
    "kernels": "models",
    "exactness": "models",
    "python": "software",
    "packages": "software",
    "extras": "software",
    "cache": "models",
    "disk": "models",
    "model": "models",
}


def findings(progress: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
    """Run all checks one after the other, and yield their findings.

    `progress` is called with the name of each check before the check begins. All checks together
    take a few seconds. They compile and download nothing, and raise nothing if something is
    missing.
    """
    for name, module in CHECKS.items():
        progress(name)
        yield look(name, partial(_check, module, name))


def _check(module: str, name: str) -> Finding:
    """Run a check. Its module is imported only now, so a missing package costs one finding only."""
    found = getattr(import_module(f"{__name__}.{module}"), f"check_{name}")()
    assert isinstance(found, Finding)
    return found


def can_run(found: Sequence[Finding]) -> bool:
    """Whether no finding keeps models from running."""
    return all(finding.status != PROBLEM for finding in found)


def record(found: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as `quickbeam doctor --json` prints them."""
    return {
        "quickbeam": __version__,
        "can_run": can_run(found),
        "findings": [
            {
                "check": one.check,
                "status": one.status,
                "text": one.text,
                "todo": one.todo,
                "data": dict(one.data),
            }
            for one in found
        ],
    }
