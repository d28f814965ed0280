"""Checks of the software: Python, required packages, extras, and the GPU that PyTorch finds."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib import metadata
from typing import Any

from quickbeam import __version__
from quickbeam.doctor.base import NOTE, OK, PROBLEM, Finding

OLDEST, NEWEST = (3, 10), (3, 14)  # versions of Python that tests run on
SHOWN = ("torch", "transformers")
EXTRAS = {
    "serve": "quickbeam serve",
    "grammar": "JSON schemas, regular expressions and grammars",
    "train": "quickbeam train",
    "bench": "plots and bench structured",
    "ray": "--ray",
}


def check_python() -> Finding:
    found = sys.version_info[:2]
    text = (
        f"quickbeam {__version__}, Python {platform.python_version()}, "
        f"{platform.platform(terse=True)}"
    )
    data = {
        "quickbeam": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if found < OLDEST:
        return Finding("python", PROBLEM, text, "Python 3.10 or newer is needed", data)
    if found > NEWEST:
        return Finding(
            "python",
            NOTE,
            text,
            f"newer than what is tested ({'.'.join(map(str, NEWEST))} at most)",
            data,
        )
    return Finding("python", OK, text, data=data)


def requirements() -> dict[str, list[Any]]:
    """Return what quickbeam's own metadata requires, as `Requirement` of `packaging`, by extra.

    The empty name holds what is always required. Raises `PackageNotFoundError` if quickbeam is not
    installed.
    """
    from packaging.requirements import Requirement

    found: dict[str, list[Any]] = {"": []}
    for line in metadata.requires("quickbeam") or ():
        one = Requirement(line)
        for extra in ("", *EXTRAS):
            named = one.marker is not None and "extra" in str(one.marker)
            if (extra != "") == named and (
                one.marker is None or one.marker.evaluate({"extra": extra})
            ):
                found.setdefault(extra, []).append(one)
    return found


def lacking(wanted: list[Any]) -> dict[str, str]:
    """Return the requirements that are not met, by package.

    The value says which version is installed and which is wanted. It is empty if the package is
    missing.
    """
    missing = {}
    for one in wanted:
        version = installed(one.name)
        if not version or not one.specifier.contains(version, prereleases=True):
            missing[str(one.name)] = f"{version} is not {one.specifier}" if version else ""
    return missing


def installed(name: str) -> str:
    """Return a package's version; it is empty if the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_packages() -> Finding:
    versions = {name: installed(name) for name in SHOWN}
    if gone := [name for name, version in versions.items() if not version]:
        return Finding(
            "packages",
            PROBLEM,
            f"missing: {', '.join(gone)}",
            "install quickbeam again, with what it needs",
            {"versions": versions},
        )
    missing = lacking(requirements()[""])
    text = ", ".join(f"{name} {version or 'is missing'}" for name, version in versions.items())
    gone = [name for name in missing if not installed(name)]
    data = {
        "versions": versions,
        "missing": gone,
        "outside": [name for name in missing if name not in gone],
    }
    if gone:
        return Finding(
            "packages",
            PROBLEM,
            f"missing: {', '.join(gone)}",
            f"pip install {' '.join(gone)}",
            data,
        )
    if missing:
        wrong = "; ".join(f"{name} {why}" for name, why in missing.items())
        return Finding(
            "packages",
            NOTE,
            f"{text}; outside the tested range: {wrong}",
            "pip install --upgrade quickbeam",
            data,
        )
    return Finding("packages", OK, f"{text}: within the tested range", data=data)


def check_extras() -> Finding:
    asked = requirements()
    missing = {extra: lacking(asked[extra]) for extra in EXTRAS if extra in asked}
    there = [extra for extra, names in missing.items() if not names]
    lacks = {extra: sorted(names) for extra, names in missing.items() if names}
    data = {"installed": there, "missing": lacks}
    text = ", ".join(there) or "none installed"
    if not lacks:
        return Finding("extras", OK, text, data=data)
    for extra, names in lacks.items():
        text += f"; {EXTRAS[extra]}: no {', '.join(names)}"
    return Finding(
        "extras", NOTE, text, f"where you need it: pip install 'quickbeam[{','.join(lacks)}]'", data
    )


def check_gpu() -> Finding:
    import torch

    data: dict[str, Any] = {"cuda": torch.version.cuda, "names": []}
    if torch.cuda.is_available():
        places = range(torch.cuda.device_count())
        data["names"] = [torch.cuda.get_device_name(place) for place in places]
        free, total = torch.cuda.mem_get_info(0)
        text = (
            f"{', '.join(data['names'])}, {total / 1e9:.0f} GB, {free / 1e9:.0f} GB free: "
            "models run there unless --device cpu is given"
        )
        return Finding(
            "gpu",
            OK,
            text,
            "answers are bit for bit the same on a CPU only: docs/guarantee.md",
            data,
        )
    if shutil.which("nvidia-smi"):
        reason = (
            "this PyTorch is built for CPUs"
            if torch.version.cuda is None
            else "its driver doesn't fit this PyTorch"
        )
        return Finding(
            "gpu",
            NOTE,
            f"there may be one, but {reason}",
            "install the build of PyTorch that fits it, if models are to run there",
            data,
        )
    return Finding("gpu", OK, "none: models run on the CPU", data=data)
