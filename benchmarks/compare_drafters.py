"""Several drafters for one model, asked in turn about the same questions.

    python benchmarks/compare_drafters.py dynaspec:8 auto dyspec:8=FOLDER auto=FOLDER

An entry is one of `quickbeam bench --methods`, with "=" and the folder of another drafter than the
model's own. The first is what the others are held against: "over the first" is the geometric mean
over questions of tokens per second, prompts left out, with its standard error; "with prompts"
counts them. "Draft ms" are those of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from statistics import fmean, stdev

from common import arguments, finish, load, params_of, questions_of, script
from quickbeam import LLM
from quickbeam.bench.methods import LLMRunner, parse_methods
from quickbeam.bench.run import begin, run, warm_up


def faster(rates: Sequence[float], first: Sequence[float]) -> tuple[float, float | None]:
    """Return the geometric mean of the ratios and its standard error; None for one question."""
    ratios = [log(a / b) for a, b in zip(rates, first, strict=True)]
    mean = exp(fmean(ratios))
    return mean, mean * stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def main() -> None:
    parser = arguments(__doc__, limit=48, max_tokens=128)
    parser.add_argument("entries", nargs="+", metavar="METHOD[=FOLDER]")
    given = parser.parse_args()
    llms, runners, items = dict[str, LLM](), dict[str, LLMRunner](), []
    for entry in given.entries:
        words, _, folder = entry.partition("=")
        drafter = folder or given.drafter
        (item,) = parse_methods(words, drafter=drafter, model=given.model)
        if folder not in llms:
            llms[folder] = load(given, item.method, drafter=drafter)
        llms[folder].prepare(item.method, item.vocab, item.shortlist)
        items.append(replace(item, name=entry))
        runners[entry] = LLMRunner(llms[folder], items[-1], given.raw)
    results = begin(items, params_of(given))
    warm_up(runners, results.params)
    list(run(questions_of(given), runners, results))
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
            "with prompts": [one.new_tokens / one.seconds for one in answers],
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
    finish(given, rows, model=next(iter(llms.values())).name, drafters=figures)


if __name__ == "__main__":
    script(main)
