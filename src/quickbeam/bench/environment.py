"""The versions, the machine and the settings of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

import quickbeam
from quickbeam.doctor.machine import cpu_name
from quickbeam.target.native.library import describe


def environment(device: str, dtype: str) -> dict[str, object]:
    """Return the versions, the machine and the settings that speed depends on.

    `commit` is included only when the package runs from its own checkout.
    """
    record: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "quickbeam": quickbeam.__version__,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})"
        if device.startswith("cuda")
        else device,
        "dtype": dtype,
        "kernels": describe(device, dtype),
    }
    if commit := _commit():
        record["commit"] = commit
    return record


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[3]  # src/quickbeam/bench/environment.py
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
