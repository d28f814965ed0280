"""Words in texts, against looking for each; and many of them. `pytest
tests/test_automaton.py`"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quickbeam import SamplingParams
from quickbeam.automaton import Automaton
from quickbeam.bans import Bans
from quickbeam.engine.output import Output

WORDS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=6)


@given(words=WORDS, text=st.text("ab", max_size=20))
def test_every_word_is_found_where_it_ends(words, text):
    automaton, state = Automaton(words), 0
    for end in range(1, len(text) + 1):
        state, seen = automaton.read(state, text[end - 1]), text[:end]
        found = automaton.ends(state)
        assert sorted(found) == [i for i, word in enumerate(words) if seen.endswith(word)]
        assert [len(words[i]) for i in found] == sorted(len(words[i]) for i in found)[::-1]
        begun = [n for word in words for n in range(len(word)) if seen.endswith(word[:n])]
        assert automaton.begun(state) == max(begun, default=0)


class Letters:
    """A tokenizer whose tokens are characters."""

    clean_up_tokenization_spaces = False

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


MANY = 20_000
TEXT = [ord(letter) for letter in "abababac" * 100]


def test_many_stop_strings_stop_where_one_does():
    stop = [f"ababab{i:06}" for i in range(MANY)] + ["abac" * 100]
    output = Output(Letters(), SamplingParams(max_tokens=1000, stop=stop))
    for token in TEXT:
        output.append(token)
        output.take()
    assert output.finish_reason is None


def test_many_bad_words_ban_what_each_does():
    bans = Bans(0, [], [[97, 98, 100 + i, 97, 98, 99] for i in range(MANY)] + [[98, 97, 5]])
    for token in TEXT:
        bans.extend([token])
        assert bans.after([98, 97]) == [5] == bans.after([97, 98, 97])
        assert bans.after([98]) == bans.after([97, 98]) == []
