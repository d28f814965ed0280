"""The n-gram index against a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.drafters.ngram import MAX_N, Match, Ngram

small = st.lists(st.integers(0, 2), max_size=40)


def search(ids, suffix, least):
    """The definition: longest first, newest first, at least one token after it."""
    for n in range(min(MAX_N, len(suffix)), least - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if list(ids[start : start + n]) == list(suffix[-n:]):
                return Match(start + n, n)
    return None


@examples(300, derandomize=True)
@given(
    st.lists(small, min_size=1, max_size=4),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), max_size=3),
)
def test_match_is_what_a_full_search_finds(chunks, least, guessed):
    index = Ngram().begin(chunks[0])
    text = list(chunks[0])
    for chunk in [[], *chunks[1:]]:
        index.extend(chunk)
        text += chunk
        for guess in (guessed[:n] for n in range(len(guessed) + 1)):
            expected = search(text, text + guess, least)
            assert index.match(text + guess, least) == expected
            assert index.match(text[-MAX_N:] + guess, least) == expected  # the tail is enough
            assert guess or expected is None or index.extent(expected) >= expected.length
    assert index.ids == text
