"""Tokens a step of methods at the same places of plain answers.

    python benchmarks/trees.py --methods dyspec,sequoia,eagle2 --budgets 8,16 --temperatures 0,0.6

A method's own steps begin where its last draft ended, so that `quickbeam bench` compares trees and
places at once. Here every method takes one step at the same places: every few tokens of answers by
plain decoding. Methods learn from place to place. In brackets: the difference from the first
method, with its standard error by answers.

Above temperature 0 what a step emits is random, too. Each tree is grown and verified with
several seeds (`--draws`), the same ones for all methods, and the mean counts: the noise behind a
place does not depend on the text before it. `NAME+residual` draws children as the papers do. The
share of places at which a drafter's likeliest token is the model's is MAT - 1 at `--budgets 2`,
temperature 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

from common import arguments, error, finish, load, numbers, params_of, prompts, script
from quickbeam import LLM, SamplingParams
from quickbeam.engine.trace import StepRecord
from quickbeam.params import COUPLED

METHODS = "dyspec,dyspec-threshold,chain,specinfer,sequoia,eagle2"
APART = 1_000_003  # between the seeds of a place


def first_steps(
    llm: LLM, ids: list[int], method: str, budget: int, params: SamplingParams
) -> list[StepRecord]:
    """Return the step after `ids` and the token that follows them first; none at the end."""
    records: list[StepRecord] = []
    stream = llm.stream(ids, params, method=method, budget=budget, observer=records.append)
    next((None for _ in stream if records), None)
    stream.close()
    return records


def emitted(llm: LLM, ids: list[int], name: str, budget: int, params: SamplingParams) -> int:
    """Return how many tokens the first step after `ids` and the token that follows them emits."""
    method, _, coupling = name.partition("+")
    own = replace(params, coupling=coupling or COUPLED, max_tokens=budget + 2)
    return next((len(one.emitted) for one in first_steps(llm, ids, method, budget, own)), 0)


def places(llm: LLM, ids: list[int], params: SamplingParams, every: int) -> Iterator[list[int]]:
    """Yield the text up to every `every`-th token of a plain answer."""
    answer = llm.generate(ids, params, method="ar").token_ids
    for end in range(0, len(answer) - 2, every):
        yield ids + answer[:end]


def difference(
    own: list[list[float]], first: list[list[float]]
) -> tuple[float, float, float | None]:
    """Return the mean over all places, that of the first method subtracted, and its error.

    Numbers are listed by answer, as places of one answer are alike.
    """
    count = sum(map(len, own))
    gaps = [[a - b for a, b in zip(*both, strict=True)] for both in zip(own, first, strict=True)]
    middle = sum(map(sum, gaps)) / count
    pulls = [(sum(gap) - middle * len(gap)) / count for gap in gaps]
    return sum(map(sum, own)) / count, middle, error(pulls)


def main() -> None:
    parser = arguments(__doc__, limit=32, max_tokens=49)
    parser.add_argument("--methods", default=METHODS, help="names, with +residual where wanted")
    parser.add_argument("--budgets", default="8,16,32,64", help="nodes of a tree")
    parser.add_argument("--temperatures", default="0", help="comma-separated")
    parser.add_argument("--every", type=int, default=4, help="tokens between two places")
    parser.add_argument("--draws", type=int, default=4, help="seeds a place, above temperature 0")
    given = parser.parse_args()
    names, budgets = given.methods.split(","), [int(one) for one in numbers(given.budgets)]
    llm, rows, figures = load(given, names[0].partition("+")[0]), [], []
    asked = prompts(llm, given, max(budgets) + 2)
    for temperature in numbers(given.temperatures):
        tokens_of: dict[tuple[str, int], list[list[float]]] = {
            (name, budget): [] for name in names for budget in budgets
        }
        for number, ids in enumerate(asked):
            seed = given.seed + number
            params = replace(params_of(given), temperature=temperature, seed=seed)
            seeds = [seed + (i + 1) * APART for i in range(given.draws if temperature else 1)]
            for lists in tokens_of.values():
                lists.append([])
            for text in places(llm, ids, params, given.every):
                for (name, budget), lists in tokens_of.items():
                    own = (replace(params, seed=one) for one in seeds)
                    lists[-1].append(mean(emitted(llm, text, name, budget, one) for one in own))
        count = sum(map(len, tokens_of[names[0], budgets[0]]))
        trees = []
        for name in names:
            row: dict[str, object] = {"temperature": f"{temperature:g}", "method": name}
            for budget in budgets:
                first = tokens_of[names[0], budget]
                tokens, gap, doubt = difference(tokens_of[name, budget], first)
                beside = "" if name == names[0] else f" ({gap:+.3f} ± {doubt or 0:.3f})"
                row[f"{budget} nodes"] = f"{tokens:.3f}{beside}"
                one = {"tree": name, "budget": budget, "tokens": tokens}
                trees.append({**one, "difference": {"mean": gap, "error": doubt}})
            rows.append(row)
        figures.append({"temperature": temperature, "places": count, "trees": trees})
    finish(given, rows, model=llm.name, temperatures=figures)


if __name__ == "__main__":
    script(main)
