"""Methods on a model whose weights are read from disk in every pass.

    python benchmarks/memory.py --model BIG --memory 1GB --drafter SMALL --draft-weights int8

A pass over many rows costs what one row does there, so a large tree pays most. The table is that of
`quickbeam bench`, with the nodes of a tree; above it what a pass reads, and the peak memory.
"""

from __future__ import annotations

from common import answers, arguments, finish, load, script
from quickbeam.bench.methods import parse_methods
from quickbeam.bench.report import footer, number, same, summaries
from quickbeam.config import WEIGHTS

COLUMNS = {
    "MAT": "mean_accepted_tokens",
    "tokens/s": "tokens_per_second",
    "with prompts": "tokens_per_second_with_prompts",
    "nodes": "nodes",
    "verify ms": "verify_ms",
    "draft ms": "draft_ms",
}


def main() -> None:
    parser = arguments(__doc__, limit=12, max_tokens=32)
    parser.add_argument("--methods", default="ar,dyspec:auto,auto")
    parser.add_argument("--weights", default="bfloat16", choices=WEIGHTS)
    given = parser.parse_args()
    items = parse_methods(given.methods, drafter=given.drafter, model=given.model)
    llm = load(given, items[0].method, weights=given.weights)
    results = answers(llm, items, given)
    figures = summaries(results)
    rows = [
        {"method": name}
        | {column: number(one[key]) for column, key in COLUMNS.items()}
        | {f"over {results.reference}": number(one["speedup"], one["speedup_error"])}
        | {"identical": same(one)}
        for name, one in figures.items()
    ]
    disk = llm.model.streamed
    print("\n".join(footer(results)), end="\n\n")
    print(disk.in_words if disk is not None else "all weights are in memory: give --memory", "\n")
    read = None if disk is None else disk.record()
    known = {"reference": results.reference, "memory": read, "skipped": results.skipped}
    finish(given, rows, model=llm.name, methods=figures, **known)


if __name__ == "__main__":
    script(main)
