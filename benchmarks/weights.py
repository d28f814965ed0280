"""What weights of fewer bits cost and save.

    python benchmarks/weights.py --weights bfloat16,int8,int4 --widths 1,8,16

Milliseconds of a pass by its rows, perplexity of a text, the share of its places at which the
likeliest next token is that of the first kind, tokens a second of plain and of drafted answers, and
the bytes that a pass reads. In brackets: how much faster than the first kind, and how much higher
its perplexity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from common import (
    arguments,
    finish,
    load,
    milliseconds,
    numbers,
    params_of,
    pass_of,
    prompts,
    script,
)
from quickbeam import LLM, SamplingParams
from quickbeam.models.base import Batch, Chain

TEXT = Path(__file__).with_name("text.txt")
ROWS = 64  # tokens of the text in one pass
METHODS = ("ar", "auto")


def read(llm: LLM, text: str) -> tuple[float, torch.Tensor]:
    """Return the perplexity of a text, and the likeliest token after each of its tokens `[n]`."""
    ids = list(llm.tokenizer(text)["input_ids"])[: llm.model.context_length]
    cache, logits = llm.model.pool.new(), []
    for begin in range(0, len(ids), ROWS):
        part = ids[begin : begin + ROWS]
        (passed,) = llm.model.forward(Batch([Chain(cache, part, len(part))]))
        logits.append(passed.logits.float().clone())
        cache.commit(range(len(part)))
    cache.release()
    whole = torch.cat(logits)
    loss = cross_entropy(whole[:-1], torch.tensor(ids[1:], device=whole.device))
    return float(loss.exp()), whole.argmax(-1)


def speeds(llm: LLM, asked: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Return tokens a second by method, and how many answers are the plain ones."""
    llm.generate(asked[0], params, method=METHODS[1])  # what is measured at first use
    tokens, rates = {}, {}
    for method in METHODS:
        answers = []
        for ids in asked:
            llm.reset()
            answers.append(llm.generate(ids, params, method=method))
        statistics = [one.statistics for one in answers]
        seconds = sum(one.seconds for one in statistics)
        rates[method] = sum(one.new_tokens - 1 for one in statistics) / seconds if seconds else 0.0
        tokens[method] = [one.token_ids for one in answers]
    same = sum(a == b for a, b in zip(*tokens.values(), strict=True))
    return {"tokens_per_second": rates, "identical": same, "prompts": len(asked)}


def main() -> None:
    parser = arguments(__doc__, limit=8, max_tokens=128)
    parser.add_argument("--weights", default="bfloat16,int8,int4")
    parser.add_argument("--widths", default="1,8,16", help="rows of a pass")
    parser.add_argument("--context", type=int, default=200, help="tokens before a pass")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    kinds, widths = given.weights.split(","), [int(one) for one in numbers(given.widths)]
    llms = {kind: load(given, weights=kind) for kind in kinds}
    first = llms[kinds[0]]
    passes = {kind: pass_of(llm.model, given.context) for kind, llm in llms.items()}
    works = {
        (kind, rows): lambda run=run, rows=rows: run(rows)
        for kind, run in passes.items()
        for rows in widths
    }
    ms, asked = milliseconds(works, given.repeats), prompts(first, given)
    figures: dict[str, dict[str, Any]] = {}
    likeliest = None
    for kind, llm in llms.items():
        perplexity, tokens = read(llm, given.text.read_text(encoding="utf-8"))
        likeliest = tokens if likeliest is None else likeliest
        figures[kind] = {
            "pass_ms": {rows: ms[kind, rows] for rows in widths},
            "perplexity": perplexity,
            "stays": float((tokens == likeliest).float().mean()),
            **speeds(llm, asked, params_of(given)),
            "bytes": llm.model.weight_bytes,
        }
    plain, rows = figures[kinds[0]], []
    for kind, one in figures.items():
        row: dict[str, object] = {"weights": kind}
        for n, taken in one["pass_ms"].items():
            row[f"ms, {n} rows"] = f"{taken:.1f} ({plain['pass_ms'][n] / taken:.2f})"
        over = one["perplexity"] / plain["perplexity"] - 1
        row |= {"perplexity": f"{one['perplexity']:.3f} ({over:+.2%})"}
        row |= {"tokens that stay": f"{one['stays']:.1%}"}
        for method, rate in one["tokens_per_second"].items():
            faster = rate / plain["tokens_per_second"][method]
            row[f"tokens/s, {method}"] = f"{rate:.1f} ({faster:.2f})"
        row["identical"] = f"{one['identical']} of {one['prompts']}"
        rows.append(row | {"MB a pass": f"{one['bytes'] / 1e6:.0f}"})
    finish(given, rows, model=first.name, weights=figures)


if __name__ == "__main__":
    script(main)
