"""`quickbeam generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quickbeam.cli.checks import check_length
from quickbeam.cli.common import check_output, follow, save, statistics_line, strict_json, write
from quickbeam.cli.loading import Follow, Loading, System, Verbose
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.params import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer; - reads standard input.")],
    loading: Loading,
    params: SamplingParams,
    wanted: Follow,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    system: System = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON record instead of the text.")
    ] = False,
    verbose: Verbose = False,
    trace_path: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Write every step's draft tree here, for `quickbeam inspect`.",
        ),
    ] = None,
) -> None:
    """Answer one prompt: text on stdout as it is made, statistics on stderr. Ctrl-C keeps the
    answer so far."""
    if raw and system is not None:
        raise InvalidInput(
            "--system goes through the chat template, which --raw skips: leave one of them out"
        )
    if params.logprobs is not None and not as_json:
        raise InvalidInput("--logprobs shows in the JSON record only: add --json")
    params = replace(params, grammar=wanted.grammar())
    text = read(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    loading.check()
    check_length(loading.model, text, params.max_tokens)
    if trace_path is not None:
        check_output("--trace", trace_path)
    from quickbeam.engine.trace import Trace

    trace = Trace() if trace_path is not None else None
    llm = loading.load()
    completion, interrupted = follow(
        lambda: (
            llm.stream(text, params, observer=trace)
            if raw
            else llm.chat_stream(messages, params, observer=trace)
        ),
        show=not as_json,
    )
    if as_json:
        write(strict_json({**completion.to_json(), "kernels": llm.describe()}) + "\n")
    else:
        print(statistics_line(completion, llm.describe(), verbose), file=sys.stderr)
    if trace_path is not None and trace is not None:
        try:
            save(trace_path, trace.to_json(completion, llm.tokenizer))
        except OSError as error:
            raise QuickbeamError(f"--trace {trace_path}: not written ({error.strerror})") from error
    if interrupted:
        raise typer.Exit(130)


def read(prompt: str) -> str:
    """Return the prompt. `-` reads it from standard input, without its last line end.

    Raises `InvalidInput` if it is empty or not UTF-8.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise InvalidInput(f"the prompt is not UTF-8 text: {error}") from error
    if not text:
        raise InvalidInput("the prompt is empty: give a text, or - to read standard input")
    return text
