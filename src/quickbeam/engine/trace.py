"""Traces: what every step drafted and what was accepted, kept to be looked at afterwards.

This module knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quickbeam.engine.result import Completion
from quickbeam.errors import InvalidInput
from quickbeam.tree import TokenTree

FORMAT, VERSION = "quickbeam trace", 1
NUMBER = (int, float)
# what records hold: by name the type of a field, the fields of an object, or the entries of a list
TOKEN: dict[str, Any] = {"token": int, "text": str}
NODE = {**TOKEN, "parent": int, "depth": int, "source": str, "value": NUMBER, "accepted": bool}
STEP: dict[str, Any] = {
    **{"nodes": [NODE], "next": TOKEN, "emitted": int},
    **dict.fromkeys(("draft_seconds", "verify_seconds", "seconds"), NUMBER),
}
ANSWER: dict[str, Any] = {
    **dict.fromkeys(("text", "finish_reason", "model", "method"), str),
    **{"new_tokens": int, "mean_accepted_tokens": NUMBER, "tokens_per_second": NUMBER},
}


class StepRecord(NamedTuple):
    """One step of a sequence."""

    tree: TokenTree
    path: list[int]  # the accepted nodes, the root first
    token: int  # the token that the target emitted after the last of them
    # the accepted tokens and `token`, as far as the answer took them: less than all where it ended
    emitted: list[int]
    draft_seconds: float
    verify_seconds: float
    seconds: float  # of the whole step


class Trace:
    """An observer that keeps an answer's steps."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []

    def __call__(self, record: StepRecord) -> None:
        tree, accepted = record.tree, set(record.path)
        columns = zip(tree.token, tree.parent, tree.depth, tree.source, tree.value, strict=True)
        nodes = [
            {
                "token": token,
                "parent": parent,
                "depth": depth,
                "source": source,
                "value": float(value),
                "accepted": node in accepted,
            }
            for node, (token, parent, depth, source, value) in enumerate(columns)
        ]
        self._steps.append(
            {
                "nodes": nodes,
                "next": {"token": record.token},
                "emitted": len(record.emitted),
                "draft_seconds": record.draft_seconds,
                "verify_seconds": record.verify_seconds,
                "seconds": record.seconds,
            }
        )

    def take(self, text: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return the steps so far, in the form of `to_json`, and forget them.

        `text` returns the text of a token.
        """
        # the engine's thread may append meanwhile
        steps = self._steps[:]
        del self._steps[: len(steps)]
        _name(steps, text)
        return steps

    def to_json(self, completion: Completion, tokenizer: Any) -> dict[str, Any]:
        """Return the record that `generate --trace` writes.

        It holds the answer and, for each step, its nodes, the token that the target emitted after
        the accepted ones, and how many tokens the answer took. The root comes first among the
        nodes; it was emitted before. `parent` is an index.
        """
        _name(self._steps, lambda token: str(tokenizer.decode([token])))
        return {
            "format": FORMAT,
            "version": VERSION,
            "answer": replace(completion, logprobs=None).to_json(),
            "steps": self._steps,
        }


def _name(steps: Sequence[dict[str, Any]], text: Callable[[int], str]) -> None:
    """Add the text of each token to its record."""
    for step in steps:
        for token in (*step["nodes"], step["next"]):
            token["text"] = text(token["token"])


def read_trace(path: Path) -> dict[str, Any]:
    """Return the record of `Trace.to_json` from a file.

    Raises `InvalidInput` that names what is wrong with a file that is not such a record.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not JSON ({error})") from error
    if not isinstance(trace, dict) or trace.get("format") != FORMAT:
        raise InvalidInput(
            f"{path}: not a trace; give a file that `quickbeam generate --trace` wrote"
        )
    if trace.get("version") != VERSION:
        raise InvalidInput(
            f"{path}: a trace of version {trace.get('version')!r}; this quickbeam "
            f"reads version {VERSION}: record it again"
        )
    _check(trace, {"answer": ANSWER, "steps": [STEP]}, f"{path}: trace")
    for number, step in enumerate(trace["steps"]):
        where = f"{path}: trace.steps[{number}].nodes"
        if not step["nodes"]:
            raise InvalidInput(f"{where}: none; a tree has its root at least")
        for i, node in enumerate(step["nodes"]):
            if not (0 <= node["parent"] < i or (i == 0 and node["parent"] == -1)):
                raise InvalidInput(
                    f"{where}[{i}].parent: {node['parent']}; must be an earlier node (-1 for the "
                    "root, node 0)"
                )
    return trace


def _check(value: Any, kind: Any, where: str) -> None:
    """Raise `InvalidInput` unless a value is of a kind, one like `STEP`. Numbers must be finite."""
    if isinstance(kind, dict) and isinstance(value, dict):
        for name, own in kind.items():
            if name not in value:
                raise InvalidInput(f"{where}: has no {name!r}; it needs {', '.join(kind)}")
            _check(value[name], own, f"{where}.{name}")
    elif isinstance(kind, list) and isinstance(value, list):
        for number, one in enumerate(value):
            _check(one, kind[0], f"{where}[{number}]")
    else:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        good = isinstance(kind, type | tuple) and isinstance(value, kind)
        good = good and (kind is bool or not isinstance(value, bool))
        if not good or (isinstance(value, int | float) and not abs(value) < 1e300):
            names = [one.__name__ if isinstance(one, type) else type(one).__name__ for one in kinds]
            raise InvalidInput(f"{where}: {str(value)[:40]!r}; must be {' or '.join(names)}")
