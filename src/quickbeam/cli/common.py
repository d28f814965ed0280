"""What commands share: how models are loaded and answers constrained, checked before PyTorch is
imported, which takes seconds; progress, showing a stream, records, statistics of an answer."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quickbeam import hub
from quickbeam.config import LLMOptions, ReplicaOptions, ReportProgress, check_vocab
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.grammar.spec import Grammar
from quickbeam.methods import METHODS, check_options, preset

if TYPE_CHECKING:
    from quickbeam.engine.result import Completion
    from quickbeam.engine.stream import Stream
    from quickbeam.llm import LLM

# the sources of drafted tokens, in words
SOURCES = {
    "ngram": "the text",
    "drafter": "the drafter",
    "last_logits": "last logits",
    "recycling": "recycled logits",
    "table": "the model's own text",
    "answers": "earlier answers",
    "prediction": "the prediction",
    "skeletons": "calls' fixed parts",
}
# control characters, without tab and line end
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class LoadOptions(LLMOptions):
    """The options of `LLM` for commands, checked before PyTorch is imported."""

    # only here are the names of methods known
    HELP: ClassVar = {"method": f"How tokens are drafted: {', '.join(METHODS)}."}

    def check(self) -> None:
        """Raise `InvalidInput` for what can be seen to be wrong before PyTorch is imported."""
        # a folder with a table of n-grams alone is for any method
        named = None if self.drafter is None else hub.drafter_for(None, fspath(self.drafter))
        given = {"drafter": named, "vocab": self.vocab, "shortlist": self.shortlist}
        for name, value in given.items():
            if value is not None and not preset(self.method).uses_drafter:
                users = (name for name, entry in METHODS.items() if entry.uses_drafter)
                raise InvalidInput(
                    f"--{name} {value}: method {self.method!r} drafts without a model; add "
                    f"--method with one of {', '.join(users)}"
                )
        check_vocab(self.vocab or preset(self.method).vocab, self.shortlist)
        check_options(self)

    def load(self) -> LLM:
        """Check, then load the model, with progress on stderr."""
        self.check()
        with loading_progress(self.source, self.drafter) as progress:
            from quickbeam.llm import LLM

            return LLM(**arguments(self, progress=progress))


def arguments(*options: Any, **others: Any) -> dict[str, Any]:
    """Return the fields of dataclasses, and `others` in place of those of their names."""
    fields = dict[str, Any]()
    for part in options:
        fields.update(vars(part))
    return {**fields, **others}


def check_models(*names: str | PathLike[str] | None) -> None:
    """Raise `InvalidInput` for a name of a model or drafter that can't be loaded."""
    for check in (hub.check_source, hub.check_hub):
        for name in names:
            if name is not None:
                check(fspath(name))


@dataclass(frozen=True)
class RayOptions(ReplicaOptions):
    """Replicas of the model on Ray, if asked for."""

    ray: bool = False
    """Answer by replicas of the model on Ray, on this machine or a cluster."""

    def check(self, loading: LoadOptions) -> None:
        """Raise `InvalidInput` for options that don't fit one another, or can't be loaded here."""
        if self.replicas > 1 and not self.ray:
            raise InvalidInput(f"--replicas {self.replicas}: they run on Ray; add --ray")
        if not self.ray:
            loading.check()


@contextmanager
def needs(extras: str, what: str) -> Iterator[None]:
    """Raise `InvalidInput` for a missing package that `extras` of quickbeam bring to `what`."""
    try:
        yield
    except ImportError as error:
        todo = f"pip install 'quickbeam[{extras}]'"
        raise InvalidInput(f"{what} needs {error.name}: {todo}") from error


@dataclass(frozen=True)
class GrammarOptions:
    """What an answer has to follow: at most one of these."""

    json_schema: str | None = field(default=None, metadata={"metavar": "FILE|JSON"})
    """The answer is JSON that fits this schema, in a file or as it is."""
    json_object: bool = False
    """The answer is a JSON object."""
    regex: str | None = field(default=None, metadata={"metavar": "PATTERN"})
    """The answer is what this regular expression matches."""
    lark: Path | None = field(default=None, metadata={"metavar": "FILE"})
    """The answer follows this Lark grammar, whose first rule is start."""

    def grammar(self) -> Grammar | None:
        """Return what `SamplingParams` takes for these options."""
        set_options = [name for name, value in vars(self).items() if value not in (None, False)]
        if len(set_options) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in set_options)
            raise InvalidInput(f"{names}: an answer follows one grammar; give one of them")
        if self.json_schema is not None:
            schema = self.json_schema
            if not schema.lstrip().startswith("{"):
                schema = read_file("--json-schema", Path(schema))
            return Grammar.json_schema(schema)
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.lark is not None:
            return Grammar.lark(read_file("--lark", self.lark))
        return Grammar.json_object() if self.json_object else None


def read_file(option: str, path: Path) -> str:
    """Return the text of the file that an option names. Raises `InvalidInput`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InvalidInput(f"{option} {path}: can't be read ({error})") from error


def stderr() -> Console:
    """Return a console on the present stderr, where it stays while a loader's is redirected."""
    return Console(file=sys.stderr, highlight=False)


