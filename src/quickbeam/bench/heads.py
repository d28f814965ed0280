"""Latency of a drafter's head alone: the whole vocabulary against shortlists.

The weights are random and of given shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from quickbeam.draft.base import law_of
from quickbeam.shortlist.head import BlockHead
from quickbeam.shortlist.layout import Layout
from quickbeam.shortlist.native import NativeRouter, rows_format
from quickbeam.shortlist.router import FastRouter, Router, RouterConfig
from quickbeam.target.linear import FastLinear, native_linear
from quickbeam.target.native.library import kernels
from quickbeam.target.native.operands import Rows
from quickbeam.target.native.program import Program

# As `train shortlist` makes them: tokens of a cluster, and the router's hidden width. One token in
# `FREQUENT` of those scored is in the frequent block, as in the default model's shortlist at 6 %.
CLUSTER, FREQUENT, WIDTH = 16, 3, 256
# numbers read between two calls: more than caches hold, as a real drafter finds them cold
SWEEP = 16 * 2**20

Scorer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # hidden, embedded -> of clusters

SHAPES = {
    "SmolLM2-135M": (49_152, 576),
    "Llama-3-8B": (128_256, 4096),
    "Qwen3-4B": (151_936, 2560),
    "Gemma-3-270M": (262_144, 640),
}


@dataclass(frozen=True)
class Latency:
    """Median milliseconds of calls on cold caches, for `rows` rows and a head `[vocab, d]`.

    `share` is the part of the vocabulary that was asked for, and `tokens` how many tokens are
    scored. `full_ms` is the target's head, in its own number format. `drafter_ms` and `head_ms` are
    heads of a drafter, which are in 8 bits where the native kernels run them.
    """

    vocab: int
    d: int
    rows: int
    share: float
    tokens: int
    full_ms: float  # the whole head and its softmax
    drafter_ms: float  # the same, as a drafter keeps it
    head_ms: float  # the shortlist's product and its softmax
    router_ms: float  # the router's scores of the clusters

    @property
    def listed(self) -> float:
        """The shortlist's time over the full head's, without routing."""
        return self.head_ms / self.full_ms

    @property
    def ratio(self) -> float:
        """The time of shortlist and router over the full head's."""
        return (self.head_ms + self.router_ms) / self.full_ms


def measure(
    vocab: int,
    d: int,
    rows: Sequence[int],
    shares: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int = 15,
) -> list[Latency]:
    """Measure the full head, a drafter's full head, shortlists and the router in turn.

    A shortlist is a frequent block and clusters spread over the rest; each share has its own, as
    small ones have a smaller block. The median of `repeats` calls counts, after one call that does
    not. The weights `[vocab, d]` have the given `dtype`.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(vocab, d, dtype=dtype)
    for part in weight.split(16_384):  # type: ignore[no-untyped-call]
        part.copy_(torch.randn(part.shape, generator=generator))
    weight = weight.to(device)
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    full = linear if device.type != "cpu" else native_linear([linear]) or FastLinear(linear)
    shortlists = [_shortlist(weight, share, dtype, device) for share in shares]
    drafter = (
        native_linear([linear], rows_format(weight)) if device.type == "cpu" else None
    ) or full
    del weight, linear
    sweep = torch.zeros(SWEEP, device=device)

    def seconds(work: object, *arguments: torch.Tensor) -> float:
        sweep.add_(1)
        _wait(device)
        began = time.perf_counter()
        work(*arguments)  # type: ignore[operator]
        _wait(device)
        return time.perf_counter() - began

    found = []
    with torch.inference_mode():
        for n in rows:
            h = torch.randn(n, d, generator=generator).to(device, dtype)
            for share, (short, router, tokens) in zip(shares, shortlists, strict=True):
                times = [
                    (
                        seconds(lambda h: law_of(full(h), 1.0), h),
                        seconds(lambda h: law_of(drafter(h), 1.0), h),
                        seconds(short, h),
                        seconds(router, h, h),
                    )
                    for _ in range(repeats + 1)
                ][1:]
                ms = [1000 * median(column) for column in zip(*times, strict=True)]
                found.append(Latency(vocab, d, n, share, tokens, *ms))
    return found


def _shortlist(
    weight: torch.Tensor, share: float, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[torch.Tensor], object], Scorer, int]:
    """Return a head and a router for this share of the vocabulary, and how many tokens are scored.

    The head chooses the same clusters in every call, and makes a softmax over what it scores.
    """
    vocab, d = weight.shape
    frequent = max(1, round(vocab * share / FREQUENT / CLUSTER)) * CLUSTER
    layout = Layout(torch.arange(vocab), frequent, CLUSTER, vocab)
    count = max(1, min(layout.clusters, round((vocab * share - frequent) / CLUSTER)))
    chosen = torch.arange(count, device=device) * layout.clusters // count
    tokens = frequent + sum(len(layout.tokens(cluster)) for cluster in chosen.tolist())
    router = _router(Router(RouterConfig(d, d, WIDTH, layout.clusters)), dtype, device)
    head = BlockHead(weight, layout, most=count)
    return lambda h: law_of(head(h, chosen).logits, 1.0), router, tokens


def _router(router: Router, dtype: torch.dtype, device: torch.device) -> Scorer:
    found, config = (
        kernels() if device.type == "cpu" and dtype is torch.bfloat16 else None,
        router.config,
    )
    if found is None or config.hidden_size % 2:
        return FastRouter(router, dtype, device)
    program = Program(found)
    hidden, embedded = (
        program.given("hidden", config.hidden_size),
        program.given("embedded", config.embed_size),
    )
    NativeRouter(router, found).add(
        program, hidden, embedded, program.given("scores", config.clusters, True)
    )

    def run(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        n = len(hidden)
        scores = torch.empty(n, config.clusters)
        program.run(
            Rows([0] * n, [0] * n, wanted=range(n)),
            {"hidden": hidden, "embedded": embedded, "scores": scores},
        )
        return scores

    return run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
