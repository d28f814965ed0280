"""A wheel brings the kernels compiled, and an install from it needs no compiler; what the image's
steps install serves an answer."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import httpx
import pytest

from quickbeam.models.native import build
from scripts import captured

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CROSS = "aarch64-linux-gnu-g++"
OFFLINE = (
    "No matching distribution found for",
    "Could not find a version that satisfies the requirement",
    "No module named pip",
)
REPORT = (
    "from quickbeam.models.native import library as l; k = l.kernels(); print(l.__file__, "
    "l.build.cached(k.name), k.name, sep='\\n')"
)
IMAGE = ROOT / "deploy" / "Dockerfile"


def make_wheel(folder, **environment):
    command = [*PIP, "wheel", "--no-deps", "--quiet", "-w", str(folder), str(ROOT)]
    done = captured(command, env={**os.environ, **environment})
    if any(words in done.stderr for words in OFFLINE):
        pytest.skip("no package index to get the build backend from")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel, folder):
    """The Python of a fresh environment with the wheel; the rest is that of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    given = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*PIP, "--python", str(python), *given], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return python


@pytest.mark.long
@pytest.mark.skipif(not build.has_kernels(), reason="no kernels for this platform")
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_a_wheel_brings_kernels_for_machines_without_a_compiler(tmp_path):
    wheel = make_wheel(tmp_path)
    assert wheel.name.endswith(f"-py3-none-{sys.platform}_{os.uname().machine}.whl")
    names, inside = zipfile.ZipFile(wheel).namelist(), "quickbeam/models/native/"
    made = [f"lib/{build.file_name(name)}" for name in build.platform_sets()]
    assert {inside + one for one in (*made, *(path.name for path in build.sources()))} <= {*names}
    python = install(wheel, tmp_path / "fresh")
    asked = {"CXX": "/nonexistent", "QUICKBEAM_KERNELS": "native"}
    asked["QUICKBEAM_CACHE"] = str(tmp_path / "cache")
    done = captured([str(python), "-c", REPORT], env={**os.environ, **asked})
    assert done.returncode == 0, done.stderr
    module, library, name = done.stdout.split()
    assert Path(module).is_relative_to(tmp_path / "fresh")
    assert Path(library).parent == Path(module).parent / "lib"
    assert name in build.machine_sets() and not (tmp_path / "cache").exists()


@pytest.mark.long
@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"{CROSS} is not there")
def test_a_cross_compiler_makes_the_wheel_of_another_platform(tmp_path):
    wheel = make_wheel(tmp_path, CXX=CROSS, _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    with zipfile.ZipFile(wheel) as file:
        libraries = [name for name in file.namelist() if name.endswith(".so")]
        machines = {file.read(name)[18:20] for name in libraries}  # of their ELF headers
    assert len(libraries) == len(build.PLATFORMS["linux", "aarch64"])
    assert machines == {(183).to_bytes(2, "little")}


@pytest.mark.long
@pytest.mark.skipif(not build.has_kernels(), reason="no kernels for this platform")
def test_without_a_compiler_the_wheel_is_the_same_for_all_platforms(tmp_path):
    wheel = make_wheel(tmp_path, CXX="/nonexistent")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "quickbeam/models/native/program.cpp" in names
    assert not any(name.endswith(".so") for name in names)


@pytest.mark.long
def test_a_fresh_environment_has_all_that_demo_and_doctor_need(tmp_path):
    wheel, python = make_wheel(tmp_path), tmp_path / "fresh" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    done = captured([str(python), *PIP[1:], "install", "--quiet", str(wheel)])
    if any(words in done.stderr for words in OFFLINE):
        pytest.skip("no package index to install from")
    assert done.returncode == 0, done.stderr
    others = ("PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in others}

    def run(*arguments):
        command = [str(python.with_name("quickbeam")), *arguments]
        done = captured(command, cwd=tmp_path, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    report = json.loads(run("doctor", "--json"))
    checks = {finding["check"]: finding for finding in report["findings"]}
    assert report["can_run"] and checks["packages"]["status"] == "ok", report
    assert not [finding for finding in report["findings"] if "can't be checked" in finding["text"]]
    if not wheel.name.endswith("any.whl"):
        assert checks["kernels"]["text"].startswith("native")
    shown = run("demo", "--max-tokens", "24", "--svg", "demo.svg")
    assert shown.count("the same tokens") == 2 and (tmp_path / "demo.svg").is_file()
    code = "import quickbeam; print(quickbeam.__file__)"
    where = captured([str(python), "-c", code], cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "fresh")


def instructions():
    """Each instruction and what follows it, without comments, on one line."""
    text = re.sub(r"^#.*\n", "", IMAGE.read_text(encoding="utf-8"), flags=re.M)
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word:
            yield word, rest


@pytest.mark.long
@pytest.mark.skipif(not IMAGE.exists() or os.name == "nt", reason="no image for this system")
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_the_steps_of_the_image_make_a_server_that_answers(tmp_path):
    def here(text):
        text = re.sub(r"(?<![\w/])/(?=opt/|src\b|var/)", f"{tmp_path}/", text)
        return text.replace("python3 -m venv", f"{sys.executable} -m venv")

    (tmp_path / "var" / "cache" / "quickbeam").mkdir(parents=True)
    ports = socket.socket()
    ports.bind(("127.0.0.1", 0))
    port = str(ports.getsockname()[1])
    ports.close()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    settings = dict[str, str]()
    for word, rest in instructions():
        if word == "RUN" and "apt-get" not in rest:
            done = captured(["sh", "-ec", here(rest)], env=environment)
            if any(words in done.stderr for words in OFFLINE):
                pytest.skip("no package index to install from")
            assert done.returncode == 0, done.stderr
        elif word == "COPY" and "--from" not in rest:
            *names, target = here(rest).split()
            for name in names:
                source, to = ROOT / name, Path(target)
                if source.is_dir():
                    shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    to.mkdir(exist_ok=True)
                    shutil.copy(source, to)
        elif word == "ENV":
            environment |= {
                name: os.path.expandvars(value) if name == "PATH" else value
                for name, _, value in (one.partition("=") for one in here(rest).split())
            }
        else:
            settings[word] = rest
    command = [port if one == "8000" else one for one in json.loads(settings["ENTRYPOINT"])]
    command[0] = shutil.which(command[0], path=environment["PATH"])
    assert command[0] is not None and command[0].startswith(str(tmp_path))
    health = json.loads(settings["HEALTHCHECK"].partition("CMD ")[2].replace("8000", port))
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as server:
        try:
            until = time.monotonic() + 600  # the first start fetches the model
            while subprocess.run(health, env=environment, capture_output=True).returncode:
                assert server.poll() is None and time.monotonic() < until
                time.sleep(1)
            asked = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json={"model": "smollm2-135m", "max_tokens": 12, "temperature": 0, **asked},
                timeout=120,
            ).json()
            assert answer["usage"]["completion_tokens"] == 12, answer
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
