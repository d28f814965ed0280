"""`quickbeam generate` and `quickbeam chat`: one answer, or a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quickbeam.cli.common import (
    GrammarOptions,
    LoadOptions,
    check_output,
    follow,
    read_file,
    save,
    say,
    statistics_text,
    strict_json,
    write,
)
from quickbeam.cli.fields import in_options, option_names
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams

if TYPE_CHECKING:
    from quickbeam.llm import LLM

LONGER = SamplingParams(max_tokens=512)
HELP = (
    "/reset forgets the conversation, /exit (or Ctrl-D) ends it, /help shows this.\n"
    "Ctrl-C stops an answer and keeps it."
)


@dataclass(frozen=True)
class ChatOptions:
    """How the model is spoken to."""

    system: str | None = field(default=None, metadata={"common": True})
    """System message before the conversation."""
    verbose: bool = field(default=False, metadata={"option": "--verbose -v", "common": True})
    """Say more about how answers were made."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ChatOptions):
    """What is answered, and what is written."""

    prompt: str = field(metadata={"argument": True, "metavar": "PROMPT"})
    """The text to answer; - reads standard input."""
    raw: bool = False
    """Continue the text as it is, without the chat template."""
    json: bool = field(default=False, metadata={"common": True})
    """Print one JSON record instead of the text."""
    prediction: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """File with a text that the answer is expected to be much like, such as the file that the
    prompt asks to edit. It is drafted first, and changes no token of the answer."""
    trace: Path | None = field(default=None, metadata={"metavar": "FILE.json"})
    """File that gets every step's draft tree, for `quickbeam inspect`."""


def generate(
    loading: LoadOptions, params: SamplingParams, asked: GenerateOptions, wanted: GrammarOptions
) -> None:
    """Answer one prompt.

    The text goes to stdout as it is made, statistics to stderr. Ctrl-C and an error keep the answer
    so far.
    """
    if asked.raw and asked.system is not None:
        raise InvalidInput(
            "--system goes through the chat template, which --raw skips: leave one of them out"
        )
    if params.logprobs is not None and not asked.json:
        raise InvalidInput("--logprobs shows in the JSON record only: add --json")
    if asked.trace is not None:
        check_output("--trace", asked.trace)
    params = replace(params, grammar=wanted.grammar())
    if asked.prediction is not None:
        params = replace(params, prediction=read_file("--prediction", asked.prediction))
    text = read(asked.prompt)
    loading.check()
    from quickbeam.engine.trace import Trace  # imports PyTorch

    trace, messages = Trace() if asked.trace else None, list[dict[str, str]]()
    if asked.system is not None:
        messages.append({"role": "system", "content": asked.system})
    messages.append({"role": "user", "content": text})
    with loading.load() as llm:  # closing it writes what --keep keeps
        completion, broken = follow(
            lambda: (
                llm.stream(text, params, observer=trace)
                if asked.raw
                else llm.chat_stream(messages, params, observer=trace)
            ),
            show=not asked.json,
        )
        kernels = llm.describe()
    if asked.json:
        write(strict_json({**completion.to_json(), "kernels": kernels}) + "\n")
    elif not isinstance(broken, QuickbeamError):
        say(statistics_text(completion, kernels, asked.verbose))
    if asked.trace and trace:
        save("--trace", asked.trace, trace.to_json(completion, llm.tokenizer, llm.learning))
    if isinstance(broken, QuickbeamError):
        raise broken
    if broken:
        raise typer.Exit(130)


def read(prompt: str) -> str:
    """Return the prompt. `-` reads it from standard input, without its last line end."""
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise InvalidInput(f"the prompt is not UTF-8 text: {error}") from error
    if not text:
        raise InvalidInput("the prompt is empty: give a text, or - to read standard input")
    return text


def chat(loading: LoadOptions, options: ChatOptions, params: SamplingParams = LONGER) -> None:
    """Talk with the model.

    /help lists what can be typed; lines may also come from a pipe.
    """
    with loading.load() as llm:  # closing it writes what --keep keeps
        talk(llm, options, params)


def talk(llm: LLM, options: ChatOptions, params: SamplingParams) -> None:
    """Answer line by line, up to the end of the input."""
    opening = [{"role": "system", "content": options.system}] if options.system is not None else []
    messages = list(opening)
    say(f"{llm.name}, method {llm.method}\n{HELP}")
    for line in lines():
        if line == "/exit":
            return
        if line == "/help":
            say(HELP)
        elif line == "/reset":
            messages = list(opening)
            say("forgotten")
        elif line.startswith("/") and line[1:].isalpha():
            say(f"unknown command {line}; /help lists what there is")
        else:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                completion, broken = follow(partial(llm.chat_stream, asked, params))
                if isinstance(broken, QuickbeamError):
                    raise broken
            # the conversation no longer fits into the context; its earlier turns are kept
            except InvalidInput as error:
                why = in_options(str(error), option_names(SamplingParams))
                say(f"error: {why}; /reset starts over")
                continue
            say(statistics_text(completion, llm.describe(), options.verbose))
            if completion.text:  # else stopped before the first word: forget the question
                messages = [*asked, {"role": "assistant", "content": completion.text}]


def lines() -> Iterator[str]:
    """Yield the lines that are typed, without blank ones. Ctrl-C drops a line."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401 (editing and history in input())
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say(" (/exit or Ctrl-D ends the conversation)")
            continue
        if line:
            yield line
