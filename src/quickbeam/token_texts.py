"""The bytes that tokens stand for."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

# bytes whose character in byte-level vocabularies is their own; the others have U+0100 and on
_OWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _OWN]
# the byte for each character
BYTES = {chr(byte): byte for byte in _OWN} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class TokenTexts:
    """The bytes of each token of a vocabulary, as decoding shows them in the middle of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = dict[int, bytes]()

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id without a token."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for bytes that are only part of a character."""
        return self.bytes_of(token).decode(errors="replace")

    def _find(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._byte_level:
            if all(character in BYTES for character in piece):
                return bytes(BYTES[character] for character in piece)
            return str(piece).encode()  # an added token, whose text is written as it is
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(byte[1], 16)])
        return str(piece).replace("▁", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        """Whether each character of a token's string stands for one byte."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in repr(getattr(backend, "decoder", None))
