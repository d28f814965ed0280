"""Bans of `min_tokens` and `bad_words` at nodes of trees, against a plain reading of the whole
output."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cases import examples
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler, bad_word_ids

V = 10
# few tokens, so that they meet
words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)
ids = st.lists(st.integers(0, 3), max_size=8)


def banned_after(output, min_tokens, ends, bad):
    """The plain reading: `output` is all tokens from the answer's first one on."""
    early = set(ends) if len(output) < min_tokens else set()
    longer = ([*output, token] for token in range(V))
    return early | {one[-1] for one in longer if any(one[-len(w) :] == list(w) for w in bad)}


def sampler_of(params, ends, bad):
    return Sampler(params, [1, 2], V, stop_ids=ends, bad=bad)


def params_of(min_tokens, bad, **more):
    return SamplingParams(min_tokens=min_tokens, bad_words=["…" for _ in bad], **more)


@examples(400)
@given(
    bad=words,
    ends=ids,
    min_tokens=st.integers(0, 12),
    steps=st.lists(ids, max_size=4),
    path=ids,
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_a_node_bans_what_the_whole_output_bans(bad, ends, min_tokens, steps, path, penalty):
    params = params_of(min_tokens, bad, repetition_penalty=penalty, logit_bias={0: 2.0})
    free = Sampler(SamplingParams(repetition_penalty=penalty, logit_bias={0: 2.0}), [1, 2], V)
    sampler = sampler_of(params, ends, bad)
    for step in steps:
        sampler.process(torch.zeros(V), path)  # looking does not count
        sampler.extend(step)
        free.extend(step)
    logits = torch.randn(V, generator=torch.Generator().manual_seed(len(path)))
    before, expected = logits.clone(), free.process(logits, path).clone()
    got = sampler.process(logits, path)
    assert torch.equal(logits, before)  # the caller's logits stay
    output = [token for step in (*steps, path) for token in step]
    for token in banned_after(output, min_tokens, ends, bad):
        expected[token] = -math.inf
    assert torch.equal(got, expected)


def test_what_bans_leave_alone():
    sampler = Sampler(SamplingParams(bad_words=["…"]), [5, 6], V, bad=[[5, 6, 7]])
    assert sampler.process(torch.zeros(V))[7] == 0
    assert sampler.process(torch.zeros(V), [5, 6])[7] == -math.inf
    bad = [[V], [2, V + 1], [V, 2], [1]]
    sampler = sampler_of(params_of(1, bad), [V, 3], bad)
    scores = sampler.process(torch.zeros(V), [])
    assert [token for token in range(V) if scores[token] == -math.inf] == [1, 3]
    assert sampler.process(torch.zeros(V), [V, 2])[2] == 0
    params = SamplingParams(min_tokens=1, bad_words="x", logit_bias={2: -math.inf})
    with pytest.raises(InvalidInput, match="min_tokens, bad_words and logit_bias ban all 3 tokens"):
        Sampler(params, [], 3, stop_ids=[0], bad=[[1]])
    Sampler(replace(params, min_tokens=0), [], 3, stop_ids=[0], bad=[[1]])


class Pieces:
    """Takes the longest piece that it knows; `dummy` goes before every text (sentencepiece)."""

    def __init__(self, pieces, dummy=""):
        self.pieces, self.dummy = list(pieces), dummy

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        ids, rest = [], self.dummy + text
        while rest:
            piece = max((piece for piece in self.pieces if rest.startswith(piece)), key=len)
            ids.append(self.pieces.index(piece))
            rest = rest[len(piece) :]
        return ids


PIECES = Pieces(["a", "b", " ", " a", "ab", "\n", "X"])
SPACE_FIRST = Pieces([" ", " no", "no", "w"], dummy=" ")


@pytest.mark.parametrize(("tokenizer", "words", "ids"), [
    (PIECES, ["a"], [[0], [3]]),
    (PIECES, [" a"], [[0], [3]]),
    (PIECES, ["ab"], [[4], [3, 1]]),  # of other lengths too
    (PIECES, ["b"], [[1]]),  # " ", "b" ends with it
    (PIECES, ["ab", "b", "ab"], [[4], [1]]),
    (PIECES, ["\n"], [[5]]),
    (PIECES, ["\na"], [[5, 0]]),  # only spaces make no difference
    (PIECES, ["Xa"], [[6, 0]]),
    (PIECES, [" "], [[2]]),
    (PIECES, [], []),
    (SPACE_FIRST, ["no"], [[1]]),  # " ", " no" ends with it
    (SPACE_FIRST, ["now"], [[1, 3]]),
])  # fmt: skip
def test_words_are_banned_with_and_without_a_leading_space(tokenizer, words, ids):
    assert bad_word_ids(tokenizer, words) == ids


def test_words_of_transformers_tokenizers_and_of_too_many_tokens():
    backend = Tokenizer(models.BPE({"a": 0, "Ġ": 1, "Ġa": 2}, [("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert bad_word_ids(PreTrainedTokenizerFast(tokenizer_object=backend), ["a"]) == [[0], [2]]
    tokenizer = Pieces(["a", " "])
    assert bad_word_ids(tokenizer, ["a" * 255]) == [[0] * 255]
    with pytest.raises(InvalidInput, match=r"bad_words: 'aaaa.* has 257 tokens: .* at most 256"):
        bad_word_ids(tokenizer, ["a" * 256])  # and a space before it
    with pytest.raises(InvalidInput, match="bad_words: 'x' has no tokens"):
        bad_word_ids(SimpleNamespace(encode=lambda text, add_special_tokens: []), ["x"])
