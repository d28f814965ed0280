"""How the native kernels are compiled, found again and refused, and what a target does without
them. Here compilers run; the rules of the choice are in `test_kernel_choice.py`."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import foreign
from cases import before, refuses
from kernels import SETS
from models import tiny
from quickbeam.errors import InvalidInput
from quickbeam.models.native import build, library
from quickbeam.models.torch.pages import RowStore
from quickbeam.tree import TokenTree
from scripts import captured
from target import Target

pytestmark = pytest.mark.skipif(not SETS, reason="no kernels for this platform")
COMPILER = build.compiler() or []
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler is there")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing asked for in the environment, and nothing loaded before or after."""
    for name in ("QUICKBEAM_KERNELS", "QUICKBEAM_ISA"):
        monkeypatch.delenv(name, raising=False)
    forget()
    yield
    forget()


def forget():
    library._selected.clear()
    library._loaded.clear()


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def compiler_that(folder, does):
    path = folder / str(len(does)) / "compiler"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_is_missing_or_fails_is_named(monkeypatch, tmp_path):
    to, error = tmp_path / "made" / "plain.so", "program.cpp:1: error: no such thing"
    for command, words in (
        ("/nonexistent", "/nonexistent"),
        (compiler_that(tmp_path, f"echo '{error}' >&2; exit 3"), f"/compiler failed: {error}"),
        (compiler_that(tmp_path, "echo 'out of memory' >&2; exit 1"), "failed: out of memory"),
    ):
        monkeypatch.setenv("CXX", command)
        refuses(words, build.compile_to, to, "plain", error=build.CannotBuild)
    assert not to.exists() and not list(to.parent.iterdir())  # nothing half made is left
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(build.CannotBuild, match=r"no C\+\+ compiler is there .*CXX"):
        build.compile_to(to, "plain")


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_cannot_be_written_is_named_first(monkeypatch, tmp_path, full):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / ("below" if full else "file")))
    if full:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _: SimpleNamespace(free=build.FREE_BYTES - 1)
        )
    words = f"kernels can't be written{': No space left' if full else ''}"
    refuses(words, build.build, "plain", error=build.CannotBuild)


def test_without_a_compiler_a_target_runs_on_pytorchs_operators(monkeypatch, no_cache):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert library.kernels() is None
    assert "/nonexistent" in library.describe()
    target = Target(tiny("llama", torch.bfloat16))
    target.prefill([1, 2, 3])
    assert isinstance(target.store, RowStore) and bool(target.verify(TokenTree(4)).isfinite().all())
    words = r"native kernels can't be had: .*/nonexistent.*; leave QUICKBEAM_KERNELS and"
    for name, value in (("QUICKBEAM_KERNELS", "native"), ("QUICKBEAM_ISA", "plain")):
        with monkeypatch.context() as patch, pytest.raises(InvalidInput, match=words):
            patch.setenv(name, value)
            Target(tiny("llama", torch.bfloat16))


def test_where_the_best_set_cannot_be_compiled_the_next_is_taken(monkeypatch, no_cache):
    asked = []

    def compile_to(path, name):
        asked.append(name)
        raise build.CannotBuild(f"unknown flags of {name}")

    monkeypatch.setattr(build, "compile_to", compile_to)
    assert library.kernels() is None and asked == build.machine_sets()
    assert f"unknown flags of {asked[-1]}" in library.describe()


@needs_compiler
def test_a_library_is_compiled_once(monkeypatch, no_cache):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))
    stages, commands = list[str](), []
    before(monkeypatch, subprocess, "run", lambda command, **_: commands.append(command))
    path = build.build("plain", stages.append)
    assert stages == ["compiling kernels for plain"] and commands
    assert list(no_cache.iterdir()) == [path]
    first = list(commands)
    assert build.build("plain", stages.append) == path and commands == first and len(stages) == 1
    assert library.load("plain").name == "plain" and commands == first


