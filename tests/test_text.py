"""Detokenisation and stopping, against decoding everything at each token."""

import json
from collections import deque
from functools import cache, partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cases import examples
from quickbeam.engine.output import Detokenizer, Output
from quickbeam.grammar import token_texts
from quickbeam.params import SamplingParams

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "naïve café, Größe, señor: déjà vu",
    "今天天气很好。我们去公园散步吧。天气好。心情好。",
    "🎉🎊 party time 🎉🎉🚀 👩‍👩‍👧‍👦 family",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
    "Привет, мир! Как дела?",
] * 4
SPECIAL = ["<eos>", "<user>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level(merge_all=False):
    """As GPT-2's. `merge_all`: merges cross words and characters, so tokens end within one."""
    tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = level(add_prefix_space=False, use_regex=not merge_all)
    tokenizer.decoder = decoders.ByteLevel()
    given = dict(initial_alphabet=level.alphabet(), special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=600, **given))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL)


@cache
def sentencepiece():
    """As Llama 2's: a leading space that decoding strips, single bytes for unknown characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    latin, special = filter(str.isascii, SENTENCES), ["<unk>", *SPECIAL]
    given = dict(vocab_size=150, special_tokens=special, show_progress=False)
    trained.train_from_iterator(latin, trainers.BpeTrainer(**given))
    model = json.loads(trained.to_str())["model"]
    known = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = {token: i for i, token in enumerate([*known, *BYTES])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", additional_special_tokens=SPECIAL
    )


MERGED = partial(byte_level, True)
TOKENIZERS = {"byte-level": byte_level, "merged bytes": MERGED, "sentencepiece": sentencepiece}
WORDS = ["the", " dog", " ", "  ", "\n", "天气", "🎉", "🎊🚀", "é", "ß", ".", ",", "привет"]
WORDS.append("👩‍👩‍👧‍👦")
kinds = st.sampled_from(list(TOKENIZERS))
parts = st.sampled_from(WORDS + SENTENCES) | st.text(alphabet="ab c你好🎉é\n", max_size=4)
texts = st.lists(parts, max_size=8).map("".join)


def encode(tokenizer, text):
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer, ids):
    """What `ids` say. Where they end within a character: the text up to there, then what the
    decoder makes of the rest. A byte-fallback decoder alone would turn the complete characters
    before it, if they are bytes too, into U+FFFD as well."""
    say = partial(tokenizer.decode, skip_special_tokens=True)
    whole = len(ids)
    while whole and say(ids[:whole]).endswith("\ufffd"):
        whole -= 1
    return say(ids[:whole]) + say(ids[whole:])


@examples(300)
@given(kind=kinds, parts=st.lists(st.tuples(texts, st.sampled_from([None, *SPECIAL])), max_size=3))
@example(kind="sentencepiece", parts=[("", "<user>"), ("  a", "<eos>"), (" b", None)])
def test_pieces_make_up_the_decoded_text(kind, parts):
    tokenizer = TOKENIZERS[kind]()
    ids = []
    for text, special in parts:
        ids += encode(tokenizer, text)
        ids += [] if special is None else [tokenizer.convert_tokens_to_ids(special)]
    detokenizer, shown = Detokenizer(tokenizer), ""
    for i, token in enumerate(ids):
        shown += detokenizer.append(token)
        whole = decode(tokenizer, ids[: i + 1])
        assert whole.startswith(shown)
        if not whole.endswith("\ufffd"):
            assert shown == whole  # nothing is held back without need
        assert "\ufffd" not in shown
    assert shown + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


class Counting:
    """A tokenizer that remembers how many tokens it was asked to decode each time."""

    def __init__(self, tokenizer):
        self.tokenizer, self.sizes = tokenizer, [0]

    def decode(self, ids, skip_special_tokens=False):
        self.sizes.append(len(ids))
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("before", ["", "the dog", " ", "🎉", "the 🎉 dog "])
def test_tokens_that_show_nothing_do_not_pile_up(kind, before):
    tokenizer = TOKENIZERS[kind]()
    # special ones, and an id that the tokenizer has no token for
    left_out = [*tokenizer.convert_tokens_to_ids(SPECIAL), len(tokenizer) + 5]
    ids = [*encode(tokenizer, before), *left_out * 1667, *encode(tokenizer, " and 🎉 on.")]
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)
    shown = "".join(map(detokenizer.append, ids)) + detokenizer.flush()
    assert shown == tokenizer.decode(ids, skip_special_tokens=True)
    assert max(counting.sizes) <= 40
    assert sum(counting.sizes) <= 80 * len(ids)  # five million and more where the window grows


class Stripping:
    """Strips its texts, as transformers' sentencepiece tokenizers in Python do; 0 is left out."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids if i).strip()


@examples(200)
@given(text=st.text(alphabet="ab \0", max_size=40))
@example(text="\0 \0a \0 \0 \0b")
def test_spaces_of_a_tokenizer_that_strips_are_kept(text):
    detokenizer = Detokenizer(Stripping())
    shown = "".join(detokenizer.append(ord(character)) for character in text) + detokenizer.flush()
    assert shown == text.replace("\0", "").strip()


