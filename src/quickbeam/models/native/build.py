"""Compiles the kernels to one shared library per instruction set.

A library is named after a hash of everything that went into it.
`python -m quickbeam.models.native.build` compiles what this machine runs, `… build avx2` what is
named, `… build --all` every set. The libraries are kept in the cache folder. A wheel may bring its
own.

The libraries have a C interface, so they depend neither on PyTorch's headers nor on its version.
Their OpenMP symbols are found in the runtime that PyTorch has loaded, so they share its threads.

Importing this file imports the standard library alone, because the build of a wheel loads it by
itself (`hatch_build.py`).
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SHIPPED = HERE / "lib"  # libraries that a wheel brings
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",  # what libraries of several sets have in a process is their own
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",  # a choice between two numbers may become lanes
    "-Wno-maybe-uninitialized",
)
_ZMM = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI = ("-DQB_VNNI", "-mavx512vnni")  # products of bytes
SETS: dict[str, tuple[str, ...]] = {  # flags to compile each set with, the best set first
    "amx": ("-DQB_AMX", *_ZMM, *_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512bf16": ("-DQB_AVX512BF16", *_ZMM, *_VNNI, "-mavx512bf16"),
    "avx512vnni": ("-DQB_AVX512", *_ZMM, *_VNNI),
    "avx512": ("-DQB_AVX512", *_ZMM),
    "avx2": ("-DQB_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}
# the AMX kernels with AMX's instructions in plain C++, for tests on machines without AMX
EMULATED = "amx-emulated"
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
NEEDS = {  # flags in /proc/cpuinfo that each set needs
    "amx": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni", *_AVX512},
    "avx512bf16": {"avx512_bf16", "avx512_vnni", *_AVX512},
    EMULATED: {"avx512_bf16", "avx512_vnni", *_AVX512},
    "avx512vnni": {"avx512_vnni", *_AVX512},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "plain": set(),
}


class CannotBuild(Exception):
    """There is no library. The message says why."""


def has_kernels() -> bool:
    """Whether kernels are built for this platform (Linux on x86-64)."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def runs(name: str) -> bool:
    """Whether this machine has the instructions of a set. False on a platform without kernels."""
    if not has_kernels():
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return NEEDS[name] <= set(
        next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split()
    )


def machine_sets() -> list[str]:
    """Return the instruction sets that this machine runs, the best first.

    There are none on a platform without kernels.
    """
    return [name for name in SETS if runs(name)]


def sources() -> list[Path]:
    return sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])


def flags_of(name: str) -> tuple[str, ...]:
    return (
        (*SETS["amx"][:1], "-DQB_AMX_EMULATED", *SETS["avx512bf16"][1:])
        if name == EMULATED
        else SETS[name]
    )


def digest(name: str) -> str:
    """Return a hash of the sources and of how they are compiled, 16 hex digits."""
    found = hashlib.sha256(" ".join([*FLAGS, *flags_of(name)]).encode())
    for path in sources():
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def file_name(name: str) -> str:
    """Return the file name of an instruction set's library.

    It contains the digest, so that a library is never used with newer sources.
    """
    return f"{name}-{digest(name)}.so"


def cached(name: str) -> Path:
    """Return where the library of an instruction set is, or would be.

    That is in the wheel if it brings the library, else in the cache folder.
    """
    from quickbeam.cache import cache_folder

    file = file_name(name)
    return SHIPPED / file if (SHIPPED / file).is_file() else cache_folder() / "kernels" / file


def compiler() -> list[str] | None:
    """Return the C++ compiler's command, or None if there is none.

    It is the command in the variable CXX. Without CXX it is the first of g++, c++ and clang++ that
    is there.
    """
    if chosen := os.environ.get("CXX", "").split():
        return chosen if shutil.which(chosen[0]) else None
    return next(([found] for found in ("g++", "c++", "clang++") if shutil.which(found)), None)


