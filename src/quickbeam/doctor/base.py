"""A finding: one line on one thing, and what to do about it. Imports the standard library alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"
WEIGHT_BYTES = 269_000_000  # of the default model in bfloat16


@dataclass(frozen=True)
class Finding:
    """What a check found. `status`: `ok`; `note`, which costs speed or a feature; `problem`, which
    keeps models from running. `todo`: one line, empty where there is nothing to do. `data`: the
    figures behind the words, as JSON has them."""

    check: str
    status: str
    text: str
    todo: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[], Finding]


def look(name: str, check: Check) -> Finding:
    """What a check finds. One that fails, for whatever is missing, is a note."""
    try:
        return check()
    except Exception as error:
        said = str(error).strip().splitlines()
        return Finding(
            name,
            NOTE,
            f"can't be told here ({type(error).__name__}{f': {said[0]}' if said else ''})",
        )
