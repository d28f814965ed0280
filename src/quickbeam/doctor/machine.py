"""Checks of the machine: processor, threads, memory, other load, speed of memory and disk."""

from __future__ import annotations

import math
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

from quickbeam.doctor.base import NOTE, OK, WEIGHT_BYTES, Finding
from quickbeam.target.native import build

BUSY = 0.1  # share of the cores; other programs that use more make times vary
LITTLE = 2 * 10**9  # bytes of free memory that are ample for the default model
BLOCK = 1 << 22  # bytes of a file read at once
SCRATCH = 1 << 26  # bytes of the file that is written if there is none as large to read
WAIT = 0.4  # seconds for which the load of other programs is measured


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
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or no limit
        return cores


def check_load() -> Finding:
    """Check what else uses the processor. This check comes first, as the others use it, too."""
    import psutil

    share, cores = psutil.cpu_percent(WAIT) / 100, usable_cores()
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    data = {"busy_share": share, "load_average": average}
    text = f"{share:.0%} of the processor is in use, {average:.1f} processes over the last minute"
    if share > BUSY or average > max(0.5, BUSY * cores):
        return Finding(
            "load", NOTE, text, "times measured now are noisy: wait, or end what else runs", data
        )
    return Finding("load", OK, text, data=data)


def check_cpu() -> Finding:
    import psutil

    usable, physical = usable_cores(), psutil.cpu_count(logical=False)
    sets = build.machine_sets()
    data = {
        "name": cpu_name(),
        "architecture": platform.machine(),
        "cores": physical,
        "usable_cores": usable,
        "instruction_sets": sets,
    }
    cores = f"{usable} logical cores" + (
        f" ({physical} physical)" if physical and physical != usable else ""
    )
    text = f"{cpu_name()}, {platform.machine()}, {cores}"
    if not build.has_kernels():
        return Finding(
            "cpu",
            NOTE,
            text,
            "native kernels are for Linux on x86-64; PyTorch's "
            "operators, which are slower, run here",
            data,
        )
    text += f", runs {', '.join(sets)}"
    if sets == ["plain"]:
        return Finding(
            "cpu", NOTE, text, "without AVX2 products are slow: a newer processor helps most", data
        )
    return Finding("cpu", OK, text, data=data)


def check_threads() -> Finding:
    import torch

    threads, usable, asked = (
        torch.get_num_threads(),
        usable_cores(),
        os.environ.get("OMP_NUM_THREADS", ""),
    )
    data = {"threads": threads, "usable_cores": usable, "OMP_NUM_THREADS": asked or None}
    text = f"{threads} for {usable} cores" + (f" (OMP_NUM_THREADS={asked})" if asked else "")
    if threads > usable:
        return Finding(
            "threads",
            NOTE,
            text,
            f"more threads than cores wait for each other: OMP_NUM_THREADS={usable}",
            data,
        )
    if asked and threads <= usable // 2:
        return Finding("threads", NOTE, text, "cores are left idle: unset OMP_NUM_THREADS", data)
    return Finding("threads", OK, text, data=data)


def check_memory() -> Finding:
    import psutil

    found = psutil.virtual_memory()
    data = {"bytes": int(found.total), "free_bytes": int(found.available)}
    text = f"{found.total / 1e9:.1f} GB, {found.available / 1e9:.1f} GB free"
    if found.available < LITTLE:
        return Finding(
            "memory",
            NOTE,
            text,
            "little is free: end other programs, or take --weights int4 and --kv-memory 200MB",
            data,
        )
    return Finding("memory", OK, text, data=data)


def check_bandwidth() -> Finding:
    """Check how fast memory is read. Plain decoding reads all weights for each token."""
    found = read_by_sum(64 if _free_memory() < LITTLE else 256, 3)
    most = found * 1e9 / WEIGHT_BYTES
    text = (
        f"memory is read at {found:.1f} GB/s: plain decoding of the default model gets at most "
        f"{most:.0f} tokens/s"
    )
    return Finding(
        "bandwidth",
        OK,
        text,
        data={"gigabytes_per_second": found, "plain_tokens_per_second_at_most": most},
    )


def _free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def read_by_sum(megabytes: int, repeats: int) -> float:
    """Return the GB/s at which PyTorch's threads read memory together.

    They sum `megabytes` MB of float32 numbers. The median of the `repeats` counts.
    """
    import torch

    numbers = torch.ones(megabytes * 250_000)
    return gigabytes_per_second(numbers.nbytes, numbers.sum, repeats)


def gigabytes_per_second(size: int, read: Callable[[], object], repeats: int) -> float:
    """Return the speed in GB/s of `read`, which reads `size` bytes.

    The median of the `repeats` counts. One call before them does not.
    """
    seconds = []
    for _ in range(repeats + 1):
        start = perf_counter()
        read()
        seconds.append(perf_counter() - start)
    return size / median(seconds[1:]) / 1e9


def read_speed(folder: Path, seconds: float = 0.8) -> float | None:
    """Return the GB/s at which the disk under `folder` is read; None if that can't be measured.

    It reads the folder's largest file for `seconds` seconds, or a file written for this purpose if
    that is small. If the system can be told to drop the file from its cache, this is the disk's
    speed, otherwise the cache's.
    """
    try:
        files = (
            [(path.stat().st_size, path) for path in folder.rglob("*") if path.is_file()]
            if folder.is_dir()
            else []
        )
        size, path = max(files, default=(0, folder), key=lambda one: one[0])
        if size >= SCRATCH:
            return _read(path, seconds)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".speed-") as scratch:
            scratch.write(os.urandom(BLOCK) * (SCRATCH // BLOCK))
            scratch.flush()
            os.fsync(scratch.fileno())
            return _read(Path(scratch.name), seconds)
    except OSError:
        return None


def _read(path: Path, seconds: float) -> float:
    done = 0
    with open(path, "rb", buffering=0) as handle:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = perf_counter()
        while (block := handle.read(BLOCK)) and perf_counter() - start < seconds:
            done += len(block)
        return done / max(perf_counter() - start, 1e-9) / 1e9
