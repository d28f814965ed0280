"""Compiles the kernels to one shared library per instruction set.

A library is named after a hash of everything that went into it.
`python -m quickbeam.models.native.build` compiles what this machine runs, `… build avx2` what is
named, `… build --all` every set of the platform. The libraries are kept in the cache folder. A
wheel may bring its own. `… build --compiler` compiles nothing and says what would.

The libraries have a C interface, so they depend neither on PyTorch's headers nor on its version.
On Linux their OpenMP symbols are found in the runtime that PyTorch has loaded, so they share its
threads. Elsewhere a call has threads of its own.

Importing this file imports the standard library alone, because the build of a wheel loads it by
itself (`hatch_build.py`).
"""

from __future__ import annotations

import ctypes
import errno
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
CPUINFO = Path("/proc/cpuinfo")
FREE_BYTES = 16 << 20  # on the disk, which compiling a library may take
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",  # libraries of several sets in a process don't share symbols
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",  # a choice between two numbers may be vectorised
    "-Wno-maybe-uninitialized",
)
_ZMM = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI = ("-DQB_VNNI", "-mavx512vnni")  # products of bytes
_AVX2 = ("-DQB_AVX2", "-mavx2", "-mfma", "-mf16c")
SETS: dict[str, tuple[str, ...]] = {  # flags to compile each set with, a platform's best set first
    "amx": ("-DQB_AMX", *_ZMM, *_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512bf16": ("-DQB_AVX512BF16", *_ZMM, *_VNNI, "-mavx512bf16"),
    "avx512vnni": ("-DQB_AVX512", *_ZMM, *_VNNI),
    "avx512": ("-DQB_AVX512", *_ZMM),
    "avxvnni": (*_AVX2, "-DQB_VNNI", "-mavxvnni"),
    "avx2": _AVX2,
    "neon-bf16": ("-DQB_NEON", "-DQB_SDOT", "-DQB_BFDOT", "-march=armv8.2-a+dotprod+bf16"),
    "neon-dot": ("-DQB_NEON", "-DQB_SDOT", "-march=armv8.2-a+dotprod"),
    "neon": ("-DQB_NEON",),
    "plain": (),
}
# sets whose own instructions are emulated by others, for tests on machines without them
EMULATED: dict[str, tuple[str, ...]] = {
    "amx-emulated": ("-DQB_AMX", "-DQB_AMX_EMULATED", *SETS["avx512bf16"][1:]),
    "avxvnni-emulated": (*_AVX2, "-DQB_VNNI", "-DQB_VNNI_EMULATED"),
}
_NEON = ("neon-bf16", "neon-dot", "neon", "plain")
PLATFORMS = {  # the sets of each, by operating system and processor
    ("linux", "x86_64"): ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "plain"),
    ("linux", "aarch64"): _NEON,
    ("darwin", "arm64"): _NEON,
    ("win32", "amd64"): ("avx512", "avx2", "plain"),
}
NO_SETS = (
    "none for this platform (Linux on x86-64 and ARM64, macOS on ARM64 and Windows on x86-64 have "
    "them)"
)
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_FMA = {"avx2", "fma", "f16c"}
NEEDS = {  # the features of a processor that each set needs, as /proc/cpuinfo names them
    "amx": {"amx_tile", "amx_bf16", "avx512_bf16", "avx512_vnni", *_AVX512},
    "avx512bf16": {"avx512_bf16", "avx512_vnni", *_AVX512},
    "amx-emulated": {"avx512_bf16", "avx512_vnni", *_AVX512},
    "avx512vnni": {"avx512_vnni", *_AVX512},
    "avx512": _AVX512,
    "avxvnni": {"avx_vnni", *_FMA},
    "avxvnni-emulated": _FMA,
    "avx2": _FMA,
    "neon-bf16": {"asimd", "asimddp", "bf16"},
    "neon-dot": {"asimd", "asimddp"},
    "neon": {"asimd"},
    "plain": set(),
}
# the same features, as other systems name them
_SYSCTL = {"asimddp": "hw.optional.arm.FEAT_DotProd", "bf16": "hw.optional.arm.FEAT_BF16"}
_WINDOWS = {"avx2": 40, "fma": 40, "f16c": 40, **dict.fromkeys(_AVX512, 41)}


