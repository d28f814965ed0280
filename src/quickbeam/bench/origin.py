"""Where figures come from: when, on what code and on which machine they were measured.

Also whether they still hold for the code.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quickbeam.bench.plan import Entry
from quickbeam.bench.saved import Saved
from quickbeam.syntax import code

KEY = "run"  # the field of a record that this module adds
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "gguf", "llguidance")
SHORT = 9  # characters of a commit's name


def covered(root: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files that these patterns match, sorted, without those in `__pycache__`."""
    names = {name for pattern in patterns for name in glob(pattern, root_dir=root, recursive=True)}
    return [
        root / name
        for name in sorted(names)
        if (root / name).is_file() and "__pycache__" not in Path(name).parts
    ]


def digest(root: Path, patterns: Sequence[str]) -> str:
    """Return a SHA-256 digest of the names and contents of the covered files.

    It changes where a file changes, is added or is removed. Python files count by what they do:
    comments, docstrings and line breaks make no difference.
    """
    whole = hashlib.sha256()
    for path in covered(root, patterns):
        own = hashlib.sha256(code(path)).hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()} {own}\n".encode())
    return whole.hexdigest()


def origin(entry: Entry, root: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """Return what is known before a measurement begins.

    `files` maps the command's blanks to what fills them. Of a file only the name and the digest are
    kept.
    """
    named = {blank: _named(value) for blank, value in files.items()}
    return {
        "name": entry.name,
        "title": entry.title,
        "command": entry.command,
        "blanks": named,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _git(root, "rev-parse", "HEAD"),
        "dirty": bool(
            _git(
                root,
                "status",
                "--porcelain",
                "--untracked-files=all",
                "--",
                *(f":(glob){one}" for one in entry.covers),
            )
        ),
        "covers": list(entry.covers),
        "digest": digest(root, entry.covers),
        "machine": {
            "platform": platform.platform(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "memory_gb": _memory(),
        },
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def stale(saved: Saved, entry: Entry, root: Path) -> str | None:
    """Return why figures are no longer those of the code and the plan, in words for the reader.

    None where they still are.
    """
    run = saved.content[KEY]
    at = f"(measured at {commit(run)})"
    if digest(root, entry.covers) != run["digest"]:
        return f"older than the code it measures {at}"
    if run["command"] != entry.command:
        return f"of another command than the plan's {at}"
    return None


def commit(run: Mapping[str, Any]) -> str:
    """Return the commit that figures were measured at, for the reader."""
    name = str(run["commit"])[:SHORT] if run["commit"] else "an unknown commit"
    return f"{name} with changes" if run["dirty"] else name


def machine(saved: Saved) -> str:
    """Return what figures were measured on, for the reader."""
    where = saved.where
    cores = where.get("cores") or saved.content.get(KEY, {}).get("machine", {}).get("cores")
    device = where.get("device")
    parts = [
        where.get("cpu") if device in (None, "cpu") else device,
        cores and f"{cores} cores",
        where.get("threads") and f"{where['threads']} thread{'s' if where['threads'] != 1 else ''}",
        where.get("kernels"),
        where.get("torch") and f"torch {where['torch']}",
    ]
    return ", ".join(str(part) for part in parts if part)


def _named(value: str) -> dict[str, str]:
    """What is kept of a value that fills a blank.

    Of a path only the last part is kept, so that the record names no folder of the machine. A
    file's SHA-256 digest is kept, too. Any other value is kept as it is.
    """
    path = Path(value)
    if not path.exists():
        return {"value": value}
    found = {"file": path.name}
    if path.is_file():
        with path.open("rb") as file:
            whole = hashlib.sha256()
            while part := file.read(1 << 20):
                whole.update(part)
        found["sha256"] = whole.hexdigest()
    return found


def _git(root: Path, *words: str) -> str | None:
    """What git prints, or None where there is no git or no repository."""
    try:
        found = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _memory() -> float:
    import psutil

    return round(float(psutil.virtual_memory().total) / 1e9, 1)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
