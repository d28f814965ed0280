"""A drafter's step on CUDA: layer and head, and the router before it or on a second stream.

    python benchmarks/second_stream.py

Weights are random. DynaSpec (2510.13847) runs the router on a second stream while the drafter's
layer runs. "Captured" is one CUDA graph, in which only the GPU's own time counts; the others wait
for the host, as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from common import arguments, finish, milliseconds, numbers, script
from heads import SHAPES, WIDTH, layout_of
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Shortlist

REPEATS = 40
Work = Callable[[], object]


def works_of(vocab: int, d: int, rows: int, share: float) -> dict[str, Work]:
    """Return the ways of one step: a layer for so many rows, and logits of their tokens."""
    on = {"device": "cuda", "dtype": torch.bfloat16}
    heads = max(1, d // 64)
    config = LlamaConfig(
        hidden_size=heads * 64,
        intermediate_size=4 * d,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(config, 0).to(**on)  # type: ignore[call-overload]
    x = torch.randn(1, rows, config.hidden_size, **on)  # type: ignore[call-overload]
    angles = LlamaRotaryEmbedding(config).to("cuda")(x, torch.arange(rows, device="cuda")[None])
    weight = torch.randn(vocab, config.hidden_size, **on)  # type: ignore[call-overload]
    layout, chosen = layout_of(vocab, share)
    router = Router(RouterConfig(x.shape[-1], x.shape[-1], WIDTH, layout.clusters))
    shortlist = Shortlist(weight, layout, None, router=router, chosen=len(chosen))
    assert shortlist.in_torch is not None and shortlist.route is not None
    head, route, aside = shortlist.in_torch, shortlist.route, torch.cuda.Stream()
    context = torch.empty(1, 0, dtype=torch.int64, device="cuda")
    sequence = torch.zeros(rows, dtype=torch.int64, device="cuda")

    def run_layer() -> torch.Tensor:
        out = layer(x, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out)[0]  # type: ignore[no-any-return]

    def before() -> object:
        columns = head.columns(shortlist.choose(route(x[0], x[0])), context)
        return head.logits(run_layer(), columns, sequence)

    def beside() -> object:
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            columns = head.columns(shortlist.choose(route(x[0], x[0])), context)
        out = run_layer()
        torch.cuda.current_stream().wait_stream(aside)
        return head.logits(out, columns, sequence)

    return {
        "layer": run_layer,
        "full": lambda: F.linear(run_layer(), weight),
        "before": before,
        "beside": beside,
    }


def captured(work: Work) -> Work:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # a capture takes no first calls
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", default="SmolLM2-135M,Qwen3-4B,Llama-3-8B,Gemma-3-270M")
    parser.add_argument("--rows", default="1,8", help="rows of a step")
    parser.add_argument("--share", type=float, default=6, help="tokens to score, in %%")
    given, table, every = parser.parse_args(), [], []
    given.device = "cuda"
    if not torch.cuda.is_available():
        parser.error("needs a GPU with CUDA, and PyTorch's build for it")
    for name in given.shapes.split(","):
        for rows in map(int, numbers(given.rows)):
            works = works_of(*SHAPES[name], rows, given.share / 100)
            plain = milliseconds(works, REPEATS, warm=5)
            graphs = {name: captured(work) for name, work in works.items()}
            gpu = milliseconds(graphs, REPEATS, warm=5)
            every.append({"head": name, "rows": rows, "ms": plain, "captured_ms": gpu})
            both = {"": plain, ", captured": gpu}
            cells = {f"{k}{kind}": f"{ms:.3f}" for kind, of in both.items() for k, ms in of.items()}
            table.append({"head": name, "rows": rows, **cells})
    finish(given, table, steps=every)


if __name__ == "__main__":
    script(main)
