"""What a drafter keeps of its accepted tokens where it scores a part of the vocabulary.

    python benchmarks/vocabulary.py --vocabs frequency+context,router --shares 3,6 --limit 48

"Kept" is the mean accepted tokens (MAT) over that of the full vocabulary; "less the first" holds it
against the first of `--vocabs` at the same size. Standard errors are over questions, which are the
same for all. Head ms are those of routing, head and softmax in a call of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import answers, arguments, error, finish, load, numbers, ratio, script
from quickbeam.bench.methods import MethodItem
from quickbeam.bench.report import summaries
from quickbeam.bench.run import Results

FULL = "full"


def items(
    method: str, budget: int, vocabs: Sequence[str], sizes: Sequence[int]
) -> list[MethodItem]:
    """Return the full vocabulary as a method, then each of `vocabs` at each size.

    The vocabulary "context" has no size to ask for, so it comes once.
    """
    asked = [(vocab, size) for vocab in vocabs for size in sizes if vocab != "context"]
    asked += [(vocab, None) for vocab in vocabs if vocab == "context"]
    named = (MethodItem(f"{v}@{n}", method, budget, v, n) for v, n in asked)
    return [MethodItem(FULL, method, budget, FULL), *named]


def points(results: Results, asked: Sequence[MethodItem], vocab_size: int) -> list[dict[str, Any]]:
    """Return the figures of each of `asked`, the first of which must be the full vocabulary."""
    rows = summaries(results)
    statistics_of = {
        item.name: [trial.answers[item.name].statistics for trial in results.trials]
        for item in asked
    }
    mats = {
        name: ratio([(max(0, one.new_tokens - 1), one.steps) for one in statistics])
        for name, statistics in statistics_of.items()
    }
    (full, full_pulls), firsts, kept, points_of_table = mats[FULL], dict[Any, str](), {}, []
    for item in asked:
        mat, pulls = mats[item.name]
        share = mat / full if full else 0.0
        pulls = [(a - share * b) / full for a, b in zip(pulls, full_pulls, strict=True)]
        kept[item.name] = share, pulls
        # without a size, it is held against the full vocabulary alone
        size = item.shortlist
        first = item.name if size is None else firsts.setdefault(size, item.name)
        heads = [one.head for one in statistics_of[item.name] if one.head is not None]
        calls, tokens, seconds = (
            sum(getattr(head, name) for head in heads) for name in ("calls", "tokens", "seconds")
        )
        against = kept[first]
        both = zip(pulls, against[1], strict=True)
        scored = tokens / calls if calls else 0.0
        speed, plain = (rows[name]["tokens_per_second"] for name in (item.name, FULL))
        points_of_table.append(
            {
                "vocab": item.vocab,
                "asked": item.shortlist,
                "scored": scored,
                "share": scored / vocab_size,
                "mat": mat,
                "kept": share,
                "kept_error": error(pulls),
                "gap": None if first == item.name else share - against[0],
                "gap_error": None if first == item.name else error([a - b for a, b in both]),
                "head_ms": 1000 * seconds / calls if calls else None,
                "speedup": speed / plain if speed and plain else None,
                "identical": rows[item.name]["identical"],
            }
        )
    return points_of_table


def text(value: float | None, form: str, doubt: float | None = None) -> str:
    beside = "" if doubt is None else f" ± {100 * doubt:.1f}"
    return "-" if value is None else f"{value:{form}}{beside}"


def main() -> None:
    parser = arguments(__doc__, limit=24)
    parser.add_argument("--vocabs", default="frequency,clusters,frequency+context,router")
    parser.add_argument("--shares", default="3,6,12.5,25", help="sizes, in %% of the vocabulary")
    parser.add_argument("--method", default="dyspec")
    parser.add_argument("--budget", type=int, default=16)
    given = parser.parse_args()
    llm = load(given, given.method)
    size = llm.model.vocab_size
    sizes = [max(1, round(size * share / 100)) for share in numbers(given.shares)]
    asked = items(given.method, given.budget, given.vocabs.split(","), sizes)
    results = answers(llm, asked, given)
    points_of_table = points(results, asked, size)
    rows = [
        {
            "vocabulary": one["vocab"],
            "scored": text(one["share"], ".1%"),
            "MAT": text(one["mat"], ".2f"),
            "kept": text(one["kept"], ".1%", one["kept_error"]),
            "less the first": text(one["gap"], "+.1%", one["gap_error"]),
            "head ms": text(one["head_ms"], ".2f"),
            "over full": text(one["speedup"], ".2f"),
            "identical": f"{one['identical']} of {len(results.trials)}",
        }
        for one in points_of_table
    ]
    finish(given, rows, model=llm.name, vocab_size=size, points=points_of_table)


if __name__ == "__main__":
    script(main)
