"""Log-probabilities of tokens as OpenAI's API shows them, for chats and for completions."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quickbeam.engine.result import Logprob

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts:
    """The bytes of each token of a vocabulary, as they stand in the middle of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = {
            token: str(added.content).encode()
            for token, added in tokenizer.added_tokens_decoder.items()
        }

    def bytes_of(self, token: int) -> bytes:
        """Empty for ids that no token has."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        """With U+FFFD for bytes that are a part of a character."""
        return self.bytes_of(token).decode(errors="replace")

    def _find(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(BYTES[character] for character in piece if character in BYTES)
        if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(found[1], 16)])
        return str(piece).replace("▁", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        """Whether each character of a token stands for a byte."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in repr(getattr(backend, "decoder", None))


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level vocabularies: those that print stand for themselves,
    the others for 256 and on, in order."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTES = _byte_alphabet()


def chat_logprobs(entries: Sequence[Logprob], texts: TokenTexts) -> dict[str, Any]:
    """The form of chats: `{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text_of(token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(texts.bytes_of(token)),
        }

    content = [
        {
            **one(entry.token, entry.logprob),
            "top_logprobs": [one(*pair) for pair in entry.top.items()],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The form of completions, piece by piece: `{"tokens", "token_logprobs", "top_logprobs",
    "text_offset"}`. `offset`: characters of text before the first token. A token begins where the
    characters before it end."""

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts, self._offset = texts, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, entries: Sequence[Logprob]) -> dict[str, Any]:
        """Of further tokens."""
        offsets, tops = [], []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.bytes_of(entry.token)))
            tops.append(self._top(entry))
        return {
            "tokens": [self._texts.text_of(entry.token) for entry in entries],
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob) -> dict[str, float]:
        """By text, the emitted token included; of tokens that look alike, the most probable."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top.items(), (entry.token, entry.logprob)]:
            top.setdefault(self._texts.text_of(token), max(logprob, LOWEST))
        return top
