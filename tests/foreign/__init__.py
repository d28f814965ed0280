"""Kernels of another platform, run by an emulator or by Wine beside the tests.

A `Kernels` of this folder hands every call to a process there. Both processes have the same memory
at the same address, so the addresses in operations and batches hold there, too, and nothing is
copied. The memory is that of `memory.cpp`, which Python is started with (`run`).
"""

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from quickbeam.models.native import build, library
from scripts import captured

HERE = Path(__file__).parent
BEGIN, SIZE = 0x100000000000, 1 << 33  # of memory.cpp


@dataclass(frozen=True)
class Machine:
    """Another platform, by the name of `_PYTHON_HOST_PLATFORM`, and what stands for it here.
    `flags`: how the driver is compiled. `needs`: commands, the last of which runs the driver.
    `packages`: of Debian and of Python, with these."""

    platform: str
    compiler: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    packages: str

    def reason_against(self) -> str:
        """Why its kernels can't be run here; empty where they can."""
        missing = [name for name in self.needs if which(name) is None]
        if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
            return "the memory is that of a process on Linux on x86-64"
        return f"{' and '.join(missing)} not there (packages: {self.packages})" if missing else ""

    def compiled(self, name: str) -> Path:
        """The library of an instruction set, in the cache."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", self.compiler)
            patch.setenv("_PYTHON_HOST_PLATFORM", self.platform)
            return build.build(name)


GCC, ZIG = "aarch64-linux-gnu-g++", os.environ.get("ZIG", "zig").split()[0]
CLANG = f"{HERE / 'zig'} x86_64-windows-gnu"
ON_ARM, QEMU = ("-fopenmp", "-ldl"), (GCC, "qemu-aarch64")
ARM = Machine("linux-aarch64", GCC, ON_ARM, QEMU, "g++-aarch64-linux-gnu, qemu-user")
WINDOWS = Machine("win-amd64", CLANG, ("-static",), (ZIG, "wine"), "ziglang, wine")


class Kernels(library.Kernels):
    """As the class above. `name`: the set that the tests take them for; `command` starts the
    driver, without its arguments. `calls`: how often a function ran there."""

    def __init__(self, name: str, path: Path, command: Sequence[str]) -> None:
        self.name, self.calls = name, 0
        self.nodes = None
        file = f"/proc/{os.getpid()}/fd/{ctypes.CDLL(None).shared_file()}"
        self._driver = subprocess.Popen(
            [*command, str(path), file, str(BEGIN), str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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
        real, words = bytearray(16), b""
        for i, (kind, value) in enumerate(zip(takes, given, strict=True)):
            real[i] = kind in (c_double, c_float)
            form = {c_double: "<d", c_float: "<f4x"}.get(kind, "<q")
            words += struct.pack(form, value if real[i] else number(value))
        request = struct.pack("<32s16s96s", name.encode(), bytes(real), words)
        assert self._driver.stdin and self._driver.stdout
        self._driver.stdin.write(request)
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


def made(machine: Machine, folder: Path) -> tuple[Path, Path]:
    """The memory to preload, and the driver."""
    memory, driver = folder / "memory.so", folder / "driver.exe"
    host = build.compiler() or ["g++"]
    source = str(HERE / "driver.cpp")
    for command in (
        [*host, "-O2", "-fPIC", "-shared", str(HERE / "memory.cpp"), "-o", str(memory)],
        [*machine.compiler.split(), "-O2", source, *machine.flags, "-o", str(driver)],
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
path, *command = sys.argv[1 : sys.argv.index("--")]
kernels = foreign.Kernels("plain", Path(path), command)
library.load = lambda name, *_: kernels
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[sys.argv.index("--") + 1 :]])
print("calls:", kernels.calls)
sys.exit(code)
"""


def run(machine: Machine, path: Path, options: Sequence[str], folder: Path, *arguments: str):
    """Run tests in a process whose kernels, whatever their set, are those of `path`. `options`: of
    the machine's runner. What it prints ends with how many calls the kernels had."""
    memory, driver = made(machine, folder)
    settings = {
        "LD_PRELOAD": str(memory),
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "WINEPREFIX": str(folder / "wine"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml=",  # what a new prefix would ask for
    }
    command = [machine.needs[-1], *options, str(driver), "--", *arguments]
    return captured([sys.executable, "-c", RUN, str(path), *command], env=os.environ | settings)
