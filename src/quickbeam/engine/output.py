"""From token ids to text, token by token, and where an answer ends. Knows nothing of drafting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

from quickbeam.params import SamplingParams

INCOMPLETE = "\ufffd"  # what decoders show for bytes that are not (yet) a character
LATER = 64  # the most tokens that are decoded later, so that no step decodes a whole long answer
PENDING = 32  # how many tokens may wait before they show text; valid text needs few


class NullTokenizer:
    """A tokenizer for a text that nobody reads: it decodes all tokens to empty text."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


class Detokenizer:
    """Turns ids into pieces of text.

    For ids of valid text, all pieces are `tokenizer.decode(ids, skip_special_tokens=...)`.

    Each time, only a window of the last few tokens is decoded: those that are not shown in full
    yet, and before them the last ones that are, since a token's spaces may depend on its
    neighbours. A character whose bytes are still arriving is held back. Tokens that decoding leaves
    out do not enter the window, so that its length has a bound. It works with any tokenizer of
    transformers, of which it uses only `decode`.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._decoder: Callable[..., str] = tokenizer.decode
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._context = 0  # leading tokens of the window that are shown in full
        self._text = ""  # the decoded window
        self._shown = ""  # the part of it that is shown so far
        self._blank: dict[int, bool] = {}  # by token: whether it shows no text alone
        self._waiting = 0  # tokens that ended in an incomplete character since text was last shown

    def append(self, token: int) -> str:
        """Return the text that `token` completes: often its own, possibly none."""
        text = self._decode([*self._window, token])
        if text == self._text and self._left_out(token):
            return ""
        self._window.append(token)
        self._text = text
        complete = text.rstrip(INCOMPLETE)
        self._waiting = self._waiting + 1 if len(complete) < len(text) else 0
        if self._waiting > 4:  # a character has 4 bytes at most: these never will be one
            complete = text
        if len(complete) <= len(self._shown):
            # only endless spaces, with a tokenizer that strips them, get here
            if len(self._window) - self._context > PENDING:
                del self._window[self._context]
            return ""
        piece = complete[len(self._shown) :]
        self._shown = complete
        self._waiting = 0
        if len(complete) == len(text):
            del self._window[: self._context]
            self._context = len(self._window)
            self._text = self._shown = self._decode(self._window)
        return piece

    def flush(self) -> str:
        """Return the text held back, at the end. An incomplete character becomes U+FFFD."""
        text = self._decode(self._window)
        # byte-fallback decoders show a run of bytes with an incomplete end as U+FFFD, all of it
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._window[self._context :])

    def _left_out(self, token: int) -> bool:
        # Alone is not enough, since some tokenizers strip spaces at both ends of a text. Twice in a
        # row, since other tokenizers strip one space.
        if token not in self._blank:
            self._blank[token] = not self._decode([token, token])
        window = self._window
        inside = [*window, token, token, *window]
        return self._blank[token] and self._decode(inside) == self._decode([*window, *window])

    def _decode(self, tokens: list[int]) -> str:
        return str(self._decoder(tokens, skip_special_tokens=self._skip_special_tokens))


class Output:
    """The answer so far, fed one emitted token at a time.

    It ends at the same token whatever drafts the tokens came from.

    - `finish_reason`: None until the answer ends. Then `stop` (an end-of-sequence id, a stop id or
      a stop string), `length` (`max_tokens`), or what `close` was given.
    - `stop_string`: the stop string that ended the answer; None if none did.
    - `token_ids`: all tokens fed, including the one that ended the answer.
    - `text`: their text, cut before the earliest stop string, or right after it with
      `include_stop_str_in_output`. An id that ended the answer gives no text. May be read from any
      thread.
    - `stop_ids`: the ids that end the answer.

    Among the first `min_tokens` tokens only `max_tokens` ends the answer. `stop_ids` should not be
    emitted there (`Sampler` bans them). A stop string that is complete by then stays in the text.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, eos_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._text = ""
        # Without stop strings a token's text is not needed before someone reads it. Behind a pass
        # the tokenizer finds cold caches: tokens decoded together take a tenth of the time.
        self._undecoded: deque[int] = deque()
        self._reading = Lock()  # held by the thread that decodes
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(eos_ids)
        self.stop_ids = frozenset(stop_ids)
        self._stop = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._taken = 0  # how many characters `take` has returned

    def append(self, token: int) -> bool:
        """Add an emitted token. Returns True if the answer ends with it.

        Raises `ValueError` after the end.
        """
        if self.finish_reason is not None:
            raise ValueError(
                f"the answer has ended already ({self.finish_reason}): feed no more tokens"
            )
        self.token_ids.append(token)
        if token in self.stop_ids and len(self.token_ids) > self._min_tokens:
            self.close("stop")
        else:
            self._undecoded.append(token)
            decodes = bool(self._stop) or len(self._undecoded) >= LATER
            if decodes and self._decode():
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self._max_tokens:
                self.close("length")
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        if not self._stop:  # otherwise `append` decodes, and sees where the answer ends
            self._decode()
        return self._text

    def _decode(self) -> bool:
        """Append the text of tokens that have none yet. Returns whether a stop string is in it."""
        with self._reading:
            while self._undecoded:
                if self._add(self._detokenizer.append(self._undecoded.popleft())):
                    return True
        return False

    def close(self, reason: str) -> None:
        """End the answer here, with the text that was held back. Does nothing after the end."""
        if self.finish_reason is not None:
            return
        try:
            self._decode()
            with self._reading:
                if self._add(self._detokenizer.flush()):
                    reason = "stop"
        finally:  # a tokenizer that fails ends the answer, too
            self.finish_reason = reason

    def take(self) -> str:
        """Return the text that has become certain since the last call, for streaming.

        What may begin a stop string waits until it does not, unless stop strings stay in the text.
        """
        text = self.text
        held = 0
        if self._stop and not self._include_stop:
            with self._reading:
                text = self._text
                held = self._partial_stop() if self.finish_reason is None else 0
        start = self._taken
        self._taken = len(text) - held
        return text[start : self._taken]

    def _partial_stop(self) -> int:
        """Return the length of the longest end of the text with which a stop string begins.

        A complete one (among the first `min_tokens` tokens) does not count.
        """
        text = self._text
        longest = 0
        for stop in self._stop:
            for length in range(1, min(len(stop), len(text) + 1)):
                # comparing one character first, since slices of a long stop string take time
                if stop[length - 1] == text[-1] and text.endswith(stop[:length]):
                    longest = max(longest, length)
        return longest

    def _add(self, piece: str) -> bool:
        """Append text. If it completes a stop string, cut the text there and return True.

        The earliest stop string counts; of two that begin at the same position, the shorter one.
        """
        # another thread may look at the text at any time, so it never holds what is cut off
        text = self._text + piece
        first_end = len(self._text) + 1  # where a stop string that this piece completes may end
        matches = list[tuple[int, int]]()  # start and length
        for stop in self._stop:
            start = text.find(stop, max(0, first_end - len(stop)))
            if start >= 0:
                matches.append((start, len(stop)))
        stopped = bool(matches) and len(self.token_ids) > self._min_tokens
        if stopped:
            start, length = min(matches)
            self.stop_string = text[start : start + length]
            text = text[: start + length if self._include_stop else start]
        self._text = text
        return stopped
