"""The steps of `deploy/Dockerfile`, run without Docker: what they install serves an answer."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from quickbeam.models.native import build
from test_wheel import OFFLINE, captured

ROOT = Path(__file__).parent.parent
IMAGE = ROOT / "deploy" / "Dockerfile"


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
    said = dict[str, str]()
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
            said[word] = rest
    command = [port if one == "8000" else one for one in json.loads(said["ENTRYPOINT"])]
    command[0] = shutil.which(command[0], path=environment["PATH"])
    assert command[0] is not None and command[0].startswith(str(tmp_path))
    health = json.loads(said["HEALTHCHECK"].partition("CMD ")[2].replace("8000", port))
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
