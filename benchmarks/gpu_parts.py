"""The parts of `gpu.py` that need quickbeam: each gets the arguments and writes figures with `put`.

Weights are random where the default model isn't there. Then drafts are hardly ever accepted, and
only the time of a step means anything.
"""

from __future__ import annotations

import cProfile
import pstats
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from common import comb
from quickbeam import LLM, SamplingParams, hub
from quickbeam.bench.methods import LLMRunner, MethodItem, load_questions
from quickbeam.bench.throughput import TimedRequest, figures, fitting, serve
from quickbeam.config import LLMOptions
from quickbeam.drafters.loading import load_drafter
from quickbeam.engine.commit import Commit
from quickbeam.engine.output import NullTokenizer
from quickbeam.engine.proposing import StepProposer
from quickbeam.models import builtin
from quickbeam.models.base import Batch, Chain, Draft, Passed
from quickbeam.models.families import stack_of
from quickbeam.models.native.operands import KVShape
from quickbeam.models.opening import LoadedModel
from quickbeam.models.torch import paged_attention
from quickbeam.models.torch.attention import attention_on, runs_triton
from quickbeam.models.torch.model import PassResults, TorchModel
from quickbeam.models.torch.paged_attention import AttentionParams
from quickbeam.models.torch.pages import RowPool
from quickbeam.models.torch.parts import Product
from quickbeam.models.torch.rows import ListedRows, Padding, list_pass, uncommitted
from quickbeam.models.torch.same_bits import Probe
from quickbeam.models.torch.size_classes import class_with_widest, size_classes
from quickbeam.models.weights.formats import pick_device
from shapes import RandomParameters

Put = Callable[[str, Any], None]

