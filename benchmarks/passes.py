"""What one pass of the model costs, by the rows of the pass and the tokens of its context.

    python benchmarks/passes.py --contexts 100,1000,4000 --widths 1,4,8,16,32,64

All passes are run in turn, and the median counts. "transformers" is the model as transformers runs
it. GB/s is how fast weights are read in our pass, and "of memory" that over how fast all threads
together read a large tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from common import arguments, finish, load, milliseconds, numbers, pass_of, script
from quickbeam import LLM
from quickbeam.config import WEIGHTS

CHUNK = 512  # tokens of the context that transformers reads at a time
MEGABYTES = 512  # more than caches hold


def transformers_pass(llm: LLM, model: torch.nn.Module, context: int) -> Callable[[int], object]:
    """Return a pass of transformers' own model over so many rows, behind `context` tokens."""
    cache, device = DynamicCache(config=model.config), model.device
    # the argument's name since transformers 5.24, and before
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    ids = torch.arange(context, device=device)[None] % llm.model.vocab_size
    with torch.inference_mode():
        for part in ids.split(CHUNK, 1):
            model(part, use_cache=True, logits_to_keep=1, **{name: cache})

    @torch.inference_mode()
    def run(rows: int) -> float:
        value = model(ids[:, :rows], use_cache=True, **{name: cache}).logits[0, 0, 0].item()
        cache.crop(-rows)
        return float(value)

    return run


def gigabytes_a_second() -> float:
    """Return how fast all threads together read memory."""
    tensor, best = torch.ones(MEGABYTES * 250_000), 0.0
    for _ in range(10):
        began = perf_counter()
        tensor.sum()
        best = max(best, tensor.nbytes / (perf_counter() - began) / 1e9)
    return best


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--contexts", default="100,1000", help="tokens before a pass")
    parser.add_argument("--widths", default="1,4,8,16,32,64", help="rows of a pass")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--weights", default="bfloat16", choices=WEIGHTS)
    parser.add_argument("--transformers", action="store_true", help="the same by transformers")
    given = parser.parse_args()
    llm = load(given, "ar", weights=given.weights)
    contexts, widths = ([int(one) for one in numbers(x)] for x in (given.contexts, given.widths))
    ways = {("ours", context): pass_of(llm.model, context) for context in contexts}
    if given.transformers:
        model = AutoModelForCausalLM.from_pretrained(llm.folder, dtype=llm.model.dtype)
        model.to(llm.model.device).eval()
        for context in contexts:
            ways["transformers", context] = transformers_pass(llm, model, context)
    works = {
        (*way, rows): lambda run=run, rows=rows: run(rows)
        for way, run in ways.items()
        for rows in widths
    }
    times, memory = milliseconds(works, given.repeats), gigabytes_a_second()
    rows = []
    for way, context in ways:
        one: dict[str, object] = {"way": way, "context": context}
        one |= {f"ms, {width} rows": f"{times[way, context, width]:.1f}" for width in widths}
        one |= {"GB/s": "-", "of memory": "-"}
        if way == "ours":
            rate = llm.model.weight_bytes / times[way, context, widths[0]] / 1e6
            one |= {"GB/s": f"{rate:.1f}", "of memory": f"{rate / memory:.0%}"}
        rows.append(one)
    table: dict[str, dict[int, dict[int, float]]] = {}
    for (way, context, width), ms in times.items():
        table.setdefault(way, {}).setdefault(context, {})[width] = ms
    if llm.model.streamed is not None:
        print(llm.model.streamed.in_words)
    known = {"weight_bytes": llm.model.weight_bytes, "gigabytes_per_second": memory}
    finish(given, rows, model=llm.name, contexts=table, **known)


if __name__ == "__main__":
    script(main)
