"""Conversations that outlive the process: keys and values in files, and files that are wrong."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from docs import save_drafter
from quickbeam.engine.engine import Engine
from quickbeam.engine.kept_prefixes import KeptPrefixes, checksum_of
from quickbeam.llm import LLM
from quickbeam.methods.base import NoDraft
from quickbeam.models.native import library
from quickbeam.params import SamplingParams
from quickbeam.serve.server import prepare
from test_recurrent import IDS, PAGE, made
from test_recurrent import answer as engine_answer

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
TOKENS = [1 + i * 7 % 90 for i in range(300)]


@pytest.fixture(scope="module")
def folder(toy_folder, tmp_path_factory):
    """A toy whose answers depend on all tokens."""
    folder = tmp_path_factory.mktemp("attentive") / "toy"
    shutil.copytree(toy_folder, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if "o_proj" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(folder, 257, 32, 2)
    return str(folder)


def answer(model, keep, ids=TOKENS, **options):
    """An answer's token ids and logprobs, and how many tokens were not read again."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
    with LLM(model, keep=keep, **options) as llm:
        completion = llm.generate(ids, params)
    scores = [(one.token, one.logprob) for one in completion.logprobs]
    return scores, completion.statistics.cached_tokens


def files(keep):
    folder = keep.with_name(f"{keep.name}.prefixes")
    return sorted(folder.glob("*.prefix")) if folder.exists() else []


@pytest.mark.parametrize("method", ["ar", "auto"])
def test_another_process_reads_only_what_is_new_and_has_the_same_bits(folder, tmp_path, method):
    keep = tmp_path / "kept"
    first, cached = answer(folder, keep, method=method)
    assert cached == 0 and files(keep)
    again, cached = answer(folder, keep, method=method)
    assert again == first and cached >= 256
    longer = [*TOKENS, *range(1, 40)]
    grown, cached = answer(folder, keep, longer, method=method)
    assert cached >= 256 and grown == answer(folder, None, longer, method=method)[0]
    other, cached = answer(folder, keep, [2, *TOKENS[1:]], method=method)
    assert cached == 0 and other == answer(folder, None, [2, *TOKENS[1:]])[0]


@pytest.mark.parametrize("method", ["dynaspec", "auto"])
def test_a_drafters_rows_are_kept_beside_the_targets(folder, drafter, tmp_path, method):
    keep = tmp_path / "kept"
    options = {"drafter": drafter, "method": method, "budget": 8}
    first, cached = answer(folder, keep, **options)
    assert cached == 0 and any("draft" in load_file(path) for path in files(keep))
    again, cached = answer(folder, keep, **options)
    assert again == first == answer(folder, None, method="ar")[0] and cached >= 256
    # another drafter would have read them otherwise
    assert answer(folder, keep, method="ar")[1] == 0


def test_states_of_recurrent_layers_are_kept(tmp_path):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    answers = list[list[int]]()
    cached = list[int]()
    for kept in (None, "files", "files"):
        model = made("qwen3_5", chunk=PAGE)
        engine = Engine(model)
        if kept is not None:
            engine.prefixes.kept = KeptPrefixes(tmp_path / kept, "m", 1 << 30)
        state = engine_answer(model, NoDraft(), params, IDS[: 3 * PAGE + 5], engine=engine)
        answers.append(state.output.token_ids)
        cached.append(state.statistics.cached_tokens)
        engine.close()
        assert model.pool.used == 0
    assert answers[0] == answers[1] == answers[2]
    assert cached == [0, 0, 3 * PAGE]


def test_a_server_that_starts_again_goes_on_with_a_conversation(folder, tmp_path):
    for expected in (0, 256):
        llm, _ = prepare(lambda: LLM(folder, keep=tmp_path / "kept"))
        with llm:
            assert llm.generate(TOKENS, PARAMS).statistics.cached_tokens >= expected


def test_wrong_bits_would_be_seen(folder, tmp_path):
    keep = tmp_path / "kept"
    first, _ = answer(folder, keep)
    for path in files(keep):
        tensors = load_file(path)
        tensors["kv"] = tensors["kv"].roll(1, -1)
        save_file(tensors, path, {"checksum": checksum_of(path.stem, tensors)})
    wrong, cached = answer(folder, keep)
    assert cached and wrong != first


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def rename(path):
    """Give a chunk the file of the one behind it."""
    others = [other for other in path.parent.glob("*.prefix") if other != path]
    shutil.copy(others[0], path)


def rewrite(change):
    def write(path):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"checksum": checksum_of(path.stem, tensors)})

    return write


HOSTILE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": cut,
    "flipped": flip,
    "no metadata": lambda path: save_file(load_file(path), path),
    "a long header": lambda path: path.write_bytes(b"\xff" * 64),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "of another chunk": rename,
    "no keys": rewrite(lambda tensors: tensors.pop("kv")),
    "wide pages": rewrite(lambda tensors: tensors.update(kv=torch.zeros(1, 5))),
    "many pages": rewrite(lambda tensors: tensors.update(kv=tensors["kv"].repeat(3, 1))),
    "other numbers": rewrite(lambda tensors: tensors.update(kv=tensors["kv"].double())),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_file_is_ignored(folder, tmp_path, name, caplog):
    keep = tmp_path / "kept"
    first, _ = answer(folder, keep)
    begin = min(files(keep), key=lambda path: -path.stat().st_mtime_ns)  # parents come last
    HOSTILE[name](begin)
    again, cached = answer(folder, keep)
    assert again == first and cached == 0


