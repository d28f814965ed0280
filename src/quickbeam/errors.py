"""The package's exceptions. A message names what was given, what is accepted and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

# what to do with a part of a prompt that isn't read
NOT_READ = "leave it out, or use transformers, vLLM or llama.cpp for this prompt"

# characters of a name that are compared: what a client sends may be long
LONGEST_NAME = 64


class QuickbeamError(Exception):
    """Something failed that is not the caller's input, such as a broken download or NaN logits.

    `completions`: the answers so far, where the error ended one of several (`LLM.generate`). The
    command line exits with code 1.
    """

    completions: Sequence[Any] = ()


class InvalidInput(QuickbeamError, ValueError):
    """The caller's input can't be used, such as an unknown method or a prompt beyond the context.

    The command line exits with code 2.
    """


def did_you_mean(name: object, accepted: Iterable[str]) -> str:
    """Return the end of an error message that refuses a name: the closest of the `accepted` ones.

    Returns "" where none is close.
    """
    start = str(name)[:LONGEST_NAME].lower()
    closest = get_close_matches(start, list(accepted), n=1, cutoff=0.65)
    return f"; did you mean {closest[0]!r}?" if closest else ""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, or the error's type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def some_of(names: Iterable[str], count: int = 4) -> str:
    """Return the first names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - count} more" if len(ordered) > count else ""
    return f"{', '.join(ordered[:count])}{more}"


def refuse_incomplete(
    missing: Iterable[str],
    mismatched: Iterable[tuple[str, Any, Any]],
    unread: Iterable[str] = (),
) -> None:
    """Raise `InvalidInput` naming the tensors that a checkpoint lacks, or has in another shape.

    `mismatched`: name, shape as stored, shape as expected. `unread`: the names of tensors that the
    checkpoint has and the model has not.
    """
    missing = sorted(missing)
    mismatched = sorted(mismatched)
    unread = sorted(unread)
    if mismatched:
        name, stored, expected = mismatched[0]
        more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        raise InvalidInput(
            f"{name}{more} has shape {list(stored)}, expected {list(expected)} by "
            "config.json: they are of two models"
        )
    if missing and unread:
        raise InvalidInput(
            f"its weights lack {some_of(missing)}, and its files hold {some_of(unread)} "
            "instead: rename the tensors as expected, or take a checkpoint whose config.json "
            "and weights are of one model"
        )
    if missing:
        hint = (
            "; if its head is its embedding, write tie_word_embeddings: true into config.json"
            if missing == ["lm_head.weight"]
            else ""
        )
        raise InvalidInput(
            f"its weights lack {some_of(missing)}: download it again, with all of its files{hint}"
        )
