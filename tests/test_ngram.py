"""The n-gram index against a search of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.drafters.ngram import SCAN, Match, Ngram, NgramIndex
from quickbeam.errors import InvalidInput

small = st.lists(st.integers(0, 2), max_size=40)
# min_n, max_n
sizes = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


def search(ids, suffix, min_n, max_n):
    """The definition: longest first, newest first, at least one token after it."""
    for n in range(min(max_n, len(suffix)), min_n - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if list(ids[start : start + n]) == list(suffix[-n:]):
                return Match(start + n, n)
    return None


@examples(300, derandomize=True)
@given(st.lists(small, min_size=1, max_size=4), sizes, st.lists(st.integers(0, 2), max_size=3))
def test_match_is_what_a_full_search_finds(chunks, size, guessed):
    index = Ngram(*size).begin(chunks[0])
    text = list(chunks[0])
    for chunk in [[], *chunks[1:]]:
        index.extend(chunk)
        text += chunk
        for guess in (guessed[:n] for n in range(len(guessed) + 1)):
            expected = search(text, text + guess, *size)
            assert index.match(text + guess) == expected
            assert index.match(text[-index.max_n :] + guess) == expected  # the tail is enough
    assert index.ids == text


@examples(300, derandomize=True)
@given(st.lists(small, min_size=1, max_size=4), sizes, st.integers(1, 4))
def test_matches_are_all_that_a_full_search_finds(chunks, size, limit):
    index = Ngram(*size).begin(chunks[0])
    for chunk in chunks[1:]:
        index.extend(chunk)
    text = [token for chunk in chunks for token in chunk]
    expected: dict[int, Match] = {}
    for n in range(min(size[1], len(text)), size[0] - 1, -1):
        occurrences = [
            start + n
            for start in range(len(text) - n - 1, -1, -1)
            if text[start : start + n] == text[-n:]
        ]
        for position in occurrences[:SCAN]:
            expected.setdefault(text[position], Match(position, n))
    assert index.matches(text, limit) == list(expected.values())[:limit]
    assert index.matches(text, 1) == [match for match in [index.match(text)] if match]
    assert all(index.extent(match) >= min(match.length, 16) for match in index.matches(text, limit))


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 3), (3, 2), (-1, -1)])
def test_sizes_that_make_no_sense(min_n, max_n):
    with pytest.raises(InvalidInput, match=f"min_n={min_n} to max_n={max_n}"):
        NgramIndex(min_n, max_n)
    with pytest.raises(InvalidInput, match=f"min_n={min_n} to max_n={max_n}"):
        Ngram(min_n, max_n)