# which compilers are looked for; on Windows g++ misaligns AVX registers
COMPILERS = ("clang-cl", "cl") if sys.platform == "win32" else ("g++", "clang++", "c++")

# what it means to have no kernels
WITHOUT = (
    "without native kernels PyTorch computes: answers take several times as long, and one may "
    "differ in a batch or with drafts where two tokens are nearly as likely"
)


class CannotBuild(Exception):
    """There is no library. The message says why."""


def target() -> tuple[str, str]:
    """Return the operating system and the processor that libraries are compiled for.

    Both are this machine's, unless `_PYTHON_HOST_PLATFORM` names others (`linux-aarch64`), as it
    does where a wheel is cross-compiled.
    """
    named = os.environ.get("_PYTHON_HOST_PLATFORM")
    if named:
        system, *_, machine = named.split("-")
        return {"macosx": "darwin", "win": "win32"}.get(system, system), machine.lower()
    return sys.platform, platform.machine().lower()


def platform_sets() -> tuple[str, ...]:
    """Return the instruction sets of this platform, the best first. Some platforms have none."""
    return PLATFORMS.get(target(), ())


def has_kernels() -> bool:
    """Whether kernels are built for this platform."""
    return bool(platform_sets())


def features() -> set[str]:
    """Return the features of this machine's processor, as /proc/cpuinfo names them."""
    if sys.platform == "darwin":
        system = ctypes.CDLL(None)

        def has(name: str) -> bool:
            value, size = ctypes.c_int(0), ctypes.c_size_t(4)
            error = system.sysctlbyname(
                name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0
            )
            return error == 0 and value.value != 0

        return {"asimd", *(feature for feature, name in _SYSCTL.items() if has(name))}
    if sys.platform == "win32":
        is_present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return {feature for feature, number in _WINDOWS.items() if is_present(number)}
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    for line in lines:
        if line.startswith(("flags", "Features")):
            _, _, names = line.partition(":")
            return set(names.split())
    return set()


def runs(name: str) -> bool:
    """Whether this machine has the instructions of a set. False on a platform without kernels."""
    return name.removesuffix("-emulated") in platform_sets() and NEEDS[name] <= features()


def machine_sets() -> list[str]:
    """Return the instruction sets that this machine runs, the best first.

    There are none on a platform without kernels.
    """
    return [name for name in platform_sets() if runs(name)]


def sources() -> list[Path]:
    return sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])


def flags_of(name: str) -> tuple[str, ...]:
    return (SETS | EMULATED)[name]


def digest(name: str) -> str:
    """Return a hash of the sources and of the flags, 16 hex digits."""
    hashed = hashlib.sha256(" ".join([*FLAGS, *flags_of(name)]).encode())
    for path in sources():
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def file_name(name: str) -> str:
    """Return the file name of an instruction set's library.

    It contains the processor, as machines may share the cache folder, and the digest, so that a
    library is never used with newer sources.
    """
    system, machine = target()
    suffix = {"darwin": "dylib", "win32": "dll"}.get(system, "so")
    return f"{name}-{machine}-{digest(name)}.{suffix}"


def cached(name: str) -> Path:
    """Return where the library of an instruction set is, or would be.

    It is in the wheel if that brings the library, else in the cache folder.
    """
    from quickbeam.hub.cache import cache_folder

    file = file_name(name)
    shipped = SHIPPED / file
    return shipped if shipped.is_file() else cache_folder() / "kernels" / file


def compiler() -> list[str] | None:
    """Return the C++ compiler's command, or None if there is none.

    It is the command in the variable CXX. Without CXX it is the first of `COMPILERS` that is there.
    """
    command = os.environ.get("CXX", "").split()
    if command:
        return command if shutil.which(command[0]) else None
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    return None


