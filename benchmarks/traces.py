"""Acceptance traces: tokens of a step by its rows and drafter calls, for each kind of draft.

    python benchmarks/traces.py --limit 16 --max-tokens 48 --json benchmarks/traces.json

Every kind takes a step at every place of plain answers. Then an answer is walked: from its first
place to the one behind the tokens that the step there gave, and so on. So copied text, which few
steps pass, counts as it does in decoding. `auto` grows trees of 64 nodes. They are in order of
worth, so the first ones are its tree for a smaller budget: they are cut where the next node is
worth less than a bound. Chains are cut to every length. Trees of fixed shape (`sequoia`) and
n-grams (`logitspec`) are grown for each size. `simulate.py` reads the result: means of (rows,
tokens, drafter calls) over the steps of all walks, by kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean

from common import arguments, finish, load, params_of, prompts, script
from quickbeam.engine.trace import StepRecord
from trees import first_steps, places

NODES, CHAIN = 64, 6  # of the widest tree, of the longest chain
FIXED, COPIED = (4, 16, 64), (2, 4, 8, 16, 32)  # nodes of trees of fixed shape, and of n-grams
BOUNDS = [0.5 * 0.8**i for i in range(20)]
Entry = tuple[float, float, float]  # of a step: rows, tokens, drafter calls
Kept = Callable[[StepRecord], int]  # how many of a tree's first nodes are taken


def walk(places: Sequence[StepRecord], kept: Kept) -> Iterator[Entry]:
    """Yield the steps of an answer whose trees are cut to their first nodes."""
    place = 0
    while place < len(places):
        (tree, path, *_), nodes = places[place], kept(places[place])
        asked = (tree.depth[node] for node in range(1, nodes) if tree.source[node] == "drafter")
        tokens = sum(node < nodes for node in path)
        yield nodes, tokens, max(asked, default=0)
        place += tokens


def entry(answers: Sequence[Sequence[StepRecord]], kept: Kept) -> Entry:
    steps = [step for places in answers for step in walk(places, kept)]
    rows, tokens, calls = (round(mean(column), 3) for column in zip(*steps, strict=True))
    return rows, tokens, calls


def worth(bound: float) -> Kept:
    """Return what counts a tree's nodes before the first one that is worth less than `bound`."""

    def count(one: StepRecord) -> int:
        low = (node for node in range(1, len(one.tree)) if one.tree.value[node] < bound)
        return next(low, len(one.tree))

    return count


def first(nodes: int) -> Kept:
    return lambda one: min(nodes, len(one.tree))


def main() -> None:
    given = arguments(__doc__, limit=16, max_tokens=48).parse_args()
    llm, plain = load(given), params_of(given)
    answers = [list(places(llm, ids, plain, 1)) for ids in prompts(llm, given, NODES)]
    long = replace(plain, max_tokens=NODES + 2)

    def steps(method: str, budget: int) -> list[list[StepRecord]]:
        return [[first_steps(llm, ids, method, budget, long)[0] for ids in one] for one in answers]

    wide, chains = steps("auto", NODES), steps("chain", CHAIN)
    curves = {
        "auto": [entry(wide, worth(bound)) for bound in BOUNDS],
        "chain": [entry(chains, first(nodes)) for nodes in range(2, CHAIN + 1)],
        "fixed tree": [entry(steps("sequoia", nodes), first(nodes)) for nodes in FIXED],
        "logitspec": [entry(steps("logitspec", nodes), first(nodes)) for nodes in COPIED],
    }
    table = [
        {"draft": name, "rows": f"{rows:.1f}", "tokens": f"{tokens:.2f}", "calls": f"{calls:.1f}"}
        for name, curve in curves.items()
        for rows, tokens, calls in dict.fromkeys(curve)
    ]
    finish(given, table, model=llm.name, places=sum(map(len, answers)), curves=curves)


if __name__ == "__main__":
    script(main)
