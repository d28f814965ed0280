"""`quickbeam doctor`, what makes quickbeam slow or unable to run here; and `quickbeam pull`.

Each check imports what it needs, so a missing package costs one finding only.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Annotated, NamedTuple

import typer

from quickbeam import __version__, hub
from quickbeam.cli.common import check_models, harmless, loading_progress, progress_bar
from quickbeam.errors import InvalidInput
from quickbeam.hub.cache import cache_folder
from quickbeam.machine import cpu_name, usable_cores
from quickbeam.models import builtin

OK, NOTE, PROBLEM = "ok", "note", "problem"
COLOURS = {OK: "green", NOTE: "yellow", PROBLEM: "red"}
BUSY = 0.2  # of a core: what uses less slows nothing down
MOMENT = 0.5  # seconds for which other programs are watched
MOST_NAMED = 5  # programs
LITTLE = 2 * 10**9  # bytes of free memory that are ample for the default model
COMPILE = "python -m quickbeam.models.native.build"
EXTRAS = ("serve", "grammar", "kernels", "ray")


class Finding(NamedTuple):
    """What a check says, and what to do about it: a note costs speed or a feature, and with a
    problem no model can run."""

    status: str
    text: str
    todo: str = ""


def cpu() -> Finding:
    import torch

    from quickbeam.models.native import build

    cores, threads, sets = usable_cores(), torch.get_num_threads(), build.machine_sets()
    text = f"{cpu_name()}, {platform.machine()}, {threads} threads for {cores} cores"
    text += f", runs {', '.join(sets)}" if sets else ""
    todo = ""
    if threads > cores:
        todo = f"threads beyond the cores wait for each other: OMP_NUM_THREADS={cores}"
    elif os.environ.get("OMP_NUM_THREADS") and threads <= cores // 2:
        todo = "cores are left idle: unset OMP_NUM_THREADS"
    elif sets == ["plain"]:
        todo = "without AVX2 products are slow: a newer processor helps most"
    return Finding(NOTE if todo else OK, text, todo)


def memory() -> Finding:
    import psutil

    now = psutil.virtual_memory()
    text = f"{now.total / 1e9:.1f} GB, {now.available / 1e9:.1f} GB free"
    todo = "little is free: end other programs, or take --weights int4 and --kv-memory 200MB"
    return Finding(NOTE, text, todo) if now.available < LITTLE else Finding(OK, text)


def load() -> Finding:
    average, programs, cores = load_average(), busy_programs(MOMENT), usable_cores()
    text = f"load average {average:.1f} on {cores} cores"
    todo = "they slow answers down and make figures vary: end them, or wait"
    if programs:
        busy = [f"{name} ({share:.1f} cores)" for name, share in programs.items()]
        more = f" and {len(busy) - MOST_NAMED} more" if len(busy) > MOST_NAMED else ""
        return Finding(NOTE, f"{text}; other programs: {', '.join(busy[:MOST_NAMED])}{more}", todo)
    if average > cores:  # of programs that end all the time, or that run outside a container
        return Finding(NOTE, f"{text}, of programs that can't be seen from here", todo)
    return Finding(OK, f"{text}; no other program is busy")


def load_average() -> float:
    """Return how many programs ran or waited for a core, on average over the last minute."""
    import psutil

    return float(psutil.getloadavg()[0])


def busy_programs(seconds: float) -> dict[str, float]:
    """Return the programs that use cores in the coming `seconds`, by name, busiest first.

    Their shares are of one core. This process is left out, and so are programs below `BUSY`.
    """
    import psutil

    watched = [process for process in psutil.process_iter(["name"]) if process.pid != os.getpid()]
    shares = Counter[str]()
    for process in watched:
        with suppress(psutil.Error):
            process.cpu_percent()  # from here on
    time.sleep(seconds)
    for process in watched:
        with suppress(psutil.Error):
            shares[harmless(process.info["name"] or "?")] += process.cpu_percent() / 100
    return {name: share for name, share in shares.most_common() if share >= BUSY}


def gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        text = f"{torch.cuda.get_device_name(0)}: models run there unless --device cpu is given"
        return Finding(OK, text, "answers are bit for bit the same where a check at load says so")
    if shutil.which("nvidia-smi"):
        return Finding(NOTE, "there may be one, but not for this PyTorch", "install one that fits")
    return Finding(OK, "none: models run on the CPU")


def kernels() -> Finding:
    from quickbeam.models.native import build, choice

    names = [name for name in ("QUICKBEAM_KERNELS", "QUICKBEAM_ISA") if os.environ.get(name)]
    unset, best = f"unset {' and '.join(names)}" if names else "", build.machine_sets()[:1]
    try:
        text = choice.describe_kernels()
    except InvalidInput as error:
        return Finding(PROBLEM, str(error), unset)
    if not text.startswith("native"):
        install = f"install {' or '.join(build.COMPILERS)}, or name one in CXX"
        todo = unset or (install if build.has_kernels() else "")
        return Finding(NOTE, f"{text}: slower, and answers are counted, not promised", todo)
    if text.endswith("compiled on first use"):
        return Finding(NOTE, text, f"the first answer waits for that: {COMPILE}")
    if best[0] not in text:
        return Finding(NOTE, text, f"{best[0]} would be faster: {unset or COMPILE}")
    return Finding(OK, text)


def lacking(extra: str = "") -> list[str]:
    """Return the packages that quickbeam or an extra requires and lacks, in the tested range."""
    from packaging.requirements import Requirement

    missing = []
    for requirement in map(Requirement, metadata.requires("quickbeam") or ()):
        required = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if required and ("extra" in str(requirement.marker)) == bool(extra):
            try:
                fits = requirement.specifier.contains(
                    metadata.version(requirement.name), prereleases=True
                )
            except metadata.PackageNotFoundError:
                fits = False
            missing += [] if fits else [f"{requirement.name}{requirement.specifier}"]
    return missing


def packages() -> Finding:
    text = f"quickbeam {__version__}, Python {platform.python_version()}"
    if missing := " ".join(lacking()):
        return Finding(PROBLEM, f"{text}, missing: {missing}", f"pip install '{missing}'")
    text += "".join(f", {name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return Finding(OK, text)


def extras() -> Finding:
    missing = {extra: ", ".join(lacking(extra)) for extra in EXTRAS if lacking(extra)}
    parts = [", ".join(extra for extra in EXTRAS if extra not in missing) or "none installed"]
    parts += [f"{extra} lacks {names}" for extra, names in missing.items()]
    todo = f"pip install 'quickbeam[{','.join(missing)}]' where you need it" if missing else ""
    return Finding(NOTE if missing else OK, "; ".join(parts), todo)


def model() -> Finding:
    folder = cache_folder()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    pulled = hub.pulled_bytes(hub.DEFAULT) > 0
    least, free = hub.EMBEDDED[hub.DEFAULT].work_bytes, shutil.disk_usage(above).free
    text = f"{hub.DEFAULT} is {'' if pulled else 'not '}in {folder}, {free / 1e9:.1f} GB free"
    if pulled:
        return Finding(OK, text)
    if free < least or not os.access(above, os.W_OK):
        text += f"; fetching it needs {least / 1e6:.0f} MB in a folder that can be written"
        return Finding(PROBLEM, text, "free some space, or set QUICKBEAM_CACHE to another folder")
    return Finding(NOTE, f"{text}: the first answer waits for it", "quickbeam pull")


def drafter(source: str) -> Finding:
    """Load a model, and say which drafters of this machine fit it and what each gains."""
    check_models(source)
    from quickbeam.engine.gain import best_trial
    from quickbeam.llm import LLM

    with loading_progress(source) as progress:
        llm = LLM(source, drafter=hub.AUTO, progress=progress)
    with llm:
        trials = llm.drafter_trials
        best = best_trial(trials, llm.method)
    text = "; ".join(map(harmless, map(str, trials))) or "none for this model is on this machine"
    if best is None:
        todo = (
            "download a smaller model of its family, or let it write for ten minutes: quickbeam "
            f"train --model {source} --only text --minutes 10"
        )
        return Finding(NOTE, text, todo)
    return Finding(OK, text, f"--drafter {best.candidate.name}, or --drafter auto")


CHECKS = (cpu, load, memory, gpu, kernels, packages, extras, model)


def look(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # something that it needs is missing
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Finding(NOTE, f"can't be checked here ({reason})")


def doctor(
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Load this model, and measure what the drafters on this machine gain for it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON record.")] = False,
) -> None:
    """Say what makes quickbeam slow or unable to run here.

    Exit code 1 where models can't run.
    """
    findings = {check.__name__: look(check) for check in CHECKS}
    if model_name is not None:
        source = model_name
        findings["drafter"] = look(lambda: drafter(source))
    can_run = all(finding.status != PROBLEM for finding in findings.values())
    if as_json:
        rows = [{"check": name, **finding._asdict()} for name, finding in findings.items()]
        print(json.dumps({"quickbeam": __version__, "can_run": can_run, "findings": rows}))
    for name, (status, text, todo) in findings.items() if not as_json else ():
        typer.secho(f"{status:8}", fg=COLOURS[status], nl=False)
        first, *others = wrapped(text) + (wrapped(f"→ {todo}") if todo else [])
        print(f"{name:10}{first}", *(f"{'':18}{line}" for line in others), sep="\n")
    raise typer.Exit(not can_run)


def wrapped(text: str) -> list[str]:
    """Return a finding's text in lines as the terminal is wide. Paths and options stay whole."""
    width = max(40, shutil.get_terminal_size().columns - 18)
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class PullOptions:
    """What is fetched or listed."""

    name: str = field(
        default=hub.DEFAULT,
        metadata={
            "argument": True,
            "metavar": "NAME",
            "help": f"Built-in model to fetch, one of: {', '.join(hub.EMBEDDED)}.",
        },
    )
    list: bool = field(default=False, metadata={"common": True})
    """Fetch nothing: say which models there are, and what is in the cache."""


def pull(options: PullOptions) -> None:
    """Fetch a built-in model into the cache.

    Its folder is printed. What is there already is not fetched again.
    """
    if options.list:
        for name, entry in hub.EMBEDDED.items():
            size = hub.pulled_bytes(name)
            state = f"{size / 1e6:.0f} MB" if size else "not pulled"
            folder = cache_folder() / name
            print(f"{name}: {state}, {entry.license}\n  {entry.summary}\n  {folder}")
    else:
        with progress_bar(f"looking for {options.name}", written=True) as report:
            folder = builtin.pull(options.name, report)
        print(folder)
