"""Reads a `.gguf` file through transformers, without reading anything twice.

By itself, transformers reads the file's metadata anew for the configuration, the weights and the
tokenizer, string by string. It also makes the table of tensor names anew for every module of the
model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np

_patching = threading.Lock()


class Reader(gguf.GGUFReader):
    """A `GGUFReader` over a plain array.

    Each string is a slice, and slices of a memory map take ten times as long.
    """

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped).view(np.ndarray)


@contextmanager
def read_once(report: Callable[[float], None] = lambda done: None) -> Iterator[None]:
    """Within this context, read a file's metadata and make each table of tensor names only once.

    It replaces functions of the `gguf` module meanwhile, for one thread at a time. `report` hears
    what share of the weights is dequantised, from 0 to 1.
    """
    library: Any = gguf
    reader, names, dequantize = library.GGUFReader, library.get_tensor_name_map, library.dequantize
    total, done = 1, 0

    def open_reader(path: Any, *arguments: Any) -> Any:
        nonlocal total
        found = kept(str(path))
        total = max(1, sum(tensor.n_bytes for tensor in found.tensors))
        return found

    def counted(data: Any, kind: Any) -> Any:
        nonlocal done
        found = dequantize(data, kind)
        done += data.nbytes
        report(min(1.0, done / total))
        return found

    kept = functools.lru_cache(maxsize=1)(Reader)
    with _patching:
        library.GGUFReader, library.get_tensor_name_map, library.dequantize = (
            open_reader,
            functools.cache(names),
            counted,
        )
        try:
            yield
        finally:
            library.GGUFReader, library.get_tensor_name_map, library.dequantize = (
                reader,
                names,
                dequantize,
            )
            kept.cache_clear()