def no_compiler() -> CannotBuild:
    command = os.environ.get("CXX")
    if command:
        return CannotBuild(f"the C++ compiler CXX={command} is not there")
    names = " or ".join(COMPILERS)
    return CannotBuild(f"no C++ compiler is there ({names}, or name one in CXX)")


def commands(
    compiler: list[str], name: str, extra: Sequence[str], part: Path, result: Path
) -> list[list[str]]:
    """Return the commands that make the object file `part`, and the library `result` from it."""
    system, source = target()[0], str(HERE / "program.cpp")
    if Path(compiler[0]).stem.lower() in ("cl", "clang-cl"):
        flags = ("/nologo", "/std:c++17", "/O2", "/EHsc", "/LD", "/wd4068", *extra)
        arch = [f"/arch:{name.upper()}"] if name != "plain" else []
        defines = [f"/D{flag[2:]}" for flag in flags_of(name) if flag.startswith("-D")]
        return [[*compiler, *flags, *arch, *defines, source, f"/Fo{part}", f"/Fe{result}"]]
    # Linked without -fopenmp: a second OpenMP runtime would bring its own threads. See
    # `library.share_openmp`.
    system_flags = {"linux": ("-fPIC", "-fopenmp"), "darwin": ("-fPIC",)}.get(system, ())
    flags = (*FLAGS, *system_flags, *flags_of(name), *extra)
    link = (*extra, "-static") if system == "win32" else extra
    return [
        [*compiler, *flags, "-c", source, "-o", str(part)],
        [*compiler, "-shared", str(part), *link, "-o", str(result)],
    ]


def compile_to(path: Path, name: str, extra: Sequence[str] = ()) -> None:
    """Compile the kernels for an instruction set to `path`.

    `extra`: further flags. Raises `CannotBuild` if there is no compiler or if it fails, `OSError`
    if `path` can't be written.
    """
    command = compiler()
    if command is None:
        raise no_compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        part, result = Path(work) / "kernels.o", Path(work) / "kernels.so"
        for step in commands(command, name, extra, part, result):
            try:
                done = subprocess.run(step, capture_output=True, text=True)
            except OSError as error:
                raise CannotBuild(f"{command[0]} can't be run: {error.strerror}") from error
            if done.returncode:
                output = done.stderr or done.stdout  # cl writes its errors there
                reason = next((line for line in output.splitlines() if "error" in line), "")
                raise CannotBuild(f"{command[0]} failed: {reason or output.strip()[:200]}")
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
    """Build libraries, and print where they are, or what follows if there are none.

    Returns the exit code. It is 2 for an unknown name, 1 if sets were asked for (by name or
    `--all`) and one can't be built, else 0.
    """
    if [*arguments] == ["--compiler"]:
        command = compiler()
        if not has_kernels():
            text = NO_SETS
        elif command is None:
            text = f"{no_compiler()}; {WITHOUT}"
        else:
            text = f"{' '.join(command)} compiles them"
        print(f"kernels: {text}", flush=True)
        return 0
    sets = [*SETS, *EMULATED]
    unknown = [name for name in arguments if name not in (*sets, "--all")]
    if unknown:
        print(
            f"error: unknown instruction set {unknown[0]!r}; known: {', '.join(sets)}, or --all",
            file=sys.stderr,
        )
        return 2
    if not has_kernels():
        print(f"kernels: {NO_SETS}; quickbeam uses PyTorch's")
        return int(bool(arguments))
    if "--all" in arguments:
        names = list(platform_sets())
    else:
        names = list(dict.fromkeys(arguments)) or machine_sets()
    missing = [name for name in names if not cached(name).is_file()]
    if missing and compiler() is not None:
        print(f"kernels: compiling {', '.join(missing)}", flush=True)
    results = build_all(names)
    failed = [name for name, result in results.items() if isinstance(result, CannotBuild)]
    for name, result in results.items():
        prefix = "not built: " if name in failed else ""
        print(f"kernels: {name} {prefix}{result}")
    if len(failed) == len(results):
        print(f"kernels: {WITHOUT}")
    return int(bool(arguments) and bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
