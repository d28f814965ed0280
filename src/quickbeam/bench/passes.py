"""What one pass of the model costs, by the number of its tokens and of the tokens in its context.

Several ways to run a pass are measured, interleaved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.target.loading import load_model, parse_dtype, pick_device
from quickbeam.target.memory import parse_bytes
from quickbeam.target.model import Model
from quickbeam.target.native import library
from quickbeam.target.native.library import ATTEND, CHOSEN, LINEAR
from quickbeam.target.native.operands import RowList
from quickbeam.target.native.quantised import BFLOAT16
from quickbeam.target.pages import PagedStore
from quickbeam.target.quantised import check_weights, refuse_place
from quickbeam.target.streamed_llama import StreamedLlama
from quickbeam.target.streamed_loading import open_streamed, refuse_memory
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree

WAYS = {
    "transformers": "the model as it comes",
    "plain": "our reference path",
    "fast": "PyTorch's packed products",
    "exact": "the same with bit-identical rows",
    "native": "our own kernels",
}
# the parts of a native pass, by kinds of operations
PARTS = {"products": (LINEAR, CHOSEN), "attention": (ATTEND,)}
CHUNK = 512  # tokens of the context that transformers reads at a time
ROOM = 128  # tokens of the widest pass


class Took(NamedTuple):
    milliseconds: float
    logit: float = 0.0  # the first logit, to check that the ways agree


# (width, context): runs one pass over `width` tokens after `context` others
Pass = Callable[[int, int], Took]
Figures = dict[str, dict[int, dict[int, float]]]  # milliseconds, by name, context and width


def comb(nodes: int, vocab: int) -> TokenTree:
    """Return a tree with the shape of drafts: a chain, with a branch beside each of its tokens.

    It has `nodes` nodes, with token ids below `vocab`.
    """
    tree, tip = TokenTree(7), 0
    while len(tree) < nodes:
        parent, tip = tip, tree.add(tip, len(tree) % vocab, "probe")
        if len(tree) < nodes:
            tree.add(parent, (len(tree) + 1) % vocab, "probe")
    return tree


class Passes(NamedTuple):
    ways: dict[str, Pass]
    parts: dict[str, Pass]  # of the native way; none where its kernels don't run the whole pass
    weight_bytes: int  # bytes that a native pass reads; 0 where that is not known
    streamed: StreamedLlama | None = None  # reads a part of the weights from disk


def make_passes(
    folder: str,
    dtype: str,
    device: str | None,
    contexts: Sequence[int],
    names: Sequence[str] = (),
    progress: Callable[[str, float | None], None] = lambda stage, fraction: None,
    weights: str = BFLOAT16,
    memory: str | None = None,
) -> Passes:
    """Prepare the ways to run a pass.

    Each way has its own copy of the model, with the longest of the contexts in its KV cache.

    - `names`: some of `WAYS`. Without any, all that this model, number format and machine have.
    - `weights`: the format of our own ways. Where no way is named, `native` is the only one of them
      that runs with quantised weights, because PyTorch's operators have these only for reference.
    - `memory`: for the weights, as `LLM` takes it. Where the model needs more, `native` is the only
      way.

    Raises `InvalidInput` for a way that this model, number format or machine does not have, for a
    context that is too long, and for `memory` on another device than a CPU. Also raises as
    `load_model` does.
    """
    place, kind = pick_device(device), parse_dtype(dtype)
    refuse_place(check_weights(weights), place, kind)
    if place.type == "cpu" and kind is torch.bfloat16 and "native" in (names or WAYS):
        library.prepare(lambda stage: progress(stage, None))
    limit_bytes = None if memory is None else parse_bytes(memory)
    streamed = None
    if limit_bytes is not None:
        refuse_memory(True, place, kind, None)
        if place.type != "cpu":
            raise InvalidInput(
                f"--memory: passes are measured so on a CPU, not on {place.type}; leave it out"
            )
        streamed = open_streamed(folder, limit_bytes, weights, progress)
    if streamed is not None:
        if others := [name for name in names if name != "native"]:
            raise InvalidInput(
                f"--ways {others[0]}: with --memory {memory} only the native way runs this model"
            )
        names = ("native",)
    model, _ = load_model(folder, kind, place) if streamed is None else streamed[:2]
    limit, longest = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
        max(contexts),
    )
    if limit and longest + ROOM > limit:
        raise InvalidInput(
            f"--context {longest}: the model's context is {limit}; give at most {limit - ROOM}"
        )
    vocab = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (longest,), generator=torch.Generator().manual_seed(0))
    passes = Passes({}, {}, 0)
    for name in names or (WAYS if weights == BFLOAT16 else ("transformers", "native")):
        progress(f"{name}: reading {longest} tokens", None)
        if name == "transformers":
            passes.ways[name] = _transformers(model.eval(), ids.to(place), contexts)
            continue
        try:
            if streamed is None:
                target = _target(name, lambda: load_model(folder, kind, place)[0], weights)
            else:
                target = Target(Model(streamed.model, weights=weights, source=streamed.source))
        except InvalidInput:
            if names or name not in ("exact", "native"):
                raise
            continue  # this model, number format or machine does not have it
        target.prefill(ids.tolist())
        passes.ways[name] = comb_pass(target)
        if name == "native" and (fused := target.model._fused) is not None:
            passes.parts.update({part: _part(target, kinds) for part, kinds in PARTS.items()})
            passes = passes._replace(
                weight_bytes=fused.weight_bytes,
                streamed=fused if isinstance(fused, StreamedLlama) else None,
            )
    return passes


def _target(name: str, load: Callable[[], PreTrainedModel], weights: str) -> Target:
    if name == "plain":
        return Target(Model(load(), fast=False, weights=weights))
    if name == "native":
        target = Target(Model(load(), weights=weights))
        if not isinstance(target.store, PagedStore):
            kind = str(target.model.dtype).removeprefix("torch.")
            why = library.describe(target.model.device.type, kind)
            raise InvalidInput(f"--ways native: {why}")
        return target
    with _pytorchs_kernels():
        return Target(Model(load(), exact=name == "exact", weights=weights))


@contextmanager
def _pytorchs_kernels() -> Iterator[None]:
    """Models that are prepared in this block do without the native kernels."""
    before = os.environ.get("QUICKBEAM_KERNELS")
    os.environ["QUICKBEAM_KERNELS"] = "eager"
    try:
        yield
    finally:
        del os.environ["QUICKBEAM_KERNELS"]
        if before is not None:
            os.environ["QUICKBEAM_KERNELS"] = before


def _transformers(model: PreTrainedModel, ids: torch.Tensor, contexts: Sequence[int]) -> Pass:
    vocab = model.get_output_embeddings().weight.shape[0]
    caches = {context: DynamicCache(config=model.config) for context in contexts}
    # the argument's name since transformers 5.24, and before
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        for context, cache in caches.items():
            for start in range(0, context, CHUNK):
                model(
                    ids[None, start : min(start + CHUNK, context)],
                    **{name: cache},
                    use_cache=True,
                )

    @torch.inference_mode()
    def run(width: int, context: int) -> Took:
        tokens = torch.tensor([comb(width, vocab).token], device=ids.device)
        start = perf_counter()
        logits = model(tokens, **{name: caches[context]}, use_cache=True).logits
        logit = logits[0, 0, 0].item()
        took = perf_counter() - start
        caches[context].crop(-width)
        return Took(took * 1e3, logit)

    return run


@contextmanager
def _behind(target: Target, context: int) -> Iterator[None]:
    """Let the target act as if it had read `context` tokens and no more.

    A pass then writes over the keys and values of some tokens that follow. Their values make no
    difference to the time of another pass.
    """
    certain = target.store.length
    target.store.length = context
    try:
        yield
    finally:
        target.store.length = certain


def comb_pass(target: Target) -> Pass:
    """Return a pass of `target` over trees with the shape of drafts (`comb`)."""

    def run(width: int, context: int) -> Took:
        tree = comb(width, target.model.vocab_size)
        with _behind(target, context):
            start = perf_counter()
            logit = target.verify(tree)[0, 0].item()
            return Took((perf_counter() - start) * 1e3, logit)

    return run


def _part(target: Target, kinds: Sequence[int]) -> Pass:
    """The same passes, with the operations of these kinds alone."""
    assert target.model._fused is not None and isinstance(target.store, PagedStore)
    part, store = target.model._fused.part(kinds), target.store

    def run(width: int, context: int) -> Took:
        tree = comb(width, target.model.vocab_size)
        with _behind(target, context):
            listed = RowList()
            store.add_tree(listed, tree)
        start = perf_counter()
        part(listed.rows(), context + max(tree.depth))
        return Took((perf_counter() - start) * 1e3)

    return run


def measure(
    passes: Mapping[str, Pass],
    contexts: Sequence[int],
    widths: Sequence[int],
    repeats: int,
    singles: Mapping[str, Pass] | None = None,
    progress: Callable[[str, float | None], None] = lambda stage, fraction: None,
) -> Figures:
    """Return the median milliseconds of each pass, by name, context and width.

    Each of the `repeats` rounds runs all passes after each context at each width, so that changes
    in the machine's speed affect all of them alike. `singles` are run over one token only.
    """
    singles = singles or {}
    plan = [
        (name, run, context, width)
        for context in contexts
        for width in widths
        for name, run in passes.items()
    ]
    plan += [(name, run, context, 1) for context in contexts for name, run in singles.items()]
    # the ways of one context and width run one after the other
    plan.sort(key=lambda entry: contexts.index(entry[2]) * (ROOM + 1) + entry[3])
    times: dict[str, dict[int, dict[int, list[float]]]] = {}
    for turn in range(repeats + 2):  # the first two warm up
        progress(f"round {turn + 1} of {repeats + 2}", turn / (repeats + 2))
        for name, run, context, width in plan:
            took = run(width, context).milliseconds
            taken = times.setdefault(name, {}).setdefault(context, {}).setdefault(width, [])
            if turn >= 2:
                taken.append(took)
    return {
        name: {
            context: {width: median(taken) for width, taken in by_width.items()}
            for context, by_width in by_context.items()
        }
        for name, by_context in times.items()
    }


def over_first_width(figures: Figures) -> Figures:
    """Return each time over that of the narrowest pass of the same way and context."""
    return {
        name: {
            context: {width: ms / by_width[min(by_width)] for width, ms in by_width.items()}
            for context, by_width in found.items()
        }
        for name, found in figures.items()
    }


def over_first_context(figures: Figures) -> Figures:
    """Return each time over that of the same pass after the shortest context."""
    return {
        name: {
            context: {width: ms / found[min(found)][width] for width, ms in by_width.items()}
            for context, by_width in found.items()
        }
        for name, found in figures.items()
    }
