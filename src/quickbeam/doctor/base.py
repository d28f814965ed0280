"""A finding: one line about one thing, and what to do about it.

Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"
WEIGHT_BYTES = 269_000_000  # of the default model in bfloat16


@dataclass(frozen=True)
class Finding:
    """What a check found.

    `status` is `ok`, `note` (it costs speed or a feature) or `problem` (it keeps models from
    running). `todo` is one line that says what to do; it is empty if there is nothing to do. `data`
    holds the figures behind the text, in JSON's types.
    """

    check: str
    status: str
    text: str
    todo: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[], Finding]


def look(name: str, check: Check) -> Finding:
    """Run a check, and return its finding.

    If the check raises an error, because something is missing for example, the finding is a note.
    """
    try:
        return check()
    except Exception as error:
        said = str(error).strip().splitlines()
        return Finding(
            name,
            NOTE,
            f"can't be told here ({type(error).__name__}{f': {said[0]}' if said else ''})",
        )
