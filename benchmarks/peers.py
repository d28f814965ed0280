"""quickbeam's server beside llama.cpp's, vLLM's and transformers', on the same questions.

    python benchmarks/peers.py --llama FOLDER --clients 1,4,16 smollm2-135m:16 BIG.gguf::SMALL.gguf

A case is MODEL[:BITS[:DRAFTER]]. MODEL is an embedded model, a model folder or a `.gguf` file; BITS
are 16, 8 or 4, and may be left out for a `.gguf` file, which is then served as it is. What a server
can't read it is not asked: llama.cpp takes `.gguf` files (those of an embedded model are fetched;
other bits are made by `llama-quantize`), vLLM and transformers take folders, in 16 bits (of a
`.gguf` file: the folder of its name beside it).

For every case and number of clients each server is started anew, asked one question that is not
counted, then all others by so many clients, and ended. Answers are greedy and streamed by one HTTP
client; tokens are those that the server counts; seconds include prompts. The first table is that of
the README: for llama.cpp also the fastest of its speculations, by name. The second has everything.
"same text" counts answers with the text of the first server.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, finish, numbers, questions_of, script
from peer_cases import Case, add_llama
from quickbeam.bench.report import markdown
from quickbeam.errors import QuickbeamError
from servers import ServerProcess, StreamedAnswer

Key = tuple[str, int, str]  # a case, how many clients, a server


class Measurement:
    """The answers of one server to so many clients, and the seconds that all of them took."""

    def __init__(self) -> None:
        self.answers, self.seconds = list[StreamedAnswer](), 0.0

    @property
    def rate(self) -> float:
        return sum(one.tokens for one in self.answers) / self.seconds

    def ask(self, name: str, command: list[str], clients: int, given: Namespace) -> None:
        """Start a server, have so many clients ask it, and end it."""
        texts = [question.turns[0] for question in questions_of(given)]
        with ServerProcess(name, command) as serving, ThreadPoolExecutor(clients) as pool:
            serving.ask(texts[0][:60], given)
            began = time.perf_counter()
            self.answers += pool.map(lambda text: serving.ask(text, given), texts)
            self.seconds += time.perf_counter() - began

    def figures(self, reference: list[StreamedAnswer]) -> dict[str, Any]:
        pairs = zip(self.answers, cycle(reference), strict=False)
        same = sum(one.text == other.text for one, other in pairs)
        one = {"tokens_per_second": self.rate, "same_text": same, "prompts": len(self.answers)}
        return one | {"p50_ttft_ms": 1000 * median(each.first for each in self.answers)}


def measure(cases: list[Case], given: Namespace) -> dict[Key, Measurement]:
    """Ask every server of every case, in turn for every round. One that fails is left out; Ctrl-C
    ends with what there is."""
    measured, failed, key = defaultdict[Key, Measurement](Measurement), set[Key](), None
    turns = [
        ((case.name, clients, name), command)
        for case in cases
        for clients in map(int, numbers(given.clients))
        for name, command in case.servers(clients)
    ]
    try:
        for key, command in turns * given.rounds:
            if key in failed:
                continue
            case, clients, name = key
            try:
                measured[key].ask(name, command, clients, given)
                note = f"{measured[key].rate:.1f} tokens/s"
            except QuickbeamError as failure:
                failed.add(key)
                del measured[key]
                note = f"left out: {failure}"
            print(f"{case}, {clients} at a time, {name}: {note}", file=sys.stderr)
    except KeyboardInterrupt:  # what is whole is shown
        measured.pop(key, None)
    if not measured:
        raise QuickbeamError("no server answered")
    return measured


def summary(measured: Mapping[Key, Measurement]) -> list[dict[str, str]]:
    """Return a row for each server, of llama.cpp's speculations the fastest in each cell."""
    cells = defaultdict[str, dict[str, tuple[float, str]]](dict)
    columns = dict.fromkeys(f"{case}, {clients} at a time" for case, clients, _ in measured)
    for (case, clients, name), one in measured.items():
        own = name.removeprefix("llama.cpp ")
        row = name if own == name else "llama.cpp, its fastest speculation"
        shown = f"{one.rate:.1f}{'' if own == name else f' ({own})'}"
        best = cells[row].get(f"{case}, {clients} at a time", (0.0, ""))
        cells[row][f"{case}, {clients} at a time"] = max(best, (one.rate, shown))
    return [
        {"tokens/s": row} | {column: of.get(column, (0.0, "-"))[1] for column in columns}
        for row, of in cells.items()
    ]


def main() -> None:
    parser = arguments(__doc__, limit=16, max_tokens=96)
    parser.add_argument("cases", nargs="+", metavar="MODEL[:BITS[:DRAFTER]]")
    parser.add_argument("--clients", default="1", help="at a time, comma-separated")
    parser.add_argument("--methods", default="auto,ar", help="of quickbeam, comma-separated")
    add_llama(parser)
    parser.add_argument("--vllm", help="the program vllm, of its build for CPUs")
    parser.add_argument("--transformers", action="store_true", help="ask `transformers serve`")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="for .gguf files")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    measured = measure([Case(text, given) for text in given.cases], given)
    rows, figures = [], dict[str, dict[int, dict[str, Any]]]()
    for (case, clients, name), one in measured.items():
        reference = next(other for key, other in measured.items() if key[:2] == (case, clients))
        of = one.figures(reference.answers)
        figures.setdefault(case, {}).setdefault(clients, {})[name] = of
        row = {"model": case, "clients": clients, "server": name, "tokens/s": f"{one.rate:.1f}"}
        row |= {"first piece ms": f"{of['p50_ttft_ms']:.0f}"}
        rows.append(row | {"same text": f"{of['same_text']} of {of['prompts']}"})
    print(f"{markdown(summary(measured))}\n")
    finish(given, rows, cases=figures)


if __name__ == "__main__":
    script(main)