def brute_force(tokenizer, ids, ends, params):
    """Token ids, text, reason and stop string, by decoding everything at each token."""
    text = ""
    for n, token in enumerate(ids, 1):
        if token in ends and n > params.min_tokens:
            return list(ids[:n]), decode(tokenizer, ids[: n - 1]), "stop", None
        before, text = len(text.rstrip("\ufffd")), decode(tokenizer, ids[:n])
        if n > params.min_tokens:  # what is complete by now and was not before
            spans = [
                (i, i + len(s))
                for s in params.stop
                for i in range(len(text))
                if text.startswith(s, i) and i + len(s) > before
            ]
            if spans:
                start, end = min(spans)
                kept = text[: end if params.include_stop_str_in_output else start]
                return list(ids[:n]), kept, "stop", text[start:end]
        if n == params.max_tokens:
            return list(ids[:n]), text, "length", None
    return list(ids), text, None, None


@examples(300)
@given(kind=kinds, text=texts, data=st.data())
def test_the_answer_ends_where_brute_force_ends_it(kind, text, data):
    tokenizer = TOKENIZERS[kind]()
    ids = encode(tokenizer, text)
    text = decode(tokenizer, ids)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 8))
    near = spans.map(lambda span: text[span[0] : sum(span)] or "x")  # found in the text, mostly
    some = near | near.map(lambda s: s + "!") | st.text("ab", min_size=1, max_size=2)
    stop = data.draw(st.lists(some, max_size=3))
    ends, eos = (data.draw(st.lists(st.sampled_from(ids or [0]), max_size=2)) for _ in range(2))
    max_tokens = data.draw(st.integers(1, len(ids) + 3))
    params = SamplingParams(
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=ends,
        ignore_eos=data.draw(st.booleans()),
        min_tokens=data.draw(st.one_of(st.just(0), st.integers(0, max_tokens))),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    expected = brute_force(tokenizer, ids, [*ends, *([] if params.ignore_eos else eos)], params)
    output, shown = Output(tokenizer, params, eos), ""
    for token in ids:
        finished = output.append(token)
        shown += output.take()
        assert expected[1].startswith(shown)  # what was shown is never taken back
        if finished:
            break
        begun = [n for s in stop for n in range(len(s)) if output.text.endswith(s[:n])]
        held = 0 if params.include_stop_str_in_output else max(begun, default=0)
        assert len(output.text) - len(shown) == held  # nor held back without need
    if output.finish_reason is None:
        output.close("interrupted")
        shown += output.take()
        expected = (*expected[:2], "interrupted", None)
    ended = (output.token_ids, output.text, output.finish_reason, output.stop_string)
    assert ended == expected
    assert shown == output.text and output.take() == ""


def test_the_earliest_stop_string_counts_and_what_begins_one_is_held_back():
    tokenizer = byte_level()
    for stop in (("b", "ab"), ("ab", "b")):  # they end together
        output = Output(tokenizer, SamplingParams(stop=stop))
        assert [output.append(tokenizer.get_vocab()[one]) for one in "xab"] == [False, False, True]
        assert output.text == "x"
    output = Output(tokenizer, SamplingParams(stop=("de", "a", "bbc"), min_tokens=9, max_tokens=9))
    shown = []
    for one in "xabbd":
        output.append(tokenizer.get_vocab()[one])
        shown.append(output.take())
    assert shown == ["x", "a", "", "", "bb"]  # then "d" begins "de"


class Words:
    """A tokenizer whose tokens are words."""

    def decode(self, ids, **_):
        return "".join(["the", " dogs", " bark"][token] for token in ids)


@pytest.mark.parametrize("kept", [False, True])
def test_the_stop_string_that_ended_an_answer_is_named(kept):
    """Without what stands behind it in the same token."""
    params = SamplingParams(stop=("bark", "do"), include_stop_str_in_output=kept)
    output = Output(Words(), params)
    assert [output.append(token) for token in (0, 1)] == [False, True]
    assert (output.stop_string, output.text) == ("do", "the do" if kept else "the ")
    output = Output(Words(), SamplingParams(stop="cat", max_tokens=2))
    assert [output.append(token) for token in (0, 1)] == [False, True]
    assert (output.stop_string, output.finish_reason) == (None, "length")


class Read(deque):
    """Tokens without text yet, of an output that is read whenever one arrives, as by a thread."""

    def __init__(self, output, stop):
        super().__init__()
        self.output, self.stop = output, stop

    def append(self, token):
        super().append(token)
        assert not self.stop or self.stop not in self.output.text


@pytest.mark.parametrize("stop", ["dog", ""])
def test_an_answer_that_others_read_ends_where_it_does_unread(stop):
    tokenizer, outcomes = byte_level(), []
    for read in (False, True):
        output = Output(tokenizer, SamplingParams(stop=stop or (), max_tokens=50))
        if read:
            output._undecoded = Read(output, stop)
        for token in encode(tokenizer, "the dog, the 天气 🎉 dog"):
            if output.append(token):
                break
        output.close("length")
        outcomes.append((output.token_ids, output.text, output.finish_reason))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1:] == (("the ", "stop") if stop else ("the dog, the 天气 🎉 dog", "length"))


def test_the_bytes_of_characters_are_those_of_transformers():
    theirs = {character: byte for byte, character in bytes_to_unicode().items()}
    assert theirs == token_texts.BYTES
