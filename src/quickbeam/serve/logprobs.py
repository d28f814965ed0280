"""Log-probabilities of tokens in the forms of OpenAI's API, for chats and for completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from quickbeam.engine.result import Logprob
from quickbeam.models.token_texts import TokenTexts

LOWEST = -9999.0  # in place of minus infinity, which JSON does not have


def chat_logprobs(entries: Sequence[Logprob], texts: TokenTexts) -> dict[str, Any]:
    """Return log-probabilities in the form of chats.

    The form is `{"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": None}`.
    """

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = {"token": texts.text_of(token), "bytes": list(texts.bytes_of(token))}
        return {**spelled, "logprob": max(logprob, LOWEST)}

    content = [
        one(entry.token, entry.logprob)
        | {"top_logprobs": [one(*pair) for pair in entry.top.items()]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    entries: Sequence[Logprob | None], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt's tokens in vLLM's form.

    The form is `[None, {"<token id>": {"logprob", "rank", "decoded_token"}}]`. A token that is none
    of the likeliest that are given has the rank None.
    """

    def one(entry: Logprob) -> dict[str, Any]:
        ranks = {token: rank for rank, token in enumerate(entry.top, 1)}
        return {
            str(token): {
                "logprob": max(logprob, LOWEST),
                "rank": ranks.get(token),
                "decoded_token": texts.text_of(token),
            }
            for token, logprob in {entry.token: entry.logprob, **entry.top}.items()
        }

    return [None if entry is None else one(entry) for entry in entries]


class CompletionLogprobs:
    """Log-probabilities in the form of completions, piece by piece.

    The form is `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`. A token's offset is
    the number of characters that are complete before it. `echo` is the text in front of the answer
    and `prompt` its tokens. Where these spell more, as with a token that begins a text, what is too
    much counts as standing before the text.
    """

    def __init__(self, texts: TokenTexts, echo: int = 0, prompt: Sequence[int] = ()) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        spelled = b"".join(map(texts.bytes_of, prompt)).decode(errors="replace")
        self._offset = echo - len(spelled)

    def add(self, tokens: Sequence[int], entries: Sequence[Logprob | None]) -> dict[str, Any]:
        """Return the log-probabilities of further tokens; a prompt's first one has None."""
        offsets = []
        for token in tokens:
            offsets.append(max(self._offset, 0))
            self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
        return {
            "tokens": [self._texts.text_of(token) for token in tokens],
            "token_logprobs": [entry and max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob) -> dict[str, float]:
        """Return log-probabilities by text, the emitted one included; of equal texts the most
        probable."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top.items(), (entry.token, entry.logprob)]:
            top.setdefault(self._texts.text_of(token), max(logprob, LOWEST))
        return top
