"""Log-probabilities in the forms of chats, of completions, and of vLLM for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from quickbeam.engine.result import Logprob
from quickbeam.grammar.token_texts import TokenTexts

LOWEST = -9999.0  # in place of minus infinity, which JSON does not have


def chat_logprobs(entries: Sequence[Logprob], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of chats, one object a token.

    The form is `{"token", "bytes", "logprob", "top_logprobs"}`.
    """

    def spelled(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text_of(token),
            "bytes": list(texts.bytes_of(token)),
            "logprob": max(logprob, LOWEST),
        }

    content = list[dict[str, Any]]()
    for entry in entries:
        top = [spelled(token, logprob) for token, logprob in entry.top.items()]
        content.append({**spelled(entry.token, entry.logprob), "top_logprobs": top})
    return content


def prompt_logprobs(
    entries: Sequence[Logprob | None], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt's tokens in vLLM's form.

    The form is `[None, {"<token id>": {"logprob", "rank", "decoded_token"}}]`. A token that is none
    of the likeliest that are given has the rank None.
    """

    def ranked(entry: Logprob) -> dict[str, Any]:
        ranks = {token: rank for rank, token in enumerate(entry.top, 1)}
        logprobs = {entry.token: entry.logprob, **entry.top}
        return {
            str(token): {
                "logprob": max(logprob, LOWEST),
                "rank": ranks.get(token),
                "decoded_token": texts.text_of(token),
            }
            for token, logprob in logprobs.items()
        }

    return [None if entry is None else ranked(entry) for entry in entries]


class CompletionLogprobs:
    """Log-probabilities in the form of completions, piece by piece.

    The form is `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`. A token's offset is
    the number of characters that are complete before it.

    - `hidden`: tokens that an answer's text leaves out.
    - `echo`: the length in characters of the text in front of the answer.
    - `prompt`: the tokens of that text. Where they spell more, as with a token that begins a text,
      what is too much counts as standing before the text.
    """

    def __init__(
        self,
        texts: TokenTexts,
        hidden: Collection[int] = (),
        echo: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        self._texts = texts
        self._hidden = hidden
        self._prompt_left = len(prompt)  # tokens of the prompt that are still to come
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        spelled = b"".join(texts.bytes_of(token) for token in prompt).decode(errors="replace")
        self._offset = echo - len(spelled)

    def add(self, tokens: Sequence[int], entries: Sequence[Logprob | None]) -> dict[str, Any]:
        """Return the log-probabilities of further tokens; a prompt's first one has None."""
        offsets = list[int]()
        for token in tokens:
            offsets.append(max(self._offset, 0))
            if self._prompt_left > 0 or token not in self._hidden:
                self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
            self._prompt_left -= 1
        return {
            "tokens": [self._texts.text_of(token) for token in tokens],
            "token_logprobs": [entry and max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob) -> dict[str, float]:
        """Return log-probabilities by text; of equal texts the most probable."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top.items(), (entry.token, entry.logprob)]:
            top.setdefault(self._texts.text_of(token), max(logprob, LOWEST))
        return top
