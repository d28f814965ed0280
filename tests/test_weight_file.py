"""The file of packed weights, and reading it ahead: what they hold, and what becomes of them where
something fails."""

import inspect
import mmap
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cases import FULL, before, refuses
from models import tiny
from quickbeam.errors import QuickbeamError
from quickbeam.hub import cache
from quickbeam.hub.cache import file_key
from quickbeam.models import memory
from quickbeam.models.families import describe
from quickbeam.models.memory import HUGE
from quickbeam.models.native import build, library
from quickbeam.models.native.quantised import Packed
from quickbeam.models.weights.file_reader import Extent, File, Ring
from quickbeam.models.weights.packed_file import ALIGNED, PackedFile
from quickbeam.models.weights.packing import PackedWeights
from quickbeam.models.weights.parameters import ModelParameters

DATA = torch.randint(0, 256, (10_000,), dtype=torch.uint8, generator=torch.Generator())


def pieces():
    yield from DATA.split(3000)


def made(path, progress=lambda stage, done: None):
    file = PackedFile(path, progress)
    file.write(len(DATA), pieces, "packing")
    return file


def test_what_is_written_is_read_and_is_safetensors(tmp_path):
    path = tmp_path / "weights" / "w.safetensors"
    file = made(path)
    read = file.read(len(DATA))
    assert read is not None and torch.equal(read, DATA) and file.read(len(DATA) + 1) is None
    with safe_open(path, "pt") as other:
        assert torch.equal(other.get_tensor("weights"), DATA)


@pytest.mark.parametrize(("share", "huge"), [(1.0, True), (0.95, True), (0.7, False), (0.0, False)])
def test_large_files_are_mapped_where_that_is_as_fast(tmp_path, monkeypatch, share, huge):
    data = torch.arange(3 * HUGE, dtype=torch.int32).view(torch.uint8)
    inside = int(share * len(data))
    monkeypatch.setattr("quickbeam.models.memory.in_huge_pages", lambda begin: inside)
    file = PackedFile(tmp_path / "w-a-b.safetensors")
    file.write(len(data), lambda: [data], "packing")
    read = file.read(len(data))
    assert read is not None and torch.equal(read, data)
    assert file.is_mapped == (huge or not hasattr(mmap, "MADV_HUGEPAGE"))
    memory = torch.zeros_like(data)
    assert file.read(len(data), memory) is memory and torch.equal(memory, data)
    assert not file.is_mapped
    other = PackedFile(tmp_path / "w-a-c.safetensors")
    other.write(len(data), lambda: [data.flip(0)], "packing")
    assert torch.equal(read, data) and [*tmp_path.glob("*.safetensors")] == [other.path]


def test_huge_pages_of_a_mapped_file_are_counted(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(8 * HUGE))
    mapped = memory.map_file(path)
    if mapped is None:
        pytest.skip("files are not in huge pages here")
    assert memory.in_huge_pages(mapped.data_ptr()) >= 4 * HUGE or sys.platform != "linux"
    assert memory.in_huge_pages(0) == 0


def test_a_full_disk_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    refuses("0 MB are free there", made, tmp_path / "w.safetensors", error=QuickbeamError)
    assert [file.name for file in tmp_path.iterdir()] == [".w.safetensors.lock"]


def test_a_cache_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "weights").symlink_to(tmp_path / "gone")
    with pytest.raises(QuickbeamError, match=r"weights.*QUICKBEAM_CACHE"):
        made(tmp_path / "weights" / "w.safetensors")
    (tmp_path / ".w.safetensors.lock").mkdir()
    refuses("QUICKBEAM_CACHE", made, tmp_path / "w.safetensors", error=QuickbeamError)


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_what_is_broken_off_leaves_nothing(tmp_path, error):
    path = tmp_path / "w.safetensors"

    def broken():
        yield DATA[:3000]
        raise error

    with pytest.raises(QuickbeamError if isinstance(error, OSError) else KeyboardInterrupt):
        PackedFile(path).write(len(DATA), broken, "packing")
    assert [file.name for file in tmp_path.iterdir()] == [".w.safetensors.lock"]
    (tmp_path / ".w.safetensors.1.tmp").write_bytes(b"of a process that was killed")
    made(path)
    assert path.is_file() and not list(tmp_path.glob(".*.tmp"))


def test_a_file_is_made_once_and_again_where_it_was_cut(tmp_path):
    path, earlier, stages = tmp_path / "w-1-b.safetensors", tmp_path / "w-1-a.safetensors", [""]
    earlier.write_bytes(b"of an earlier layout")
    made(path, lambda stage, done: stages.append(stage))
    first, count = path.read_bytes(), len(stages)
    assert count > 3 and not earlier.exists()
    made(path, lambda stage, done: stages.append(stage))
    assert len(stages) == count
    os.truncate(path, len(first) - 1)
    made(path)
    assert path.read_bytes() == first


