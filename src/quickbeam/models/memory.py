"""How much memory there is, and memory in huge pages."""

from __future__ import annotations

import mmap
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import psutil
import torch

HUGE = 2**21  # bytes of a huge page


def memory_for_weights(size: int) -> torch.Tensor:
    """Return a tensor `[size]` uint8 on the CPU that is not filled yet.

    Where Linux has huge pages, it lies in these. A pass reads all weights once. In pages of 4 kB
    each, their addresses don't fit the processor's table of pages: reading takes longer, and
    displaces the entries of all other memory from that table.
    """
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    # new memory, as pages that are in use don't become huge
    block = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    begin = -memory.data_ptr() % HUGE
    return memory[begin : begin + size]


def map_file(path: Path) -> torch.Tensor | None:
    """Return a file's bytes, `[size]` uint8, mapped.

    Each page is read when it is first used, and is shared with other processes.

    None where Linux maps many in small pages, which a pass reads more slowly than large ones
    (`memory_for_weights`). Large ones need a file system that keeps a file in them (ext4 and XFS in
    recent versions).
    """
    with open(path, "rb") as file:
        block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped = torch.frombuffer(block, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        mapped[::HUGE].sum()  # maps them
        if in_huge_pages(mapped.data_ptr()) < 0.9 * len(mapped):
            return None
    return mapped


def in_huge_pages(begin: int) -> int:
    """Return how many bytes of the file that is mapped at address `begin` are in huge pages."""
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as maps:
        is_reached = False
        for line in maps:
            is_reached = is_reached or line.startswith(f"{begin:x}-")
            if is_reached and line.startswith("FilePmdMapped:"):
                return int(line.split()[1]) * 1024
    return 0


def reserved(size: int) -> torch.Tensor:
    """Return `size` bytes of addresses without memory: they can't be read or written."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that can't be written
        return torch.frombuffer(block, dtype=torch.uint8)


def free_memory(device: torch.device) -> int:
    """Return how many bytes are free on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def peak_bytes() -> int | None:
    """Return this process's peak memory in bytes; None where the system doesn't say."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
