"""The file of packed weights: how it is cut, what it holds, and what becomes of it where making it
fails.

pytest tests/test_packed_file.py
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quickbeam.errors import QuickbeamError
from quickbeam.models import packed_file
from quickbeam.models.native import library
from quickbeam.models.packed_file import ALIGNED, EmbeddingRows, Plan, WeightShape, make
from quickbeam.models.weight_stream import File, WeightStream

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
SHAPES = [
    WeightShape(64, 70, False, "bfloat16"),
    WeightShape(64, 200, True, "int8"),
    WeightShape(200, 64, False, "int4"),
]
TABLE = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def plan() -> Plan:
    found = library.kernels()
    assert found is not None
    return Plan(found, SHAPES, (50, 64))


def rows(shape: WeightShape) -> packed_file.Rows:
    weights = [
        torch.randn(shape.rows, shape.inputs, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i in range(shape.step)
    ]
    return lambda first, last: [weight[first:last] for weight in weights]


def made(path: Path, progress: packed_file.Progress = lambda stage, fraction: None) -> Plan:
    found = plan()
    make(
        path,
        found,
        [rows(shape) for shape in SHAPES],
        lambda first, last: [TABLE[first:last]],
        progress,
        "packing",
    )
    return found


def test_segments_hold_every_block_once_and_no_more_than_a_piece() -> None:
    found = plan()
    seen = [[False] * shape.blocks for shape in SHAPES]
    end = 0
    for segment in found.segments:
        assert (
            segment.offset == end
            and segment.offset % ALIGNED == segment.size % ALIGNED == 0
            and segment.size <= found.piece
        )
        end, used = segment.offset + segment.size, 0
        for part in segment.parts:
            assert part.offset == used and part.first % SHAPES[part.weight].step == 0
            used += part.blocks * found.blocks[part.weight]
            for block in range(part.first, part.first + part.blocks):
                assert not seen[part.weight][block]
                seen[part.weight][block] = True
        assert used <= segment.size
    assert all(map(all, seen)) and end == found.size


def test_the_file_is_safetensors_and_holds_the_weights_as_packed_whole(tmp_path: Path) -> None:
    path = tmp_path / "weights" / "w.safetensors"
    found = made(path)
    with safe_open(path, "pt") as file:
        data, table = file.get_tensor("weights"), file.get_tensor("embedding")
    assert torch.equal(table, TABLE) and data.numel() == found.size
    for number, shape in enumerate(SHAPES):
        parts = [
            (segment, part)
            for segment in found.segments
            for part in segment.parts
            if part.weight == number
        ]
        size = found.blocks[number]
        got = torch.cat(
            [data[s.offset + p.offset : s.offset + p.offset + p.blocks * size] for s, p in parts]
        )
        packer = packed_file.Packer(found.kernels, shape.name)
        whole = packer.pack(rows(shape)(0, shape.rows), None, shape.gated).data.view(torch.uint8)
        assert torch.equal(got, whole)
    table = EmbeddingRows(path, found)
    wanted = [3, 49, 3, 0, *range(20)]
    assert torch.equal(table.rows(wanted), TABLE[wanted]) and torch.equal(
        table.rows(wanted), TABLE[wanted]
    )
    assert torch.equal(table.all(), TABLE)


def test_a_full_disk_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: namedtuple("Usage", "total used free")(10**9, 10**9, 1000)
    )
    with pytest.raises(QuickbeamError, match="MB free"):
        made(tmp_path / "w.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == [".w.safetensors.lock"]


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").symlink_to(tmp_path / "gone")
    with pytest.raises(QuickbeamError, match=r"weights.*QUICKBEAM_CACHE"):
        made(tmp_path / "weights" / "w.safetensors")
    (tmp_path / ".w.safetensors.lock").mkdir()
    with pytest.raises(QuickbeamError, match="QUICKBEAM_CACHE"):
        made(tmp_path / "w.safetensors")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_is_broken_off_leaves_nothing(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pack = tmp_path / "w.safetensors", Plan.pack

    def fail(self: Plan, segment: packed_file.Segment, rows: object) -> torch.Tensor:
        if segment.offset:
            raise error
        return pack(self, segment, rows)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "pack", fail)
        with pytest.raises(QuickbeamError if isinstance(error, OSError) else KeyboardInterrupt):
            made(path)
    assert [file.name for file in tmp_path.iterdir()] == [".w.safetensors.lock"]
    (tmp_path / ".w.safetensors.1.tmp").write_bytes(b"of a process that was killed")
    made(path)
    assert path.is_file() and not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_a_file_is_made_once_and_again_where_it_was_cut(tmp_path: Path) -> None:
    path, earlier, told = (
        tmp_path / "w-1-b.safetensors",
        tmp_path / "w-1-a.safetensors",
        list[str](),
    )
    earlier.write_bytes(b"of an earlier layout")
    found = made(path, lambda stage, fraction: told.append(stage))
    first, count = path.read_bytes(), len(told)
    assert count > 3 and not earlier.exists()
    made(path, lambda stage, fraction: told.append(stage))
    assert len(told) == count
    os.truncate(path, found.file_bytes - 1)
    made(path)
    assert path.read_bytes() == first


@pytest.mark.parametrize("buffers", [2, 3, 5])
@pytest.mark.parametrize("direct", [True, False])
def test_segments_come_in_their_order_again_and_again(
    tmp_path: Path, buffers: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    data = os.urandom(7 * ALIGNED)
    path.write_bytes(data)
    if not direct:
        monkeypatch.setattr("quickbeam.models.weight_stream._direct", lambda _: False)
    segments = [(0, 2 * ALIGNED), (2 * ALIGNED, ALIGNED), (4 * ALIGNED, 3 * ALIGNED)]
    stream = WeightStream(path, segments, buffers)
    import ctypes

    for _ in range(5):
        stream.begin()
        for number, (offset, size) in enumerate(segments):
            assert ctypes.string_at(stream.take(number), size) == data[offset : offset + size]
            stream.release()
        stream.end()
    assert (
        stream.rate > 0
        and stream.bytes == 6 * ALIGNED
        and stream.buffer_bytes == buffers * 3 * ALIGNED
    )
    stream.close()


class Interrupted(set[int]):
    def discard(self, turn: int) -> None:
        super().discard(turn)
        raise KeyboardInterrupt


def test_an_interrupt_as_the_first_segment_is_taken_is_followed_by_a_whole_pass(
    tmp_path: Path,
) -> None:
    path, segments, taken = tmp_path / "data", [(0, ALIGNED), (ALIGNED, ALIGNED)], list[int]()
    path.write_bytes(os.urandom(2 * ALIGNED))
    stream = WeightStream(path, segments, 2)

    def one_pass() -> None:
        stream.begin()
        for number in range(len(segments)):
            stream.take(number)
            stream.release()
            taken.append(number)
        stream.end()

    one_pass()
    stream.begin()
    work = stream._work
    assert work is not None
    with work.changed:
        work.ready = Interrupted(work.ready)
    with pytest.raises(KeyboardInterrupt):
        stream.take(0)
    after = threading.Thread(target=one_pass, daemon=True)
    after.start()
    after.join(timeout=10)
    assert taken == [0, 1, 0, 1]
    stream.close()


def test_a_file_system_without_direct_reads_is_said_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, opened = tmp_path / "data", os.open
    path.write_bytes(bytes(range(256)) * 16)

    def refuse(name: object, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(name, flags, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    file = File(path)
    assert not file.direct and "through it" in caplog.text
    room = bytearray(256)
    file.read(0, memoryview(room))
    assert room == bytes(range(256))
