"""Bans of `min_tokens` and `bad_words` at nodes of trees, against a plain reading of the whole
output. Run: pytest tests/test_bans.py"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cases import examples
from quickbeam.bans import bad_word_ids
from quickbeam.errors import InvalidInput
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler, draw, most_probable
from quickbeam.tree import TokenTree
from quickbeam.verify import verify_equal, verify_residual

V = 10
# few tokens, so that they meet
words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)
ids = st.lists(st.integers(0, 3), max_size=8)


def banned_after(
    output: Sequence[int], min_tokens: int, ends: Sequence[int], bad: Sequence[Sequence[int]]
) -> set[int]:
    """The plain reading: `output` is all tokens from the answer's first one on."""
    early = set(ends) if len(output) < min_tokens else set()
    return early | {
        token
        for token in range(V)
        if any([*output, token][-len(word) :] == list(word) for word in bad)
    }


def sampler_of(
    params: SamplingParams, ends: Sequence[int], bad: Sequence[Sequence[int]]
) -> Sampler:
    return Sampler(params, [1, 2], V, ends=ends, bad=bad)


def params_of(min_tokens: int, bad: Sequence[Sequence[int]], **more: object) -> SamplingParams:
    return SamplingParams(min_tokens=min_tokens, bad_words=["…" for _ in bad], **more)


# --- one node -------------------------------------------------------------------------------------


