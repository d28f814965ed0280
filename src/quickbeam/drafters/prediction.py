"""Predicted outputs as sources: texts that the answer, or parts of it, are expected to be like.

An edited file is much like the file as it was. A tool call has parts that are the same in each call
of the tool: names, keys and quotes. The answer is followed in these texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickbeam.drafters.base import Context, Source
from quickbeam.drafters.predicted_text import PredictedText
from quickbeam.drafters.texts import Match


class Prediction(Source):
    """Looks up `Context.prediction`, the text that a request predicts, if it predicts one."""

    name = "prediction"

    def text(self, context: Context) -> PredictedText | None:
        """Return the text that is looked up; None without one."""
        return context.prediction

    def match(self, context: Context, path: Sequence[int] = ()) -> Match | None:
        """Return where the text goes on after the answer so far continued by `path`; or None."""
        text = self.text(context)
        if text is None:
            return None
        if not path:
            text.follow(context.ids)
        return text.match(context.ids, path)


class Skeletons(Prediction):
    """Looks up `Context.skeletons`, the fixed parts of the tool calls that an answer may hold."""

    name = "skeletons"

    def text(self, context: Context) -> PredictedText | None:
        return context.skeletons
