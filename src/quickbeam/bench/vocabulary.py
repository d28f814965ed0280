"""What a shortened vocabulary keeps of the accepted length, and what it saves.

One kind of tree is measured with several vocabularies on the same questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

from rich.table import Table

from quickbeam.bench.methods import MethodItem
from quickbeam.bench.run import Results, Trial
from quickbeam.bench.summary import grouped, summarise
from quickbeam.presets import FULL


@dataclass(frozen=True)
class Kept:
    """The figures of one vocabulary over some prompts, against the full one.

    - `mat`: mean accepted tokens.
    - `kept`: `mat` over that of the full vocabulary. `kept_error`: its standard error over prompts.
    - `gap`: `kept` less that of the first vocabulary that was asked for at the same size.
      `gap_error`: its standard error. Both are None for that first vocabulary and for the full one.
    - `recall`: the share of the text's tokens that were scored (`Summary.recall`).
    - `rare`: how many of the text's tokens were neither frequent nor in the context. `rare_recall`:
      the share of them that was scored. `rare_by_depth`, `rare_held_by_depth`: how many there were
      and how many were scored, by depth.
    - `head_ms`: milliseconds of routing, head and softmax in a call of the drafter. `head_ratio`:
      over those of the full vocabulary.
    - `speedup`: of decoding, over the same kind of tree with the full vocabulary.
    """

    vocab: str
    asked: int | None  # tokens of the shortlist, as asked for
    scored: float  # tokens scored in a call, on average
    share: float  # of the vocabulary
    mat: float
    kept: float
    kept_error: float | None
    gap: float | None
    gap_error: float | None
    recall: float | None
    rare: int
    rare_recall: float | None
    rare_by_depth: list[int]
    rare_held_by_depth: list[int]
    head_ms: float
    head_ratio: float
    speedup: float


def items(
    method: str, budget: int | None, vocabs: Sequence[str], sizes: Sequence[int]
) -> list[MethodItem]:
    """Return the full vocabulary as a method, then each of `vocabs` at each of `sizes`.

    The vocabulary "context" has no size to ask for, so it comes once.
    """
    found = [MethodItem(FULL, method, budget, FULL)]
    for vocab in vocabs:
        if vocab == "context":
            found.append(MethodItem(vocab, method, budget, vocab))
            continue
        found += [MethodItem(f"{vocab}@{size}", method, budget, vocab, size) for size in sizes]
    return found


def points(trials: Sequence[Trial], asked: Sequence[MethodItem], vocab_size: int) -> list[Kept]:
    """Return the figures of each of `asked`, the first of which must be the full vocabulary."""
    rows = {item.name: summarise(trials, item.name, FULL, True) for item in asked}
    mats = {
        item.name: _Ratio(
            [(trial.answers[item.name].decoded, trial.answers[item.name].steps) for trial in trials]
        )
        for item in asked
    }
    first = {item.shortlist: item for item in reversed(asked[1:])}
    found = []
    for item in asked:
        row, full = rows[item.name], rows[FULL]
        kept = mats[item.name].over(mats[FULL])
        other = first.get(item.shortlist)
        gap = (
            None
            if item.vocab == FULL or other is None or other is item
            else kept.less(mats[other.name].over(mats[FULL]))
        )
        heads = [head for trial in trials if (head := trial.answers[item.name].head) is not None]
        rare, held = (
            [sum(column) for column in zip(*numbers, strict=True)]
            for numbers in ([h.rare for h in heads], [h.rare_held for h in heads])
        )
        found.append(
            Kept(
                vocab=str(item.vocab),
                asked=item.shortlist,
                scored=row.shortlist or 0.0,
                share=(row.shortlist or 0.0) / vocab_size,
                mat=row.mean_accepted_tokens or 0.0,
                kept=kept.value,
                kept_error=kept.error,
                gap=None if gap is None else gap.value,
                gap_error=None if gap is None else gap.error,
                recall=row.recall,
                rare=sum(rare),
                rare_recall=sum(held) / sum(rare) if sum(rare) else None,
                rare_by_depth=rare,
                rare_held_by_depth=held,
                head_ms=_over(row.head_ms, row.drafter_calls),
                head_ratio=_over(
                    _over(row.head_ms, row.drafter_calls), _over(full.head_ms, full.drafter_calls)
                ),
                speedup=_over(row.tokens_per_second, full.tokens_per_second),
            )
        )
    return found


class _Figure:
    """A number, and how much each prompt moved it (`pull`, which sums to about 0)."""

    def __init__(self, value: float, pull: Sequence[float]) -> None:
        self.value, self.pull = value, pull

    @property
    def error(self) -> float | None:
        """The standard error over prompts: sqrt(G / (G - 1) * sum of squared pulls), G prompts.

        None for one prompt.
        """
        prompts = len(self.pull)
        return (
            sqrt(prompts / (prompts - 1) * sum(x * x for x in self.pull)) if prompts > 1 else None
        )

    def over(self, other: _Figure) -> _Figure:
        """The quotient. Errors that both have in common cancel (the delta method)."""
        if not other.value:
            return _Figure(0.0, [0.0] * len(self.pull))
        value = self.value / other.value
        return _Figure(
            value,
            [(a - value * b) / other.value for a, b in zip(self.pull, other.pull, strict=True)],
        )

    def less(self, other: _Figure) -> _Figure:
        return _Figure(
            self.value - other.value, [a - b for a, b in zip(self.pull, other.pull, strict=True)]
        )


class _Ratio(_Figure):
    """The sum of the first numbers of pairs over the sum of the second ones, a pair per prompt."""

    def __init__(self, pairs: Sequence[tuple[float, float]]) -> None:
        above, below = (sum(column) for column in zip(*pairs, strict=True))
        value = above / below if below else 0.0
        super().__init__(value, [(a - value * b) / below if below else 0.0 for a, b in pairs])


def record(results: Results, asked: Sequence[MethodItem], vocab_size: int) -> dict[str, object]:
    """Return what the JSON record holds beside the trials."""
    if not results.trials:
        return {"vocab_size": vocab_size, "points": [], "by_category": {}}
    return {
        "vocab_size": vocab_size,
        "points": [asdict(one) for one in points(results.trials, asked, vocab_size)],
        "by_category": {
            name: [asdict(one) for one in points(trials, asked, vocab_size)]
            for name, trials in grouped(results).items()
        },
    }


def overall_table(results: Results, asked: Sequence[MethodItem], vocab_size: int) -> Table:
    """Return a table with a row for each vocabulary and size."""
    table = Table("vocabulary", title=f"all questions, {vocab_size:,} tokens")
    others = (
        "asked",
        "scored",
        "share",
        "MAT",
        "kept",
        "less the first",
        "recall",
        "of rare",
        "head ms a call",
        "of full",
        "speed over full",
    )
    for column in others:
        table.add_column(column, justify="right")
    for one in points(results.trials, asked, vocab_size):
        table.add_row(
            one.vocab,
            "" if one.asked is None else f"{one.asked:,}",
            f"{one.scored:,.0f}",
            f"{one.share:.1%}",
            f"{one.mat:.2f}",
            _with_error(one.kept, one.kept_error),
            "" if one.gap is None else _with_error(one.gap, one.gap_error, "+"),
            "" if one.recall is None else f"{one.recall:.3f}",
            "" if one.rare_recall is None else f"{one.rare_recall:.3f} of {one.rare}",
            f"{one.head_ms:.2f}",
            f"{one.head_ratio:.2f}",
            f"{one.speedup:.2f}x",
        )
    return table


def _with_error(value: float, error: float | None, sign: str = "") -> str:
    return f"{value:{sign}.1%}" + ("" if error is None else f" ± {100 * error:.1f}")


def category_table(results: Results, asked: Sequence[MethodItem], vocab_size: int) -> Table:
    """Return a table of MAT kept, with a row per category and a column per vocabulary."""
    table = Table("category", title="MAT kept, by category (full: MAT)")
    for item in asked:
        table.add_column(item.name, justify="right")
    for category, trials in grouped(results).items():
        found = points(trials, asked, vocab_size)
        table.add_row(
            category,
            *(f"{one.mat:.2f}" if one.vocab == FULL else f"{one.kept:.1%}" for one in found),
        )
    return table


def plot(results: Results, asked: Sequence[MethodItem], vocab_size: int, path: Path) -> None:
    """Write plots of MAT kept and of head time, against the share of the vocabulary scored.

    Raises `OSError` where the file `path` can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    found = points(results.trials, asked, vocab_size)
    for vocab in dict.fromkeys(one.vocab for one in found if one.vocab != FULL):
        curve = sorted((one for one in found if one.vocab == vocab), key=lambda one: one.share)
        shares = [100 * one.share for one in curve]
        axes[0].plot(shares, [100 * one.kept for one in curve], marker="o", label=vocab)
        axes[1].plot(shares, [one.head_ms for one in curve], marker="o", label=vocab)
    axes[0].axhline(100, color="grey", linewidth=0.8)
    axes[1].axhline(found[0].head_ms, color="grey", linewidth=0.8)
    axes[0].set_ylabel("MAT kept, % of the full vocabulary's")
    axes[1].set_ylabel("routing, head and softmax, ms a call")
    for axis in axes:
        axis.set_xlabel("tokens scored, % of the vocabulary")
        axis.legend()
    figure.savefig(path)
    pyplot.close(figure)


def _over(part: float | None, whole: float | None) -> float:
    return part / whole if part is not None and whole else 0.0
