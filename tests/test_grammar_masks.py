"""Masks of a grammar along trees, and the exactness of what is sampled under them."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import regex
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cases import few, refuses
from drafters import DRAFTED, KnownDrafter, grown
from quickbeam.drafters.base import GRAMMAR, Context
from quickbeam.drafters.last_logits import LastLogits
from quickbeam.drafters.ngram import Ngram
from quickbeam.engine.commit import accept
from quickbeam.grammar.compiler import Compiler
from quickbeam.grammar.masks import DeadEnd
from quickbeam.grammar.spec import Grammar
from quickbeam.methods.auto import Auto
from quickbeam.methods.constrained import constrained
from quickbeam.methods.dyspec import DySpec
from quickbeam.models.base import Passed
from quickbeam.noise import Noise
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.tree import TokenTree
from toy import ToyModel, chi_square, exact_probs, path_tokens, sample_sequences

LETTERS = "abcdefghijkl"
V = 6  # five letters and the end
# what may come depends on what came; after a fork a letter is forced
FORKS = "(a[bc]|[bc]d[ae]|[de](ab|c)){2,9}"
WORDS = "(a|ab|abc|bd{2,4}e?|c(d|e)*)+"


def letters(count):
    """Token i is the i-th letter; `<end>` comes after them."""
    vocab = {letter: i for i, letter in enumerate(LETTERS[:count])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


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


def ids(text):
    return [LETTERS.index(letter) for letter in text]


def spelt(tokens):
    return "".join("." if token >= V - 1 else LETTERS[token] for token in tokens)


@pytest.mark.parametrize("pattern", [FORKS, WORDS])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_place_allows_what_the_language_does_wherever_one_came_from(pattern, seed):
    """Random walks through a growing answer and paths below it."""
    chance, found, text = random.Random(seed), masks(pattern, V - 1, vocab=9), list[int]()
    for _ in range(120):
        path = list[int]()
        for _ in range(chance.randrange(6)):
            place = found.place(path)
            free = [token for token in range(V - 1) if not place.banned[token]]
            path.append(chance.choice(free or [V - 1]))
            if path[-1] == V - 1:
                break
        if path[-1:] == [V - 1]:
            assert found.place(path) is None
            assert found.forced(path) is None
            assert found.follows(path, [0]) == 0
            continue
        expected = allowed(pattern, spelt([*text, *path]), V - 1)
        if (question := chance.randrange(3)) == 0:
            found.forced(path)
        elif question == 1:
            found.follows(path, [chance.randrange(V) for _ in range(3)])
        place = found.place(path)
        # 6 to 8 are padding
        assert {token for token in range(9) if not place.banned[token]} == expected
        assert (place.left, place.first) == (len(expected), min(expected))
        only = min(expected) if len(expected) == 1 else None
        assert found.forced(path) == (None if only == V - 1 else only)
        if chance.random() < 0.15 and path and len(text) < 12:
            found.extend(path)
            text += path


def test_paths_that_are_banned_or_behind_the_end_spoil_nothing():
    found = masks("ab(cd)*", V - 1)
    refuses("no token can come after 2 tokens", found.place, ids("ac"), error=DeadEnd)
    assert found.find(ids("ac")) is None and found.forced(ids("ac")) is None
    assert found.forced(ids("a")) == 1
    found.extend(ids("ab"))
    place = found.place()
    assert place is not None and place.left == 2
    found = masks("a+", V - 1)
    found.extend([0, V - 1])
    assert found.place() is None and found.place([3]) is None
    assert torch.equal(found.ban(torch.zeros(V)), torch.zeros(V))


def test_a_grammar_that_cannot_be_read_backwards_is_read_anew():
    """Lark's `max_tokens` counts tokens, and llguidance has no way back from there."""
    grammar = Grammar.lark('start: gen "e"\ngen[max_tokens=2]: /[ab]*/')
    found = compiler(V - 1, V).begin(grammar, [V - 1])
    for text in ("a", "ab", "b", "", "ba"):
        banned = found.place(ids(text)).banned
        expected = {4} if len(text) == 2 else {0, 1, 4}
        assert {token for token in range(V) if not banned[token]} == expected


SAMPLING: dict[str, dict[str, object]] = {
    "plain": {},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.4},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
}


def probs_of(model, params):
    """The exact distribution, with what is allowed found by brute force before anything else is
    done to the logits."""
    free = replace(params, grammar=None)

    @cache
    def probs(context):
        logits = model.target(context).log()
        if V - 1 in context[1:]:
            return logits.exp()
        keep = allowed(FORKS, spelt(context[1:]), V - 1)
        logits[[token for token in range(V) if token not in keep]] = -torch.inf
        sampler = Sampler(free, [0], V)
        sampler.extend(context[1:])
        return sampler.probs(logits)

    return lambda context: probs(tuple(context))


def sampler_of(params, context):
    sampler = Sampler(params, [0], V, grammar=masks(FORKS, V - 1))
    sampler.extend(context[1:])
    return sampler


def coupled_answers(model, params, seeds, length=4):
    """First tokens of answers by the noise of places, in random trees."""
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(seeds):
        noise, chance = Noise(seed, 0, V), random.Random(seed)
        sampler, context = sampler_of(params, [0]), [0]
        while len(context) <= length:
            tree = TokenTree(context[-1])
            for _ in range(6):
                node, token = chance.randrange(len(tree)), chance.randrange(V)
                if tree.child(node, token) is None:
                    tree.add(node, token, "random")
            paths = (path_tokens(tree, node) for node in range(len(tree)))
            logits = torch.stack([model.target([*context, *path]).log() for path in paths])
            passed = Passed(logits, None)
            path, token = accept(sampler, tree, passed, noise, torch.Generator(), len(context))
            new = [*(tree.token[node] for node in path[1:]), token]
            sampler.extend(new)
            context += new
        counts[tuple(context[1 : length + 1])] += 1
    return counts


