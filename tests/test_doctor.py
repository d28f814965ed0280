"""`quickbeam doctor`: each finding, faked and as it is here, and what is said where packages are
missing. `pytest tests/test_doctor.py`"""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata

import pytest
from typer.testing import CliRunner

from quickbeam import __version__, hub, machine
from quickbeam.cache import cache_folder
from quickbeam.cli import doctor
from quickbeam.cli.app import app
from quickbeam.cli.doctor import CHECKS, NOTE, OK, PROBLEM, Finding
from quickbeam.models.native import build

Usage = namedtuple("Usage", "total used free")
NAMES = [check.__name__ for check in CHECKS]


def findings(text):
    """The findings of a JSON record by their check, looked at for what a program may rely on."""
    record = json.loads(text)
    assert set(record) == {"quickbeam", "can_run", "findings"}
    assert record["quickbeam"] == __version__
    assert [finding["check"] for finding in record["findings"]] == NAMES
    for finding in record["findings"]:
        assert set(finding) == {"check", "status", "text", "todo"} and finding["text"]
        assert finding["status"] in (OK, NOTE, PROBLEM)
        assert "\n" not in finding["text"] + finding["todo"]
    statuses = {finding["status"] for finding in record["findings"]}
    assert record["can_run"] is (PROBLEM not in statuses)
    return {finding["check"]: finding for finding in record["findings"]}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """Nothing asked for, an empty cache."""
    for name in ("QUICKBEAM_KERNELS", "QUICKBEAM_ISA", "CXX", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))


def linux(monkeypatch, *sets, compiler=True):
    """A machine that runs these sets."""
    monkeypatch.setattr(build, "has_kernels", lambda: bool(sets))
    monkeypatch.setattr(build, "runs", lambda name: name in sets)
    monkeypatch.setattr(build, "machine_sets", lambda: list(sets))
    monkeypatch.setattr(build, "compiler", lambda: ["g++"] if compiler else None)


def compiled(*names):
    for name in names:
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
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    says(doctor.kernels(), NOTE, "(QUICKBEAM_KERNELS=eager)", "unset QUICKBEAM_KERNELS")
    monkeypatch.setenv("QUICKBEAM_KERNELS", "native")
    says(doctor.kernels(), PROBLEM, "native kernels can't be had", "unset QUICKBEAM_KERNELS")
    monkeypatch.setenv("QUICKBEAM_KERNELS", "nativ")
    says(doctor.kernels(), PROBLEM, "QUICKBEAM_KERNELS='nativ'")
    monkeypatch.delenv("QUICKBEAM_KERNELS")
    linux(monkeypatch)
    says(doctor.kernels(), NOTE, "Linux on x86-64", "counted, not promised")


def test_a_quota_bounds_the_cores(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "QUOTA", quota)
    whole = machine.usable_cores()
    assert whole >= 1
    quota.write_text("max 100000\n")
    assert machine.usable_cores() == whole
    quota.write_text("50000 100000\n")
    assert machine.usable_cores() == 1


def test_the_default_model_and_the_cache(monkeypatch):
    def disk(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, int(free)))

    disk(10**8)
    says(doctor.model(), PROBLEM, "needs 400 MB", "QUICKBEAM_CACHE")
    disk(10**11)
    says(doctor.model(), NOTE, "100.0 GB free", "quickbeam pull")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        says(doctor.model(), PROBLEM, "QUICKBEAM_CACHE")
    folder = cache_folder() / hub.DEFAULT
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    says(doctor.model(), OK, "smollm2-135m is in")


def versions(monkeypatch, **there):
    def version(name):
        if name.replace("-", "_") not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name.replace("-", "_")]

    requires = [
        "torch<2.14,>=2.9",
        "transformers<6,>=5.17",
        "typer>=0.16",
        "nothing>=1; sys_platform == 'never'",
        'fastapi>=0.115; extra == "serve"',
        'uvicorn>=0.32; extra == "serve"',
        'llguidance>=1.9; extra == "grammar"',
        'pytest; extra == "dev"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(metadata, "version", version)


def test_packages_and_the_tested_range(monkeypatch):
    there = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "typer": "0.20"}
    versions(monkeypatch, **there)
    says(doctor.packages(), OK, f"quickbeam {__version__}, Python 3", "torch 2.13.0+cpu")
    versions(monkeypatch, **there | {"torch": "2.15.0"})
    says(doctor.packages(), NOTE, "torch 2.15.0 is not <2.14,>=2.9")
    versions(monkeypatch, torch="2.13", transformers="5.23")
    says(doctor.packages(), PROBLEM, "missing: typer", "pip install typer")
    versions(monkeypatch, transformers="5.23")
    says(doctor.packages(), PROBLEM, "missing: torch")


def test_extras_and_what_is_missing_for_what(monkeypatch):
    monkeypatch.setattr(doctor, "EXTRAS", ("serve", "grammar"))
    there = {"torch": "2.13", "transformers": "5.23", "typer": "1", "fastapi": "0.115"}
    versions(monkeypatch, **there)
    lacks = ("none installed; serve lacks uvicorn; grammar lacks llguidance",)
    says(doctor.extras(), NOTE, *lacks, "pip install 'quickbeam[serve,grammar]'")
    versions(monkeypatch, **there | {"uvicorn": "0.40", "llguidance": "1.9"})
    says(doctor.extras(), OK, "serve, grammar")


def test_a_check_that_fails_is_a_note():
    says(doctor.look(lambda: 1 / 0), NOTE, "can't be checked here (ZeroDivisionError: division")


def test_a_problem_is_exit_code_1_and_everything_is_shown(monkeypatch):
    def faked(**found):
        checks = []
        for name, finding in found.items():
            checks.append(lambda finding=finding: finding)
            checks[-1].__name__ = name
        monkeypatch.setattr(doctor, "CHECKS", checks)

    faked(cpu=Finding(OK, "a processor"), kernels=Finding(NOTE, "PyTorch's", "install g++"))
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines() == [
        "ok      cpu       a processor",
        "note    kernels   PyTorch's",
        "                  → install g++",
    ]
    faked(model=Finding(PROBLEM, "full", "free some space"))
    for options in ((), ("--json",)):
        assert CliRunner().invoke(app, ["doctor", *options]).exit_code == 1


def test_this_machine_as_json():
    """The real thing: with an empty cache there is the model to pull, and kernels may have to be
    compiled."""
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    every = findings(result.stdout).values()
    assert all(one["status"] != PROBLEM for one in every) is (result.exit_code == 0)
    unknown = {one["check"] for one in every if "can't be checked" in one["text"]}
    assert unknown <= {"packages", "extras"}  # these need an install


@pytest.mark.parametrize(
    "gone", ["torch transformers numpy", "psutil platformdirs filelock packaging", "typer"]
)
def test_no_traceback_whatever_is_missing(gone):
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
sys.argv = ["quickbeam", "doctor", "--json"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    if "typer" in gone:
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: ")
        return
    every = findings(done.stdout)
    if "torch" in gone:
        assert (done.returncode, every["packages"]["status"]) == (1, PROBLEM)
        assert "missing: torch" in every["packages"]["text"]
        assert "can't be checked" in every["gpu"]["text"]
    else:
        assert "can't be checked" in every["memory"]["text"]


@pytest.mark.parametrize("gone", ["torch", "rich"])
def test_other_commands_name_what_is_missing_in_one_line(gone):
    code = (
        f"import sys; sys.modules['{gone}'] = None; from quickbeam.cli import main; sys.argv = "
        "['quickbeam', 'generate', 'hello']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert gone in done.stderr and "quickbeam doctor" in done.stderr
