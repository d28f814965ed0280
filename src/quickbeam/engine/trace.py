"""Traces: what every step drafted and what was accepted, kept to be looked at afterwards.

This module knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from quickbeam.engine.learning import LearningFigures
from quickbeam.engine.result import Completion
from quickbeam.errors import InvalidInput
from quickbeam.tree import TokenTree

FORMAT, VERSION = "quickbeam trace", 1
SECONDS = ("draft_seconds", "verify_seconds", "seconds")


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
        tree = record.tree
        accepted = set(record.path)
        nodes: list[dict[str, Any]] = [
            {
                "token": tree.token[node],
                "parent": tree.parent[node],
                "depth": tree.depth[node],
                "source": tree.source[node],
                "value": float(tree.value[node]),
                "accepted": node in accepted,
            }
            for node in range(len(tree))
        ]
        step: dict[str, Any] = {"nodes": nodes, "next": {"token": record.token}}
        step["emitted"] = len(record.emitted)
        for name in SECONDS:
            step[name] = getattr(record, name)
        self._steps.append(step)

    def take(self, text: Callable[[int], str]) -> list[dict[str, Any]]:
        """Return the steps so far, in the form of `to_json`, and forget them.

        `text` returns the text of a token.
        """
        # the engine's thread may append meanwhile
        steps = self._steps[:]
        del self._steps[: len(steps)]
        _name(steps, text)
        return steps

    def to_json(
        self, completion: Completion, tokenizer: Any, learning: LearningFigures | None = None
    ) -> dict[str, Any]:
        """Return the record that `generate --trace` writes.

        It holds the answer, what the drafter has learned, if it learns, and, for each step, its
        nodes, the token that the target emitted after the accepted ones, and how many tokens the
        answer took. The root comes first among the nodes; it was emitted before. `parent` is an
        index.
        """
        _name(self._steps, lambda token: str(tokenizer.decode([token])))
        return {
            "format": FORMAT,
            "version": VERSION,
            "answer": replace(completion, logprobs=None).to_json(),
            "learning": None if learning is None else asdict(learning),
            "steps": self._steps,
        }


def _name(steps: Sequence[dict[str, Any]], text: Callable[[int], str]) -> None:
    """Add the text of each token to its record."""
    for step in steps:
        for token in (*step["nodes"], step["next"]):
            token["text"] = text(token["token"])


def read_trace(path: Path) -> dict[str, Any]:
    """Return the record of `Trace.to_json` from a file.

    Raises `InvalidInput` for a file that is not such a record, or of another version.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: can't be read ({error})") from error
    parts = {"answer", "steps"}
    if not isinstance(trace, dict) or trace.get("format") != FORMAT or not parts <= trace.keys():
        raise InvalidInput(
            f"{path}: not a trace; give a file that `quickbeam generate --trace` wrote"
        )
    if trace.get("version") != VERSION:
        raise InvalidInput(
            f"{path}: a trace of version {trace.get('version')!r}; this quickbeam "
            f"reads version {VERSION}: record it again"
        )
    return trace
