"""Tokenizers and grammars for tests, and what a grammar allows by another hand."""

from functools import cache

import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quickbeam.grammar.compiler import Compiler
from quickbeam.grammar.spec import Grammar

LETTERS = "abcdefghijkl"


def letters(count, *more):
    """Token i is the i-th letter; `<end>` and further special tokens come after them."""
    vocab = {letter: i for i, letter in enumerate(LETTERS[:count])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    return tokenizer


@cache
def compiler(count, vocab):
    """For logits of width `vocab`; token `count` is the end."""
    return Compiler(letters(count), vocab, [count])


def masks(pattern, count, text=(), vocab=None):
    """Of an answer that has said `text`."""
    found = compiler(count, vocab or count + 1).begin(Grammar.regex(pattern), [count])
    found.extend(text)
    return found


@cache
def allowed(pattern, text, count):
    """Tokens that may follow `text`, by another library's partial matches; `count` stands for the
    end."""
    language = regex.compile(pattern)
    found = {
        i
        for i, letter in enumerate(LETTERS[:count])
        if language.fullmatch(text + letter, partial=True)
    }
    return frozenset(found | ({count} if language.fullmatch(text) else set()))
