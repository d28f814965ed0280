"""Measures what passes of a model cost."""

from __future__ import annotations

import time

import torch

from quickbeam.engine.cost import CostModel
from quickbeam.models.base import Batch, Draft, Model
from quickbeam.tree import TokenTree

NODES = (1, 4, 8, 16, 32)  # of the trees that are measured
NODES_BEHIND_TEXT = (1, 16)  # the same with `TEXT` tokens before them
TEXT = 1024
# the same where weights are read from disk in every pass: that takes seconds, whatever the nodes
NODES_FROM_DISK = (1, 64, 512)


def measure(model: Model, max_nodes: int) -> CostModel:
    """Measure passes over trees of at most `max_nodes` nodes.

    Of two rounds the faster times count: a busy machine only adds time, and so does the first pass
    of each size on a GPU. Where weights are read from disk, one round is enough.
    """
    text = min(TEXT, (model.context_length or TEXT) // 2)
    sizes = [(nodes, 0) for nodes in NODES]
    sizes += [(nodes, text) for nodes in NODES_BEHIND_TEXT]
    if model.streamed is not None:
        sizes = [(nodes, 0) for nodes in NODES_FROM_DISK]
    sizes = [size for size in sizes if size[0] <= max_nodes]
    _seconds(model, *sizes[0])  # not counted, since the first pass of all may be slow
    seconds = {size: _seconds(model, *size) for size in sizes}
    if model.streamed is None:
        second_round = {size: _seconds(model, *size) for size in sizes}
        seconds = {size: min(seconds[size], second_round[size]) for size in sizes}
    passes = dict[int, float]()
    per_token = dict[int, float]()
    # of each number of nodes, the pass without a text comes first
    for (nodes, tokens), pass_seconds in seconds.items():
        if not tokens:
            passes[nodes] = pass_seconds
        else:
            per_token[nodes] = max(0.0, pass_seconds - passes[nodes]) / tokens
    return CostModel(passes, per_token)


@torch.inference_mode()
def _seconds(model: Model, nodes: int, tokens: int) -> float:
    """Return the seconds of a pass over a tree of so many nodes behind so many tokens.

    The pool's limit is lifted meanwhile.
    """
    tree = TokenTree(0)
    for node in range(1, nodes):
        tree.add((node - 1) // 2, node % model.vocab_size, "probe")
    cache = model.pool.new()
    with model.pool.unbounded():
        try:
            cache.reserve(tokens + nodes + 2)
            cache.length = tokens
            start = time.perf_counter()
            passed = model.forward(Batch([Draft(cache, tree)]))
            passed[0].logits[0, 0].item()
            return time.perf_counter() - start
        finally:
            cache.release()
