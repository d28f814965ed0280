"""Machines with several memory nodes: which threads are near which weights, and the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import SETS, linear, load, number
from quickbeam import LLM, SamplingParams
from quickbeam.machine import memory_nodes
from quickbeam.models.native import build
from quickbeam.models.native.library import MemoryNodes
from quickbeam.models.native.quantised import Packed

PAGE = 4096
TWO = [[0], [1]]  # fake nodes, of one processor each

needs_two = pytest.mark.skipif(
    sys.platform != "linux" or {0, 1} - {*os.sched_getaffinity(0)}, reason="takes two processors"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Runs `threads.cpp`, and gives what it prints by line."""
    compiler = build.compiler()
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C++ compiler is there")
    path = tmp_path_factory.mktemp("threads") / "threads"
    source = Path(__file__).parent / "threads.cpp"
    flags = ["-std=c++17", "-O2", "-Wall", "-Werror", "-pthread", f"-I{build.HERE}"]
    subprocess.run([*compiler, *flags, source, "-o", path], check=True)

    def run(*arguments):
        done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize(("n", "threads", "processors"), [
    (100, 4, [2, 2]), (100, 4, [4]), (97, 6, [2, 2, 2]), (1000, 5, [12, 4]), (7, 8, [4, 4]),
    (100, 3, [1, 1, 1, 1]),
])  # fmt: skip
def test_a_thread_takes_its_part_then_those_of_its_node(program, n, threads, processors):
    *lines, apart = program(n, threads, *processors)
    assert apart == "apart 0"
    nodes = [int(line.split()[0]) for line in lines]
    assert nodes == sorted(nodes) and {*nodes} <= {*range(len(processors))}
    for thread, line in enumerate(lines):
        pieces = [tuple(map(int, piece.split("-"))) for piece in line.split()[1:]]
        taken = [i for first, last in pieces for i in range(first, last)]
        assert sorted(taken) == [*range(n)]
        owners = [i for i in range(threads) if part(n, i, threads)]
        parts = {i: part_of for part_of in owners for i in part(n, part_of, threads)}
        order = [*dict.fromkeys(parts[i] for i in taken)]
        near = [i for i in owners if nodes[i] == nodes[thread]]
        assert {*order[: len(near)]} == {*near} and {*order} == {*owners}
        if thread in owners:
            assert order[0] == thread
        own = [nodes[i] for i in order]
        if len(processors) == 1:
            assert order == [*owners[owners.index(thread) :], *owners[: owners.index(thread)]]
        assert own[: len(near)] == [nodes[thread]] * len(near)


def part(n, thread, threads):
    """The pieces of work that are a thread's own."""
    return range(n * thread // threads, n * (thread + 1) // threads)


@pytest.fixture
def kernels(threads):
    """The best kernels with two threads, each in a memory node of its own."""
    kernels = load(SETS[0])
    threads(2)
    before = kernels.nodes
    kernels.nodes = MemoryNodes(TWO)
    yield kernels
    kernels.nodes = before


@needs_two
@pytest.mark.parametrize("gated", [False, True])
def test_a_weights_pages_are_touched_by_the_threads_that_read_them(kernels, program, gated):
    weight = number(544, 320)
    weights = [weight, weight] if gated else [weight]
    packed = Packed(kernels, weights, gated=gated)
    step_bytes = 16 * 320 * 2 * len(weights)
    packed.data.fill_(255)
    packed.touch()
    touched = (packed.data == 0).nonzero().flatten().tolist()
    steps = len(packed.data) // step_bytes
    assert steps == 544 // 16
    lines = program(steps, 2, 1, 1)[:2]
    firsts = [int(line.split()[1].split("-")[0]) for line in lines]  # where their parts begin
    assert firsts == [0, steps // 2]
    begin, end = [first * step_bytes for first in firsts], len(packed.data)
    assert touched == [*range(begin[0], begin[1], PAGE), *range(begin[1], end, PAGE)]


@needs_two
def test_threads_stay_in_their_node_and_the_callers_goes_free(kernels):
    def allowed():
        tasks = Path("/proc/self/task").iterdir()
        lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
        return [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]

    before = os.sched_getaffinity(0)
    packed, x = Packed(kernels, [number(544, 320)]), number(3, 320)
    linear(kernels, packed, x)
    assert os.sched_getaffinity(0) == before
    assert "1" in allowed() and "0" not in allowed()


@needs_two
def test_results_have_the_same_bits(kernels):
    weight, x = number(544, 320), number(40, 320)
    packed = Packed(kernels, [weight])
    spread = [linear(kernels, packed, x[:rows]) for rows in (1, 7, 40)]
    kernels.nodes = None
    for rows, y in zip((1, 7, 40), spread, strict=True):
        assert torch.equal(linear(kernels, packed, x[:rows]), y)


@needs_two
def test_answers_are_the_same(kernels, toy_folder):
    def answers():
        with LLM(toy_folder) as llm:
            params = SamplingParams(max_tokens=24, temperature=0.7, seed=5)
            return [llm.generate(f"abc {i}", params).token_ids for i in range(4)]

    spread = answers()
    kernels.nodes = None
    assert answers() == spread


def folder_of(tmp_path, **nodes):
    for name, processors in nodes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{processors}\n")
    (tmp_path / "possible").write_text("0-9\n")
    return tmp_path


def test_nodes_are_read_from_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(20)} - {3}, raising=False)
    nodes = {"node10": "12-13,16-17", "node2": "5", "node0": "0-4,8", "node3": "", "node4": "40-49"}
    found = memory_nodes(folder_of(tmp_path, **nodes))
    assert found == [[0, 1, 2, 4, 8], [5], [12, 13, 16, 17]]
    assert memory_nodes(tmp_path / "none") == []
    masks = MemoryNodes(found)
    assert (masks.count, masks.bytes) == (3, 8)
    assert [int(mask[0]) for mask in masks._masks] == [0b100010111, 1 << 5, 0b110011 << 12]
    assert masks._before.tolist() == [0, 5, 6, 10]
    assert MemoryNodes([[0], [64]]).bytes == 16
