"""`quickbeam doctor`: each finding, faked and as it is here, and what is said where packages are
missing."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from quickbeam import __version__, hub
from quickbeam.cli import doctor
from quickbeam.cli.doctor import CHECKS, NOTE, OK, PROBLEM, Finding
from quickbeam.hub.cache import cache_folder
from quickbeam.models.native import build
from scripts import captured, cli

pytestmark = pytest.mark.usefixtures("plain_environment")


def findings(text):
    record = json.loads(text)
    assert set(record) == {"quickbeam", "can_run", "findings"}
    assert record["quickbeam"] == __version__
    by_check = {finding.pop("check"): finding for finding in record["findings"]}
    assert list(by_check) == [check.__name__ for check in CHECKS]
    for finding in by_check.values():
        assert set(finding) == {"status", "text", "todo"} and finding["text"]
        assert finding["status"] in (OK, NOTE, PROBLEM)
        assert "\n" not in finding["text"] + finding["todo"]
    assert record["can_run"] is all(one["status"] != PROBLEM for one in by_check.values())
    return by_check


def linux(monkeypatch, *sets, compiler=True):
    monkeypatch.setattr(build, "has_kernels", lambda: bool(sets))
    monkeypatch.setattr(build, "runs", lambda name: name in sets)
    monkeypatch.setattr(build, "compiler", lambda: ["g++"] if compiler else None)


def compiled(name):
    build.cached(name).parent.mkdir(parents=True, exist_ok=True)
    build.cached(name).touch()


def says(finding, status, *words):
    assert finding.status == status, finding
    for word in words:
        assert word in f"{finding.text}\n{finding.todo}"


def test_the_kernels_and_why_they_are_not_native(monkeypatch):
    linux(monkeypatch, "avx2", "plain")
    command = "python -m quickbeam.models.native.build"
    says(doctor.kernels(), NOTE, "native (avx2), compiled on first use", command)
    compiled("plain")
    linux(monkeypatch, "avx2", "plain", compiler=False)
    says(doctor.kernels(), NOTE, "native (plain)", "avx2 would be faster")
    compiled("avx2")
    says(doctor.kernels(), OK, "native (avx2)")
    monkeypatch.setenv("QUICKBEAM_ISA", "plain")
    says(doctor.kernels(), NOTE, "native (plain)", "unset QUICKBEAM_ISA")


def test_without_a_compiler_and_forced_and_elsewhere(monkeypatch):
    linux(monkeypatch, "avx2", compiler=False)
    says(doctor.kernels(), NOTE, "no C++ compiler is there", "install g++")
    for asked, status, words in (
        ("eager", NOTE, "(QUICKBEAM_KERNELS=eager)"),
        ("native", PROBLEM, "native kernels can't be had"),
        ("nativ", PROBLEM, "QUICKBEAM_KERNELS='nativ'"),
    ):
        monkeypatch.setenv("QUICKBEAM_KERNELS", asked)
        says(doctor.kernels(), status, words, "unset QUICKBEAM_KERNELS")
    monkeypatch.delenv("QUICKBEAM_KERNELS")
    linux(monkeypatch)
    says(doctor.kernels(), NOTE, "Linux on x86-64", "counted, not promised")


def test_the_default_model_and_the_cache(monkeypatch):
    def with_free(free, status, *words):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        says(doctor.model(), status, *words)

    with_free(10**8, PROBLEM, "needs 400 MB", "QUICKBEAM_CACHE")
    with_free(10**11, NOTE, "100.0 GB free", "quickbeam pull")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        says(doctor.model(), PROBLEM, "QUICKBEAM_CACHE")
    folder = cache_folder() / hub.DEFAULT
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    says(doctor.model(), OK, "smollm2-135m is in")


def test_other_load_is_named(monkeypatch):
    def with_load(average, programs, status, *words):
        monkeypatch.setattr(doctor, "load_average", lambda: average)
        monkeypatch.setattr(doctor, "busy_programs", lambda seconds: programs)
        says(doctor.load(), status, *words)

    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    with_load(0.3, {}, OK, "load average 0.3 on 2 cores", "no other program is busy")
    with_load(2.5, {}, NOTE, "load average 2.5", "can't be seen from here")
    programs = {"chrome": 1.26, "cc1plus": 0.4}
    with_load(0.3, programs, NOTE, "chrome (1.3 cores), cc1plus (0.4 cores)")
    many = {f"p{i}": 0.5 for i in range(8)}
    with_load(9.0, many, NOTE, "p4 (0.5 cores) and 3 more", "end them, or wait")


@pytest.mark.skipif(sys.platform != "linux", reason="a program is called as its link is")
def test_a_busy_program_is_found_by_its_name_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "BUSY", 0.01)  # whatever else runs here
    program = tmp_path / "busybee"
    program.symlink_to(sys.executable)
    code = "print(flush=True)\nwhile True: pass"
    command = [str(program), "-c", code, "--secret=1234"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            busy = doctor.busy_programs(0.5)
        finally:
            process.kill()
    assert busy["busybee"] > 0.01
    assert "1234" not in "".join(busy)


@pytest.mark.parametrize("columns", [80, 90])
def test_lines_fit_the_terminal_and_keep_words_whole(monkeypatch, columns):
    def check():
        return Finding(NOTE, " ".join(["several words --and-an-option"] * 9), "a/long/path " * 12)

    monkeypatch.setattr(doctor, "CHECKS", [check])
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli("doctor").stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert shown.count("--and-an-option") == 9 and shown.count("a/long/path") == 12


def test_a_problem_is_exit_code_1_and_everything_is_shown(monkeypatch):
    def cpu():
        return finding

    monkeypatch.setattr(doctor, "CHECKS", [cpu])
    finding = Finding(NOTE, "a processor", "take another")
    shown = cli("doctor")
    lines = ["note    cpu       a processor", "                  → take another"]
    assert (shown.exit_code, shown.stdout.splitlines()) == (0, lines)
    finding = Finding(PROBLEM, "full", "free some space")
    for options in ((), ("--json",)):
        assert cli("doctor", *options).exit_code == 1


def test_this_machine_as_json():
    result = cli("doctor", "--json", catch_exceptions=False)
    every = findings(result.stdout)
    assert all(one["status"] != PROBLEM for one in every.values()) is (result.exit_code == 0)
    unknown = {name for name, one in every.items() if "can't be checked" in one["text"]}
    assert unknown <= {"packages", "extras"}  # these need an install


def without(gone, *arguments):
    code = f"""
import importlib.metadata as metadata, sys
sys.modules.update(dict.fromkeys({gone.split()!r}))
version = metadata.version
def without(name):
    if name in {gone.split()!r}:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without
from quickbeam.cli import main
sys.argv = ["quickbeam", *{arguments!r}]
main()
"""
    return captured([sys.executable, "-c", code])


def test_no_traceback_whatever_is_missing():
    done = without("torch transformers numpy", "doctor", "--json")
    every = findings(done.stdout)
    assert (done.returncode, every["packages"]["status"]) == (1, PROBLEM)
    assert "torch" in every["packages"]["text"].partition("missing: ")[2]
    assert "can't be checked" in every["gpu"]["text"] and "Traceback" not in done.stderr


@pytest.mark.parametrize("gone", ["typer", "torch"])
def test_a_command_that_needs_what_is_missing_names_it_in_one_line(gone):
    done = without(gone, "generate", "hello")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and gone in done.stderr
    assert gone == "typer" or "quickbeam doctor" in done.stderr
