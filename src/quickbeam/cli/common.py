"""What commands share: progress, showing a stream, records, the line of statistics."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quickbeam import cache, hub
from quickbeam.errors import InvalidInput, QuickbeamError

if TYPE_CHECKING:
    from quickbeam.engine.result import Completion
    from quickbeam.engine.stream import Stream

# control characters, without tab and line end
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def stderr() -> Console:
    """Return a console on the present stderr, where it stays while a loader's is redirected."""
    return Console(file=sys.stderr, highlight=False)


def say(text: str) -> None:
    """Write to stderr. A disk that is full or a reader that has left ends nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(first: str, by_itself: bool = True) -> Iterator[cache.Progress]:
    """Show a line on stderr that says what is going on, and remove it at the end.

    Yields the callback that changes the line. Where stderr is no terminal, nothing is shown. What
    is written to stderr meanwhile stands above the line.
    `by_itself`: whether a thread draws the line, or only the callback.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()
    how: dict[str, Any] = {"transient": True, "redirect_stdout": False, "console": stderr()}
    how |= {"disable": not how["console"].is_terminal, "auto_refresh": by_itself}
    with Progress(*columns, TimeElapsedColumn(), **how) as bar:
        task = bar.add_task(first, total=None)

        def report(stage: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            bar.update(task, description=stage, total=total, completed=fraction or 0.0)
            if not by_itself:
                bar.refresh()

        yield report


@contextmanager
def loading_progress(*names: str | None) -> Iterator[cache.Progress]:
    """Show on stderr that the models of these names are loaded; the first is the target's."""
    known = (None, *hub.EMBEDDED)
    if all(name in known or Path(name or "").expanduser().exists() for name in names):
        # the loaders' own bars (tqdm) are hidden
        first = f"loading {names[0] or hub.DEFAULT}"
        with progress_bar(first) as report, redirect_stderr(io.StringIO()):
            yield report
    else:  # the Hugging Face hub's own bars show a download
        yield lambda stage, fraction: None


def follow(begin: Callable[[], Stream], show: bool = True) -> tuple[Completion, bool]:
    """Write a stream to stdout as it comes. Return its completion, and whether Ctrl-C ended it.

    `begin` may take long before the first word; a spinner shows this.
    """
    shown, interrupted = "", False
    with ExitStack() as waiting:
        waiting.enter_context(stderr().status("reading the prompt" if show else "answering"))
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
    """Return text with its control characters, which could command a terminal, as `\\x1b`."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def strict_json(record: Any, indent: int | None = None) -> str:
    """Return a record as JSON. Infinities and NaN, which JSON lacks, become null."""
    return json.dumps(finite(record), allow_nan=False, indent=indent, ensure_ascii=indent is None)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_output(option: str, path: Path) -> None:
    """Raise `InvalidInput` where `path` can't be a file. The error names `option`."""
    if path.is_dir():
        raise InvalidInput(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise InvalidInput(f"{option} {path}: folder {path.parent} does not exist")


def save(option: str, path: Path, content: str | dict[str, Any]) -> None:
    """Write a text or a JSON record so that `path` always holds a complete one.

    Raises `QuickbeamError`, which names `option`, where the file can't be written.
    """
    text = content if isinstance(content, str) else strict_json(content, indent=1) + "\n"
    part = path.with_name(f".{path.name}.tmp")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")
        part.replace(path)
    except OSError as error:
        raise QuickbeamError(f"{option} {path}: not written ({error.strerror})") from error


def statistics_line(completion: Completion, kernels: str, verbose: bool = False) -> str:
    """Return what an answer cost, in one line; `verbose`: for who compares methods or machines."""
    s = completion.statistics
    # an answer that ended by itself needs no word
    reason = f" ({completion.finish_reason})" if completion.finish_reason != "stop" else ""
    parts = [f"{s.new_tokens} tokens{reason}", f"{s.tokens_per_second:.1f} tokens/s"]
    parts.append(f"{s.mean_accepted_tokens:.2f} tokens a step")
    if "drafter" in s.sources and s.steps > 8 * max(1, s.drafter_calls):
        parts.append("the drafter does not pay here")
    if verbose:
        parts += [f"{s.steps} steps", f"prefill {s.prefill_seconds:.2f} s"]
        if completion.seed is not None:
            parts.append(f"seed {completion.seed}")
        if s.head is not None and s.head.calls:
            parts.append(f"drafter scored {s.head.tokens / s.head.calls:,.0f} tokens a call")
        for name, count in s.sources.items():
            parts.append(f"{name} {count.accepted} of {count.drafted} drafted accepted")
        parts += ["bit-identical" if s.exact else "not bit-identical", f"kernels: {kernels}"]
    return f"[{completion.method}] " + ", ".join(parts)
