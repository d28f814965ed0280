"""From token ids to text, one token at a time: detokenisation, and where the answer ends. Knows nothing of drafting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quickbeam.sampling import SamplingParams

INCOMPLETE = "\ufffd"  # what decoders show for bytes that are not (yet) a character


class Detokenizer:
    """Turns ids into pieces of text whose concatenation is `tokenizer.decode(ids, skip_special_tokens=...)` for ids that spell valid text.

    Only a window of the last few tokens is decoded each time: those that are not shown in full yet, after the last ones that are, since a
    token's spaces may depend on its neighbours. A character whose bytes are still arriving is held back. Works with any tokenizer of
    transformers; `decode` is all that it asks for.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._context = 0  # leading tokens of the window that are shown in full
        self._shown = ""  # what the window's text shows so far
        self._waiting = 0  # tokens that ended in an incomplete character since text was last shown

    def append(self, token: int) -> str:
        """The text that `token` completes, often its own, possibly empty."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(INCOMPLETE)
        self._waiting = self._waiting + 1 if len(whole) < len(text) else 0
        if self._waiting > 4:  # a character has 4 bytes at most: what is no character after as many tokens never will be one
            whole = text
        if len(whole) <= len(self._shown):
            return ""
        piece = whole[len(self._shown) :]
        self._shown, self._waiting = whole, 0
        if len(whole) == len(text):
            del self._window[: self._context]
            self._context = len(self._window)
            self._shown = self._decode(self._window)
        return piece

    def flush(self) -> str:
        """The end: what was held back, an incomplete character as U+FFFD."""
        text = self._decode(self._window)
        # Byte-fallback decoders show a whole run of bytes as U+FFFD where its end is incomplete, characters shown before included.
        piece = text[len(self._shown) :] if text.startswith(self._shown) else self._decode(self._window[self._context :])
        self._window, self._context, self._shown, self._waiting = [], 0, "", 0
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens))


class Output:
    """The answer so far, fed one emitted token at a time, so that it ends at the same token however the tokens were found.

    `finish_reason` is None until it ends: `stop` at an end-of-sequence id, a stop id or a stop string, `length` at `max_tokens`, or what
    `close` was given. `token_ids` keeps all tokens fed, up to and including the one that ended it. `text` is their text, cut before
    the earliest stop string; an id that ended the answer gives no text.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, eos_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._stop = tuple(params.stop)
        self._max_tokens = params.max_tokens
        self._taken = 0  # characters that `take` has handed out

    def append(self, token: int) -> bool:
        """Add an emitted token; True when the answer ends with it. Raises `ValueError` after the end."""
        if self.finish_reason is not None:
            raise ValueError(f"the answer has ended already ({self.finish_reason}): feed no more tokens")
        self.token_ids.append(token)
        if token in self._ends:
            self.close("stop")
        elif self._add(self._detokenizer.append(token)):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._max_tokens:
            self.close("length")
        return self.finish_reason is not None

    def close(self, reason: str) -> None:
        """End the answer here, with what the detokenizer held back. Does nothing after the end."""
        if self.finish_reason is None:
            self.finish_reason = "stop" if self._add(self._detokenizer.flush()) else reason

    def take(self) -> str:
        """For streaming: text that is certain since the last call. What may be the beginning of a stop string waits until it is not."""
        start, self._taken = self._taken, len(self.text) - (self._held() if self.finish_reason is None else 0)
        return self.text[start : self._taken]

    def _add(self, piece: str) -> bool:
        """Append text; where that completes a stop string, cut before the earliest and return True."""
        before = len(self.text)
        self.text += piece
        starts = (self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        cut = min((start for start in starts if start >= 0), default=-1)
        if cut >= 0:
            self.text = self.text[:cut]
        return cut >= 0

    def _held(self) -> int:
        """Length of the longest end of the text that could begin a stop string."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0)