@examples(400)
@given(
    bad=words,
    ends=ids,
    min_tokens=st.integers(0, 12),
    steps=st.lists(ids, max_size=4),
    path=ids,
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_a_node_bans_what_the_whole_output_bans(
    bad: list[list[int]],
    ends: list[int],
    min_tokens: int,
    steps: list[list[int]],
    path: list[int],
    penalty: float,
) -> None:
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
    for token in banned_after(
        [*(token for step in steps for token in step), *path], min_tokens, ends, bad
    ):
        expected[token] = -math.inf
    assert torch.equal(got, expected)


def test_the_first_min_tokens_tokens_do_not_end_the_answer() -> None:
    sampler = Sampler(SamplingParams(min_tokens=3), [], V, ends=[4, 7])
    logits = torch.zeros(V)
    assert [bool(sampler.process(logits, [0] * n)[4] == -math.inf) for n in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    sampler.extend([0, 0])
    assert [bool(sampler.process(logits, [0] * n)[7] == -math.inf) for n in range(3)] == [
        True,
        False,
        False,
    ]
    probs = Sampler(SamplingParams(min_tokens=1, temperature=1.0), [], V, ends=[4, 7]).probs(logits)
    assert probs.tolist() == pytest.approx(
        [0.0 if token in (4, 7) else 1 / 8 for token in range(V)]
    )


def test_a_word_that_begins_in_the_prompt_is_not_seen() -> None:
    sampler = Sampler(SamplingParams(bad_words=["…"]), [5, 6], V, bad=[[5, 6, 7]])
    assert sampler.process(torch.zeros(V))[7] == 0
    assert sampler.process(torch.zeros(V), [5, 6])[7] == -math.inf


def test_ids_outside_the_vocabulary_need_no_ban() -> None:
    sampler = Sampler(
        SamplingParams(min_tokens=1, bad_words=["…"]),
        [],
        V,
        ends=[V, 3],
        bad=[[V], [2, V + 1], [V, 2], [1]],
    )
    assert [
        token for token in range(V) if sampler.process(torch.zeros(V), [])[token] == -math.inf
    ] == [1, 3]
    assert sampler.process(torch.zeros(V), [V, 2])[2] == 0


def test_bans_must_leave_a_token_and_be_complete() -> None:
    with pytest.raises(InvalidInput, match="min_tokens, bad_words and logit_bias ban all 3 tokens"):
        Sampler(
            SamplingParams(min_tokens=1, bad_words="x", logit_bias={2: -math.inf}),
            [],
            3,
            ends=[0],
            bad=[[1]],
        )
    Sampler(
        SamplingParams(min_tokens=0, bad_words="x", logit_bias={2: -math.inf}),
        [],
        3,
        ends=[0],
        bad=[[1]],
    )
    for params, bad in [(SamplingParams(bad_words="x"), []), (SamplingParams(), [[1]])]:
        with pytest.raises(ValueError, match="give bad=bad_word_ids"):
            Sampler(params, [], V, bad=bad)


def test_ends_change_nothing_without_min_tokens() -> None:
    logits = torch.randn(V)
    # not even copied
    assert Sampler(SamplingParams(), [], V, ends=[1, 2]).process(logits) is logits


# --- whole answers: trees against plain decoding --------------------------------------------------


class Forgetful(Sampler):
    """The mistake to find out: nodes below the root are judged as the root is."""

    def process(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        return super().process(logits)


def model(context: Sequence[int]) -> torch.Tensor:
    """Raw logits `[V]` after `context`: the last token decides, mostly, so that texts run in
    circles and words come up."""
    logits = 2 * torch.randn(V, generator=torch.Generator().manual_seed(sum(context[-1:])))
    return logits + 0.3 * torch.randn(
        V, generator=torch.Generator().manual_seed(hash(tuple(context)) % 2**31)
    )


def plain_answer(
    params: SamplingParams, ends: Sequence[int], bad: Sequence[Sequence[int]], prompt: list[int]
) -> list[int]:
    """One token at a time, the bans read off the whole output."""
    output, generator = [], torch.Generator().manual_seed(params.seed or 0)
    free = Sampler(SamplingParams(temperature=params.temperature), prompt, V)
    while len(output) < params.max_tokens and not (output and output[-1] in ends):
        logits = model([*prompt, *output])
        logits[list(banned_after(output, params.min_tokens, ends, bad))] = -math.inf
        output.append(
            most_probable(logits[None])[0] if params.greedy else draw(free.probs(logits), generator)
        )
    return output


def random_tree(root: list[int], rng: random.Random, size: int) -> TokenTree:
    """A tree with probable tokens, so that paths of a few nodes are accepted. `root`: the context,
    the root last."""
    tree = TokenTree(root[-1])
    for _ in range(size):
        parent = rng.randrange(len(tree)) if rng.random() < 0.5 else len(tree) - 1
        likely = (
            model([*root, *(tree.token[node] for node in tree.path(parent)[1:])])
            .topk(3)
            .indices.tolist()
        )
        token = rng.choice(likely)
        if tree.child(parent, token) is None:
            tree.add(parent, token, "random")
    return tree


def tree_answer(
    sampler: Sampler, ends: Sequence[int], prompt: list[int], rng: random.Random
) -> tuple[list[int], int]:
    """The answer by verified trees, as the engine makes it, and how many drafted tokens were
    accepted."""
    params, accepted = sampler.params, 0
    generator = torch.Generator().manual_seed(params.seed or 0)
    logits = model(prompt)
    output = [sampler.best(logits) if params.greedy else draw(sampler.probs(logits), generator)]
    sampler.extend(output)
    while len(output) < params.max_tokens and output[-1] not in ends:
        context = [*prompt, *output]
        tree = random_tree(context, rng, 12)

        def at(
            node: int, choose: Callable, context: list[int] = context, tree: TokenTree = tree
        ) -> object:
            path = [tree.token[i] for i in tree.path(node)[1:]]
            return choose(model([*context, *path]), path)

        if params.greedy:
            verdict = verify_equal(tree, lambda node, at=at: at(node, sampler.best))
        else:
            verdict = verify_residual(tree, lambda node, at=at: at(node, sampler.probs), generator)
        accepted += len(verdict.path) - 1
        tokens = []
        for token in [*(tree.token[node] for node in verdict.path[1:]), verdict.token]:
            tokens.append(token)
            if token in ends or len(output) + len(tokens) == params.max_tokens:
                break
        output += tokens
        sampler.extend(tokens)
    return output, accepted


def compare(kind: type[Sampler], temperature: float) -> tuple[int, int, int, int]:
    """How many of 60 answers by trees are plain decoding's own; in how many bans mattered, how many
    ended, and tokens accepted."""
    same = mattered = ended = accepted = 0
    for seed in range(60):
        rng = random.Random(seed)
        ends, prompt = rng.sample(range(V), 2), [rng.randrange(V) for _ in range(3)]
        free = SamplingParams(max_tokens=24, temperature=temperature, seed=seed)
        said = plain_answer(free, [], [], prompt)
        starts = rng.sample(range(20), rng.choice([0, 4, 8]))
        bad = [said[i : i + rng.randint(2, 3)] for i in starts] + [
            [rng.randrange(V)] for _ in range(rng.randint(0, 2))
        ]
        params = params_of(
            rng.choice([4, 11, 18]), bad, max_tokens=24, temperature=temperature, seed=seed
        )
        expected = plain_answer(params, ends, bad, prompt)
        got, count = tree_answer(kind(params, prompt, V, ends=ends, bad=bad), ends, prompt, rng)
        same += got == expected
        accepted += count
        ended += expected[-1] in ends
        mattered += expected != plain_answer(free, ends, [], prompt)
        assert len(expected) > params.min_tokens  # the token that ends comes after so many
        for word in bad:
            assert not any(expected[i : i + len(word)] == word for i in range(len(expected)))
    return same, mattered, ended, accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_give_plain_decodings_tokens(temperature: float) -> None:
    same, mattered, ended, accepted = compare(Sampler, temperature)
    assert same == 60
    assert mattered > 20 and ended > 20 and accepted > 200  # the test is a test


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sampler_that_forgets_the_path_is_found_out(temperature: float) -> None:
    assert compare(Forgetful, temperature)[0] < 55


# --- words to tokens ------------------------------------------------------------------------------


class Pieces:
    """A tokenizer that takes the longest piece that it knows; `dummy` goes before every text, as
    the space of sentencepiece does."""

    def __init__(self, pieces: Sequence[str], dummy: str = "") -> None:
        self.pieces, self.dummy = list(pieces), dummy

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        found, rest = [], self.dummy + text
        while rest:
            piece = max((piece for piece in self.pieces if rest.startswith(piece)), key=len)
            found.append(self.pieces.index(piece))
            rest = rest[len(piece) :]
        return found


def test_words_are_banned_with_and_without_a_leading_space() -> None:
    tokenizer = Pieces(["a", "b", " ", " a", "ab", "\n", "X"])
    assert bad_word_ids(tokenizer, ["a"]) == [[0], [3]]
    assert bad_word_ids(tokenizer, [" a"]) == bad_word_ids(tokenizer, ["a"])
    assert bad_word_ids(tokenizer, ["ab"]) == [[4], [3, 1]]  # of other lengths too
    assert bad_word_ids(tokenizer, ["b"]) == [[1]]  # " ", "b" ends with it
    assert bad_word_ids(tokenizer, ["ab", "b", "ab"]) == [[4], [1]]
    assert bad_word_ids(tokenizer, ["\n"]) == [[5]]
    assert bad_word_ids(tokenizer, ["\na"]) == [[5, 0]]  # only spaces make no difference
    assert bad_word_ids(tokenizer, ["Xa"]) == [[6, 0]]
    assert bad_word_ids(tokenizer, [" "]) == [[2]]
    assert bad_word_ids(tokenizer, []) == []


def test_words_of_a_tokenizer_that_puts_a_space_first() -> None:
    tokenizer = Pieces([" ", " no", "no", "w"], dummy=" ")
    assert bad_word_ids(tokenizer, ["no"]) == [[1]]  # " ", " no" ends with it
    assert bad_word_ids(tokenizer, ["now"]) == [[1, 3]]


def test_words_of_a_tokenizer_of_transformers() -> None:
    vocab = {"a": 0, "Ġ": 1, "Ġa": 2}
    backend = Tokenizer(models.BPE(vocab, [("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert bad_word_ids(PreTrainedTokenizerFast(tokenizer_object=backend), ["a"]) == [[0], [2]]


def test_a_word_of_too_many_tokens_is_named() -> None:
    tokenizer = Pieces(["a", " "])
    assert bad_word_ids(tokenizer, ["a" * 255]) == [[0] * 255]
    with pytest.raises(InvalidInput, match=r"bad_words: 'aaaa.* has 257 tokens: .* at most 256"):
        bad_word_ids(tokenizer, ["a" * 256])  # and a space before it


def test_a_word_without_tokens_is_named() -> None:
    class Empty:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(InvalidInput, match="bad_words: 'x' has no tokens"):
        bad_word_ids(Empty(), ["x"])
