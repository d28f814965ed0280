"""What commands share: loading with progress, showing a stream, the line of statistics."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quickbeam import hub
from quickbeam.bench.files import save
from quickbeam.cli.options import Device, Dtype, WeightsKind
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.presets import PRESETS, check_vocab, preset

if TYPE_CHECKING:
    from quickbeam.engine.result import Completion
    from quickbeam.engine.stream import Stream
    from quickbeam.llm import LLM

PLAIN_WIDTH = 160  # columns of tables if the output is not a terminal
# control characters, without tab and line end
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def stdout() -> Console:
    """Return a console for tables."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def stderr() -> Console:
    """Return a console on the present stderr.

    It stays on that stream while stderr is redirected for a loader.
    """
    return Console(file=sys.stderr, highlight=False)


@contextmanager
def progress_bar(first: str) -> Iterator[hub.Progress]:
    """Show a line on stderr that says what is going on, if stderr is a terminal.

    Yields the callback that changes the line. The line disappears at the end.
    """
    console = stderr()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    quiet = not console.is_terminal
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=quiet,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(first, total=None)

        def report(stage: str, fraction: float | None) -> None:
            bar.update(
                task,
                description=stage,
                total=None if fraction is None else 1.0,
                completed=fraction or 0.0,
            )

        yield report


def load(
    model: str | None,
    method: str,
    dtype: Dtype,
    device: Device | None,
    budget: int | None = None,
    exact: bool | None = None,
    drafter: str | None = None,
    vocab: str | None = None,
    shortlist: int | None = None,
    trust_remote_code: bool = False,
    kv_memory: str | None = None,
    weights: WeightsKind = WeightsKind.bfloat16,
    **more: Any,
) -> LLM:
    """Load the model of a command, with progress on stderr.

    `more` holds further arguments of `LLM`. Raises what `LLM` raises. Before anything is loaded, it
    raises `InvalidInput` for an unknown method, and for a drafter or its settings if the method
    doesn't use a drafter.
    """
    given = {"--drafter": drafter, "--vocab": vocab, "--shortlist": shortlist}
    if "drafter" not in preset(method).sources and (
        useless := [f"{name} {value}" for name, value in given.items() if value is not None]
    ):
        users = ", ".join(name for name, entry in PRESETS.items() if "drafter" in entry.sources)
        raise InvalidInput(
            f"{useless[0]}: method {method!r} drafts without a model; add --method "
            f"with one of {users}"
        )
    check_vocab(vocab or preset(method).vocab, shortlist)
    with ExitStack() as stack:
        report = None
        if all(
            name is None or name in hub.EMBEDDED or Path(name).exists() for name in (model, drafter)
        ):
            report = stack.enter_context(progress_bar(f"loading {model or hub.DEFAULT}"))
            # hides the loaders' own progress bars (tqdm)
            stack.enter_context(redirect_stderr(io.StringIO()))
        # Otherwise the model comes from the Hugging Face hub, whose own bars show the download.
        from quickbeam.llm import LLM

        place = device.value if device else None
        return LLM(
            model,
            method,
            dtype=dtype.value,
            device=place,
            budget=budget,
            drafter=drafter,
            vocab=vocab,
            shortlist=shortlist,
            exact=exact,
            progress=report,
            trust_remote_code=trust_remote_code,
            kv_memory=kv_memory,
            weights=weights.value,
            **more,
        )


def follow(begin: Callable[[], Stream], show: bool = True) -> tuple[Completion, bool]:
    """Write a stream to stdout as it comes. Return its completion, and whether Ctrl-C ended it.

    Without `show`, nothing is written. `begin` starts the stream. It may measure costs and read a
    long prompt before the first word; a spinner shows this.
    """
    console = stderr()
    shown = ""
    interrupted = False
    with ExitStack() as waiting:
        if console.is_terminal:
            waiting.enter_context(console.status("reading the prompt" if show else "answering"))
        stream = begin()
        try:
            for piece in stream:
                if show:
                    waiting.close()
                    shown += piece
                    write(piece)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            stream.close()
    completion = stream.completion
    if show:
        # the text that the stream held back because it might have become a stop string
        if interrupted and completion.text.startswith(shown):
            write(completion.text[len(shown) :])
        write("\n")
    return completion, interrupted


def write(text: str) -> None:
    """Write text to stdout. A terminal gets it with its control characters made visible."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def harmless(text: str) -> str:
    """Return text with its control characters written as in Python (`\\x1b`).

    Tabs and line ends stay. Control characters in a model's text could send commands to a terminal.
    """
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def strict_json(record: Any) -> str:
    """Return a record as one line of JSON. Infinities and NaN, which JSON lacks, become null."""
    return json.dumps(finite(record), allow_nan=False)


def finite(value: Any) -> Any:
    """Return a value with infinities and NaN replaced by None, in lists and dictionaries too."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_record(path: Path, record: dict[str, Any]) -> None:
    """Write the record of a benchmark to the file that `--json` names.

    Call it after the tables are printed. Raises `QuickbeamError` if it can't be written.
    """
    try:
        save(path, finite(record))
    except OSError as error:
        raise QuickbeamError(
            f"--json {path}: not written ({error.strerror}); see the tables instead"
        ) from error


def statistics_line(completion: Completion, kernels: str) -> str:
    """Return what an answer cost, in one line. `kernels` says what computed it."""
    s = completion.statistics
    parts = [
        f"{s.new_tokens} tokens ({completion.finish_reason})",
        f"{s.steps} steps",
        f"MAT {s.mean_accepted_tokens:.2f}",
        f"{s.tokens_per_second:.1f} tokens/s",
        f"prefill {s.prefill_seconds:.2f} s",
    ]
    if completion.seed is not None:
        parts.append(f"seed {completion.seed}")
    if s.head is not None and s.head.wanted:
        parts.append(f"drafter scored {s.head.tokens / s.head.calls:,.0f} tokens a call")
    parts += [
        f"{name} {count.accepted} of {count.drafted} drafted accepted"
        for name, count in s.sources.items()
    ]
    parts.append(f"kernels: {kernels}")
    return f"[{completion.method}] " + ", ".join(parts)
