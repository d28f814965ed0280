"""When, on what code and on which machine a measurement was made."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import transformers

import quickbeam
from quickbeam.machine import cpu_name
from quickbeam.models.native.library import describe


def environment(device: str, dtype: str) -> dict[str, object]:
    """Return the command, the date and what speed depends on.

    `commit` is empty where the package does not run from its own checkout.
    """
    root, commit = Path(quickbeam.__file__).resolve().parents[2], ""
    if (root / ".git").exists() and shutil.which("git"):
        head = ["git", "-C", str(root), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "quickbeam": quickbeam.__version__}
    program = Path(sys.argv[0]).name.replace("__main__.py", "quickbeam")
    command = " ".join([program, *sys.argv[1:]])
    known = {"command": command, "date": date.today().isoformat(), "commit": commit, **versions}
    cores = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    kernels = describe(device, dtype)
    return {**known, **cores, "device": device, "dtype": dtype, "kernels": kernels}
