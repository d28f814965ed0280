"""Which kernels a process uses, where they are kept, and what is said of them."""

import os
import sys
from pathlib import Path

import pytest

from cases import refuses
from quickbeam import __version__
from quickbeam.errors import InvalidInput
from quickbeam.models.native import build, choice, library
from quickbeam.models.native.choice import KernelRequest
from scripts import captured, cli

pytestmark = pytest.mark.usefixtures("plain_environment")
needs_kernels = pytest.mark.skipif(not build.has_kernels(), reason="no kernels for this platform")


def machine(monkeypatch, *sets):
    monkeypatch.setattr(build, "runs", lambda name: name in sets)
    monkeypatch.setattr(build, "machine_sets", lambda: list(sets))


def test_libraries_are_kept_under_the_digest_of_their_sources(monkeypatch, tmp_path):
    before = build.cached("avx2")
    assert before.parent == tmp_path / "cache" / "kernels" and build.digest("avx2") in before.name
    changed = tmp_path / "program.cpp"
    changed.write_text("// another kernel")
    monkeypatch.setattr(build, "sources", lambda: [changed])
    assert build.cached("avx2") != before
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "lib")
    (tmp_path / "lib").mkdir()
    for stale in ("avx2.so", "avx2-0123456789abcdef.so"):
        (tmp_path / "lib" / stale).touch()
    assert build.cached("avx2").parent == tmp_path / "cache" / "kernels"
    (tmp_path / "lib" / build.file_name("avx2")).touch()
    assert build.cached("avx2").parent == tmp_path / "lib"


