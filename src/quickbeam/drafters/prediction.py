"""Predicted outputs as a source: a text that the caller expects the answer to be much like.

An edited file is one: most of the answer is the file as it was. The answer is followed in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.drafters.base import Context, Source
from quickbeam.drafters.texts import Match


class Prediction(Source):
    """Looks up `Context.prediction`, the text that a request predicts, if it predicts one."""

    name = "prediction"

    def match(self, context: Context, path: Sequence[int] = ()) -> Match | None:
        """Return where the prediction goes on after the text continued by `path`; or None."""
        if context.prediction is None:
            return None
        if not path:
            context.prediction.follow(context.ids)
        return context.prediction.match(context.ids, path)
