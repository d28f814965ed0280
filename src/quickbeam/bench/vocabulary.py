"""What a shortened vocabulary keeps of the accepted length, and what it saves: one tree, several vocabularies, the same questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from quickbeam.bench.methods import MethodItem
from quickbeam.bench.run import Results
from quickbeam.bench.summary import Summary, by_category, summaries

FULL = "full"


@dataclass(frozen=True)
class Kept:
    """One vocabulary over some prompts, against the full one.

    `mat_kept`: its MAT over that of the full vocabulary; `head_ratio`: milliseconds of routing, head and softmax in a call of the drafter
    (`head_ms`) over those of the full vocabulary; `speedup`: of decoding, over the same tree with the full vocabulary.
    """

    vocab: str
    asked: int | None  # tokens
    tokens: float  # scored in a call, on average
    share: float  # of the vocabulary
    mat: float
    mat_kept: float
    recall: float | None
    head_ms: float
    head_ratio: float
    speedup: float


def items(method: str, budget: int | None, vocabs: Sequence[str], sizes: Sequence[int]) -> list[MethodItem]:
    """The full vocabulary, then each of `vocabs` at each of `sizes`; the context, which has no size to ask for, once."""
    found = [MethodItem(FULL, method, budget, FULL)]
    for vocab in vocabs:
        if vocab == "context":
            found.append(MethodItem(vocab, method, budget, vocab))
            continue
        found += [MethodItem(f"{vocab}@{size}", method, budget, vocab, size) for size in sizes]
    return found


def kept(rows: Mapping[str, Summary], asked: Sequence[MethodItem], vocab_size: int) -> list[Kept]:
    """`rows` as shares of the full vocabulary's."""
    full = rows[FULL]
    return [
        Kept(
            vocab=str(item.vocab),
            asked=item.shortlist,
            tokens=row.shortlist or 0.0,
            share=(row.shortlist or 0.0) / vocab_size,
            mat=row.mean_accepted_tokens or 0.0,
            mat_kept=_over(row.mean_accepted_tokens, full.mean_accepted_tokens),
            recall=row.recall,
            head_ms=_over(row.head_ms, row.drafter_calls),
            head_ratio=_over(_over(row.head_ms, row.drafter_calls), _over(full.head_ms, full.drafter_calls)),
            speedup=_over(row.tokens_per_second, full.tokens_per_second),
        )
        for item in asked
        if (row := rows[item.name])
    ]


def record(results: Results, asked: Sequence[MethodItem], vocab_size: int) -> dict[str, object]:
    """What the JSON record has beside the trials."""
    groups = by_category(results)
    return {
        "vocab_size": vocab_size,
        "overall": [asdict(one) for one in kept(summaries(results), asked, vocab_size)],
        "by_category": {name: [asdict(one) for one in kept(rows, asked, vocab_size)] for name, rows in groups.items()},
    }


def overall_table(results: Results, asked: Sequence[MethodItem], vocab_size: int) -> Table:
    """A row a vocabulary and size."""
    table = Table("vocabulary", title=f"all questions, {vocab_size:,} tokens")
    for column in ("asked", "scored", "share", "MAT", "kept", "recall", "head ms a call", "of full", "speed over full"):
        table.add_column(column, justify="right")
    for one in kept(summaries(results), asked, vocab_size):
        table.add_row(
            one.vocab,
            "" if one.asked is None else f"{one.asked:,}",
            f"{one.tokens:,.0f}",
            f"{one.share:.1%}",
            f"{one.mat:.2f}",
            f"{one.mat_kept:.1%}",
            "" if one.recall is None else f"{one.recall:.3f}",
            f"{one.head_ms:.2f}",
            f"{one.head_ratio:.2f}",
            f"{one.speedup:.2f}x",
        )
    return table


def category_table(results: Results, asked: Sequence[MethodItem], vocab_size: int) -> Table:
    """MAT kept, a row a category and a column a vocabulary."""
    table = Table("category", title="MAT kept, by category (full: MAT)")
    for item in asked:
        table.add_column(item.name, justify="right")
    for category, rows in by_category(results).items():
        found = kept(rows, asked, vocab_size)
        table.add_row(category, *(f"{one.mat:.2f}" if one.vocab == FULL else f"{one.mat_kept:.1%}" for one in found))
    return table


def plot(results: Results, asked: Sequence[MethodItem], vocab_size: int, path: Path) -> None:
    """MAT kept and head time against the share of the vocabulary that is scored. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    found = kept(summaries(results), asked, vocab_size)
    for vocab in dict.fromkeys(one.vocab for one in found if one.vocab != FULL):
        points = sorted((one for one in found if one.vocab == vocab), key=lambda one: one.share)
        shares = [100 * one.share for one in points]
        axes[0].plot(shares, [100 * one.mat_kept for one in points], marker="o", label=vocab)
        axes[1].plot(shares, [one.head_ms for one in points], marker="o", label=vocab)
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
