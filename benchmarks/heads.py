"""Latency of a drafter's head alone: the whole vocabulary against shortlists with a router.

    python benchmarks/heads.py --shares 1,6 --rows 1,8

Weights are random, caches cold. "Full" is the target's head and its softmax, "a drafter's full" the
same in 8 bits with the native kernels. "Both, of full" is shortlist and router over the full head.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from common import arguments, finish, milliseconds, numbers, script
from quickbeam.drafters.base import probs_of
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.native import rows_format
from quickbeam.drafters.shortlist.router import NativeRouter, Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.models.compile.compiled_stack import NativeLinear
from quickbeam.models.native.library import Kernels, kernels
from quickbeam.models.native.quantised import BFLOAT16, Packer

# tokens of a cluster, scored tokens for each frequent one, and the router's hidden width
CLUSTER, FREQUENT, WIDTH = 16, 3, 256
SWEEP = 16 * 2**20  # numbers read between two calls: more than caches hold
SHAPES = {
    "SmolLM2-135M": (49_152, 576),
    "Llama-3-8B": (128_256, 4096),
    "Qwen3-4B": (151_936, 2560),
    "Qwen3.5-0.8B": (248_320, 1024),
    "Gemma-3-270M": (262_144, 640),
}
CELLS = {"full": "full_ms", "a drafter's full": "drafter_ms", "shortlist": "head_ms"}
CELLS |= {"router": "router_ms", "both, of full": "ratio"}
Head = Callable[[torch.Tensor], object]  # hidden states `[n, d]`


def layout_of(vocab: int, share: float) -> tuple[Layout, torch.Tensor]:
    """Return a layout, and clusters with which this share of the vocabulary is scored."""
    frequent = max(1, round(vocab * share / FREQUENT / CLUSTER)) * CLUSTER
    layout = Layout(torch.arange(vocab), frequent, CLUSTER, vocab)
    count = max(1, min(layout.clusters, round((vocab * share - frequent) / CLUSTER)))
    return layout, torch.arange(count) * layout.clusters // count


def shortlist(weight: torch.Tensor, share: float) -> tuple[Head, Layout, int]:
    """Return a head that scores this share of the vocabulary, its layout, and how many tokens."""
    layout, chosen = layout_of(len(weight), share)
    chosen = chosen.to(weight.device)
    router = Router(RouterConfig(2, 2, 2, layout.clusters))  # `router_of` measures one
    score = Shortlist(weight, layout, kernels(), router=router, chosen=len(chosen)).begin([]).score
    tokens = layout.frequent + len(chosen) * CLUSTER
    return lambda h: probs_of(score(h, chosen).logits, 1.0), layout, tokens


def router_of(weight: torch.Tensor, clusters: int, native: Kernels | None) -> Head:
    """Return a router's scores of the clusters, by the native kernels where they run."""
    d = weight.shape[1]
    router = Router(RouterConfig(d, d, WIDTH, clusters))
    if native is None or d % 2:
        plain = router.to(weight)
        return lambda h: plain(h, h)
    packed = NativeRouter(router, native)
    return lambda h: packed(h, h)


def timed(work: Head, h: torch.Tensor, sweep: torch.Tensor) -> Callable[[], float]:
    """Return a call on cold caches that gives its own milliseconds."""
    works = {"sweep": lambda: sweep.add_(1), "work": lambda: work(h)}
    return lambda: milliseconds(works, 1, warm=0)["work"]


@torch.inference_mode()
def measure(
    vocab: int, d: int, rows: list[int], shares: list[float], given: Namespace
) -> list[dict[str, float]]:
    """Return the milliseconds of all heads, by rows and share."""
    generator, device = torch.Generator().manual_seed(0), given.device or "cpu"
    weight = torch.empty(vocab, d, dtype=torch.bfloat16)
    for part in weight.split(16_384):
        part.copy_(torch.randn(part.shape, generator=generator))
    weight, repeats = weight.to(device), given.repeats
    plain: Any = nn.Linear(1, 1, bias=False)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    full = drafter = plain
    if (native := None if weight.is_cuda else kernels()) is not None:
        full = NativeLinear(native, Packer(native, BFLOAT16).pack([weight]))
        drafter = NativeLinear(native, Packer(native, rows_format(weight)).pack([weight]))
    rows_of_table, sweep = [], torch.zeros(SWEEP, device=device)
    for share in shares:
        short, layout, tokens = shortlist(weight, share)
        heads: dict[str, Head] = {
            "full_ms": lambda h: probs_of(full(h), 1.0),
            "drafter_ms": lambda h: probs_of(drafter(h), 1.0),
            "head_ms": short,
            "router_ms": router_of(weight, layout.clusters, native),
        }
        for n in rows:
            h = torch.randn(n, d, generator=generator).bfloat16().to(device)
            works = {name: timed(work, h, sweep) for name, work in heads.items()}
            times = {name: sorted(run() for _ in range(repeats + 1)) for name, run in works.items()}
            one: dict[str, float] = {name: taken[repeats // 2] for name, taken in times.items()}
            one |= {"ratio": (one["head_ms"] + one["router_ms"]) / one["full_ms"]}
            rows_of_table.append({"vocab": vocab, "d": d, "rows": n, "tokens": tokens, **one})
    return rows_of_table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}, or VxD"
    )
    parser.add_argument("--rows", default="1", help="rows of a call")
    parser.add_argument("--shares", default="1,6", help="tokens to score, in %% of the vocabulary")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    shares, rows = [x / 100 for x in numbers(given.shares)], [int(x) for x in numbers(given.rows)]
    rows_of_table = []
    for name in given.shapes.split(","):
        shape = SHAPES.get(name) or tuple(map(int, name.split("x")))
        rows_of_table += [{"name": name, **one} for one in measure(*shape, rows, shares, given)]
    table = [
        {
            "head": f"{one['name']} {one['vocab']:,} x {one['d']:,}",
            "rows": one["rows"],
            "scored": f"{one['tokens'] / one['vocab']:.1%}",
            **{title: f"{one[key]:.2f}" for title, key in CELLS.items()},
        }
        for one in rows_of_table
    ]
    finish(given, table, heads=rows_of_table)


if __name__ == "__main__":
    script(main)
