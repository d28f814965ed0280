"""What one pass of the model costs, by how many tokens it looks at: transformers as it comes, and ours, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from transformers import DynamicCache, PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.target.loading import load_model, parse_dtype, pick_device
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree

Pass = Callable[[int], object]  # runs one pass over so many tokens behind the context


def comb(nodes: int, vocab: int) -> TokenTree:
    """A tree of the shape that drafts have: a chain, and a branch beside each of its tokens."""
    tree, tip = TokenTree(7), 0
    while len(tree) < nodes:
        parent, tip = tip, tree.add(tip, len(tree) % vocab, "probe")
        if len(tree) < nodes:
            tree.add(parent, (len(tree) + 1) % vocab, "probe")
    return tree


def make_passes(folder: str, dtype: str, device: str | None, context: int) -> dict[str, Pass]:
    """The ways to run a pass, each with its own copy of the model and `context` tokens behind it. Raises as `load_model` does."""
    place, kind = pick_device(device), parse_dtype(dtype)
    passes: dict[str, Pass] = {}
    model, _ = load_model(folder, kind, place)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and context + 128 > limit:
        raise InvalidInput(f"--context {context}: the model's context is {limit}; give at most {limit - 128}")
    vocab = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (context,), generator=torch.Generator().manual_seed(0))
    passes["transformers"] = _transformers(model.eval(), ids.to(place))
    for name, options in (("plain", {"fast": False}), ("fast", {"exact": False}), ("exact", {"exact": True})):
        try:
            target = Target(load_model(folder, kind, place)[0], **options)
        except InvalidInput:
            if name != "exact":
                raise
            continue  # not to be had for this model, type or machine
        target.prefill(ids.tolist())
        passes[name] = _ours(target)
    return passes


def _transformers(model: PreTrainedModel, ids: torch.Tensor) -> Pass:
    cache, vocab = DynamicCache(config=model.config), model.get_output_embeddings().weight.shape[0]
    with torch.inference_mode():
        model(ids[None], past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def run(width: int) -> object:
        tokens = torch.tensor([comb(width, vocab).token], device=ids.device)
        logits = model(tokens, past_key_values=cache, use_cache=True).logits
        cache.crop(-width)
        return logits[0, 0, 0].item()

    return run


def _ours(target: Target) -> Pass:
    return lambda width: target.verify(comb(width, target.vocab_size))[0, 0].item()


def measure(passes: dict[str, Pass], widths: Sequence[int], repeats: int) -> dict[str, dict[int, float]]:
    """Median milliseconds of a pass, by name and width. Each round runs all ways at each width: they share what the machine does."""
    times: dict[str, dict[int, list[float]]] = {name: {width: [] for width in widths} for name in passes}
    for turn in range(repeats + 2):  # the first two warm up
        for width in widths:
            for name, run in passes.items():
                start = perf_counter()
                run(width)
                if turn >= 2:
                    times[name][width].append((perf_counter() - start) * 1e3)
    return {name: {width: median(taken) for width, taken in by_width.items()} for name, by_width in times.items()}
