"""A model's tokenizer in the form in which llguidance reads it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from quickbeam.errors import InvalidInput
from quickbeam.grammar.token_texts import TokenTexts

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """The tokens of a model's tokenizer, as grammars see them.

    A token is either text or special. A special token stands for nothing in a grammar's text. A
    grammar reaches it only by its name or its id, and other tokens spell its text. Special are the
    tokens that decoding leaves out, and those that end an answer. All others are text, added tokens
    too, with the bytes that decoding shows.

    - `size`: how many ids there are.
    - `missing`: the ids without a token.
    - `special`: the ids of the special tokens, and those without a token.
    - `added`: the ids of the added tokens, special or not, by their texts.

    `vocab` is the width of the model's logits, `eos` its end-of-sequence ids. Raises an error of
    any kind for a tokenizer that is not one of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: Collection[int]) -> None:
        # a copy, because its settings are changed
        self._backend = plain_backend(copy.copy(tokenizer.backend_tokenizer))
        decoder = repr(self._backend.decoder)
        if "ByteLevel" not in decoder and "ByteFallback" not in decoder:
            raise InvalidInput(f"a decoder without bytes: {decoder}")
        texts = TokenTexts(tokenizer)
        self.size = max(vocab, len(tokenizer))
        self._texts = [texts.bytes_of(token) for token in range(self.size)]
        self._eos = list(eos)
        added_tokens = tokenizer.added_tokens_decoder
        hidden = {token for token, added in added_tokens.items() if added.special}
        self.missing = frozenset(token for token, text in enumerate(self._texts) if not text)
        self.special = self.missing.union(hidden, eos)
        self.added = {added.content: token for token, added in added_tokens.items()}

    def for_grammar(self, named: Set[int]) -> LLTokenizer:
        """Return the tokenizer for a grammar that names the ids `named`: these are special then."""
        from llguidance import LLTokenizer

        special = self.special.union(named)
        wrapper: Any = _Wrapper(self._backend, self._texts, special, self._eos)
        return LLTokenizer(wrapper, eos_token=self._eos)

    def unspelt(self, text: str) -> str:
        """Return the characters of a text that no token spells, each of them once."""
        text = text.encode(errors="ignore").decode()  # without halves of surrogate pairs
        if self._bytes.issuperset(text.encode()):
            return ""
        return "".join(
            character
            for character in dict.fromkeys(text)
            if character not in self._characters and not self._bytes.issuperset(character.encode())
        )

    @cached_property
    def _bytes(self) -> frozenset[int]:
        """The bytes that are tokens by themselves."""
        return frozenset(
            text[0]
            for token, text in enumerate(self._texts)
            if len(text) == 1 and token not in self.special
        )

    @cached_property
    def _characters(self) -> frozenset[str]:
        """The characters that stand in a token."""
        return frozenset(
            character
            for token, text in enumerate(self._texts)
            if token not in self.special
            for character in text.decode(errors="ignore")
        )


def plain_backend(backend: Backend) -> Backend:
    """Change a tokenizer so that it reads any text as if it stood in the middle of another one.

    It then reads the names of special tokens as ordinary characters.
    """
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    for part in _parts(backend.normalizer):
        if hasattr(part, "prepend"):
            part.prepend = ""
    for part in _parts(backend.pre_tokenizer):
        if hasattr(part, "prepend_scheme"):
            part.prepend_scheme = "never"
        if hasattr(part, "add_prefix_space"):
            part.add_prefix_space = False
    return backend


def _parts(component: Any) -> list[Any]:
    """Return the parts of a component that is a sequence, nested ones too; otherwise itself."""
    if not hasattr(component, "__getitem__"):
        return [component]
    return [inner for part in component for inner in _parts(part)]


class _Wrapper:
    """A tokenizer with the fields and the call that llguidance asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        backend: Backend,
        texts: Sequence[bytes],
        special: Set[int],
        eos: Sequence[int],
    ) -> None:
        self._backend = backend
        self.eos_token_id = eos[0]
        self.special_token_ids = sorted(special)
        self.tokens = list(texts)
        for token in self.special_token_ids:
            self.tokens[token] = texts[token] or b"<[%d]>" % token  # a name that no token has
        self._special = special

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text: the tokenizer's own where they spell it."""
        encoded = text.encode()
        ids = self._backend.encode(text, add_special_tokens=False).ids
        spelt = b"".join(self.tokens[token] for token in ids)
        if spelt == encoded and self._special.isdisjoint(ids):
            return ids
        return self._spell(encoded)

    def _spell(self, text: bytes) -> list[int]:
        """Return the longest token with which a text begins, then that of the remainder, and so on.

        Bytes that no token spells are left out.
        """
        ids = list[int]()
        start = 0
        while start < len(text):
            end = min(len(text), start + self._longest)
            while end > start and text[start:end] not in self._ids:
                end -= 1
            if end > start:
                ids.append(self._ids[text[start:end]])
                start = end
            else:
                start += 1
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The token of each text; of tokens with equal texts, the one with the lowest id."""
        descending = range(len(self.tokens) - 1, -1, -1)
        return {self.tokens[token]: token for token in descending if token not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))
