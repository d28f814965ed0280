"""What a memory of answers gains on an agent-like load: tasks that repeat tools, files and answers.

    python benchmarks/agents.py --rounds 3

The tasks of agents.jsonl are asked one after the other, each of a model that keeps no answers and
of one that does. Prompts are counted. Each round begins with an empty memory.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from time import perf_counter
from typing import Any

from common import arguments, error, finish, load, params_of, ratio, script
from quickbeam import LLM
from quickbeam.bench.methods import load_questions

TASKS = Path(__file__).with_name("agents.jsonl")


def answer(llm: LLM, text: str, given: Namespace) -> dict[str, Any]:
    began = perf_counter()
    done = llm.chat([{"role": "user", "content": text}], params_of(given), method=given.method)
    seconds = perf_counter() - began
    return {"ids": done.token_ids, "steps": done.statistics.steps, "seconds": seconds}


def main() -> None:
    parser = arguments(__doc__, questions=TASKS, max_tokens=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--method", default="auto")
    given = parser.parse_args()
    llms = {size: load(given, given.method, memory_of_answers=size) for size in ("0", "64MB")}
    tasks, every = [one.turns[0] for one in load_questions(given.questions)][: given.limit], []
    for llm in llms.values():
        answer(llm, "Hello.", given)
    for number in range(given.rounds):
        for llm in llms.values():
            llm.reset()
        for i, task in enumerate(tasks):
            turn = list(llms.items())[:: 1 if (i + number) % 2 else -1]
            every.append({size: answer(llm, task, given) for size, llm in turn})
    rows, figures = [], {}
    gain, pulls = ratio([(one["0"]["seconds"], one["64MB"]["seconds"]) for one in every])
    for size in llms:
        own = [one[size] for one in every]
        tokens, steps = sum(len(one["ids"]) for one in own), sum(one["steps"] for one in own)
        figures[size] = {
            "tokens_per_second": tokens / sum(one["seconds"] for one in own),
            "mean_accepted_tokens": (tokens - len(own)) / max(1, steps),
            "speedup": gain if size != "0" else 1.0,
            "error": error(pulls) if size != "0" else None,
            "identical": sum(one[size]["ids"] == one["0"]["ids"] for one in every),
            "prompts": len(every),
        }
        one = figures[size]
        off = "" if one["error"] is None else f" ± {one['error']:.2f}"
        rows.append(
            {
                "memory of answers": size,
                "tokens/s": f"{one['tokens_per_second']:.1f}",
                "over none": f"{one['speedup']:.2f}{off}",
                "MAT": f"{one['mean_accepted_tokens']:.2f}",
                "identical": f"{one['identical']} of {len(every)}",
            }
        )
    finish(given, rows, memory_of_answers=figures)


if __name__ == "__main__":
    script(main)
