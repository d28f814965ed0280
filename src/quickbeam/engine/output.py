"""From token ids to text, one token at a time: detokenisation, and where the answer ends. Knows
nothing of drafting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quickbeam.params import SamplingParams

INCOMPLETE = "\ufffd"  # what decoders show for bytes that are not (yet) a character
PENDING = 32  # tokens that may wait for text to show; valid text needs few


class Detokenizer:
    """Turns ids into pieces of text whose concatenation is `tokenizer.decode(ids,
    skip_special_tokens=...)` for ids that spell valid text.

    Only a window of the last few tokens is decoded each time: those that are not shown in full yet,
    after the last ones that are, since a token's spaces may depend on its neighbours. A character
    whose bytes are still arriving is held back. Tokens that decoding leaves out, such as special
    ones, do not enter the window, so that its length has a bound. Works with any tokenizer of
    transformers; `decode` is all that it asks for.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._context = 0  # leading tokens of the window that are shown in full
        self._text = ""  # of the window
        self._shown = ""  # how much of it is shown so far
        self._blank: dict[int, bool] = {}  # by token: whether it shows nothing alone
        self._waiting = 0  # tokens that ended in an incomplete character since text was last shown

    def append(self, token: int) -> str:
        """The text that `token` completes, often its own, possibly empty."""
        text = self._decode([*self._window, token])
        if text == self._text and self._left_out(token):
            return ""
        self._window.append(token)
        self._text = text
        whole = text.rstrip(INCOMPLETE)
        self._waiting = self._waiting + 1 if len(whole) < len(text) else 0
        # a character has 4 bytes at most: what is no character after as many tokens never will be
        # one
        if self._waiting > 4:
            whole = text
        if len(whole) <= len(self._shown):
            # only spaces for ever, of a tokenizer that strips them, come this far
            if len(self._window) - self._context > PENDING:
                del self._window[self._context]
            return ""
        piece = whole[len(self._shown) :]
        self._shown, self._waiting = whole, 0
        if len(whole) == len(text):
            del self._window[: self._context]
            self._context = len(self._window)
            self._text = self._shown = self._decode(self._window)
        return piece

    def flush(self) -> str:
        """The end: what was held back, an incomplete character as U+FFFD."""
        text = self._decode(self._window)
        # Byte-fallback decoders show a whole run of bytes as U+FFFD where its end is incomplete,
        # characters shown before included.
        piece = (
            text[len(self._shown) :]
            if text.startswith(self._shown)
            else self._decode(self._window[self._context :])
        )
        self._window, self._context, self._text, self._shown, self._waiting = [], 0, "", "", 0
        return piece

    def _left_out(self, token: int) -> bool:
        """Whether decoding leaves `token` out: it shows nothing alone, and nothing in the middle of
        a text.

        Alone is not enough, since some tokenizers strip spaces at both ends of a text. It is tried
        twice in a row, since others strip one.
        """
        if token not in self._blank:
            self._blank[token] = not self._decode([token, token])
        window = self._window
        return self._blank[token] and self._decode(
            [*window, token, token, *window]
        ) == self._decode([*window, *window])

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens))


class Output:
    """The answer so far, fed one emitted token at a time, so that it ends at the same token however
    the tokens were found.

    `finish_reason` is None until it ends: `stop` at an end-of-sequence id, a stop id or a stop
    string, `length` at `max_tokens`, or what `close` was given. `token_ids` keeps all tokens fed,
    up to and including the one that ended it. `text` is their text, cut before the earliest stop
    string, or right after it with `include_stop_str_in_output`; an id that ended the answer gives
    no text.

    The first `min_tokens` tokens end it only by `max_tokens`: `ends`, the ids that would, should
    not be emitted there (`Sampler`), and a stop string that is complete by then stays in the text.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, eos_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self.ends = frozenset([*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)])
        self._stop = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens
        self._taken = 0  # characters that `take` has handed out

    def append(self, token: int) -> bool:
        """Add an emitted token; True when the answer ends with it. Raises `ValueError` after the
        end."""
        if self.finish_reason is not None:
            raise ValueError(
                f"the answer has ended already ({self.finish_reason}): feed no more tokens"
            )
        self.token_ids.append(token)
        if token in self.ends and len(self.token_ids) > self._min_tokens:
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
        """For streaming: text that is certain since the last call.

        What may be the beginning of a stop string waits until it is not, unless stop strings stay
        in the text.
        """
        start, self._taken = (
            self._taken,
            len(self.text) - (self._held() if self.finish_reason is None else 0),
        )
        return self.text[start : self._taken]

    def _add(self, piece: str) -> bool:
        """Append text; where that completes a stop string, cut at the earliest and return True. Of
        two that begin together, the shorter."""
        before = len(self.text)
        self.text += piece
        if len(self.token_ids) <= self._min_tokens:
            return False
        found = [
            (start, len(stop))
            for stop in self._stop
            if (start := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            start, length = min(found)
            self.text = self.text[: start + length if self._include_stop else start]
        return bool(found)

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string could still cut."""
        if self._include_stop:
            return 0
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])),
            default=0,
        )
