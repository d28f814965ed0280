"""What `--model` names, checked before anything is loaded."""

import os
import socket
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from cases import refuses
from quickbeam.hub import check_hub, check_source
from scripts import captured


def test_names_that_may_be_loaded_pass_and_others_are_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    (tmp_path / "a.gguf").touch()
    for name in ("smollm2-135m", "gpt2", "owner/a-model_1.5", str(tmp_path), f"{tmp_path}/a.gguf"):
        check_source(name)
    for name in ("smollm2-135m", str(tmp_path)):  # on this machine: nobody is asked for them
        check_hub(name)
    (tmp_path / "here/empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for file in ("weights.bin", "model.safetensors"):
        Path(file).touch()
    for name, words in (
        ("./nope", "no such model folder or file: ./nope"),
        ("~/nope", "no such"),
        ("/a/b", "no such"),
        ("a/b/c", "no such"),
        ("nope.gguf", "no such"),
        ("a model", "no such"),
        ("", "the name of a model is empty"),
        ("empty", "empty is not a model folder: it has no config.json"),
        ("weights.bin", "weights.bin is a file, and of files only .gguf"),
        ("model.safetensors", "is a file"),
    ):
        refuses(words, check_source, name)


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path.startswith("/api/models/owner/known")
        self.send_response(200 if known else 404)
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if known:
            self.wfile.write(b'{"id": "owner/known", "_id": "1", "tags": [], "siblings": []}')

    def log_message(self, *_):
        pass


CHECK = """
import sys
from quickbeam import hub
hub.PATIENCE = float(sys.argv[2])
try: hub.check_hub(sys.argv[1])
except Exception as error: sys.exit(f'{type(error).__name__}: {error}')
"""


def asked(name, port, cache, offline="0", patience="8"):
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_CACHE": str(cache)}
    hub |= {"HF_HUB_OFFLINE": offline, "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", CHECK, name, patience]
    done = captured(command, env={**os.environ, **hub}, timeout=60)
    return done.returncode, done.stderr


def keep(cache, name):
    files = {"refs/main": "0123456789abcdef", "snapshots/0123456789abcdef/config.json": "{}"}
    for file, text in files.items():
        path = cache / f"models--{name.replace('/', '--')}" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)


def test_the_hub_is_asked_about_an_id_while_it_is_in_reach(tmp_path):
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert asked("owner/known", server.server_port, tmp_path) == (0, "")
        code, error = asked("owner/typo", server.server_port, tmp_path)
        assert code == 1 and "InvalidInput" in error and "no such model" in error
        server.shutdown()
    with bound() as (silent, port):
        code, error = asked("owner/model", port, tmp_path)
        assert code == 1 and "out of reach" in error
        silent.listen()
        code, error = asked("owner/model", port, tmp_path, patience="1")
        assert code == 1 and "out of reach" in error
    with bound() as (_, port):
        keep(tmp_path, "owner/model")
        assert asked("owner/model", port, tmp_path) == (0, "")


@contextmanager
def bound():
    """A socket and its port. Nobody is connected until it listens, and nobody ever answers."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one, one.getsockname()[1]


def test_offline_only_what_was_downloaded(tmp_path):
    code, error = asked("owner/model", 1, tmp_path, offline="1")
    assert code == 1 and "HF_HUB_OFFLINE is set" in error
    keep(tmp_path, "owner/model")
    assert asked("owner/model", 1, tmp_path, offline="1") == (0, "")
