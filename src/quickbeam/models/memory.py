"""How much memory there is, and memory in huge pages."""

from __future__ import annotations

import mmap
import sys
import warnings
from contextlib import suppress

import psutil
import torch

HUGE = 2**21  # bytes of a huge page


def room_for_weights(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor `[size]` on the CPU that is not filled yet.

    Where Linux has huge pages, it lies in these. A pass reads all weights once. In pages of 4 kB
    each, their addresses don't fit the processor's table of pages: reading takes longer, and
    whatever runs next finds nothing of its own in that table.
    """
    bytes_needed = size * dtype.itemsize
    if bytes_needed < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=dtype)
    # memory that nobody has touched yet, as pages that are in use stay as they are
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    block = mmap.mmap(-1, bytes_needed + HUGE, private)
    with suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE
    return whole[begin : begin + bytes_needed].view(dtype)


def reserved(size: int) -> torch.Tensor:
    """Return `size` bytes of addresses that nothing else gets. They can't be read or written."""
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