@pytest.mark.parametrize(
    ("name", "value"), [("QUICKBEAM_KERNELS", "nativ"), ("QUICKBEAM_ISA", "sse")]
)
def test_a_value_that_is_not_known_is_bad_input(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    known = choice.MODES if name == "QUICKBEAM_KERNELS" else build.SETS
    refuses(rf"{name}='{value}': must be one of {', '.join(known)}", choice.requested)
    plain = ["generate", "hi", "--device", "cpu", "--dtype"]
    for command in (["--version"], [*plain, "bfloat16"], [*plain, "float32"]):
        result = cli(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {name}='{value}'")
        assert result.stderr.count("\n") == 1


def test_a_set_that_the_machine_lacks_is_bad_input_and_other_formats_use_pytorchs(monkeypatch):
    machine(monkeypatch, "avx2", "plain")
    with pytest.raises(InvalidInput, match="QUICKBEAM_ISA=amx: this machine runs avx2, plain"):
        choice.candidates(KernelRequest("auto", "amx"))
    assert choice.candidates(KernelRequest("auto", "plain")) == (["plain"], "")
    assert choice.candidates(KernelRequest("auto", ""))[0] == ["avx2", "plain"]
    assert choice.candidates(KernelRequest("eager", "amx")) == ([], "QUICKBEAM_KERNELS=eager")
    assert library.describe("cpu", "float16") == "PyTorch's (float16 on cpu)"
    assert library.describe("cuda", "bfloat16") == "PyTorch's (bfloat16 on cuda)"


def test_what_is_asked_first_imports_no_pytorch():
    code = "import sys; from quickbeam.cli import main; sys.argv = ['quickbeam', '--version']\n"
    done = captured([sys.executable, "-c", f"{code}main(); sys.exit('torch' in sys.modules)"])
    first, second = done.stdout.splitlines()
    assert (done.returncode, done.stderr, first) == (0, "", __version__)
    assert second == f"kernels: {choice.describe_kernels()}"
    code = "import sys; from quickbeam.models.native import choice; names = set(sys.modules)\n"
    code += "sys.exit(bool({'torch', 'platformdirs', 'numpy'} & names))"
    assert captured([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere kernels have threads of their own")
@needs_kernels
def test_kernels_find_an_openmp_that_pytorch_keeps_to_itself_as_on_arm():
    code = "import ctypes as c\nkept, c.RTLD_GLOBAL = c.RTLD_GLOBAL, c.RTLD_LOCAL\nimport torch\n"
    code += "assert not hasattr(c.CDLL(None), 'omp_get_thread_num')\nc.RTLD_GLOBAL = kept\n"
    code += "from quickbeam.models.native import library\nprint(library.describe())"
    assert captured([sys.executable, "-c", code]).stdout.startswith("native ")


@needs_kernels
def test_building_says_what_is_where(tmp_path):
    """With a stand-in for the compiler, which leaves empty files."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)

    def run(*arguments, **environment):
        command = [sys.executable, "-m", "quickbeam.models.native.build", *arguments]
        done = captured(command, env={**os.environ, "CXX": str(compiler), **environment})
        return done.returncode, done.stdout, done.stderr

    folder = tmp_path / "cache" / "kernels"
    made = f"kernels: plain {folder / build.file_name('plain')}\n"
    assert run("plain") == (0, f"kernels: compiling plain\n{made}", "")
    assert run("plain") == (0, made, "")
    assert [path.name for path in folder.iterdir()] == [build.file_name("plain")]
    code, shown, _ = run("avx2", "plain", CXX="/nonexistent")
    words = "kernels: avx2 not built: the C++ compiler CXX=/nonexistent is not there"
    assert (code, shown.splitlines()[0]) == (1, words)
    code, shown, _ = run(CXX="/nonexistent", QUICKBEAM_CACHE=str(tmp_path / "other"))
    assert code == 0 and shown.endswith(f"is not there\nkernels: {build.WITHOUT}\n")
    assert run("--compiler") == (0, f"kernels: {compiler} compiles them\n", "")
    words = f"kernels: the C++ compiler CXX=/nonexistent is not there; {build.WITHOUT}\n"
    assert run("--compiler", CXX="/nonexistent") == (0, words, "")
    assert run("plan")[::2] == (
        2,
        "error: unknown instruction set 'plan'; known: amx, avx512bf16, avx512vnni, avx512, "
        "avxvnni, avx2, neon-bf16, neon-dot, neon, plain, amx-emulated, avxvnni-emulated, or "
        "--all\n",
    )


@needs_kernels
def test_a_load_without_a_compiler_says_what_follows(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setattr(library, "_selected", {})
    monkeypatch.setattr(library, "_loaded", {})
    assert library.kernels() is None and library.kernels() is None
    (warning,) = caplog.messages  # at the level that is shown where no logging is set up
    assert warning == f"the C++ compiler CXX=/nonexistent is not there; {build.WITHOUT}"
    caplog.clear()
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    assert library.kernels() is None and not caplog.messages


def test_a_platform_has_sets_of_its_own(monkeypatch):
    for named, best, suffix in (
        ("linux-x86_64", "amx", "so"),
        ("linux-aarch64", "neon-bf16", "so"),
        ("macosx-11.0-arm64", "neon-bf16", "dylib"),
        ("win-amd64", "avx512", "dll"),
        ("linux-riscv64", None, "so"),
    ):
        monkeypatch.setenv("_PYTHON_HOST_PLATFORM", named)
        sets = build.platform_sets()
        assert sets[:1] == ((best,) if best else ()) and build.has_kernels() == bool(best)
        assert set(sets) <= build.SETS.keys() and (not sets or sets[-1] == "plain")
        machine = build.target()[1]  # x86-64 and ARM64 both have `plain`, and may share a cache
        assert build.file_name("plain") == f"plain-{machine}-{build.digest('plain')}.{suffix}"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has /proc/cpuinfo")
def test_a_processor_runs_the_sets_that_it_has_instructions_for(monkeypatch, tmp_path):
    laptop, arm = "flags\t: fma avx2 f16c avx_vnni", "linux-aarch64"
    for platform, line, sets in (
        (arm, "Features\t: fp asimd evtstrm crc32 cpuid", ["neon", "plain"]),
        (arm, "Features\t: fp asimd asimdhp asimddp", ["neon-dot", "neon", "plain"]),
        (arm, "Features\t: fp asimd asimddp i8mm bf16", ["neon-bf16", "neon-dot", "neon", "plain"]),
        (arm, laptop, ["plain"]),
        (arm, "", ["plain"]),
        ("linux-x86_64", laptop, ["avxvnni", "avx2", "plain"]),
    ):
        monkeypatch.setenv("_PYTHON_HOST_PLATFORM", platform)
        monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
        build.CPUINFO.write_text(f"processor\t: 0\n{line}\n")
        assert build.machine_sets() == sets


def test_compilers_are_told_what_they_understand(monkeypatch):
    def flags(compiler, platform, name):
        monkeypatch.setenv("_PYTHON_HOST_PLATFORM", platform)
        return build.commands([compiler], name, [], Path("part"), Path("result"))

    (one,) = flags(r"clang-cl.exe", "win-amd64", "avx2")
    assert {"/DQB_AVX2", "/arch:AVX2", "/Feresult"} <= set(one)
    assert not [flag for flag in one if flag.startswith(("-f", "-m"))]
    assert "/arch:AVX512" in flags("cl", "win-amd64", "avx512")[0]
    compile_, link = flags("g++", "linux-x86_64", "plain")
    assert "-fopenmp" in compile_ and "-fopenmp" not in link
    for step in (*flags("clang++", "macosx-11.0-arm64", "neon"),):
        assert "-fopenmp" not in step
