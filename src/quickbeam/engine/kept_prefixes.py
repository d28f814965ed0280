"""Chunks of the prefix cache in files, so that another process need not compute them again.

Each chunk is a safetensors file of its own. Its name is a hash of the model's identity and of all
tokens up to the chunk's end, so no other model, and no other text, finds it. A file is written
under another name first: what a killed process leaves is a whole file or none that is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

logger = logging.getLogger(__name__)
SUFFIX = ".prefix"
PART = ".part"  # of a file that is being written


class KeptPrefixes:
    """The files in `folder`, of at most `limit` bytes in all; those used last stay.

    `identity`: of the model, its kernels and its drafter. Files of others are never read.
    """

    def __init__(self, folder: Path, identity: str, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self.root = hashlib.sha256(identity.encode()).hexdigest()
        self._failed = False
        for part in folder.glob(f"*.*{PART}"):
            *_, process, _ = part.name.split(".")
            with suppress(OSError, OverflowError):  # the latter: no process has such a number
                if process.isdecimal() and not psutil.pid_exists(int(process)):  # it was killed
                    part.unlink()

    def name(self, parent: str, key: Sequence[int]) -> str:
        """Return the name of the chunk of this key behind a chunk, or behind `root`."""
        return hashlib.sha256(" ".join(map(str, (parent, *key))).encode()).hexdigest()

    def load(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a chunk; None if it is not kept or its file is damaged."""
        path = self._path(name)
        try:
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                checksum = (file.metadata() or {}).get("checksum")
            if checksum != checksum_of(name, tensors):
                raise ValueError("its content is not what was written")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            if not path.exists():  # another process has removed it meanwhile
                return None
            logger.warning("a kept prefix is ignored: %s is damaged (%s)", path, error)
            return None
        self.touch(name)
        return tensors

    def touch(self, name: str) -> None:
        """Note that a chunk was used."""
        with suppress(OSError):
            os.utime(self._path(name))

    def save(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a chunk. After a failure, as of a full disk, no more are written."""
        if self._failed:
            return
        path = self._path(name)
        # a process may have two engines, and processes of two containers the same number
        part = path.with_name(f"{name}-{secrets.token_hex(8)}.{os.getpid()}{PART}")
        try:
            self._folder.mkdir(exist_ok=True)
            if self._make_room(sum(tensor.nbytes for tensor in tensors.values()), path):
                # `save_file` would write under a name that nobody removes if the process is killed
                part.write_bytes(save(dict(tensors), {"checksum": checksum_of(name, tensors)}))
                os.replace(part, path)
        except (OSError, SafetensorError) as error:
            self._failed = True
            logger.warning("prefixes are no longer kept: %s can't be written (%s)", path, error)
            with suppress(OSError):
                part.unlink()

    def _make_room(self, needed: int, path: Path) -> bool:
        """Remove the files used longest ago; return whether `path` may have so many bytes."""
        if needed > self._limit:
            return False
        files = list[tuple[os.stat_result, Path]]()
        for entry in self._folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # another process has removed it
                files.append((entry.stat(), entry))
        files.sort(key=lambda file: file[0].st_mtime_ns)
        used = sum(stat.st_size for stat, entry in files if entry != path)
        for stat, entry in files:
            if used + needed <= self._limit:
                break
            if entry != path:
                entry.unlink(missing_ok=True)
                used -= stat.st_size
        return used + needed <= self._limit

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"


def checksum_of(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum of a file's name, and of its tensors: names, types, shapes, numbers."""
    checksum = zlib.crc32(name.encode())
    for key in sorted(tensors):
        tensor = tensors[key].contiguous()
        checksum = zlib.crc32(f"{key} {tensor.dtype} {tensor.shape}".encode(), checksum)
        content = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        checksum = zlib.crc32(content, checksum)
    return f"{checksum:08x}"