def test_another_way_of_packing_has_another_file(tmp_path, monkeypatch):
    """What lays out weights is part of the file's name: Python's part, and the kernels'."""
    sources = tmp_path / "sources"
    shutil.copytree(build.HERE, sources, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    monkeypatch.setattr(build, "HERE", sources)
    packing = [Path(inspect.getfile(Packed)).name]
    packing += [one.name for one in sources.glob("*.h") if "static void pack(" in one.read_text()]
    assert len(packing) == 2
    names = {PackedFile.for_checkpoint(str(tmp_path), None, "int8", None).path}
    for name in packing:
        with (sources / name).open("a") as file:
            file.write("\n")
        names.add(PackedFile.for_checkpoint(str(tmp_path), None, "int8", None).path)
    assert len(names) == 3


LARGE = 3 * cache.SMALL_FILE


def put(path, content):
    """Give a file its content and a time, as archives and image layers do."""
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    return file_key(path)


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_file_has_one_key_as_long_as_it_is_the_same(tmp_path, size):
    path, other = tmp_path / "w.safetensors", tmp_path / "other"
    key = put(path, bytes(size))
    assert file_key(path) == key
    changed = bytearray(size)
    changed[size * 2 // 3] = 1
    keys = {key, put(path, changed)}  # in place
    put(other, bytes(size))
    os.replace(other, path)
    keys.add(file_key(path))
    put(other, changed)
    shutil.copy2(other, path)
    keys.add(file_key(path))
    assert len(keys) == 4


def test_a_model_in_several_files_has_one_key_for_all(tmp_path):
    first, second = (tmp_path / f"a[1]-0000{i}-of-00002.gguf" for i in (1, 2))
    put(first, b"1")
    put(second, b"2")
    assert cache.split_files(first) == [first, second] == cache.split_files(second)
    key, other = file_key(first), put(tmp_path / "a[1]-00001-of-00003.gguf", b"1")
    put(second, b"3")
    assert len({key, other, file_key(first)}) == 3


def test_images_without_times_and_inodes_are_told_apart_by_their_content(tmp_path, monkeypatch):
    state = SimpleNamespace(st_size=LARGE, st_ino=1, st_mtime_ns=0, st_ctime_ns=0)
    monkeypatch.setattr("os.fstat", lambda file: state)
    norm, matrix = torch.ones(64), torch.zeros(LARGE // 4)

    def key(**changes):
        tensors = {"matrix": matrix, "norm": norm} | changes
        save_file(tensors, tmp_path / "w.safetensors")
        state.st_size = (tmp_path / "w.safetensors").stat().st_size
        return file_key(tmp_path / "w.safetensors")

    keys = [key(), key(norm=norm * 2), key(matrix=matrix + 1), key()]
    assert len(set(keys)) == 3 and keys[0] == keys[3]
    for header in (b"\xff" * 8, b"\x10" + bytes(7)):  # a broken one has a key as well
        (tmp_path / "w.safetensors").write_bytes(header + bytes(LARGE))
        assert file_key(tmp_path / "w.safetensors")


@pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("layout", ["qwen2", "gpt2", "gpt-oss-sinks"])
def test_weights_packed_in_parts_have_the_bytes_of_ones_packed_whole(layout, kind, monkeypatch):
    kernels, model = library.kernels(), tiny(layout, torch.bfloat16, wide=True)
    weights = PackedWeights(ModelParameters(model), describe(model), kernels, kind)
    whole = list(weights.pieces())
    monkeypatch.setattr("quickbeam.models.weights.packing.CHUNK", 1)
    parts = list(weights.pieces())
    assert torch.equal(torch.cat(parts), torch.cat(whole)) and len(parts) > len(whole)
    assert sum(map(len, parts)) == weights.size


@pytest.mark.parametrize("buffers", [2, 3, 5])
@pytest.mark.parametrize("direct", [True, False])
def test_extents_come_in_their_order_again_and_again(tmp_path, buffers, direct, monkeypatch):
    path = tmp_path / "data"
    data = os.urandom(7 * ALIGNED - 100)  # the last extent ends behind the file
    path.write_bytes(data)
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    extents = [Extent(first * ALIGNED, last * ALIGNED) for first, last in [(0, 2), (2, 3), (4, 7)]]
    known = 0

    def parts(extent, turn):
        return [extents[extent]] if extent != 1 or turn < known else None

    ring = Ring(File(path), extents, buffers, parts)
    for _ in range(5):
        ring.begin()
        for number, (first, last) in enumerate(extents):
            known += number == 1  # only now it is known what of it is wanted
            right = data[first:last]
            assert bytes(ring.take().numpy()[: len(right)]) == right
            ring.release()
        ring.end()
    assert ring.rate > 0 and ring.size == buffers * 3 * ALIGNED
    ring.close()


def test_a_file_system_without_direct_reads_is_read(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 16)

    def refuse(name, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")

    before(monkeypatch, os, "open", refuse)
    file = File(path)
    assert not file.direct
    room = torch.zeros(256, dtype=torch.uint8)
    file.read(0, room)
    assert room.tolist() == list(range(256))
