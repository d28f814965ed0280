"""Compiles grammars for one model's tokenizer, with llguidance."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Collection
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from quickbeam.errors import InvalidInput
from quickbeam.grammar import trial
from quickbeam.grammar.masks import CompiledGrammar, Masks
from quickbeam.grammar.spec import Grammar
from quickbeam.machine import in_own_thread

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)
KEPT = 64  # how many compiled grammars are kept
LIKE_PYTHON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Compiles grammars for a tokenizer of transformers, and keeps those used last.

    `vocab` is the width of the model's logits, `eos` its end-of-sequence ids. The tokenizer is
    converted to llguidance's form with the first grammar; that takes a second for a large
    vocabulary. Calls may come from several threads.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: Collection[int]) -> None:
        self._hf, self._vocab, self._eos = tokenizer, vocab, sorted(eos)
        self._tokenizer: LLTokenizer | None = None
        self._compiling = threading.Lock()
        self.compile = lru_cache(KEPT)(self._compile)  # known grammars never wait

    def begin(self, grammar: Grammar, ends: Collection[int]) -> Masks:
        """Return the masks of an answer that the ids `ends` end.

        Raises `InvalidInput` if llguidance is missing, if it can't take the tokenizer or the
        grammar, and if no id is left that could end the answer.
        """
        compiled = self.compile(grammar)
        assert self._tokenizer is not None
        known, special = self._tokenizer.vocab_size, self._tokenizer.is_special_token
        closing = [
            token for token in ends if token in self._eos or (token < known and special(token))
        ]
        if not closing:
            raise InvalidInput(
                "grammar with ignore_eos: nothing could end the answer where the grammar ends; "
                "leave ignore_eos out, or give a special token in stop_token_ids"
            )
        return Masks(compiled, self._vocab, ends, closing)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar compiled, which may take seconds. Raises `InvalidInput` as `begin`."""
        with self._compiling:
            return self._compiled(grammar)

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise InvalidInput(
                "grammar: needs llguidance: pip install 'quickbeam[grammar]'"
            ) from error
        if self._tokenizer is None:
            self._tokenizer = self._convert_tokenizer()
        try:
            if grammar.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(
                    grammar.text,
                    defaults=None if grammar.any_whitespace else LIKE_PYTHON,  # type: ignore[arg-type]
                )
            else:
                text = getattr(LLMatcher, f"grammar_from_{grammar.kind}")(grammar.text)
        except ValueError as error:
            raise InvalidInput(f"{grammar.kind}: {error}") from error
        if (why := trial.failure(text)) is not None:
            raise InvalidInput(f"{grammar.kind}: {why}")
        compile_text = partial(LLMatcher, self._tokenizer, text, log_level=0)
        matcher = in_own_thread(compile_text, 2 * trial.STACK)
        if matcher.is_error():
            why = matcher.get_error().strip()
            why = "it is too large: make it smaller" if "panic" in why else why
            raise InvalidInput(f"{grammar.kind}: {why}")
        # a warning may quote the grammar, which is part of a request
        for warning in matcher.get_grammar_warnings():
            logger.info("%s: %r", grammar.kind, warning)
        return CompiledGrammar(matcher, self._tokenizer.eos_tokens, self._tokenizer.vocab_size)

    def _convert_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        known = [token for token in self._eos if token < len(self._hf)]
        if not known:
            raise InvalidInput(
                "grammar: this model has no end-of-sequence token, by which an answer would end"
            )
        try:
            backend = copy.copy(self._hf.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            size = max(self._vocab, len(self._hf))
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=known)
        except Exception as error:  # llguidance may raise anything here
            raise InvalidInput(
                f"grammar: llguidance can't take this model's tokenizer ({error})"
            ) from error