def say(text: str) -> None:
    """Write to stderr. A disk that is full or a reader that has left ends nothing."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(
    first: str, by_itself: bool = True, written: bool = False
) -> Iterator[ReportProgress]:
    """Show a line on stderr that says what is going on, and remove it at the end.

    Yields the callback that changes the line. What is written to stderr meanwhile stands above the
    line. Where stderr is no terminal, nothing is shown; if `written`, each stage but plain loading
    is a line there: what is fetched, converted or compiled, which takes long and happens once.
    `by_itself`: whether a thread draws the line, or only the callback.
    """
    console = stderr()
    if not console.is_terminal:
        yield written_stages() if written else hub.quiet
        return
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=by_itself,
        transient=True,
        redirect_stdout=False,
    )
    with bar:
        task = bar.add_task(first, total=None)

        def report(stage: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            bar.update(task, description=stage, total=total, completed=fraction or 0.0)
            if not by_itself:
                bar.refresh()

        yield report


def written_stages() -> ReportProgress:
    """Return a callback that writes each stage to stderr, once, in a line. Loading is none."""
    seen = set[str]()

    def report(stage: str, fraction: float | None) -> None:
        if stage not in seen and not stage.startswith("loading"):
            seen.add(stage)
            say(stage)

    return report


@contextmanager
def loading_progress(*names: str | PathLike[str] | None) -> Iterator[ReportProgress]:
    """Show on stderr that the models of these names are loaded; the first is the target's."""
    without_download = (None, *hub.DRAFTER_WORDS, *hub.EMBEDDED)
    absent = [
        name
        for name in names
        if name not in without_download and not hub.on_this_machine(str(name or ""))
    ]
    if not absent:
        with progress_bar(f"loading {names[0] or hub.DEFAULT}", written=True) as report:
            yield report
        return
    # in a terminal the Hugging Face hub's own bars show a download
    if not stderr().is_terminal:
        say(f"downloading {' and '.join(map(str, absent))} from the Hugging Face hub")
    yield hub.quiet


def follow(
    begin: Callable[[], Stream], show: bool = True
) -> tuple[Completion, KeyboardInterrupt | QuickbeamError | None]:
    """Write a stream to stdout as it comes. Return its completion, and the error that ended it.

    `begin` may take long before the first word; a spinner shows this.
    """
    shown = ""
    broken: KeyboardInterrupt | QuickbeamError | None = None
    with ExitStack() as waiting:
        waiting.enter_context(stderr().status("reading the prompt" if show else "answering"))
        stream = begin()
        try:
            for piece in stream:
                if show:
                    waiting.close()
                    shown += piece
                    write(piece)
        except (KeyboardInterrupt, QuickbeamError) as error:
            broken = error
        finally:
            stream.close()
    completion = stream.completion
    # the text that the stream held back because it might have become a stop string
    held = completion.text[len(shown) :] if completion.text.startswith(shown) else ""
    if show and (shown or held or not isinstance(broken, QuickbeamError)):
        write(f"{held}\n")
    return completion, broken


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
    special = path.exists() and not path.is_file()  # a device or a pipe
    path = path if special else path.resolve()  # a link stays one
    part = path if special else path.with_name(f".{path.name}.tmp")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")
        if not special:
            part.replace(path)
    except OSError as error:
        if not special:
            part.unlink(missing_ok=True)
        raise QuickbeamError(f"{option} {path}: not written ({error.strerror})") from error


def statistics_text(completion: Completion, kernels: str, verbose: bool = False) -> str:
    """Return what an answer cost, in a line, and what was done where the drafter is too slow.

    `verbose`: with further lines, to compare methods or machines by.
    """
    s = completion.statistics
    # an answer that ended by itself needs no word
    reason = f" ({completion.finish_reason})" if completion.finish_reason != "stop" else ""
    parts = [f"{s.new_tokens} tokens{reason}", f"{s.tokens_per_second:.1f} tokens/s"]
    parts.append(f"{s.mean_accepted_tokens:.2f} tokens a step")
    lines = [f"[{completion.method}] {', '.join(parts)}"]
    if "drafter" in s.sources and s.steps > 8 * max(1, s.drafter_calls):
        used = [SOURCES.get(name, name) for name, count in s.sources.items() if count.drafted]
        others = [name for name in used if name != SOURCES["drafter"]]
        instead = f"drafted from {in_words(others)}" if others else "decoded without drafts"
        lines.append(f"{instead}: faster here than the drafter")
    if verbose:
        lines += more_statistics(completion, kernels)
    return "\n  ".join(lines)


def more_statistics(completion: Completion, kernels: str) -> list[str]:
    """Return lines on how an answer was made."""
    s = completion.statistics
    seed = f", seed {completion.seed}" if completion.seed is not None else ""
    lines = [f"{s.steps} steps, prefill {s.prefill_seconds:.2f} s{seed}"]
    accepted = [
        f"{name} {count.accepted} of {count.drafted}"
        for name, count in s.sources.items()
        if count.drafted
    ]
    if accepted:
        lines.append(f"drafts accepted: {', '.join(accepted)}")
    if s.head is not None and s.head.calls:
        scored = s.head.tokens / s.head.calls
        lines.append(f"the drafter scored {scored:,.0f} tokens of the vocabulary a call")
    exact = "bit-identical" if s.exact else "not bit-identical"
    return [*lines, f"{exact} to plain decoding, kernels: {kernels}"]


def in_words(words: Sequence[str]) -> str:
    """Return words as in `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
