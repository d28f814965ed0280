"""Kernels of another processor, run by an emulator beside the tests.

A `Kernels` of this folder hands every call to a process of the emulator. Both processes have the
same memory at the same address, so the addresses in operations and batches hold there, too, and
nothing is copied. The memory is that of `memory.cpp`, which Python is started with (`run`).
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64
from pathlib import Path
from typing import Any

import pytest

from quickbeam.models.native import build, library

HERE = Path(__file__).parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
BEGIN, SIZE = 0x100000000000, 1 << 36  # of memory.cpp


class Kernels(library.Kernels):
    """As the class above. `name`: the set that the tests take them for; `command` starts the
    driver, without its arguments. `calls`: how often a function ran there."""

    def __init__(self, name: str, path: Path, command: Sequence[str]) -> None:
        self.name, self.calls = name, 0
        file = ctypes.CDLL(None).shared_file()
        self._driver = subprocess.Popen(
            [*command, str(path), str(file), str(BEGIN), str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file],
            env={key: value for key, value in os.environ.items() if key != "LD_PRELOAD"},
        )
        version, size = (self._call(f"qb_{one}", (), ()) for one in ("version", "size_of_op"))
        assert version == library.VERSION and size == ctypes.sizeof(library.Op)
        self.page = self._call("qb_page", (), ())
        for function, (takes, _) in library.SIGNATURES.items():
            setattr(self, function, self._function(f"qb_{function}", takes))

    def _function(self, name: str, takes: tuple[Any, ...]) -> Any:
        return lambda *given: self._call(name, takes, given)

    def _call(self, name: str, takes: tuple[Any, ...], given: tuple[Any, ...]) -> int:
        whole, real = [], []
        for kind, value in zip(takes, given, strict=True):
            if kind is c_double:
                real.append(struct.pack("<d", value))
            elif kind is c_float:
                real.append(struct.pack("<fi", value, 0))
            else:
                whole.append(number(value))
        request = struct.pack("<32s12q", name.encode(), *whole, *[0] * (12 - len(whole)))
        assert self._driver.stdin and self._driver.stdout
        self._driver.stdin.write(request + b"".join(real).ljust(64, b"\0"))
        self._driver.stdin.flush()
        answer = self._driver.stdout.read(8)
        if len(answer) < 8:
            raise AssertionError(f"{name} ended the driver: {self._driver.wait()}")
        self.calls += 1
        return int.from_bytes(answer, "little", signed=True)


def number(value: Any) -> int:
    """A whole number, or the address of what is given by reference."""
    if value is None:
        return 0
    if hasattr(value, "_obj"):  # of ctypes.byref
        value = value._obj
    at = value if isinstance(value, int) else ctypes.addressof(value)
    return c_int64(at).value


def reason_against() -> str:
    """Why kernels for ARM64 can't be run here; empty where they can."""
    from shutil import which

    missing = [name for name in (COMPILER, EMULATOR) if which(name) is None]
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return "the emulator's memory is that of a process on Linux on x86-64"
    packages = "g++-aarch64-linux-gnu and qemu-user"
    return f"{' and '.join(missing)} not there ({packages} of Debian)" if missing else ""


def compiled(name: str) -> Path:
    """The library of an instruction set of ARM64, in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        patch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")
        return build.build(name)


def made(folder: Path) -> tuple[Path, Path]:
    """The memory to preload, and the driver."""
    memory, driver = folder / "memory.so", folder / "driver"
    host = build.compiler() or ["g++"]
    for command in (
        [*host, "-O2", "-fPIC", "-shared", str(HERE / "memory.cpp"), "-o", str(memory)],
        [COMPILER, "-O2", "-fopenmp", str(HERE / "driver.cpp"), "-ldl", "-o", str(driver)],
    ):
        subprocess.run(command, check=True)
    return memory, driver


RUN = """
import mmap
import sys
from pathlib import Path
import pytest
import foreign
del mmap.MADV_HUGEPAGE  # weights in huge pages would lie elsewhere
from quickbeam.models.native import library
path, cpu, driver = sys.argv[1:4]
command = [foreign.EMULATOR, "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu", driver]
kernels = foreign.Kernels("plain", Path(path), command)
library.load = lambda name: kernels
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[4:]])
print("calls:", kernels.calls)
sys.exit(code)
"""


def run(path: Path, cpu: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a process whose kernels, whatever their set, are those of `path`. What it
    prints ends with how many calls they had."""
    memory, driver = made(folder)
    settings = {
        "LD_PRELOAD": str(memory),
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", RUN, str(path), cpu, str(driver), *arguments]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
