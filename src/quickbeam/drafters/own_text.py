"""The model's own text as a source: what followed the last tokens in what it wrote before."""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.drafters.base import Context, SuccessorSource
from quickbeam.drafters.ngram_table import ORDER
from quickbeam.drafters.successors import Successors


class OwnText(SuccessorSource):
    """Looks up `Context.table`, the n-grams of what the model wrote before, if there are any."""

    name = "table"

    def knows_of(self, context: Context) -> bool:
        return context.table is not None

    def after(self, context: Context, path: Sequence[int]) -> Successors | None:
        if context.table is None:
            return None
        return context.table.after([*context.ids[-ORDER:], *path][-ORDER:])
