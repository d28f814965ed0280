"""Answers that follow a JSON schema, and the same prompts without it.

    python benchmarks/structured.py --methods ar,auto --answers 10

Ten tasks of our own (`schemas.jsonl`). Every answer to a task has a seed of its own, which all
methods share; methods take turns. "Valid" counts answers that fit their schema by jsonschema,
"identical" those with the tokens of the first method. Tokens a second leave prompts out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from common import arguments, finish, load, params_of, script
from quickbeam import LLM, Grammar, SamplingParams
from quickbeam.bench.methods import MethodItem, parse_methods

FREE, BOUND = "free text", "JSON schema"


def fits(text: str, schema: Any) -> bool:
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def measure(
    llm: LLM, tasks: list[Any], items: list[MethodItem], count: int, params: SamplingParams
) -> dict[tuple[str, str], dict[str, Any]]:
    """Answer each task `count` times with each method, with and without its schema.

    Returns the figures by kind of text and by method.
    """
    sums: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for seed in range(-1, count):  # what is measured or compiled at first use is not counted
        for task in tasks[: 1 if seed < 0 else None]:
            for kind in (FREE, BOUND):
                grammar = Grammar.json_schema(task["schema"]) if kind == BOUND else None
                own, first = replace(params, seed=max(0, seed), grammar=grammar), None
                for item in items:
                    llm.reset()
                    asked = [{"role": "user", "content": task["prompt"]}]
                    answer = llm.chat(asked, own, **item.options())
                    first = answer.token_ids if first is None else first
                    statistics, row = answer.statistics, sums[kind, item.name]
                    if seed >= 0:
                        row["answers"] += 1
                        row["valid"] += fits(answer.text, task["schema"])
                        row["identical"] += answer.token_ids == first
                        row["tokens"] += max(0, statistics.new_tokens - 1)
                        row["steps"] += statistics.steps
                        row["seconds"] += statistics.seconds
    return {
        key: {
            **row,
            "tokens_per_second": row["tokens"] / row["seconds"] if row["seconds"] else 0.0,
            "mean_accepted_tokens": row["tokens"] / row["steps"] if row["steps"] else None,
        }
        for key, row in sums.items()
    }


def main() -> None:
    parser = arguments(__doc__, temperature=0.8, max_tokens=256)
    parser.add_argument("--methods", default="ar,auto")
    parser.add_argument("--answers", type=int, default=10, help="answers to each task")
    given = parser.parse_args()
    items = parse_methods(given.methods, drafter=given.drafter, model=given.model)
    llm = load(given, items[0].method)
    lines = Path(__file__).with_name("schemas.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines][: given.limit]
    cells = measure(llm, tasks, items, given.answers, params_of(given))
    rows = [
        {
            "answers": kind,
            "method": name,
            "valid": f"{one['valid']:.0f} of {one['answers']:.0f}",
            "identical": f"{one['identical']:.0f} of {one['answers']:.0f}",
            "tokens/s": f"{one['tokens_per_second']:.1f}",
            "MAT": f"{one['mean_accepted_tokens'] or 0:.2f}",
            "tokens an answer": f"{one['tokens'] / one['answers'] + 1:.0f}",
        }
        for (kind, name), one in cells.items()
    ]
    figures: dict[str, dict[str, Any]] = {}
    for (kind, name), one in cells.items():
        figures.setdefault(kind, {})[name] = one
    finish(given, rows, model=llm.name, structured=figures)


if __name__ == "__main__":
    script(main)