@needs_compiler
def test_a_library_of_another_version_or_none_at_all_is_refused(monkeypatch, no_cache, tmp_path):
    def library_with(version, size):
        source, made = tmp_path / "other.cpp", tmp_path / f"{version}-{size}.so"
        numbers = {"version": version, "size_of_op": size, "page": 64, "allowed": 0}
        lines = [f'extern "C" long qb_{name}() {{ return {n}; }}' for name, n in numbers.items()]
        source.write_text("\n".join(lines))
        subprocess.run([*COMPILER, "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        return made

    size = ctypes.sizeof(library.Op)
    for other in (library_with(library.VERSION + 1, size), library_with(library.VERSION, size + 8)):
        with pytest.raises(build.CannotBuild, match="was made for another version of quickbeam"):
            library.Kernels("plain", other)
    with pytest.raises(build.CannotBuild, match="the system does not let this process use amx"):
        library.Kernels("amx", library_with(library.VERSION, size))
    no_cache.mkdir()
    build.cached("plain").write_text("not a library")
    words = r"library can't be loaded: .*plain.*\.so"
    refuses(words, library.load, "plain", error=build.CannotBuild)
    monkeypatch.setenv("QUICKBEAM_ISA", "plain")
    refuses(f"native kernels can't be had: .*the {words}", library.kernels)


SANITIZED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from quickbeam.models.native import library
kernels = library.Kernels(sys.argv[1], Path(sys.argv[2]))
library.load = lambda name, *_: kernels
"""
TESTS = """
import pytest
sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-k", sys.argv[1], sys.argv[3]]))
"""
# In bfloat16: the sanitizer does not look at masked stores.
BEYOND = """
import torch
from kernels import number, plain_rows
from quickbeam.models.native.quantised import Packed
from quickbeam.models.native.program import Program
program = Program(kernels)
source, target = program.external("x", 32), program.external("y", 40)
program.linear(Packed(kernels, [number(40, 32)]), source, target)
program.run(plain_rows(2), {"x": number(2, 32), "y": torch.empty(79, dtype=torch.bfloat16)})
"""


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("isa", SETS)
def test_kernels_touch_nothing_beyond_their_buffers(isa, tmp_path):
    names = ("libasan.so", "libstdc++.so")  # the second, too, has to be there before Python
    runtime = [captured([*COMPILER, f"-print-file-name={name}"]).stdout.strip() for name in names]
    if not all(Path(path).is_absolute() for path in runtime):
        pytest.skip(f"{COMPILER[0]} has no libasan")
    made, here = tmp_path / f"{isa}.so", Path(__file__).parent
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    build.compile_to(made, isa, flags)
    settings = {"LD_PRELOAD": ":".join(runtime), "ASAN_OPTIONS": "detect_leaks=0"}
    settings |= {"PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}
    settings["PYTHONPATH"] = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    given = [isa, str(made), str(here / "test_native_kernels.py")]

    def run(code):
        command = [sys.executable, "-c", SANITIZED + code, *given]
        return captured(command, env={**os.environ, **settings})

    seen = run(BEYOND)
    assert seen.returncode and "heap-buffer-overflow" in seen.stderr, seen.stderr[-3000:]
    done = run(TESTS)
    output = done.stdout[-3000:] + done.stderr[-6000:]
    assert done.returncode == 0 and " passed" in done.stdout, output


@pytest.mark.long
@needs_compiler
def test_without_openmp_calls_have_threads_of_their_own(tmp_path):
    """As on macOS and Windows."""
    made, here = tmp_path / "own.so", Path(__file__).parent
    build.compile_to(made, "plain", ["-O1", "-fno-openmp", "-pthread"])
    files = [str(here / f"test_native_{name}.py") for name in ("bits", "experts")]
    code = 'import pytest\nsys.exit(pytest.main(["-q", "-k", "plain and threads", *sys.argv[3:]]))'
    done = captured(
        [sys.executable, "-c", SANITIZED + code, "plain", str(made), *files],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


def names_of(file):
    """What a library of macOS (Mach-O) exports, and the libraries that it has other names from."""
    at, libraries, exported, needed = 32, [""], set(), set()
    for _ in range(int.from_bytes(file[16:20], "little")):
        command, size, *numbers = struct.unpack_from("<6I", file, at)
        if command == 0xC:  # LC_LOAD_DYLIB
            libraries.append(file[at + numbers[0] : at + size].split(b"\0")[0].decode())
        if command == 0x2:  # LC_SYMTAB
            symbols, count, strings, _ = numbers
        at += size
    for i in range(count):
        name, kind, _, description, _ = struct.unpack_from("<IBBHQ", file, symbols + 16 * i)
        if kind == 0x01:  # external, of another library
            needed.add(libraries[description >> 8])  # no such index where any library would do
        elif kind == 0x0F:  # external, of a section
            begin = strings + name
            exported.add(file[begin : file.index(b"\0", begin)].decode())
    return exported, needed


@pytest.mark.long
@pytest.mark.skipif(not shutil.which(foreign.ZIG), reason="zig is not there")
def test_every_set_of_macos_compiles(monkeypatch, tmp_path):
    """Those of other platforms are compiled, and run, in test_foreign.py."""
    monkeypatch.setenv("CXX", f"{foreign.HERE}/zig aarch64-macos.11.0")
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "macosx-11.0-arm64")
    functions = {*library.SIGNATURES, "version", "size_of_op", "page", "allowed"}
    for name in build.platform_sets():
        made = tmp_path / build.file_name(name)
        build.compile_to(made, name, ["-O1"])
        exported, needed = names_of(made.read_bytes())
        assert {f"_qb_{one}" for one in functions} <= exported
        assert needed <= {"/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib"}


@pytest.mark.parametrize("isa", SETS[:1])
def test_libraries_of_several_sets_share_nothing(isa):
    """Objects that are unique in a process would be those of the set that was loaded first."""
    nm = shutil.which("nm")
    if nm is None or sys.platform != "linux":
        pytest.skip("no nm that lists a library's names")
    listed = captured([nm, "-D", build.build(isa)], check=True)
    shared = {line.split()[-1] for line in listed.stdout.splitlines() if line.split()[-2] != "U"}
    mangled = sorted(name for name in shared if "qb" in name and not name.startswith("qb_"))
    assert not mangled and "qb_run" in shared