def test_another_models_files_are_not_read(folder, toy_folder, tmp_path):
    keep = tmp_path / "kept"
    answer(folder, keep)
    before = len(files(keep))
    shutil.copytree(tmp_path / "kept.prefixes", tmp_path / "other.prefixes")
    assert answer(toy_folder, tmp_path / "other")[1] == 0  # of the same shapes
    assert answer(folder, keep, dtype="float32")[1] == 0
    assert len(files(keep)) > before


def test_files_are_bounded_and_those_used_last_stay(tmp_path):
    kept = KeptPrefixes(tmp_path / "p", "m", 3500)
    names = [kept.name(kept.root, [i]) for i in range(4)]
    for i, name in enumerate(names):
        kept.save(name, {"kv": torch.zeros(200)})
        os.utime(tmp_path / "p" / f"{name}.prefix", ns=(i, i))
    sizes = [path.stat().st_size for path in (tmp_path / "p").iterdir()]
    assert sum(sizes) <= 3500 and len(sizes) == 3
    assert kept.load(names[0]) is None
    assert kept.load(names[1]) is not None  # which is now the newest
    kept.save(names[0], {"kv": torch.zeros(200)})
    assert kept.load(names[2]) is None and kept.load(names[1]) is not None
    kept.save(names[2], {"kv": torch.zeros(4000)})  # larger than all may be
    assert kept.load(names[2]) is None and kept.load(names[1]) is not None


def test_files_that_another_process_removes_stop_nothing(tmp_path, monkeypatch, caplog):
    kept = KeptPrefixes(tmp_path, "m", 3500)
    name = kept.name(kept.root, [1])
    glob = Path.glob
    with monkeypatch.context() as patch:  # removed while the files are counted
        gone = tmp_path / "gone.prefix"
        patch.setattr(Path, "glob", lambda path, pattern: [gone, *glob(path, pattern)])
        kept.save(name, {"kv": torch.zeros(200)})
    assert kept.load(name) is not None

    from_file = torch.UntypedStorage.from_file
    opened = []

    def removed(path, *more, **named):  # behind the header, which was read before
        opened.append(path)
        (tmp_path / f"{name}.prefix").unlink()
        return from_file(path, *more, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", removed)
    assert kept.load(name) is None
    assert opened and not caplog.records


def test_two_engines_of_a_process_write_the_same_chunk(tmp_path, monkeypatch, caplog):
    engines = [KeptPrefixes(tmp_path, "m", 3500) for _ in range(2)]
    name = engines[0].name(engines[0].root, [1])
    write = Path.write_bytes
    others = [engines[1]]

    def write_bytes(path, content):
        write(path, content)
        if others:
            others.pop().save(name, {"kv": torch.zeros(200)})

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    engines[0].save(name, {"kv": torch.zeros(200)})
    assert not others and not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.prefix"]


def test_parts_of_processes_that_never_were(tmp_path):
    for process in ("9" * 30, "\u00b2", "x"):
        (tmp_path / f"a.{process}.part").touch()
    KeptPrefixes(tmp_path, "m", 3500)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_is_said_once_and_serving_goes_on(folder, tmp_path, monkeypatch, caplog):
    write = Path.write_bytes

    def full(path, content):
        write(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    keep = tmp_path / "kept"
    assert answer(folder, keep)[0] == answer(folder, None)[0]
    said = [record for record in caplog.records if "no longer kept" in record.message]
    assert len(said) == 1 and "No space left" in said[0].message
    assert not list((tmp_path / "kept.prefixes").iterdir())


def test_none_are_kept_where_that_is_asked_for(folder, tmp_path):
    keep = tmp_path / "kept"
    answer(folder, keep, kept_prefixes=0)
    answer(folder, keep, share_prefixes=False)
    assert not files(keep)


def test_what_was_forgotten_is_read_anew(folder, tmp_path):
    with LLM(folder, keep=tmp_path / "kept") as llm:
        llm.generate(TOKENS, PARAMS)
        llm.reset()
        assert llm.generate(TOKENS, PARAMS).statistics.cached_tokens == 0


KILLED = {
    "half written": """
def write_bytes(path, content):
    write(path, content[: len(content) // 2 if dies() else None])
    if dies():
        os.kill(os.getpid(), signal.SIGKILL)
    writes.append(path)
write = Path.write_bytes
Path.write_bytes = write_bytes
""",
    "not named yet": """
def replace(part, path):
    if dies():
        os.kill(os.getpid(), signal.SIGKILL)
    writes.append(path)
    rename(part, path)
rename = os.replace
kept_prefixes.os = SimpleNamespace(**vars(os) | {"replace": replace})
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_a_killed_process_leaves_files_that_can_be_read(folder, tmp_path, name):
    keep = tmp_path / "kept"
    program = textwrap.dedent(
        f"""
        import os, signal, time
        from pathlib import Path
        from types import SimpleNamespace
        from quickbeam.engine import kept_prefixes
        from quickbeam.llm import LLM
        from quickbeam.params import SamplingParams
        writes = []
        dies = lambda: len(writes) == 3
        llm = LLM({folder!r}, keep={str(keep)!r})
        exec({KILLED[name]!r})
        llm.generate({TOKENS}, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        time.sleep(60)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert done.returncode == -9
    kept = tmp_path / "kept.prefixes"
    assert len(files(keep)) == 3 and len(list(kept.iterdir())) == 4
    first, _ = answer(folder, None)
    assert answer(folder, keep)[0] == first
    assert not list(kept.glob("*.part"))
    again, cached = answer(folder, keep)
    assert again == first and cached >= 256
