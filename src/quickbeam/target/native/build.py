"""Compiles the kernels: one shared library an instruction set, kept in the user's cache under a hash of all that went into it.

`python -m quickbeam.target.native.build` compiles what this machine can run, with progress. The libraries need neither PyTorch's
headers nor
its version: they have a C interface, and their OpenMP symbols are found in the runtime that PyTorch has loaded, whose threads they share.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from platformdirs import user_cache_path

HERE = Path(__file__).parent
SHIPPED = HERE / "lib"  # what a wheel carries
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wno-maybe-uninitialized")
_ZMM = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
SETS: dict[str, tuple[str, ...]] = {  # best first; how to compile each
    "amx": ("-DQB_AMX", *_ZMM, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512bf16": ("-DQB_AVX512BF16", *_ZMM, "-mavx512bf16"),
    "avx512": ("-DQB_AVX512", *_ZMM),
    "avx2": ("-DQB_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}
EMULATED = "amx-emulated"  # AMX's way with its instructions in plain C++: for tests on machines without AMX
NEEDS = {  # flags in /proc/cpuinfo
    "amx": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512bf16": {"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    EMULATED: {"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
    "plain": set(),
}


class CannotBuild(Exception):
    """Why there is no library, in words."""


def machine_sets() -> list[str]:
    """Instruction sets that this machine runs, best first; none where the platform is not one that kernels are built for."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return []
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ["plain"]
    flags = set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
    return [name for name in SETS if NEEDS[name] <= flags]


def sources() -> list[Path]:
    return sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])


def flags_of(name: str) -> tuple[str, ...]:
    return (*SETS["amx"][:1], "-DQB_AMX_EMULATED", *SETS["avx512bf16"][1:]) if name == EMULATED else SETS[name]


def digest(name: str, extra: Sequence[str] = ()) -> str:
    """Of the sources and how they are compiled."""
    found = hashlib.sha256(" ".join([*FLAGS, *flags_of(name), *extra]).encode())
    for path in sources():
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def cached(name: str) -> Path:
    """Where the library of an instruction set is, or would be: in the wheel, else in the cache."""
    shipped = SHIPPED / f"{name}.so"
    return shipped if shipped.is_file() else user_cache_path("quickbeam") / "kernels" / f"{name}-{digest(name)}.so"


def compile_to(path: Path, name: str, extra: Sequence[str] = ()) -> None:
    """Compile the kernels for an instruction set. Raises `CannotBuild` where there is no compiler, or it fails."""
    compiler = os.environ.get("CXX") or next((found for found in ("g++", "c++", "clang++") if shutil.which(found)), None)
    if compiler is None:
        raise CannotBuild("no C++ compiler is there (g++ or clang++, or name one in CXX)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        part, result = Path(work) / "kernels.o", Path(work) / "kernels.so"
        # Linked without -fopenmp: a second OpenMP runtime would bring threads of its own.
        for step in (
            [*compiler.split(), *FLAGS, *flags_of(name), *extra, "-c", str(HERE / "program.cpp"), "-o", str(part)],
            [*compiler.split(), "-shared", *extra, str(part), "-o", str(result)],
        ):
            try:
                done = subprocess.run(step, capture_output=True, text=True)
            except OSError as error:
                raise CannotBuild(f"{compiler} can't be run: {error.strerror}") from error
            if done.returncode:
                reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                raise CannotBuild(f"{compiler} failed: {reason}")
        os.replace(result, path)


def build(name: str, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The library of an instruction set, compiled where it is not there yet. Raises `CannotBuild`."""
    path = cached(name)
    if path.is_file():
        return path
    progress(f"compiling kernels for {name}")
    try:
        compile_to(path, name)
    except OSError as error:
        raise CannotBuild(f"{path.parent} can't be written: {error.strerror}") from error
    return path


def main() -> None:
    names = machine_sets()
    if not names:
        print("kernels: none for this platform; quickbeam uses PyTorch's")
    for name in names:
        try:
            print(f"kernels: {name} in {build(name, lambda what: print(f'{what} …', flush=True))}", flush=True)
        except CannotBuild as error:
            print(f"kernels: not built for {name}: {error}; quickbeam uses PyTorch's")
            return


if __name__ == "__main__":
    main()
