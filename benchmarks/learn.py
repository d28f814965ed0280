"""What a drafter learns from the answers to questions of one kind, and what it forgets of others.

    python benchmarks/learn.py --kind sql --taught 200 --asked 100

Three models answer the same questions in the same order: one keeps nothing, one has a memory of
answers, and one learns besides. After each question there is a pause, in which what can be learned
is learned. Counted are the tokens of a step in the answers to further questions of that kind, and
to general ones. Trees have a fixed number of nodes (`--budget`), so no time is measured, and the
machine may have other work.
"""

from __future__ import annotations

import ast
import random
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from common import arguments, error, finish, load, params_of, prompts, ratio, script
from contexts import MODULES, source
from quickbeam import LLM

TABLES = {
    "orders": ("id", "customer", "total", "created_at", "status"),
    "employees": ("id", "name", "salary", "department", "hired"),
    "products": ("id", "title", "price", "stock", "category"),
    "students": ("id", "name", "grade", "class", "city"),
    "flights": ("id", "origin", "destination", "departs", "seats"),
    "books": ("id", "title", "author", "year", "pages"),
}
QUERIES = (
    "the {number} rows with the highest {a}",
    "the average {a} for each {b}",
    "all rows whose {a} is larger than {number}",
    "the number of rows for each {b}",
    "the {a} and {b} of all rows, sorted by {a}",
    "the rows whose {b} is missing",
    "the sum of {a} by {b}, largest first",
    "the difference between the largest and the smallest {a}",
)
GERMAN = (
    "Warum ist {thing} wichtig?",
    "Erkläre einem Kind, was {thing} ist.",
    "Was muss man über {thing} wissen?",
    "Schreibe einen kurzen Text über {thing}.",
    "Welche Vorteile hat {thing}?",
    "Wie funktioniert {thing}?",
    "Erzähle mir von den Anfängen: {thing} in früherer Zeit.",
    "Was kostet {thing}, und warum?",
)
THINGS = (
    *("das Wasser", "die Sonne", "das Fahrrad", "die Schule", "das Internet", "der Garten"),
    *("die Musik", "der Winter", "die Demokratie", "der Computer", "das Brot", "der Wald"),
    *("die Gesundheit", "das Buch", "der Sport", "die Stadt", "das Meer", "die Zeitung"),
    *("der Arzt", "die Küche", "der Zug", "das Geld", "die Familie", "der Hund", "der Schlaf"),
    *("das Licht", "die Brücke", "der Berg", "das Theater", "die Uhr", "der Kaffee", "das Holz"),
    *("die Wolke", "der Fluss", "das Salz", "die Post", "der Markt", "das Papier"),
)

SOURCE_SIZES = (200, 1200)  # characters
ABOUT_CODE = (
    "Explain what this function of ours does.",
    "Write a unit test for this function of ours.",
    "Write this function of ours anew, with type hints.",
)


def sql(rng: random.Random) -> str:
    table = rng.choice(list(TABLES))
    a, b = rng.sample(TABLES[table], 2)
    wanted = rng.choice(QUERIES).format(number=rng.randrange(2, 500), a=a, b=b)
    columns = ", ".join(TABLES[table])
    return f"The table {table} has the columns {columns}. Write a SQL query that returns {wanted}."


def german(rng: random.Random) -> str:
    return rng.choice(GERMAN).format(thing=rng.choice(THINGS))


@cache
def functions() -> list[str]:
    """Return functions of a code base that is on every machine, those that fit into a prompt."""
    sources = list[str]()
    for text in map(source, MODULES):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                sources.append(ast.get_source_segment(text, node) or "")
    return [each for each in sources if SOURCE_SIZES[0] < len(each) < SOURCE_SIZES[1]]


def code(rng: random.Random) -> str:
    return f"{rng.choice(ABOUT_CODE)}\n\n```python\n{rng.choice(functions())}\n```"


KINDS: dict[str, Callable[[random.Random], str]] = {"sql": sql, "german": german, "code": code}
NAMES = ("alone", "memory", "learning")


class Answer(NamedTuple):
    ids: list[int]
    steps: int


def different(kind: str, count: int, seed: int) -> list[str]:
    """Return questions of a kind, none of them twice."""
    rng = random.Random(seed)
    questions = dict[str, None]()
    while len(questions) < count:
        questions[KINDS[kind](rng)] = None
    return list(questions)


def answer(llm: LLM, prompt: list[int], given: Namespace) -> Answer:
    """Answer a question, and wait until what can be learned from it is learned."""
    done = llm.generate(prompt, params_of(given), method=given.method, budget=given.budget)
    while llm.learning is not None and llm.learning.pending:
        time.sleep(0.01)
    return Answer(done.token_ids, done.statistics.steps)


def tokens_of_step(answers: Sequence[Answer]) -> float:
    """Return the tokens of a step. The first token of an answer takes none."""
    tokens = sum(len(one.ids) - 1 for one in answers)
    return tokens / max(1, sum(one.steps for one in answers))


def compared(
    name: str, answers: Sequence[Sequence[Answer]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a row of the table and its figures, of each question's answers by `NAMES`."""
    row = {"questions": f"{len(answers)} {name}"}
    figures: dict[str, Any] = {"count": len(answers)}
    for number, of in enumerate(NAMES):
        mat = tokens_of_step([each[number] for each in answers])
        # answers are the same, so their steps alone make the difference
        gain, pulls = ratio([(each[0].steps, each[number].steps) for each in answers])
        off = error(pulls)
        figures[of] = {"mat": mat, "gain": gain, "error": off}
        row[of] = f"{mat:.2f}"
        if number:
            row[f"gain of {of}"] = f"{gain:.2f}" + ("" if off is None else f" ± {off:.2f}")
    figures["identical"] = sum(len({tuple(one.ids) for one in each}) == 1 for each in answers)
    row["identical"] = f"{figures['identical']} of {len(answers)}"
    return row, figures


def main() -> None:
    parser = arguments(__doc__, limit=40)
    parser.add_argument("--kind", default="sql", choices=KINDS)
    parser.add_argument("--taught", type=int, default=200, help="questions to learn from")
    parser.add_argument("--asked", type=int, default=100, help="further ones, which count")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--budget", type=int, default=8, help="nodes of a tree")
    given = parser.parse_args()
    memory = {"memory_of_answers": "64MB"}
    llms = [load(given, given.method, **more) for more in ({}, memory, memory | {"learn": True})]
    texts = different(given.kind, given.taught + given.asked, given.seed)
    questions = [llms[0].encode_chat(text) for text in texts]
    kinds = {
        f"{given.kind}, while it learned": questions[: given.taught],
        f"{given.kind}, after it": questions[given.taught :],
        "general": prompts(llms[0], given),
    }
    rows, figures = list[dict[str, str]](), dict[str, Any]()
    for name, of_kind in kinds.items():
        row, figures[name] = compared(
            name, [[answer(llm, question, given) for llm in llms] for question in of_kind]
        )
        rows.append(row)
    finish(given, rows, learn=figures, learned=str(llms[-1].learning))


if __name__ == "__main__":
    script(main)
