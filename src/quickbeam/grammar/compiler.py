"""Compiles grammars for one model's tokenizer, with llguidance."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from functools import cached_property, lru_cache, partial
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
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)
KEPT = 64  # how many compiled grammars are kept
# how many forms of the tokenizer are kept: grammars that name the same tokens share one
KEPT_TOKENIZERS = 4
MOST_LOGGED = 10  # of what answers under a grammar are not held to
LIKE_PYTHON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Compiles grammars for a tokenizer of transformers, and keeps those used last.

    `vocab` is the width of the model's logits, `eos` its end-of-sequence ids. The tokenizer is
    converted to llguidance's form with the first grammar; that takes a second for a large
    vocabulary. Calls may come from several threads.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: Collection[int]) -> None:
        self._hf, self._vocab, self._eos = tokenizer, vocab, sorted(eos)
        self._compiling = threading.Lock()
        self.compile = lru_cache(KEPT)(self._compile)  # known grammars never wait
        self._tokenizer = lru_cache(KEPT_TOKENIZERS)(self._convert_tokenizer)

    def begin(self, grammar: Grammar, ends: Collection[int]) -> Masks:
        """Return the masks of an answer that the ids `ends` end.

        Raises `InvalidInput` if llguidance is missing, if it can't take the tokenizer or the
        grammar, and if no id is left that could end the answer.
        """
        compiled = self.compile(grammar)
        closing = [token for token in ends if token in self._vocabulary.special]
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
        vocabulary = self._vocabulary
        source = read_lark(grammar.text) if grammar.kind == "lark" else LarkSource()
        named = self._named(source)
        named_added = named.intersection(vocabulary.added.values())
        tokenizer = self._tokenizer(named_added - vocabulary.special)
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
        compile_text = partial(LLMatcher, tokenizer, text, log_level=0)
        matcher = in_own_thread(compile_text, 2 * trial.STACK)
        if matcher.is_error():
            why = matcher.get_error().strip()
            why = "it is too large: make it smaller" if "panic" in why else why
            raise InvalidInput(f"{grammar.kind}: {why}")
        self._check_spelling(grammar)
        for note in grammar.left_out[:MOST_LOGGED]:
            logger.warning("%s: answers are not held to %s", grammar.kind, note)
        # a warning may quote the grammar, which is part of a request
        for warning in matcher.get_grammar_warnings():
            logger.info("%s: %r", grammar.kind, warning)
        special = vocabulary.special | named_added
        return CompiledGrammar(
            matcher,
            ends=tokenizer.eos_tokens,
            size=tokenizer.vocab_size,
            unnamed=np.array(
                sorted(vocabulary.missing if source.takes_others else special - named), dtype=int
            ),
            named_text=named - special,
        )

    def _named(self, source: LarkSource) -> frozenset[int]:
        """Return the ids that a grammar names, by their texts or as numbers."""
        vocabulary = self._vocabulary
        named = np.zeros(vocabulary.size, dtype=bool)
        named[[vocabulary.added[name] for name in source.names & vocabulary.added.keys()]] = True
        for first, last in source.ids:
            named[first : last + 1] = True
        return frozenset(named.nonzero()[0].tolist())

    def _check_spelling(self, grammar: Grammar) -> None:
        """Raise `InvalidInput` if no tokens spell the texts that a grammar writes."""
        for text in grammar_texts(grammar):
            if unspelt := self._vocabulary.unspelt(text):
                raise InvalidInput(
                    f"{grammar.kind}: no token of this model spells {unspelt!r} of {text[:60]!r}: "
                    "leave it out"
                )

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        known = [token for token in self._eos if token < len(self._hf)]
        if not known:
            raise InvalidInput(
                "grammar: this model has no end-of-sequence token, by which an answer would end"
            )
        try:
            return Vocabulary(self._hf, self._vocab, known)
        except Exception as error:  # a tokenizer of another kind may raise anything here
            raise self._not_taken(error) from error

    def _convert_tokenizer(self, named: frozenset[int]) -> LLTokenizer:
        try:
            return self._vocabulary.for_grammar(named)
        except Exception as error:  # llguidance may raise anything here
            raise self._not_taken(error) from error

    def _not_taken(self, error: Exception) -> InvalidInput:
        return InvalidInput(f"grammar: llguidance can't take this model's tokenizer ({error})")
