"""`quickbeam generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from quickbeam.cli.common import check_output, follow, save, statistics_line, strict_json, write
from quickbeam.cli.loading import Follow, Loading, check_length
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams


@dataclass(frozen=True)
class Asked:
    """What is answered, and what is written."""

    prompt: str = field(metadata={"argument": True})
    """The text to answer; - reads standard input."""
    raw: bool = False
    """Continue the text as it is, without the chat template."""
    system: str | None = None
    """System message put before the conversation."""
    json: bool = False
    """Print one JSON record instead of the text."""
    verbose: bool = field(default=False, metadata={"option": "--verbose -v"})
    """Say more about how the answer was made."""
    trace: Path | None = field(default=None, metadata={"metavar": "FILE.json"})
    """Write every step's draft tree here, for `quickbeam inspect`."""

    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidInput` for options that don't fit one another."""
        if self.raw and self.system is not None:
            raise InvalidInput(
                "--system goes through the chat template, which --raw skips: leave one of them out"
            )
        if params.logprobs is not None and not self.json:
            raise InvalidInput("--logprobs shows in the JSON record only: add --json")
        if self.trace is not None:
            check_output("--trace", self.trace)


def generate(asked: Asked, loading: Loading, params: SamplingParams, wanted: Follow) -> None:
    """Answer one prompt: text on stdout as it is made, statistics on stderr. Ctrl-C keeps the
    answer so far."""
    asked.check(params)
    params, text = replace(params, grammar=wanted.grammar()), read(asked.prompt)
    loading.check()
    check_length(loading.model, text, params.max_tokens)
    from quickbeam.engine.trace import Trace

    trace, messages = Trace() if asked.trace else None, list[dict[str, str]]()
    if asked.system is not None:
        messages.append({"role": "system", "content": asked.system})
    messages.append({"role": "user", "content": text})
    with loading.load() as llm:  # closing it writes what --keep keeps
        completion, interrupted = follow(
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
    else:
        print(statistics_line(completion, kernels, asked.verbose), file=sys.stderr)
    if asked.trace and trace:
        save("--trace", asked.trace, trace.to_json(completion, llm.tokenizer))
    if interrupted:
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
