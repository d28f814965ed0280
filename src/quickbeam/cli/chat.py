"""`quickbeam chat`: a conversation.

The model keeps the keys and values of what two turns share, so that each turn reads only new text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from quickbeam.cli.common import follow, say, statistics_line
from quickbeam.cli.loading import Loading
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.llm import LLM

LONGER = SamplingParams(max_tokens=512)
HELP = (
    "/reset forgets the conversation, /exit (or Ctrl-D) ends it, /help shows this. Ctrl-C "
    "stops an answer and keeps it."
)


@dataclass(frozen=True)
class Conversation:
    """How the model is spoken to."""

    system: str | None = None
    """System message put before the conversation."""
    verbose: bool = field(default=False, metadata={"option": "--verbose -v"})
    """Say more about how each answer was made."""


def chat(given: Conversation, loading: Loading, params: SamplingParams = LONGER) -> None:
    """Talk with the model. /help lists what can be typed; lines may also come from a pipe."""
    with loading.load() as llm:  # closing it writes what --keep keeps
        talk(llm, given, params)


def talk(llm: LLM, given: Conversation, params: SamplingParams) -> None:
    """Answer line by line, up to the end of the input."""
    opening = [{"role": "system", "content": given.system}] if given.system is not None else []
    messages = list(opening)
    say(f"{llm.name}, method {llm.method}. {HELP}")
    for line in lines():
        if line == "/exit":
            return
        if line == "/help":
            say(HELP)
        elif line == "/reset":
            messages = list(opening)
            say("forgotten")
        elif line.startswith("/") and line[1:].isalpha():
            say(f"unknown command {line}. {HELP}")
        else:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                completion, _ = follow(partial(llm.chat_stream, asked, params))
            # the conversation no longer fits into the context; its earlier turns are kept
            except InvalidInput as error:
                say(f"error: {error}; /reset starts over")
                continue
            say(statistics_line(completion, llm.describe(), given.verbose))
            if completion.text:  # else stopped before the first word: forget the question
                messages = [*asked, {"role": "assistant", "content": completion.text}]


def lines() -> Iterator[str]:
    """Yield the lines that are typed, without blank ones.

    Ctrl-C drops a line. The end of the input ends the lines. Raises `InvalidInput` if the input is
    not UTF-8.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401 (editing and history in input())
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            say(" (/exit or Ctrl-D ends the conversation)")
            continue
        except UnicodeDecodeError as error:
            raise InvalidInput(f"standard input is not UTF-8 text: {error}") from error
        if not terminal and not line:
            return
        if line.strip():
            yield line.strip()