METHODS = ("ar", "logitspec", "dyspec", "dynaspec", "auto")
DEFAULT = "SmolLM2-135M"
CONFIGS: dict[str, PreTrainedConfig] = {
    DEFAULT: LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "tiny": LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `heads`: of attention, as heads, heads of keys, and their dimension."""

    shapes: tuple[str, ...]
    heads: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    classes: tuple[int, ...]  # rows of passes in which rows' bits are compared
    padded: tuple[int, ...]  # rows to which all passes are padded
    ways_rows: tuple[int, ...]  # of passes that are measured each way
    prompt: int  # tokens of a prompt, the same
    batches: int  # random ones, for graphs
    repeats: int
    copied: int  # bytes, to measure the bandwidth
    loads: tuple[int, ...]
    prompts: int  # at least, of each load
    max_tokens: int


FULL = Sizes(
    shapes=(DEFAULT, "Qwen2.5-1.5B"),
    heads=((9, 3, 64), (12, 2, 128), (32, 8, 128), (4, 1, 256)),
    rows=(1, 4, 8, 16, 32, 64, 128),
    contexts=(100, 2000, 8000),
    classes=(1, 2, 4, 8, 16, 32, 64, 128),
    padded=(64, 128),
    ways_rows=(1, 16, 64),
    prompt=512,
    batches=6,
    repeats=15,
    copied=2**31,
    loads=(1, 16, 64),
    prompts=8,
    max_tokens=64,
)
SMALL = Sizes(
    shapes=("tiny",),
    heads=((4, 2, 16),),
    rows=(1, 4),
    contexts=(10, 70),
    classes=(1, 2, 4),
    padded=(4, 8),
    ways_rows=(1, 2),
    prompt=10,
    batches=2,
    repeats=2,
    copied=2**20,
    loads=(1, 2),
    prompts=2,
    max_tokens=6,
)


def sizes_of(given: Namespace) -> Sizes:
    return SMALL if given.small else FULL


# models


class DeviceParameters(RandomParameters):
    """Random parameters that are made on a device."""

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        super().__init__(config)
        self._some = self._some.to(device)


def random_model(name: str, device: torch.device, sizes: Sequence[int] | None = None) -> TorchModel:
    """Return a model with random weights. `sizes`: as of `TorchModel`."""
    with torch.inference_mode():
        parameters: Any = DeviceParameters(CONFIGS[name], device)
        stack = stack_of(parameters.config, parameters.dtype)
        reason = "its weights are random"
        return TorchModel(parameters, stack, device, sizes=sizes, reason=reason)


def random_ids(model: TorchModel, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.vocab_size, count).tolist()


def text_of(model: TorchModel, count: int, seed: int) -> Any:
    """Return the cache of a random text of `count` tokens, which the model has read."""
    cache, ids = model.pool.new(), random_ids(model, count, seed)
    for begin in range(0, count, model.chunk):
        part = ids[begin : begin + model.chunk]
        model.forward(Batch([Chain(cache, part)]))
        cache.commit(range(len(part)))
    return cache


@contextmanager
def without_graphs(model: Any) -> Iterator[None]:
    """Run the passes of a model one operation after the other within this context."""
    graphs = getattr(model, "_graphs", None)
    model._graphs = None
    try:
        yield
    finally:
        model._graphs = graphs


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median milliseconds of a call, until the device is done with it."""
    taken = list[float]()
    for _ in range(repeats + 2):
        wait(device)
        began = perf_counter()
        work()
        wait(device)
        taken.append(1000 * (perf_counter() - began))
    return median(taken[2:])


# correctness


def correctness(given: Namespace, put: Put) -> None:
    """Compare attention with its reference, and graphs with passes without."""
    device, sizes = pick_device(given.device), sizes_of(given)
    put("attention", [check_attention(device, *heads) for heads in sizes.heads])
    graphs = list[dict[str, Any]]()
    for name in sizes.shapes:
        model = random_model(name, device)
        for seed in range(sizes.batches):
            graphs.append({"shape": name, "batch": seed, **check_graph(model, seed)})
            put("graphs", graphs)


@dataclass(frozen=True)
class Way:
    """A way to give rows the same bits. `triton`: products are Triton's. `rows`: all passes are
    padded to so many; None: to the class of sizes that agree with the widest one."""

    name: str
    triton: bool = False
    rows: int | None = None


def bits(given: Namespace, put: Put) -> None:
    """Compare ways to give rows the same bits, where the library divides no sum."""
    padded = [Way(f"padded to {rows}", rows=rows) for rows in sizes_of(given).padded]
    ways = [Way("library"), Way("triton", triton=True), *padded]
    compare_ways(given, put, ways, splits=False)


def bits_with_splits(given: Namespace, put: Put) -> None:
    """Find out which sizes agree where the library may divide sums: `gpu.py` gives it room."""
    compare_ways(given, put, [Way("library")], splits=True)


def compare_ways(given: Namespace, put: Put, ways: Sequence[Way], splits: bool) -> None:
    device, sizes = pick_device(given.device), sizes_of(given)
    measured = list[dict[str, Any]]()
    for name in sizes.shapes:
        model = random_model(name, device, sizes=())
        if not splits:
            forbid_splits(put)
        for way in ways:
            if way.triton and not runs_triton(device):
                row = {"classes": "needs Triton on CUDA"}
            else:
                row = measure_way(model, way, sizes)
            measured.append({"shape": name, "way": way.name, **row})
            put("ways", measured)


def forbid_splits(put: Put) -> None:
    """Have the library divide no sum. PyTorch can say so since 2.10, and to cuBLASLt alone."""
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul: Any = torch.backends.cuda.matmul
    try:
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
    except (TypeError, ValueError, RuntimeError):
        put("note", "this PyTorch can't turn split-K off, only sums in bfloat16")


@torch.inference_mode()
def measure_way(model: TorchModel, way: Way, sizes: Sizes) -> dict[str, Any]:
    """Return the sizes of passes that agree, and what passes and prompts take that keep to them."""
    if way.triton:
        from quickbeam.models.torch.fused_product import multiply
    else:
        multiply = F.linear
    for module in model._network.modules():
        if isinstance(module, Product):
            module.multiply = multiply
    if model._graphs is not None:
        model._graphs.clear()  # they hold other products
    looked_at = sizes.classes if way.rows is None else (way.rows,)
    classes, wanted = classes_of(model, looked_at)
    members = next((one for one in classes if max(looked_at) in one), ())
    model._padding = Padding(members, wanted)
    row: dict[str, Any] = {
        "classes": "; ".join(" ".join(map(str, one)) for one in classes) or "none",
        "with logits": " ".join(map(str, wanted)) or "none",
    }
    for rows in sizes.ways_rows:
        batch = Batch([Draft(text_of(model, 30, rows), comb(rows, model.vocab_size))])
        taken = milliseconds(partial(model.forward, batch), sizes.repeats, model.device)
        row[f"ms, {rows} rows"] = f"{taken:.3f}"
    prompt = Batch([Chain(model.pool.new(), random_ids(model, sizes.prompt, 1))])
    taken = milliseconds(partial(model.forward, prompt), sizes.repeats, model.device)
    return row | {f"ms, a prompt of {sizes.prompt}": f"{taken:.3f}"}


def classes_of(
    model: TorchModel, sizes: Sequence[int]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the classes of sizes in which rows have the same bits; and of sizes of rows with
    logits, the class of the widest one."""
    model._padding = Padding()
    probe = Probe(
        lambda listed: model._results(listed).logits,
        model._pool,
        model.vocab_size,
        model.context_length,
        max(sizes),
    )
    try:
        return size_classes(probe.in_rows, sizes), class_with_widest(probe.in_wanted, sizes)
    finally:
        probe.release()


@torch.inference_mode()
def check_attention(
    device: torch.device, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    """Compare attention on a device with the reference, for trees and prompts of several texts."""
    pool, parts = RowPool([KVShape(kv_heads, head_dim, head_dim)], torch.bfloat16, device), []
    for length in (0, 63, 511, 2000):
        cache = pool.new()
        cache.reserve(length + 64)
        cache.length = length
        parts.append(uncommitted(Draft(cache, comb(20, 100))))
    for tensor in (*pool.key, *pool.value):
        tensor.normal_()
    rows = list_pass(parts, pool, padding=Padding()).to(device)
    query = torch.randn(len(rows.positions), heads, head_dim, device=device).bfloat16()
    params = AttentionParams(0, head_dim**-0.5)
    got = attention_on(device)(pool, rows, params, query)
    right = paged_attention.attend(pool, rows, params, query)
    real = ~rows.is_padding
    error = (got - right)[real].norm() / right[real].norm()
    return {
        "heads": heads,
        "of keys": kv_heads,
        "dimension": head_dim,
        "error": f"{float(error):.1e}",
        "finite": bool(got.isfinite().all()),
    }


def random_batch(model: TorchModel, seed: int) -> Batch:
    """Return trees and a prompt behind texts of random lengths."""
    rng = np.random.default_rng(seed)
    most = min(600, (model.context_length or 600) // 4)
    parts: list[Any] = []
    for i in range(int(rng.integers(1, 4))):
        cache = text_of(model, int(rng.integers(1, most)), 10 * seed + i)
        parts.append(Draft(cache, comb(int(rng.integers(1, 24)), model.vocab_size)))
    parts.append(Chain(model.pool.new(), random_ids(model, int(rng.integers(1, 40)), seed)))
    return Batch(parts)


def listed_of(model: TorchModel, batch: Batch) -> ListedRows:
    parts = [uncommitted(part) for part in batch.parts]
    padding = model._padding or Padding()
    return list_pass(parts, model._pool, batch.tokens, batch.wanted, padding)


def run_listed(model: TorchModel, listed: ListedRows) -> PassResults:
    """Run a pass as a graph where the model has graphs, else without."""
    if model._graphs is None:
        return model._run(listed.to(model.device))
    return PassResults(*model._graphs.run(listed, model._pool.generation))


@torch.inference_mode()
def check_graph(model: TorchModel, seed: int) -> dict[str, Any]:
    """Compare a graph with the same pass without, when it is captured and when it runs again."""
    listed = listed_of(model, random_batch(model, seed))
    first, again = run_listed(model, listed).logits, run_listed(model, listed).logits
    right = model._run(listed.to(model.device)).logits
    error = float((first - right).abs().max() / right.abs().max())
    return {
        "rows": listed.sizes.rows,
        "error": f"{error:.1e}",
        "same bits": torch.equal(first, right),
        "again": torch.equal(first, again),
    }


# passes


def passes(given: Namespace, put: Put) -> None:
    """Measure passes, with graphs and without, against bytes over bandwidth."""
    device, sizes = pick_device(given.device), sizes_of(given)
    rate = bytes_a_second(device, sizes.copied)
    put("GB/s of a copy, read and written", f"{rate / 1e9:.0f}")
    found = list[dict[str, Any]]()
    for name in sizes.shapes:
        model = random_model(name, device)
        for context in sizes.contexts:
            if context + max(sizes.rows) <= (model.context_length or context):
                for rows in sizes.rows:
                    times = measure_pass(model, context, rows, sizes.repeats, rate)
                    found.append({"shape": name, "context": context, "rows": rows, **times})
                    put("ms a pass", found)


def bytes_a_second(device: torch.device, size: int) -> float:
    """Return how fast a device copies its own memory: bytes read and bytes written."""
    source = torch.randint(255, (size // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return size / milliseconds(lambda: target.copy_(source), 10, device) * 1000


@torch.inference_mode()
def measure_pass(
    model: TorchModel, context: int, rows: int, repeats: int, rate: float
) -> dict[str, Any]:
    """Measure a pass over a tree behind `context` tokens, whichever they are."""
    cache, device = model.pool.new(), model.device
    cache.reserve(context + rows)
    cache.length = context
    batch = Batch([Draft(cache, comb(rows, model.vocab_size))])
    host = milliseconds(lambda: listed_of(model, batch), repeats, torch.device("cpu"))
    read = model.weight_bytes + context * model.pool.page_bytes / model.pool.page
    least = 1000 * read / rate
    times: dict[str, Any] = {"bytes/bandwidth": f"{least:.3f}"}
    graphs = model._graphs
    if graphs is not None:
        listed = listed_of(model, batch)
        graphs.run(listed, model._pool.generation)
        replay = graphs._captured[listed.sizes, ()].graph.replay
        whole = milliseconds(lambda: model.forward(batch), repeats, device)
        alone = milliseconds(lambda: [replay() for _ in range(10)], 3, device) / 10
        times |= {"graph": f"{whole:.3f}", "its GPU time": f"{alone:.3f}"}
        times["over bytes/bandwidth"] = f"{whole / least:.2f}"
    with without_graphs(model):
        times["without"] = f"{milliseconds(lambda: model.forward(batch), repeats, device):.3f}"
    cache.release()
    return times | {"rows listed": f"{host:.3f}"}


# methods


def model_part(given: Namespace, put: Put) -> None:
    """Fetch and convert the default model, where another one isn't named."""
    if given.model is None and not given.small:
        put("folder", str(builtin.pull()))


def opened(given: Namespace, sizes: Sizes, put: Put) -> LLM:
    """Return the model that is named, or the default one; random weights where it isn't there."""
    most = max(sizes.loads)
    if given.model is not None or (hub.pulled_bytes(hub.DEFAULT) and not given.small):
        llm = LLM(
            given.model,
            drafter=given.drafter,
            device=given.device,
            memory_of_answers=0,
            max_running=most,
        )
        put("model", llm.name)
        return llm
    name = sizes.shapes[0]
    put("model", f"random weights of {name}'s shape: tokens a second of drafts mean nothing")
    model = random_model(name, pick_device(given.device))
    place = given.drafter or (None if given.small else hub.drafter_of(None))
    load = None if place is None else partial(load_drafter, place)
    loaded = LoadedModel(model, NullTokenizer(), set(), {})
    options = LLMOptions(max_running=most, memory_of_answers=0)
    return LLM.of_loaded(loaded, name, options, load)


def prompts_of(llm: LLM, count: int, max_tokens: int) -> list[list[int]]:
    """Return prompts: our own questions, again and again, or random ids for random weights."""
    if not isinstance(llm.tokenizer, NullTokenizer):
        runner = LLMRunner(llm, MethodItem("ar", "ar"))
        fit = fitting(runner, load_questions(None), max_tokens)
    else:
        rng = np.random.default_rng(0)
        fit = [rng.integers(3, llm.model.vocab_size, 20 + 3 * i).tolist() for i in range(20)]
    # a prompt that is asked again begins otherwise, so that nothing of it is known
    return [fit[i % len(fit)] + [5] * (i // len(fit)) for i in range(count)]


def methods(given: Namespace, put: Put) -> None:
    """Measure all methods under all loads, and count answers that plain decoding gives alone."""
    sizes = sizes_of(given)
    llm: Any = opened(given, sizes, put)
    params = SamplingParams(max_tokens=sizes.max_tokens)
    drafts = [name for name in METHODS if name in llm.methods]
    prompts = prompts_of(llm, max(sizes.prompts, max(sizes.loads)), sizes.max_tokens)
    asked = [TimedRequest(ids) for ids in prompts]
    alone = {tuple(one.ids): one.token_ids for one in plain_answers(llm, asked, params)}
    found = list[dict[str, Any]]()
    for way in ("graphs", "without"):
        for load in sizes.loads if way == "graphs" else sizes.loads[:2]:
            for name in drafts:
                own = (
                    asked[: max(load, sizes.prompts)] if way == "graphs" else asked[: max(load, 2)]
                )
                row = measure_method(llm, way, name, own, load, params, alone)
                found.append(row | {"over ar": over(row, found)})
                put("tokens/s", found)


def plain_answers(llm: Any, asked: Sequence[TimedRequest], params: SamplingParams) -> Any:
    return serve(llm, asked, MethodItem("ar", "ar"), params, 1).answers


def measure_method(
    llm: Any,
    way: str,
    name: str,
    asked: Sequence[TimedRequest],
    load: int,
    params: SamplingParams,
    alone: dict[tuple[int, ...], list[int]],
) -> dict[str, Any]:
    """Measure one method under one load, after a few tokens of each prompt that don't count."""
    item = MethodItem(name, name)
    with_graphs = way == "graphs"

    def run() -> Any:
        serve(llm, asked[:load], item, replace(params, max_tokens=min(16, params.max_tokens)), load)
        return serve(llm, asked, item, params, load)

    if with_graphs:
        done = run()
    else:
        with without_graphs(llm.model):
            done = run()
    of = figures([done])
    same = sum(one.equals(alone[tuple(one.ids)]) for one in done.answers)
    return {
        "at a time": load,
        "method": name,
        "way": way,
        "tokens/s": round(of["tokens_per_second"], 1),
        "MAT": None if of["mean_accepted_tokens"] is None else f"{of['mean_accepted_tokens']:.2f}",
        "identical": f"{same} of {len(done.answers)}",
    }


def over(row: dict[str, Any], found: Sequence[dict[str, Any]]) -> str | None:
    """Return how many times the speed of `ar` in the same case a method has."""
    for one in found:
        if one["method"] == "ar" and all(one[key] == row[key] for key in ("at a time", "way")):
            return f"{row['tokens/s'] / one['tokens/s']:.2f}"
    return None


# host


def host(given: Namespace, put: Put) -> None:
    """Find out where a step of `auto` spends its time."""
    sizes = sizes_of(given)
    llm: Any = opened(given, sizes, put)
    params = SamplingParams(max_tokens=2 * sizes.max_tokens)
    name = "auto" if "auto" in llm.methods else "logitspec"
    (prompt,) = prompts_of(llm, 1, params.max_tokens)
    for _ in range(2):  # captures graphs, and learns what is accepted
        llm.generate(prompt, params, method=name)
    found = list[dict[str, Any]]()
    for way in ("graphs", "without") if getattr(llm.model, "_graphs", None) else ("without",):
        if way == "graphs":
            found.append({"way": way, **step_times(llm, prompt, params, name)})
        else:
            with without_graphs(llm.model):
                found.append({"way": way, **step_times(llm, prompt, params, name)})
        put(f"ms a step of {name}", found)
    with free_passes(llm, prompt, params):
        put("ms of the host a step", [host_times(llm, prompt, params, name)])
        put("lines", profile_lines(llm, prompt, params, name))


def step_times(llm: Any, prompt: list[int], params: SamplingParams, name: str) -> dict[str, Any]:
    """Return milliseconds of a step, and of its parts."""
    spent, forward = list[float](), llm.model.forward

    def timed(batch: Batch) -> Any:
        began = perf_counter()
        passed = forward(batch)
        spent.append(perf_counter() - began)
        return passed

    llm.model.forward = timed
    try:
        done = llm.generate(prompt, params, method=name).statistics
    finally:
        del llm.model.forward
    steps = max(1, done.steps)
    passing = sum(spent[-steps:])
    return {
        "steps": done.steps,
        "step": f"{1000 * done.seconds / steps:.3f}",
        "draft": f"{1000 * done.draft_seconds / steps:.3f}",
        "of it drafter": f"{1000 * done.drafter_seconds / steps:.3f}",
        "pass": f"{1000 * passing / steps:.3f}",
        "rest": f"{1000 * (done.seconds - done.draft_seconds - passing) / steps:.3f}",
    }


@contextmanager
def free_passes(llm: Any, prompt: list[int], params: SamplingParams) -> Iterator[None]:
    """Let trees behind a prompt be verified within this context by what plain decoding gives.

    That costs nothing but copies. A node gets the results of its position, whatever its path is;
    those of accepted paths are right.
    """
    model, forward, known = llm.model, llm.model.forward, dict[int, Passed]()

    def record(batch: Batch) -> list[Passed]:
        (part,), (passed,) = batch.parts, forward(batch)
        if isinstance(part, Draft):
            hidden = None if passed.hidden is None else passed.hidden[:1].clone()
            known[part.cache.length] = passed._replace(
                logits=passed.logits[:1].clone(), hidden=hidden
            )
        return [passed]

    def recall(batch: Batch) -> list[Passed]:
        (part,) = batch.parts
        first, last = part.cache.length, max(known)
        if not isinstance(part, Draft) or first not in known:
            return list(forward(batch))
        part.cache.reserve(first + part.rows)
        rows = [known[min(first + depth, last)] for depth in part.tree.depth]
        hidden = [row.hidden for row in rows if row.hidden is not None]
        return [
            Passed(
                torch.cat([row.logits for row in rows]),
                torch.cat(hidden) if hidden else None,
                [token for row in rows for token in row.best or [-1]],
            )
        ]

    model.forward = record
    try:
        llm.generate(prompt, params, method="ar")
        model.forward = recall
        yield
    finally:
        del model.forward


@contextmanager
def cpu_times(owner: Any, name: str) -> Iterator[list[float]]:
    """Collect the CPU seconds of each call of a method within this context."""
    method, spent = getattr(owner, name), list[float]()

    def timed(*args: Any, **options: Any) -> Any:
        began = thread_time()
        try:
            return method(*args, **options)
        finally:
            spent.append(thread_time() - began)

    setattr(owner, name, timed)
    try:
        yield spent
    finally:
        setattr(owner, name, method)


def host_times(llm: Any, prompt: list[int], params: SamplingParams, name: str) -> dict[str, Any]:
    """Return milliseconds of the engine's thread a step, without passes and drafter's calls."""
    drafter = llm.method_store.drafter
    parts = dict[str, list[float]]()
    with ExitStack() as stack:
        parts["step"] = stack.enter_context(cpu_times(llm.engine, "step"))
        parts["pass"] = stack.enter_context(cpu_times(llm.model, "forward"))
        parts["draft"] = stack.enter_context(cpu_times(StepProposer, "propose"))
        parts["commit"] = stack.enter_context(cpu_times(Commit, "part"))
        for call in () if drafter is None else ("answer", "read"):
            parts[call] = stack.enter_context(cpu_times(drafter, call))
        done = llm.generate(prompt, params, method=name).statistics
    steps = max(1, len(parts["step"]))
    ms = {part: 1000 * sum(spent) / steps for part, spent in parts.items()}
    called = ms.get("answer", 0.0) + ms.get("read", 0.0)
    host = ms["step"] - ms["pass"] - called
    drafting = ms["draft"] - called
    return {
        "steps": done.steps,
        "drafter's calls a step": f"{len(parts.get('answer', ())) / steps:.2f}",
        "host": f"{host:.3f}",
        "of it search": f"{drafting:.3f}",
        "commit": f"{ms['commit']:.3f}",
        "rest": f"{host - drafting - ms['commit']:.3f}",
    }


def profile_lines(
    llm: Any, prompt: list[int], params: SamplingParams, name: str
) -> list[dict[str, Any]]:
    """Return the functions in which most of an answer's time is spent, under the profiler."""
    profile = cProfile.Profile()
    llm.thread.call(profile.enable)
    try:
        steps = max(1, llm.generate(prompt, params, method=name).statistics.steps)
    finally:
        llm.thread.call(profile.disable)
    stats: Any = pstats.Stats(profile)
    lines = list[dict[str, Any]]()
    of_lines = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])
    for (file, line, function), (_, calls, own, whole, _) in of_lines[:25]:
        where = function if file == "~" else f"{Path(file).stem}:{line} {function}"
        lines.append(
            {
                "function": where.replace("|", "/"),
                "calls a step": f"{calls / steps:.1f}",
                "ms a step, own": f"{1000 * own / steps:.3f}",
                "with what it calls": f"{1000 * whole / steps:.3f}",
            }
        )
    return lines


PARTS: dict[str, Callable[[Namespace, Put], None]] = {
    "model": model_part,
    "correctness": correctness,
    "bits": bits,
    "bits-with-splits": bits_with_splits,
    "passes": passes,
    "methods": methods,
    "host": host,
}
