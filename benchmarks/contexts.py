"""Answers about long contexts, by method and length: copying, editing, summing up.

    python benchmarks/contexts.py --lengths 2000,6000 --methods ar,pld,logitspec,auto

The contexts are modules of Python's own library, as many tokens of each as asked for. An edit
renames a name of the context; with `prediction` the context is also given as the predicted output.
All methods answer the same prompts in turn and begin with nothing remembered. A prompt is read once
for all of them; its seconds are a column.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from common import arguments, error, finish, load, numbers, params_of, ratio, script
from quickbeam import LLM, SamplingParams
from quickbeam.errors import InvalidInput
from quickbeam.methods import preset

MODULES = ("argparse", "tarfile", "smtplib", "zipfile", "configparser", "statistics")
NAMES = re.compile(r"\b[a-z_]{6,}\b")
PREDICTED = "+prediction"  # behind a method's name


@dataclass(frozen=True)
class Task:
    """A prompt about a context. `prediction`: what its answer is much like, if anything is."""

    name: str
    prompt: str
    prediction: str = ""


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InvalidInput(f"this Python has no source of {module}")
    origin = Path(spec.origin)
    return origin.read_text(encoding="utf-8")


def cut(llm: LLM, text: str, tokens: int) -> str:
    """Return the first lines of a text, repeated where it is short, in at most `tokens` tokens."""
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = (ids * (tokens // max(1, len(ids)) + 1))[:tokens]
    return llm.tokenizer.decode(ids).rpartition("\n")[0]


def tasks(context: str) -> Iterator[Task]:
    names = Counter(NAMES.findall(context)).most_common(12)
    name = names[-1][0]
    lines = [line for line in context.splitlines() if len(line) > 30]
    line = lines[len(lines) * 2 // 3].strip()
    code = f"```python\n{context}\n```"
    yield Task("copy", f"{code}\nRepeat the code above from the line `{line}` on, word for word.")
    rename = f"Rename `{name}` to `{name}_value` everywhere. Answer with the whole file alone."
    yield Task("edit", f"{code}\n{rename}", code)
    yield Task("sum up", f"{code}\nSay in five sentences what this module does.")


def answer(
    llm: LLM, task: Task, method: str, params: SamplingParams
) -> tuple[list[int], float, int]:
    """Return an answer's token ids, its seconds of decoding and its steps."""
    name = method.removesuffix(PREDICTED)
    if name != method:
        params = replace(params, prediction=task.prediction)
    llm.prepare(name)
    # a tenant of its own: nothing that an earlier answer left is drafted
    completion = llm.chat_stream(task.prompt, params, method=name, tenant=object()).result()
    return completion.token_ids, completion.statistics.seconds, completion.statistics.steps


def main() -> None:
    parser = arguments(__doc__, max_tokens=128)
    parser.add_argument("--lengths", type=numbers, default=[2000.0], help="tokens of a context")
    parser.add_argument("--methods", default="ar,pld,logitspec,recycling,auto,auto+prediction")
    given = parser.parse_args()
    methods = given.methods.split(",")
    for method in methods:
        preset(method.removesuffix(PREDICTED))
    llm = load(given, methods[0].removesuffix(PREDICTED))
    params = replace(params_of(given), ignore_eos=True)
    count = given.limit or 2
    rows = list[dict[str, object]]()
    for length in map(int, given.lengths):
        seconds: dict[tuple[str, str], list[float]] = {}
        steps: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        same: Counter[tuple[str, str]] = Counter()
        reading: dict[str, float] = {}
        for module in MODULES[:count]:
            for task in tasks(cut(llm, source(module), length)):
                began = perf_counter()
                answer(llm, task, methods[0], replace(params, max_tokens=1))
                reading[task.name] = reading.get(task.name, 0.0) + perf_counter() - began
                first: list[int] | None = None
                for method in methods:
                    if method.endswith(PREDICTED) and not task.prediction:
                        continue
                    ids, taken, made = answer(llm, task, method, params)
                    first = first or ids
                    key = task.name, method
                    seconds.setdefault(key, []).append(taken)
                    steps[key] += made
                    tokens[key] += len(ids) - 1
                    same[key] += ids == first
        for name, method in seconds:
            key = name, method
            value, pulls = ratio(list(zip(seconds[name, methods[0]], seconds[key], strict=True)))
            rows.append(
                {
                    "tokens": length,
                    "task": name,
                    "method": method,
                    "MAT": f"{tokens[key] / steps[key]:.2f}",
                    "tokens/s": f"{tokens[key] / sum(seconds[key]):.1f}",
                    f"over {methods[0]}": f"{value:.2f} ± {error(pulls) or 0:.2f}",
                    "prompt s": f"{reading[name] / count:.1f}",
                    "identical": f"{same[key]} of {count}",
                }
            )
    finish(given, rows, contexts=rows)


if __name__ == "__main__":
    script(main)
