"""Several drafters for one model, or `auto` without one of its sources, asked in turn.

    python benchmarks/compare_drafters.py dynaspec:8 auto dyspec:8=FOLDER auto=FOLDER
    python benchmarks/compare_drafters.py auto ar auto-ngram auto-last_logits auto-recycling

An entry is one of `quickbeam bench --methods`, with "=" and the folder of another drafter than the
model's own. "auto-" and a source's name is `auto` without it. The first is what the others are held
against: "over the first" is the geometric mean over questions of tokens per second, prompts left
out, with its standard error; "with prompts" counts them. "Draft ms" are those of a step.
What a pass costs by its rows is measured beside every question, since drafts gain less where memory
is fast: one row then costs little, and further rows as much as before.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, log
from statistics import fmean, quantiles, stdev
from unittest.mock import patch

from common import (
    arguments,
    finish,
    load,
    milliseconds,
    params_of,
    pass_of,
    questions_of,
    script,
)
from quickbeam import LLM
from quickbeam.bench.methods import LLMRunner, parse_methods
from quickbeam.bench.run import begin, run, warm_up
from quickbeam.config import WEIGHTS
from quickbeam.drafters.base import Context, Drafter
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram, NgramIndex
from quickbeam.drafters.own_text import OwnText
from quickbeam.drafters.recycling import Recycling
from quickbeam.errors import InvalidInput
from quickbeam.methods import METHODS, auto
from quickbeam.methods.base import ProposalSteps

# that `auto` can be asked to do without
SOURCES = (Ngram.name, LastLogits.name, Recycling.name, OwnText.name)
WIDTHS = (1, 4, 8)  # rows of the passes whose cost is told
CONTEXT = 200  # tokens before them


class Without(auto.Auto):
    """`auto` without one source."""

    def __init__(self, source: str, drafter: Drafter | None = None) -> None:
        super().__init__(drafter)
        self.without = source
        if source == LastLogits.name:
            self.last_logits = None
        self.successors = [each for each in self.successors if each.name != source]

    def propose(self, context: Context, budget: int, max_depth: int) -> ProposalSteps:
        if self.without == Ngram.name:
            states = context.states | {Ngram.name: NgramIndex()}
            context = replace(context, states=states)
        return super().propose(context, budget, max_depth)


def method_without(source: str) -> str:
    """Return the name of `auto` without this source, which methods are made by from now on."""
    if source not in SOURCES:
        raise InvalidInput(f"auto-{source}: names of sources are {', '.join(SOURCES)}")
    name = f"auto-{source}"
    setattr(auto, name, partial(Without, source))
    for drafting in ("auto", "recycling"):  # with and without a drafter
        METHODS[f"{drafting}-{source}"] = replace(METHODS[drafting], maker=f"auto.{name}")
    METHODS[name] = replace(METHODS[name], without=f"recycling-{source}")
    return name


def faster(rates: Sequence[float], first: Sequence[float]) -> tuple[float, float | None]:
    """Return the geometric mean of the ratios and its standard error; None for one question."""
    ratios = [log(a / b) for a, b in zip(rates, first, strict=True)]
    mean = exp(fmean(ratios))
    return mean, mean * stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def passes_in_words(costs: Sequence[Mapping[int, float]]) -> str:
    """Say what a pass took, by its rows: the median over questions, and the quartiles."""
    parts = []
    for rows in WIDTHS:
        ms = [cost[rows] for cost in costs]
        low, middle, high = quantiles(ms, method="inclusive") if len(ms) > 1 else ms * 3
        parts.append(f"{rows} row{'s' * (rows > 1)} {middle:.1f} ms ({low:.1f} to {high:.1f})")
    return f"A pass behind {CONTEXT} tokens: {', '.join(parts)}."


def main() -> None:
    parser = arguments(__doc__, limit=48, max_tokens=128)
    parser.add_argument("entries", nargs="+", metavar="METHOD[=FOLDER]")
    parser.add_argument("--weights", default="bfloat16", choices=WEIGHTS)
    with patch.dict(METHODS):  # without what `method_without` adds
        compare(parser.parse_args())


def compare(given: Namespace) -> None:
    llms, runners, items = dict[str, LLM](), dict[str, LLMRunner](), []
    for entry in given.entries:
        words, _, folder = entry.partition("=")
        drafter = folder or given.drafter
        whole, _, source = words.partition("auto-")
        (item,) = parse_methods(whole or "auto", drafter=drafter, model=given.model)
        if source:
            item = replace(item, method=method_without(source))
        if folder not in llms:
            llms[folder] = load(given, item.method, drafter=drafter, weights=given.weights)
        llms[folder].prepare(item.method, item.vocab, item.shortlist)
        items.append(replace(item, name=entry))
        runners[entry] = LLMRunner(llms[folder], items[-1], given.raw)
    results = begin(items, params_of(given))
    warm_up(runners, results.params)
    one_pass = pass_of(next(iter(llms.values())).model, CONTEXT)
    works = {rows: partial(one_pass, rows) for rows in WIDTHS}
    costs = [milliseconds(works, 3, warm=1) for _ in run(questions_of(given), runners, results)]
    rows, figures, first = list[dict[str, object]](), {}, {}
    for entry in given.entries:
        answers = [trial.answers[entry].statistics for trial in results.trials]
        answers = [one for one in answers if one.steps]
        tokens, steps = (sum(getattr(one, of) for one in answers) for of in ("new_tokens", "steps"))
        rates = {
            "over the first": [
                one.steps * one.mean_accepted_tokens / (one.draft_seconds + one.verify_seconds)
                for one in answers
            ],
            "with prompts": [
                one.new_tokens / (one.prefill_seconds + one.seconds) for one in answers
            ],
        }
        first = first or rates
        apart = sum(one["method"] == entry for one in results.differences)
        figure = {
            "mean_accepted_tokens": (tokens - len(answers)) / steps,
            "draft_ms": 1000 * sum(one.draft_seconds for one in answers) / steps,
            "identical": len(results.trials) - apart if entry in results.compared else None,
        }
        row = {"entry": entry, "MAT": f"{figure['mean_accepted_tokens']:.2f}"}
        row["draft ms"] = f"{figure['draft_ms']:.2f}"
        for name, mine in rates.items():
            figure[name] = mean, error = faster(mine, first[name])
            row[name] = f"{mean:.2f}" + ("" if error is None else f" ± {error:.2f}")
        same = figure["identical"]
        row["identical"] = "-" if same is None else f"{same} of {len(results.trials)}"
        rows.append(row)
        figures[entry] = figure
    finish(
        given, rows, model=next(iter(llms.values())).name, drafters=figures, pass_milliseconds=costs
    )
    print(passes_in_words(costs))


if __name__ == "__main__":
    script(main)
