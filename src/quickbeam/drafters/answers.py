"""What other answers know, as a source of candidates."""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.drafters.base import Context, Source, SourceState
from quickbeam.drafters.texts import AGREED, Match


class Answers(Source):
    """The texts of `Context.texts` as a source of candidates."""

    name = "answers"

    def begin(self, ids: Sequence[int]) -> SourceState:
        return SourceState()

    def match(self, context: Context, path: Sequence[int] = ()) -> Match | None:
        """Return the best match of the text so far, continued by `path`; None without one."""
        if context.texts is None:
            return None
        return context.texts.match([*context.ids[-AGREED:], *path][-AGREED:])
