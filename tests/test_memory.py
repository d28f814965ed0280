"""Models that are larger than the memory for their weights: the bits of the same model in memory,
whatever is read from disk."""

import json
import os
import shutil
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from cases import before, raising, refuses
from checkpoints import configure
from features import interrupt
from models import SIZES, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.errors import QuickbeamError
from quickbeam.llm import LLM
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.models.weights.checkpoint import Checkpoint
from quickbeam.models.weights.file_reader import File, Ring
from quickbeam.params import SamplingParams
from scripts import captured, cli
from streaming import TOKENIZER, alike, bush, ids, limits, on_disk, saved, stored
from target import Target
from test_families import made

pytestmark = [
    pytest.mark.skipif(library.kernels() is None, reason="no native kernels here"),
    pytest.mark.usefixtures("cache"),
]

TIGHT = 60_000  # bytes, of toys that take more
PROMPTS = ["abcabcabcab", "one two one two one", "x = f(x) + f(x)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_folder):
    return cache(lambda layout: saved(layout, tmp_path_factory.mktemp(layout), toy_folder))


def in_memory(layout="qwen2", kind="bfloat16"):
    return Target(make_model(tiny(layout, torch.bfloat16, wide=True), weights=kind))


def from_disk(folder, layout="qwen2", kind="bfloat16", limit=0):
    """The same model with memory for so many resident groups."""
    checkpoint = stored(folder(layout))
    return on_disk(checkpoint, limits(checkpoint, kind)[limit], kind)


# a tied head, biases, weights stored in another order and learned positions, experts
BFLOAT16, INT8 = ("llama", "qwen3", "gpt2", "gpt-oss-sinks"), ("qwen2", "mistral-window")
CASES = [*((one, "bfloat16") for one in BFLOAT16), *((one, "int8") for one in INT8)]
CASES += [("llama-multi-head", "int4"), ("gpt-oss-sinks", "int4")]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_a_model_read_from_disk_has_the_bits_of_one_in_memory(folder, layout, kind):
    disk = from_disk(folder, layout, kind, 3)
    alike(in_memory(layout, kind), disk)
    record = disk.model.streamed.record()
    assert record["streamed_bytes"] > 0 < record["resident_bytes"]
    disk.model.close()


@pytest.mark.parametrize("name", ["ernie4_5_moe", "qwen3_moe", "qwen3_5", "granite_hybrid-moe"])
def test_hybrids_and_experts_read_from_disk_have_the_bits_of_ones_in_memory(tmp_path, name):
    dtype = torch.float32 if name == "qwen3_5" else torch.bfloat16
    model = made(name, dtype)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, dtype, library.kernels())
    every = limits(checkpoint)
    disk = on_disk(checkpoint, every[len(every) // 2])
    alike(Target(make_model(model)), disk, (1, 17))
    disk.model.close()


def test_only_experts_that_a_row_has_chosen_are_read(folder):
    disk = from_disk(folder, "gpt-oss-sinks")

    def read(width):
        disk.model.close()  # nothing is read ahead before the pass; after it, buffers may be filled
        before = int(disk.model.streamed.record()["read_bytes"])
        disk.verify(bush(width))
        disk.model.close()
        return int(disk.model.streamed.record()["read_bytes"]) - before

    disk.verify(bush(1))
    one, many, record = read(1), read(100), disk.model.streamed.record()
    every, ahead = record["streamed_bytes"], record["buffer_bytes"]
    assert one - ahead < 0.8 * every <= every <= many <= every + ahead


@pytest.mark.parametrize(
    ("layout", "kind"), [("llama-multi-head", "int8"), ("gpt-oss-sinks", "bfloat16")]
)
def test_every_division_of_the_memory_gives_the_same_bits(folder, layout, kind):
    memory, resident = in_memory(layout, kind), []
    checkpoint = stored(folder(layout))
    for limit in limits(checkpoint, kind):
        disk = on_disk(checkpoint, limit, kind)
        memory.reset()
        alike(memory, disk, (1, 24))
        record = disk.model.streamed.record()
        resident.append(record["resident_bytes"])
        assert record["buffer_bytes"] + resident[-1] <= limit
        disk.model.close()
    assert resident[0] == 0 and resident == sorted(resident) and len(set(resident)) > 5


def test_several_sequences_and_long_prompts_share_a_pass(folder):
    logits = []
    for model in (in_memory().model, from_disk(folder, limit=2).model):
        caches = [model.pool.new() for _ in range(3)]
        model.forward(Batch([Chain(one, ids(600 + i)) for i, one in enumerate(caches)]))
        for i, one in enumerate(caches):
            one.commit(range(600 + i))
        passed = model.forward(Batch([Draft(one, bush(9 + i)) for i, one in enumerate(caches)]))
        logits.append(torch.cat([one.logits for one in passed]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("layout", ["qwen2", "gpt-oss-sinks"])
def test_hidden_states_are_the_same(folder, layout):
    memory, disk = in_memory(layout), from_disk(folder, layout, limit=2)
    for target in (memory, disk):
        target.verify(bush(3))  # a program without them first
        target.model.set_aux_layers([1, 3, 4])
        target.prefill(ids(40))
    assert torch.equal(memory.take_hidden(), disk.take_hidden())
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(memory.model.head(x), disk.model.head(x))  # what a feature drafter shares
    every = torch.arange(97)
    assert torch.equal(memory.model.embedding(every), disk.model.embedding(every))


def test_slow_reads_are_waited_for(folder, monkeypatch):
    disk = from_disk(folder)
    turn = iter(range(10**9))

    def slow(self, offset, room):
        room.numpy()[:] = 255  # numbers that are none: nobody may read them
        time.sleep((next(turn) * 7 % 5) / 2000)

    before(monkeypatch, File, "read", slow)
    alike(in_memory(), disk, (1, 9))
    disk.model.close()


def test_a_buffer_that_is_given_back_too_early_shows(folder, monkeypatch):
    """The wrong version that the tests above must catch."""
    memory, disk, take = in_memory(), from_disk(folder), Ring.take

    def early(self):
        buffer = take(self)
        self.release()
        for _, future in self._ahead:  # what follows is there, in the same buffer
            future.result()
        return buffer

    monkeypatch.setattr(Ring, "take", early)
    with pytest.raises(AssertionError):
        alike(memory, disk, (1,))


def test_a_pass_that_was_broken_off_is_followed_by_a_whole_one(folder, monkeypatch):
    memory, disk = in_memory(), from_disk(folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, Ring, "take", 5, late=False)
        disk.verify(bush(3))
    disk.reset()
    alike(memory, disk, (1, 9))


def test_two_models_and_threads_that_end(folder):
    before = set(threading.enumerate())

    def reading():
        return not set(threading.enumerate()) <= before

    first, second, memory = from_disk(folder), from_disk(folder, "llama"), in_memory()
    second.prefill(ids(20))
    alike(memory, first, (1,))
    assert reading()
    first.model.close()
    second.model.close()
    assert not reading()
    memory.reset()
    alike(memory, first, (1,))  # it begins anew
    first.model.close()


def test_files_that_are_missing_or_cut_are_named(folder, tmp_path, cache):
    shutil.copytree(folder("qwen2"), tmp_path / "model")
    shard = tmp_path / "model" / "model.safetensors"
    with safe_open(shard, "pt") as file:
        names = {name: "part.safetensors" for name in file.keys()}  # noqa: SIM118
    shard.unlink()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    words = r"part\.safetensors.*can't be read.*download it again"
    with pytest.raises(QuickbeamError, match=words):
        on_disk(stored(tmp_path / "model"), limits(stored(folder("qwen2")))[0])
    disk = from_disk(folder)
    disk.prefill(ids(20))
    (path,) = (cache / "weights").glob("*.safetensors")
    disk.model.close()
    os.truncate(path, 8192)
    for _ in range(2):
        refuses(str(path), disk.verify, bush(3), error=QuickbeamError)
    disk.model.close()


def test_answers_are_the_same_and_so_after_an_error(toy_folder, monkeypatch, cache):
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
    plain, disk = LLM(toy_folder, "ar"), LLM(toy_folder, "ar", memory=TIGHT)
    assert "MB a pass from disk" in disk.describe() and disk.kernels == plain.kernels
    expected = [answers.token_ids for answers in plain.generate(PROMPTS, params, progress=False)]
    answers = disk.generate(PROMPTS, params, method="logitspec", budget=0, progress=False)
    assert [one.token_ids for one in answers] == expected
    (path,) = (cache / "weights").glob("*.safetensors")
    fail = raising(OSError(5, "Input/output error"))
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(QuickbeamError, match=path.name):
            patch.setattr(os, "preadv", fail)
            disk.generate(PROMPTS[0], params)
    assert disk.generate(PROMPTS[0], params).token_ids == expected[0]
    disk.close()


def test_a_model_drafts_for_one_on_disk(toy_folder):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = LLM(toy_folder, "ar").generate(PROMPTS[0], params).token_ids
    with LLM(toy_folder, "dyspec", memory=TIGHT, drafter=toy_folder, draft_weights="int8") as llm:
        answer = llm.generate(PROMPTS[0], params, budget=16)
        drafter = llm.method_store.drafter
        assert isinstance(drafter, LMDrafter) and drafter.model.weights == "int8"
        assert drafter.model.streamed is None
    assert answer.token_ids == expected and answer.statistics.mean_accepted_tokens > 2


def test_what_fits_is_loaded_as_ever(toy_folder, cache):
    with LLM(toy_folder, "ar", memory="1GB") as llm:
        assert llm.model.streamed is None and llm.describe() == llm.kernels
    assert not list(cache.glob("weights/*"))
    arguments = f"generate abcabc --model {toy_folder} --method ar --max-tokens 5 --raw".split()
    plain = cli(*arguments)
    disk = cli(*arguments, "--verbose", "--memory", TIGHT)
    assert disk.exit_code == 0 and disk.stdout == plain.stdout
    assert "MB a pass from disk" in disk.stderr and "peak memory" in disk.stderr
    few = cli(*arguments, "--memory", "100")
    assert few.exit_code == 2 and "needs at least" in few.stderr


def test_what_cannot_be_read_while_computing_is_refused(toy_folder, tmp_path, monkeypatch):
    least = limits(stored(toy_folder))[0]
    refuses("at least 1MB", LLM, toy_folder, "ar", memory=least - 1)
    LLM(toy_folder, "ar", memory=least).close()
    for options, words in (
        ({"memory": "much"}, "memory=.much.: must be a size of memory"),
        ({"dtype": "float16"}, "goes with bfloat16 or float32"),
    ):
        refuses(words, LLM, toy_folder, "ar", **{"memory": TIGHT, **options})
    odd = saved("llama", tmp_path / "odd", toy_folder)
    configure(Path(odd), odd_scaling=2.0)
    refuses("odd_scaling", LLM, odd, "ar", memory=TIGHT)
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    refuses("eager", LLM, toy_folder, "ar", memory=TIGHT)


LOADING = """
import sys
from quickbeam.llm import LLM
from quickbeam.params import SamplingParams
from quickbeam.models.memory import peak_bytes
llm = LLM(sys.argv[1], "ar", memory=sys.argv[2] or None)
assert (llm.model.streamed is None) == (not sys.argv[2])
llm.generate([3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
print(peak_bytes())
"""


@pytest.mark.long
def test_a_load_takes_little_more_than_its_limit(tmp_path, toy_folder):
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=30_000)
    config = LlamaConfig(**SIZES | sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).named_parameters()
    filled = {n: torch.full(p.shape, 0.01, dtype=torch.bfloat16) for n, p in parameters}
    save_file(filled, tmp_path / "model.safetensors")
    for name in TOKENIZER:
        shutil.copy(Path(toy_folder) / name, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 3e8

    def peak(folder, memory):
        command = [sys.executable, "-c", LOADING, folder, memory]
        return int(captured(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout)

    python, limit = peak(toy_folder, ""), 80_000_000
    for _ in range(2):  # the first packs the weights
        assert peak(str(tmp_path), str(limit)) - python < limit + 130e6 < size
