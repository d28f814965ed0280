"""This machine: its processor's name, the cores that a process may use, and its threads."""

from __future__ import annotations

import math
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

NODES = Path("/sys/devices/system/node")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's share of the processor
T = TypeVar("T")
_starting = threading.Lock()  # held while the size of new threads' stacks is changed


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
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        limit = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no container, or no limit
        return cores
    return max(1, min(cores, limit))


def memory_nodes(folder: Path = NODES) -> list[list[int]]:
    """Return the numbers of the processors near each memory node (NUMA), in the nodes' order.

    Only those that this process may use count, and only nodes that have such. `folder`: where Linux
    says so; elsewhere the list is empty.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    nodes = list[list[int]]()
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        near = set[int]()
        for part in (path / "cpulist").read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            near.update(range(int(first or 0), int(last or first or -1) + 1))
        if near & usable:
            nodes.append(sorted(near & usable))
    return nodes


def fulfil(result: Future[T], work: Callable[[], T]) -> None:
    """Set a future's result to what `work` returns, or its exception to what that raises."""
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def in_own_thread(work: Callable[[], T], stack: int = 0) -> T:
    """Return what `work` returns, called in a new thread. Raises what `work` raises.

    OpenMP keeps a pool of threads for each thread that has computed in parallel, until that thread
    ends. Once all pools together have more threads than there are cores, threads no longer wait for
    work while keeping their core. Each parallel part of a pass then begins some 50 microseconds
    later. So parallel work outside the engine's thread, such as loading, is done here.

    An interrupt does not wait for the work's end. `stack`: bytes of the thread's stack, of which
    only those that are used take memory; 0 for the default size.
    """
    result = Future[T]()
    thread = threading.Thread(
        target=fulfil, args=(result, work), name="quickbeam-work", daemon=True
    )
    with _starting:
        earlier_size = threading.stack_size(stack)
        thread.start()
        threading.stack_size(earlier_size)
    value = result.result()
    thread.join()
    return value
