"""The thought that a model's answer begins with, and the marks around it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

OPENING_MARKS = ("<think>", "[THINK]")
CLOSING_MARKS = ("</think>", "[/THINK]")
THOUGHT_BEGINS = re.compile("|".join(map(re.escape, OPENING_MARKS)))
THOUGHT_ENDS = re.compile("|".join(map(re.escape, CLOSING_MARKS)))
LONGEST_MARK = max(map(len, CLOSING_MARKS))

MAX_SPACE = 64  # characters of white space next to a mark that are left out
MARK_TOKENS = 8  # at the end of a prompt, where the mark of a thought may stand


def opens_thought(prompt: Sequence[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with the mark that begins a thought, so that its answer is one."""
    end = str(tokenizer.decode(prompt[-MARK_TOKENS:]))
    return end.rstrip().endswith(OPENING_MARKS)


class Part(NamedTuple):
    """A part of an answer: of its thought, or of its text."""

    kind: Literal["thinking", "text"]
    text: str


class ThoughtParser:
    """Separates the thought that an answer begins with from its text, while the answer arrives.

    White space at both ends of the thought, and before the text behind it, is left out. A mark
    further on begins no thought, as the text may be about it. What may belong to a mark is held
    back.

    `thinking`: whether the prompt opened the thought.
    """

    def __init__(self, thinking: bool) -> None:
        self._state: Literal["start", "thought", "behind", "text"] = "start"
        if thinking:
            self._state = "thought"
        self._begun = False  # whether anything of the thought has come but white space
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are certain after `text`, in order."""
        text = self._held + text
        self._held = ""
        if self._state == "start":
            text = self._read_start(text)
        thought = ""
        if self._state == "thought":
            thought, text = self._read_thought(text)
        if self._state == "behind":
            text = text.lstrip()
        if self._state == "behind" and text:
            self._state = "text"
        parts = [Part("thinking", thought), Part("text", text)]
        return [part for part in parts if part.text]

    def flush(self) -> list[Part]:
        """Return what was held back, where the answer ends or a tool call comes."""
        held = self._held
        self._held = ""
        if self._state == "start":
            self._state = "text"
        if self._state != "thought":
            return [Part("text", held)] if held else []
        held = held.rstrip()
        return [Part("thinking", held)] if held else []

    def _read_start(self, text: str) -> str:
        """Look for the mark that an answer may begin with. Return the text behind it."""
        stripped = text.lstrip()
        if len(text) - len(stripped) > MAX_SPACE:
            self._state = "text"
            return text
        mark = THOUGHT_BEGINS.match(stripped)
        if mark is not None:
            self._state = "thought"
            return stripped[mark.end() :]
        if any(mark.startswith(stripped) for mark in OPENING_MARKS):
            self._held = text
            return ""
        self._state = "text"
        return text

    def _read_thought(self, text: str) -> tuple[str, str]:
        """Return the part of the thought that a text begins with, and the text behind it."""
        if not self._begun:
            text = text.lstrip()
        mark = THOUGHT_ENDS.search(text)
        if mark is None:
            end = _without_space(text, _begin_of_mark(text))
            self._held = text[end:]
            self._begun = self._begun or end > 0
            return text[:end], ""
        self._state = "behind"
        return text[: _without_space(text, mark.start())], text[mark.end() :]


def _begin_of_mark(text: str) -> int:
    """Return where a mark may begin that ends a thought, of which only a part has come."""
    at = max(0, len(text) - LONGEST_MARK + 1)
    while not any(mark.startswith(text[at:]) for mark in CLOSING_MARKS):
        at += 1
    return at


def _without_space(text: str, end: int) -> int:
    """Return where a text ends that is followed by white space up to `end`."""
    return max(len(text[:end].rstrip()), end - MAX_SPACE)
