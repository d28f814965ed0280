"""What of this machine makes quickbeam slow, inexact or unable to run, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from quickbeam import __version__
from quickbeam.doctor.base import PROBLEM, Finding, look

CHECKS = {  # by name, the module that has `check_…`; the load is looked at before anything works
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
    """All checks, one after the other; `progress` hears the name of each before it begins. Takes a
    few seconds, compiles and pulls nothing, and raises nothing for what is missing."""
    for name, module in CHECKS.items():
        progress(name)
        yield look(name, partial(_check, module, name))


def _check(module: str, name: str) -> Finding:
    """Imported when it is looked at: a package that is missing costs one finding."""
    found = getattr(import_module(f"{__name__}.{module}"), f"check_{name}")()
    assert isinstance(found, Finding)
    return found


def can_run(found: Sequence[Finding]) -> bool:
    """Whether nothing keeps models from running."""
    return all(finding.status != PROBLEM for finding in found)


def record(found: Sequence[Finding]) -> dict[str, Any]:
    """The findings as `quickbeam doctor --json` prints them."""
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
