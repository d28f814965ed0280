"""The bytes that tokens stand for."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

# the bytes that byte-level vocabularies write as the character of the same number
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
# the others, which they write as U+0100 and on
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# the byte for each character of a byte-level vocabulary
BYTES = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + i): byte for i, byte in enumerate(_OTHERS)},
}


class TokenTexts:
    """The bytes of each token of a vocabulary, as decoding shows them in the middle of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cached = dict[int, bytes]()

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id without a token."""
        if token not in self._cached:
            self._cached[token] = self._read(token)
        return self._cached[token]

    def text_of(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for bytes that are only part of a character."""
        return self.bytes_of(token).decode(errors="replace")

    def _read(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._byte_level:
            if all(character in BYTES for character in piece):
                return bytes(BYTES[character] for character in piece)
            return str(piece).encode()  # an added token, whose text is written as it is
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return str(piece).replace("▁", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        """Whether each character of a token's string stands for one byte."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in repr(getattr(backend, "decoder", None))
