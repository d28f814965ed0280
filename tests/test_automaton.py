"""Words in texts, against looking for each; and many of them."""

from hypothesis import given
from hypothesis import strategies as st

from quickbeam.automaton import Automaton

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
