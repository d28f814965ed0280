"""Answers about long contexts, by method and length: copying, editing, summing up.

    python benchmarks/contexts.py --lengths 2000,6000 --methods ar,pld,logitspec,auto

The contexts are modules of Python's own library, as many tokens of each as asked for. An edit
renames a name of the context; with `prediction` the context is also given as the predicted output.
All methods answer the same prompts in turn and begin with nothing remembered. A prompt is read once
for all of them; its seconds are a column.

With `--llama` llama.cpp's server answers them, too, without and with each of its `--speculations`.
It reads each context once as well. Seconds, drafts and prompts are what it says of them; its MAT is
of tokens by those of them that were not drafted.
"""

from __future__ import annotations

import importlib.util
import json
import re
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from common import arguments, error, finish, load, numbers, params_of, ratio, script
from peer_cases import add_llama, llama_servers
from quickbeam import LLM, SamplingParams
from quickbeam.errors import InvalidInput
from quickbeam.methods import preset
from servers import ServerProcess

MODULES = ("argparse", "tarfile", "smtplib", "zipfile", "configparser", "statistics")
NAMES = re.compile(r"\b[a-z_]{6,}\b")
PREDICTED = "+prediction"  # behind a method's name
TEMPLATE = 300  # tokens of a prompt beside its context, at most


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


class Answer(NamedTuple):
    """What a prompt was answered with: seconds of reading and of decoding, which took `steps`."""

    text: str
    tokens: int
    steps: int
    reading: float
    seconds: float


def answer(llm: LLM, task: Task, method: str, params: SamplingParams) -> Answer:
    name = method.removesuffix(PREDICTED)
    if name != method:
        params = replace(params, prediction=task.prediction)
    llm.prepare(name)
    began = perf_counter()
    # a tenant of its own: nothing that an earlier answer left is drafted
    completion = llm.chat_stream(task.prompt, params, method=name, tenant=object()).result()
    of = completion.statistics
    reading = perf_counter() - began - of.seconds
    return Answer(completion.text, len(completion.token_ids) - 1, of.steps, reading, of.seconds)


def answer_of_llama(server: ServerProcess, task: Task, given: Namespace) -> Answer:
    body = {"messages": [{"role": "user", "content": task.prompt}], "max_tokens": given.max_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    with server.open(server.request("/v1/chat/completions", body)) as response:
        said = json.load(response)
    of = said["timings"]
    tokens = of["predicted_n"] - 1  # the prompt's pass gives the first
    text = said["choices"][0]["message"]["content"]
    steps = tokens - of.get("draft_n_accepted", 0)
    return Answer(text, tokens, steps, of["prompt_ms"] / 1000, of["predicted_ms"] / 1000)


@dataclass
class Figures:
    """The answers of a method to the prompts of a task, and how many are the first method's."""

    answers: list[Answer] = field(default_factory=list)
    same: int = 0

    def row(self, plain: Figures) -> dict[str, str]:
        """Return the columns of a table. `plain`: of the method that others are compared with."""
        seconds = [one.seconds for one in self.answers]
        tokens = sum(one.tokens for one in self.answers)
        steps = sum(one.steps for one in self.answers)
        pairs = list(zip([one.seconds for one in plain.answers], seconds, strict=True))
        value, pulls = ratio(pairs)
        return {
            "MAT": f"{tokens / max(1, steps):.2f}",
            "tokens/s": f"{tokens / sum(seconds):.1f}",
            "over the first": f"{value:.2f} ± {error(pulls) or 0:.2f}",
            "prompt s": f"{max(one.reading for one in self.answers):.1f}",
            "same text": f"{self.same} of {len(self.answers)}",
        }


def main() -> None:
    parser = arguments(__doc__, max_tokens=128)
    parser.add_argument("--lengths", type=numbers, default=[2000.0], help="tokens of a context")
    parser.add_argument("--methods", default="ar,pld,logitspec,recycling,auto,auto+prediction")
    add_llama(parser)
    given = parser.parse_args()
    methods = given.methods.split(",")
    for method in methods:
        preset(method.removesuffix(PREDICTED))
    if given.llama and not str(given.model).endswith(".gguf"):
        raise InvalidInput("--llama: needs a .gguf file as --model")
    llm = load(given, methods[0].removesuffix(PREDICTED))
    params = replace(params_of(given), ignore_eos=True)
    figures = defaultdict[tuple[int, str, str], Figures](Figures)
    with ExitStack() as stack:
        servers = list[ServerProcess]()
        if given.llama:
            room = int(max(given.lengths)) + given.max_tokens + TEMPLATE
            for name, command in llama_servers(given, given.model, given.drafter or "", 1, room):
                servers.append(stack.enter_context(ServerProcess(name, command)))
        for length, module in product(map(int, given.lengths), MODULES[: given.limit or 2]):
            for task in tasks(cut(llm, source(module), length)):
                named = {
                    method: answer(llm, task, method, params)
                    for method in methods
                    if task.prediction or not method.endswith(PREDICTED)
                }
                named |= {one.name: answer_of_llama(one, task, given) for one in servers}
                for method, said in named.items():
                    of = figures[length, task.name, method]
                    of.answers.append(said)
                    of.same += said.text == named[methods[0]].text
    rows = [
        {"tokens": length, "task": task, "method": method}
        | one.row(figures[length, task, methods[0]])
        for (length, task, method), one in figures.items()
    ]
    finish(given, rows, contexts=rows)


if __name__ == "__main__":
    script(main)