def no_compiler() -> CannotBuild:
    if chosen := os.environ.get("CXX"):
        return CannotBuild(f"the C++ compiler CXX={chosen} is not there")
    return CannotBuild("no C++ compiler is there (g++ or clang++, or name one in CXX)")


def compile_to(path: Path, name: str, extra: Sequence[str] = ()) -> None:
    """Compile the kernels for an instruction set to `path`.

    `extra`: further flags. Raises `CannotBuild` if there is no compiler or if it fails, `OSError`
    if `path` can't be written.
    """
    command = compiler()
    if command is None:
        raise no_compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        part, result = Path(work) / "kernels.o", Path(work) / "kernels.so"
        # Linked without -fopenmp: a second OpenMP runtime would bring its own threads.
        for step in (
            [
                *command,
                *FLAGS,
                *flags_of(name),
                *extra,
                "-c",
                str(HERE / "program.cpp"),
                "-o",
                str(part),
            ],
            [*command, "-shared", *extra, str(part), "-o", str(result)],
        ):
            try:
                done = subprocess.run(step, capture_output=True, text=True)
            except OSError as error:
                raise CannotBuild(f"{command[0]} can't be run: {error.strerror}") from error
            if done.returncode:
                reason = next(
                    (line for line in done.stderr.splitlines() if "error" in line),
                    done.stderr.strip()[:200],
                )
                raise CannotBuild(f"{command[0]} failed: {reason}")
        os.replace(result, path)


def build(name: str, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Return the library of an instruction set, compiled if it is not there yet.

    `progress` is called before it compiles. Raises `CannotBuild`.
    """
    path = cached(name)
    if path.is_file():
        return path
    progress(f"compiling kernels for {name}")
    try:
        compile_to(path, name)
    except OSError as error:
        raise CannotBuild(f"{path.parent} can't be written: {error.strerror}") from error
    return path


def build_all(
    names: Sequence[str], make: Callable[[str], Path] = build
) -> dict[str, Path | CannotBuild]:
    """Build the libraries of several instruction sets in parallel, on all cores.

    Returns by name the path of each library, or the reason why there is none.
    """

    def attempt(name: str) -> Path | CannotBuild:
        try:
            return make(name)
        except CannotBuild as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(attempt, names), strict=True))


def main(arguments: Sequence[str]) -> int:
    """Build libraries, and print in a few lines where they are. Returns the exit code.

    It is 2 for an unknown name, 1 if sets were asked for (by name or `--all`) and one can't be
    built, else 0.
    """
    known = [*SETS, EMULATED]
    if unknown := [name for name in arguments if name not in (*known, "--all")]:
        print(
            f"error: unknown instruction set {unknown[0]!r}; known: {', '.join(known)}, or --all",
            file=sys.stderr,
        )
        return 2
    if not has_kernels():
        print(
            "kernels: none for this platform (Linux on x86-64 has them); quickbeam uses PyTorch's"
        )
        return int(bool(arguments))
    names = list(SETS) if "--all" in arguments else list(dict.fromkeys(arguments)) or machine_sets()
    missing = [name for name in names if not cached(name).is_file()]
    if missing and compiler() is not None:
        print(f"kernels: compiling {', '.join(missing)}", flush=True)
    results = build_all(names)
    built = [(name, path) for name, path in results.items() if isinstance(path, Path)]
    for folder in dict.fromkeys(path.parent for _, path in built):
        print(
            f"kernels: {', '.join(name for name, path in built if path.parent == folder)} in "
            f"{folder}"
        )
    reasons = {
        name: str(result) for name, result in results.items() if isinstance(result, CannotBuild)
    }
    for reason in dict.fromkeys(reasons.values()):
        failed = ", ".join(name for name in reasons if reasons[name] == reason)
        instead = "" if built else "; quickbeam uses PyTorch's"
        print(f"kernels: {failed} not built: {reason}{instead}")
    return int(bool(arguments and reasons))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
