"""Earlier answers as a source: how finished texts went on where they agree with this one's end."""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.drafters.base import Context, Source
from quickbeam.drafters.texts import Match


class Answers(Source):
    """Looks up the texts of `Context.texts`, which `AnswerMemory` keeps."""

    name = "answers"

    def match(self, context: Context, path: Sequence[int] = ()) -> Match | None:
        """Return the best match of the text so far, continued by `path`; None without one."""
        if context.texts is None:
            return None
        return context.texts.match(context.ids, path)
