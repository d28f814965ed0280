"""The n-gram index against a search of the whole text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.drafters.base import Context
from quickbeam.drafters.ngram import MAX_N, SCAN, Match, Ngram
from quickbeam.methods.acceptance import ALTERNATIVE, RATES, REPEATED
from quickbeam.methods.auto import Auto
from quickbeam.methods.prompt_lookup import PromptLookup

small = st.lists(st.integers(0, 2), max_size=40)


def agreement(ids, position, suffix):
    """How many tokens before `position` are those that `suffix` ends with."""
    length = 0
    while length < min(position, len(suffix)) and ids[position - 1 - length] == suffix[-1 - length]:
        length += 1
    return length


def search(ids, suffix, least):
    """The definition: the newest occurrences of the longest n-gram, at least one token after them.

    Of these the one that agrees the most, and the one that does so of those that go on differently.
    """
    for n in range(min(MAX_N, len(suffix)), least - 1, -1):
        gram = list(suffix[-n:])
        positions = [end for end in range(n, len(ids)) if ids[end - n : end] == gram]
        matches = [Match(end, agreement(ids, end, suffix)) for end in positions[-SCAN:]]
        matches.sort(key=lambda match: (match.length, match.position), reverse=True)
        if matches:
            best = matches[0]
            others = [m for m in matches if ids[m.position] != ids[best.position]]
            return [best, *others[:1]]
    return []


@examples(300, derandomize=True)
@given(
    st.lists(small, min_size=1, max_size=4),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), max_size=3),
)
def test_matches_are_what_a_full_search_finds(chunks, least, guessed):
    index = Ngram().begin(chunks[0])
    text = list(chunks[0])
    for chunk in [[], *chunks[1:]]:
        index.extend(chunk)
        text += chunk
        for guess in (guessed[:n] for n in range(len(guessed) + 1)):
            for suffix in (text + guess, (text + guess)[-16:], (text + guess)[-MAX_N:]):
                expected = search(text, suffix, least)
                assert index.matches(suffix, least) == expected
                assert index.match(suffix, least) == (expected[0] if expected else None)
    assert index.ids == text


def test_of_many_occurrences_the_newest_are_compared():
    gram = [1, 2, 3]
    text = [9, *gram, 50]  # it agrees with one token more than all others do
    for i in range(SCAN):
        text += [8, *gram, 60 + i]
        index = Ngram().begin([*text, 9, *gram])
        best, other = index.matches([9, *gram])
        newest = Match(len(text) - 1, 3)
        if i < SCAN - 1:
            assert (best, other) == (Match(4, 4), newest)
        else:  # the oldest of more than `SCAN` is not looked at
            assert (best, other) == (newest, Match(newest.position - 5, 3))


def tree(method, ids, **fields):
    context = Context(list(ids), torch.zeros(100), **fields).begin([Ngram()])
    steps = method.propose(context, 16, 6)
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


def test_the_longest_agreement_is_continued_and_an_alternative_stands_beside_it():
    """After `5 6 7 8` came 20, and later, after `1 6 7 8`, came 30."""
    text = [5, 6, 7, 8, 20, 21, 1, 6, 7, 8, 30, 31, 5, 6, 7, 8]
    drafted = tree(PromptLookup(), text).tree
    assert [drafted.token[node] for node in drafted.children[0].values()] == [20]
    costs = [0.0] + [0.01] * 20
    method = Auto()
    proposal = tree(method, text, node_costs=costs)
    drafted = proposal.tree
    children = drafted.children[0]
    assert drafted.value[children[20]] == RATES[REPEATED][2]
    assert drafted.value[children[30]] == RATES[ALTERNATIVE][1]
    assert drafted.children[children[30]].keys() == {31}
    # a rate of its own is learned for the alternative
    for _ in range(40):
        proposal.learn(drafted, [0, children[30]])
    drafted = tree(method, text, node_costs=costs).tree
    children = drafted.children[0]
    assert drafted.value[children[20]] < 0.3 < drafted.value[children[30]]
    assert sum(drafted.value[child] for child in children.values()) <= 1
