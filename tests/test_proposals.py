"""Methods against brute force and by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from drafters import paths, tree_of
from quickbeam.drafters.base import Context
from quickbeam.methods import METHODS, make_method

texts = st.lists(st.integers(0, 5), min_size=1, max_size=60)
budgets = st.integers(1, 80)
depths = st.integers(0, 24)
WITHOUT = [name for name, preset in METHODS.items() if not preset.uses_drafter]


def logits_in_order(order, vocab):
    """`[vocab]` logits whose ranking begins with `order`; the other tokens follow by id."""
    ranking = [*order, *(token for token in range(vocab) if token not in order)]
    logits = torch.empty(vocab)
    logits[torch.tensor(ranking)] = torch.arange(vocab, 0, -1).float()
    return logits


@st.composite
def contexts(draw):
    """A text and logits that rank the root first, or, as after sampling, anywhere."""
    ids = draw(texts)
    order = draw(st.permutations(range(draw(st.sampled_from([6, 20, 100])))))
    if draw(st.booleans()):
        order = [ids[-1], *(token for token in order if token != ids[-1])]
    return Context(ids, logits_in_order(order, len(order)))


def started(method, context):
    """The method's sources are fed as the engine does: the prompt, then what was emitted."""
    for source in method.sources:
        state = context.states[source.name] = source.begin(context.ids[:-1])
        state.extend(context.ids[-1:])
    return context


def method_tree(context, budget, max_depth=32, name="logitspec"):
    method = make_method(name)
    return tree_of(method, started(method, context), budget, max_depth)


def longest_match(text, suffix):
    """Where the newest, longest (3 to 1 tokens) earlier occurrence goes on, and its length."""
    for n in range(min(3, len(suffix)), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix[-n:]:
                return start + n, n
    return None


def read_on(text, guessed, length):
    """What follows text and guess by their longest match, read on into itself."""
    match = longest_match(text, text + guessed)
    if match is None:
        return []
    virtual = text + guessed
    for i in range(length):
        virtual.append(virtual[match[0] + i])
    return virtual[len(text) + len(guessed) :]


def ranking(logits):
    return logits.argsort(descending=True).tolist()


def drafts(context, max_depth):
    """The paths of LogitSpec's rule without a budget: the chain, then the branches by rank."""
    yield read_on(context.ids, [], 20)[:max_depth]
    for rank, token in enumerate(ranking(context.logits)[:64]):
        if token != context.ids[-1]:
            length = 4 if rank <= 8 else 3 if rank <= 32 else 1
            yield [token, *read_on(context.ids, [token], length - 1)][:max_depth]


def nodes(tree):
    return list(zip(tree.token, tree.parent, tree.depth, tree.source, strict=True))


@examples(200, derandomize=True)
@given(contexts(), budgets, depths, st.sampled_from(WITHOUT))
def test_every_tree_keeps_the_contract(context, budget, max_depth, name):
    before = (list(context.ids), context.logits.clone())
    tree = method_tree(context, budget, max_depth, name)
    assert 1 <= len(tree) <= budget
    assert max(tree.depth) <= max_depth
    assert (tree.token[0], tree.parent[0], tree.source[0]) == (context.ids[-1], -1, "root")
    assert all(tree.parent[node] < node for node in range(len(tree)))
    assert len({(), *paths(tree)}) == len(tree)  # no duplicate siblings, no prefix twice
    assert set(tree.source[1:]) <= {source.name for source in make_method(name).sources}
    assert tree.probs == [None] * len(tree)
    assert context.ids == before[0]
    assert torch.equal(context.logits, before[1])


@examples(200, derandomize=True)
@given(contexts(), budgets, budgets, depths, st.sampled_from(["pld", "logitspec"]))
def test_a_smaller_budget_gives_the_beginning_of_the_tree(context, small, large, max_depth, name):
    small, large = sorted((small, large))
    method = make_method(name)
    started(method, context)
    whole = nodes(tree_of(method, context, large, max_depth))
    assert nodes(tree_of(method, context, small, max_depth)) == whole[:small]


@examples(100, derandomize=True)
@given(contexts(), budgets, depths)
def test_chain_is_the_longest_match_read_on(context, budget, max_depth):
    tree = method_tree(context, budget, max_depth, "pld")
    assert tree.token[1:] == read_on(context.ids, [], 60)[: min(10, budget - 1, max_depth)]
    assert tree.parent == list(range(-1, len(tree) - 1))


@examples(200, derandomize=True)
@given(contexts(), budgets, depths)
def test_the_tree_is_the_trie_of_drafts_the_chain_first(context, budget, max_depth):
    """Of all drafts where there is room, within a budget of so many as fit."""
    every, chain = drafts(context, max_depth), read_on(context.ids, [], 20)[:max_depth]
    wanted = {tuple(path[:end]) for path in every for end in range(1, len(path) + 1)}
    assert set(paths(method_tree(context, 1000, max_depth))) == wanted
    tree = method_tree(context, budget, max_depth)
    assert set(paths(tree)) <= wanted and len(tree) == min(budget, 1 + len(wanted))
    match = longest_match(context.ids, context.ids)
    lead = min(3 * match[1], budget - 1, max_depth) if match else 0
    assert tree.token[1 : 1 + lead] == chain[:lead]


def test_by_hand():
    #      0  1  2  3  4  5  6  7  8  9 10 11
    ids = [1, 2, 3, 9, 4, 5, 6, 7, 8, 9, 4, 1]
    context = Context(ids, logits_in_order([1, 9, 2, 6, 0], 40))
    # The match of (1) at 0 gives 2 3 9 and leads; then guess 9 (longest match (9), newest at 9: 4
    # 1, then itself: 9), then the chain's turn, and so on.
    tree = method_tree(context, 15)
    # four for the branch, four for the chain; guess 2 is the chain's first token and its branch
    # 2 3 9 4 is there: not paid for
    assert tree.token == [1, 2, 3, 9, 9, 4, 1, 9, 4, 5, 6, 7, 6, 7, 8]
    assert tree.parent == [-1, 0, 1, 2, 0, 4, 5, 6, 3, 8, 9, 10, 0, 12, 13]
    guesses = [node for node in range(1, 15) if tree.source[node] != "ngram"]
    assert guesses == [4, 12] and {tree.source[node] for node in guesses} == {"last_logits"}


def test_sequences_of_one_policy_do_not_share_state():
    for name in ("pld", "logitspec"):
        method = make_method(name)
        first, second = (
            started(method, Context(ids, logits_in_order([ids[-1], 5], 6)))
            for ids in ([1, 2, 1], [3, 4, 3])
        )

        def drafted(*contexts, method=method):
            return [tree_of(method, context, 2, 9).token[1:] for context in contexts]

        assert drafted(first, second, first) == [[2], [4], [2]]
        first.extend([2, 0, 1])
        assert drafted(first, second) == [[2], [4]]
        first.extend([0, 1])
        assert drafted(first, second) == [[0], [4]]
