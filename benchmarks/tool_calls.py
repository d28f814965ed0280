"""Tool calls under `tool_choice: "auto"`, with and without drafts of their fixed parts.

    python benchmarks/tool_calls.py --model qwen-coder-0.5b.gguf --rounds 3

Twelve requests of our own (`tool_calls.jsonl`). Each is answered by plain decoding, by `auto`, and
by `auto` with the tools' skeletons, as the server drafts them, in turns; nothing is remembered from
one answer to the next. Tokens a second leave prompts out.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from common import arguments, error, finish, load, params_of, ratio, script
from quickbeam import LLM, SamplingParams
from quickbeam.serve.errors import Refused
from quickbeam.serve.skeletons import call_skeletons
from quickbeam.serve.tool_fields import Tool
from quickbeam.serve.tools import HERMES, tool_format

PLAIN, AUTO, SKELETONS = "`ar`", "`auto`", "`auto` with skeletons"


def encode(llm: LLM, task: dict[str, Any]) -> list[int]:
    """Return a task's prompt. Where the chat template takes no tools, it says only their names."""
    if "tools" in str(llm.tokenizer.chat_template):
        return llm.encode_chat(task["prompt"], tools=task["tools"])
    names = ", ".join(tool["function"]["name"] for tool in task["tools"])
    return llm.encode_chat(f"{task['prompt']} Call one of {names}, as JSON.")


def skeletons_of(llm: LLM, task: dict[str, Any]) -> tuple[str, ...]:
    try:
        form = tool_format(llm.tokenizer)
    except Refused:
        form = HERMES
    return call_skeletons(form, [Tool.model_validate(tool) for tool in task["tools"]])


def main() -> None:
    parser = arguments(__doc__, max_tokens=128)
    parser.add_argument("--rounds", type=int, default=2, help="how often each is answered")
    given = parser.parse_args()
    llm = load(given)
    params = params_of(given)
    lines = Path(__file__).with_name("tool_calls.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines][: given.limit]
    seconds: dict[str, list[float]] = {PLAIN: [], AUTO: [], SKELETONS: []}
    steps: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    same: Counter[str] = Counter()
    for task in tasks:
        prompt = encode(llm, task)
        skeletons = skeletons_of(llm, task)
        llm.generate(prompt, SamplingParams(max_tokens=1))
        taken: Counter[str] = Counter()
        plain_ids: list[int] = []
        for _ in range(given.rounds):
            for name in seconds:
                method = "ar" if name == PLAIN else "auto"
                drafted = skeletons if name == SKELETONS else ()
                # a tenant of its own: nothing that an earlier answer left is drafted
                answer = llm.stream(
                    prompt, params, method=method, tenant=object(), skeletons=drafted
                ).result()
                plain_ids = plain_ids or answer.token_ids
                taken[name] += answer.statistics.seconds
                steps[name] += answer.statistics.steps
                tokens[name] += len(answer.token_ids) - 1
                same[name] += answer.token_ids == plain_ids
        for name in seconds:
            seconds[name].append(taken[name])
    rows = list[dict[str, object]]()
    for name in seconds:
        row: dict[str, object] = {
            "": name,
            "tokens a step": f"{tokens[name] / max(1, steps[name]):.2f}",
            "tokens/s": f"{tokens[name] / sum(seconds[name]):.1f}",
        }
        for below in (PLAIN, AUTO):
            value, pulls = ratio(list(zip(seconds[below], seconds[name], strict=True)))
            row[f"over {below}"] = f"{value:.2f} ± {error(pulls) or 0:.2f}"
        row["identical"] = f"{same[name]} of {len(tasks) * given.rounds}"
        rows.append(row)
    finish(given, rows, tool_calls=rows)


if __name__ == "__main__":
    script(main)
