"""What the first answers of a new server gain over plain decoding, before it has learned anything.

python benchmarks/cold_start.py --rounds 4 --clients 1 --serve "--weights int4"

Each round starts a server for `ar` and one for the method, in turn, and asks both the same
questions. A gain is the tokens a second over those of `ar` in the same round.
"""

from __future__ import annotations

import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import geometric_mean, mean, stdev

from common import arguments, finish, questions_of, script
from servers import ServerProcess

PLAIN = "ar"


def speeds_of(method: str, prompts: Sequence[str], given: Namespace) -> tuple[float, list[float]]:
    """Return the tokens a second of a new server: over all answers, and of each answer."""
    command = [sys.executable, "-m", "quickbeam", "serve", "--port", "{port}", "--method", method]
    command += shlex.split(given.serve)

    def ask(prompt: str) -> tuple[int, float]:
        began = time.perf_counter()
        answer = server.ask(prompt, given)
        return answer.tokens, time.perf_counter() - began

    with ServerProcess(method, command) as server, ThreadPoolExecutor(given.clients) as clients:
        began = time.perf_counter()
        answers = list(clients.map(ask, prompts))
        seconds = time.perf_counter() - began
    tokens = sum(answer_tokens for answer_tokens, _ in answers)
    return tokens / seconds, [answer_tokens / taken for answer_tokens, taken in answers]


def main() -> None:
    parser = arguments(__doc__, limit=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=1, help="that ask at the same time")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--serve", default="", help="further options of quickbeam serve")
    given = parser.parse_args()
    prompts = [question.turns[0] for question in questions_of(given)]
    gains = list[float]()
    answer_gains: list[list[float]] = [[] for _ in prompts]
    for _ in range(given.rounds):
        plain, plain_answers = speeds_of(PLAIN, prompts, given)
        drafted, drafted_answers = speeds_of(given.method, prompts, given)
        gains.append(drafted / plain)
        for i, (above, below) in enumerate(zip(drafted_answers, plain_answers, strict=True)):
            answer_gains[i].append(above / below)
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    rows = [{"answers": "all", "gain": f"{mean(gains):.2f} ± {error:.2f}"}]
    for i, of_answer in enumerate(answer_gains, 1):
        rows.append({"answers": str(i), "gain": f"{geometric_mean(of_answer):.2f}"})
    finish(given, rows, gains=gains, answer_gains=answer_gains)


if __name__ == "__main__":
    script(main)
