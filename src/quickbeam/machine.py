"""What this machine is: its processor's name and the cores that this process may use."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's share of the processor


def cpu_name() -> str:
    """Return the name of the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Return the number of logical cores that this process may use.

    The process's affinity and its container's CPU quota limit them.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or no limit
        return cores
