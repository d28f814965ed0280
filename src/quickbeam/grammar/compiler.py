"""Compiles grammars for one model's tokenizer, with llguidance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from quickbeam.errors import InvalidInput
from quickbeam.grammar import trial
from quickbeam.grammar.masks import CompiledGrammar, Masks
from quickbeam.grammar.source import LarkSource, grammar_texts, read_lark
from quickbeam.grammar.spec import Grammar
from quickbeam.grammar.vocabulary import Vocabulary
from quickbeam.machine import in_own_thread

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)
CACHED_GRAMMARS = 64
CACHED_TOKENIZERS = 4  # grammars that name the same tokens share one
MOST_LOGGED = 10  # notes on what answers under a grammar are not held to
LIKE_PYTHON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Compiles grammars for a tokenizer of transformers, and caches those used last.

    `vocab` is the width of the model's logits, `eos` its end-of-sequence ids. The tokenizer is
    converted to llguidance's form with the first grammar; that takes a second for a large
    vocabulary. Calls may come from several threads.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: Collection[int]) -> None:
        self._hf = tokenizer
        self._vocab = vocab
        self._eos = sorted(eos)
        self._compiling = threading.Lock()
        self.compile = lru_cache(CACHED_GRAMMARS)(self._compile)  # cached ones need no lock
        self._tokenizer = lru_cache(CACHED_TOKENIZERS)(self._convert_tokenizer)

    def begin(self, grammar: Grammar, eos_ids: Collection[int]) -> Masks:
        """Return the masks of an answer that any of `eos_ids` ends.

        Raises `InvalidInput` if llguidance is missing, if llguidance can't take the tokenizer or
        the grammar, and if none of `eos_ids` could end the answer.
        """
        compiled = self.compile(grammar)
        closing_ids = [token for token in eos_ids if token in self._vocabulary.special]
        if not closing_ids:
            raise InvalidInput(
                "grammar with ignore_eos: nothing could end the answer where the grammar ends; "
                "leave ignore_eos out, or give a special token in stop_token_ids"
            )
        return Masks(compiled, self._vocab, eos_ids, closing_ids)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar compiled, which may take seconds. Raises `InvalidInput` as `begin`."""
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise InvalidInput(
                "grammar: needs llguidance: pip install 'quickbeam[grammar]'"
            ) from error
        with self._compiling:
            return self._compiled(grammar)

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._vocabulary
        source = read_lark(grammar.text) if grammar.kind == "lark" else LarkSource()
        named = self._named(source)
        named_added = named.intersection(vocabulary.added.values())
        tokenizer = self._tokenizer(named_added - vocabulary.special)
        matcher = self._llguidance_matcher(grammar, tokenizer)
        self._check_spelling(grammar)
        for note in grammar.left_out[:MOST_LOGGED]:
            logger.warning("%s: answers are not held to %s", grammar.kind, note)
        # a warning may quote the grammar, which is part of a request
        for warning in matcher.get_grammar_warnings():
            logger.info("%s: %r", grammar.kind, warning)
        special = vocabulary.special | named_added
        unnamed = vocabulary.missing if source.takes_others else special - named
        return CompiledGrammar(
            matcher,
            eos_ids=tokenizer.eos_tokens,
            size=tokenizer.vocab_size,
            unnamed=np.array(sorted(unnamed), dtype=int),
            named_text=named - special,
        )

    def _llguidance_matcher(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        """Return llguidance's matcher of a grammar. Raises `InvalidInput` for one it can't take."""
        try:
            text = self._llguidance_text(grammar)
        except ValueError as error:
            raise InvalidInput(f"{grammar.kind}: {error}") from error
        reason = trial.failure(text)
        if reason is not None:
            raise InvalidInput(f"{grammar.kind}: {reason}")

        def compile_here() -> LLMatcher:
            from llguidance import LLMatcher

            return LLMatcher(tokenizer, text, log_level=0)

        matcher = in_own_thread(compile_here, 2 * trial.STACK)
        if matcher.is_error():
            reason = matcher.get_error().strip()
            if "panic" in reason:
                reason = "it is too large: make it smaller"
            raise InvalidInput(f"{grammar.kind}: {reason}")
        return matcher

    def _llguidance_text(self, grammar: Grammar) -> str:
        """Return a grammar in llguidance's form. Raises `ValueError` for one that is wrong."""
        from llguidance import LLMatcher

        if grammar.kind == "json_schema":
            whitespace = None if grammar.any_whitespace else LIKE_PYTHON
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=whitespace)  # type: ignore[arg-type]
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        return LLMatcher.grammar_from_lark(grammar.text)

    def _named(self, source: LarkSource) -> frozenset[int]:
        """Return the ids that a grammar names, by their texts or as numbers."""
        vocabulary = self._vocabulary
        by_name = [vocabulary.added[name] for name in source.names & vocabulary.added.keys()]
        named = np.zeros(vocabulary.size, dtype=bool)
        named[by_name] = True
        for first, last in source.ids:
            named[first : last + 1] = True
        return frozenset(named.nonzero()[0].tolist())

    def _check_spelling(self, grammar: Grammar) -> None:
        """Raise `InvalidInput` if no tokens spell the texts that a grammar writes."""
        for text in grammar_texts(grammar):
            unspelt = self._vocabulary.unspelt(text)
            if unspelt:
                raise InvalidInput(
                    f"{grammar.kind}: no token of this model spells {unspelt!r} of {text[:60]!r}: "
                    "leave it out"
                )

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        eos = [token for token in self._eos if token < len(self._hf)]
        if not eos:
            raise InvalidInput(
                "grammar: this model has no end-of-sequence token, by which an answer would end"
            )
        try:
            return Vocabulary(self._hf, self._vocab, eos)
        except Exception as error:  # a tokenizer of another kind may raise anything here
            raise self._not_taken(error) from error

    def _convert_tokenizer(self, named: frozenset[int]) -> LLTokenizer:
        try:
            return self._vocabulary.for_grammar(named)
        except Exception as error:  # llguidance may raise anything here
            raise self._not_taken(error) from error

    def _not_taken(self, error: Exception) -> InvalidInput:
        return InvalidInput(f"grammar: llguidance can't take this model's tokenizer ({error})")
