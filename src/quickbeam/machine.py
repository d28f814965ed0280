"""This machine: its processor's name, the cores that a process may use, how threads share them."""

from __future__ import annotations

import math
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's share of the processor
T = TypeVar("T")
_starting = threading.Lock()  # held while the size of stacks is another one


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


def fulfil(result: Future[T], work: Callable[[], T]) -> None:
    """Set a future's result to what `work` returns, or its exception to what that raises."""
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def in_own_thread(work: Callable[[], T], stack: int = 0) -> T:
    """Return what `work` returns, called in a thread that ends with it. Raises what it raises.

    OpenMP keeps a pool of threads for each thread that has computed in parallel, until that thread
    ends. Where all pools together have more threads than there are cores, none of them waits for
    work with its core in hand any more, and each parallel part of a pass begins some 50
    microseconds later. So whatever computes in parallel beside the engine's own thread, as loading
    does, does it here. An interrupt does not wait for the work's end. `stack`: bytes of its stack,
    of which only those that are used take memory; 0 for the usual size.
    """
    result, name = Future[T](), "quickbeam-work"
    thread = threading.Thread(target=fulfil, args=(result, work), name=name, daemon=True)
    with _starting:
        before = threading.stack_size(stack)
        thread.start()
        threading.stack_size(before)
    value = result.result()
    thread.join()
    return value