@pytest.mark.parametrize("name", few(list(SAMPLING), ["top-k"]))
def test_coupled_answers_have_the_exact_distribution(name):
    model = ToyModel(V, seed=3, zeros=0.0)
    params = SamplingParams(temperature=1.0, grammar=Grammar.regex(FORKS), **SAMPLING[name])
    counts = coupled_answers(model, params, 1200)
    assert chi_square(counts, exact_probs(probs_of(model, params), V, 4)) > 1e-3


@pytest.mark.parametrize("name", few(["top-k", "top-p"], ["top-k"]))
def test_a_mask_after_the_filters_is_found_out(name, monkeypatch):
    """As is done elsewhere: what is banned then has its part in the filters."""

    def late(self, logits, path=()):
        place = self.grammar.place(path)
        probs = right(Sampler(replace(self.params, grammar=None), [0], V), logits)
        kept = probs if place is None else probs.masked_fill(place.banned, 0.0)
        return kept / kept.sum() if kept.any() else right(self, logits, path)

    right = Sampler.probs
    monkeypatch.setattr(Sampler, "probs", late)
    model = ToyModel(V, seed=3, zeros=0.0)
    params = SamplingParams(temperature=1.0, grammar=Grammar.regex(FORKS), **SAMPLING[name])
    counts = coupled_answers(model, params, 1200)
    monkeypatch.undo()
    assert chi_square(counts, exact_probs(probs_of(model, params), V, 4)) < 1e-4


def residual_p(name, wrong=False, count=1500, length=3):
    """Of the test that answers of drawn trees have the exact distribution. `wrong`: the
    distribution that a child is said to be drawn from is the drafter's before the mask."""
    model = ToyModel(V, seed=5, noise=3.0, zeros=0.0)
    params = SamplingParams(temperature=1.0, grammar=Grammar.regex(FORKS))
    drafter, generator = KnownDrafter(model.draft), torch.Generator().manual_seed(3)
    policy = DRAFTED[name](drafter)

    def grow(context, rng):
        sampler = sampler_of(params, context)
        where = Context(list(context), torch.zeros(V), 1.0, generator, grammar=sampler.grammar)
        growth = constrained(policy.grow(where, 6, 4), where, 6, 4)
        tree = grown(growth, drafter.answer).tree
        for node in range(1, len(tree)):
            if wrong and tree.probs[node] is not None:
                tree.probs[node] = model.draft([*context, *path_tokens(tree, tree.parent[node])])
        return tree

    def probs(context):
        return sampler_of(params, context).probs(model.target(context).log())

    known = cache(lambda *context: probs(context))
    given = dict(count=count, length=length, probs=lambda context: known(*context))
    counts = sample_sequences(model, grow, **given)
    return chi_square(counts, exact_probs(probs_of(model, params), V, length))


@pytest.mark.parametrize("name", few(list(DRAFTED), ["specinfer"]))
def test_drawn_trees_keep_the_exact_distribution(name):
    assert residual_p(name) > 1e-3


def test_a_drafters_distribution_before_the_mask_is_found_out():
    assert residual_p("specinfer", wrong=True) < 1e-4


def draft(policy, pattern, text, budget, temperature=0.0, depth=9):
    """What is grown after a prompt of one token and a text."""
    found = masks(pattern, V - 1, ids(text))
    context = Context([0, *ids(text)], torch.zeros(V), temperature, grammar=found)
    growth = policy.grow(context.begin(policy.sources), budget, depth)
    return grown(constrained(growth, context, budget, depth), policy.sources[0].answer)


def known():
    """A drafter that likes the letters in their order, whatever comes before."""
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.05])
    return KnownDrafter(lambda context: probs)


def test_banned_tokens_are_not_drafted_and_the_rest_shares_what_is_left():
    tree = draft(DySpec(known()), "[bd]", "", 3).tree
    (b, d) = tree.children[0]
    assert (b, d) == (1, 3)
    assert tree.probability[1:] == pytest.approx([0.25 / 0.35, 0.1 / 0.35])


@pytest.mark.parametrize("name", [*DRAFTED, "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", [FORKS, WORDS, "ab(c|d)eab+"])
def test_every_tree_keeps_to_the_grammar(name, temperature, pattern):
    chance = random.Random(0)
    policy = Auto(known(), Ngram(), LastLogits()) if name == "auto" else DRAFTED[name](known())
    for _ in range(5):
        text = list[int]()
        for _ in range(chance.randrange(8)):
            place = masks(pattern, V - 1, text).place()
            options = [token for token in range(V - 1) if not place.banned[token]]
            text += [chance.choice(options)] if options else []
        tree = draft(policy, pattern, spelt(text), 10, temperature, 6).tree
        assert len(tree) <= 10 and max(tree.depth) <= 6
        for node in range(1, len(tree)):
            keep = allowed(pattern, spelt([*text, *tree.tokens(tree.parent[node])]), V - 1)
            assert tree.token[node] in keep
            forced = len(keep) == 1 and tree.source[node] != Ngram.name
            assert (tree.source[node] == GRAMMAR) == forced
