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
from drafters import DRAFTED, KnownDrafter, finish
from quickbeam.drafters.base import GRAMMAR, Context
from quickbeam.drafters.ngram import Ngram
from quickbeam.engine.commit import accept
from quickbeam.grammar.compiler import GrammarCompiler
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
from toy import ToyModel, chi_square, exact_probs, path_tokens, samples

LETTERS = "abcdefghijkl"
V = 6  # five letters and the end
# what may come depends on what came; after a fork a letter is forced
FORKS = "(a[bc]|[bc]d[ae]|[de](ab|c)){2,9}"
WORDS = "(a|ab|abc|bd{2,4}e?|c(d|e)*)+"


def letters(count):
    """Token i is the i-th letter; `<end>` comes after them."""
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS[:count])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@cache
def compiler(count, vocab):
    """For logits of width `vocab`; token `count` is the end."""
    return GrammarCompiler(letters(count), vocab, [count])


def masks(pattern, count, text=(), vocab=None):
    mask = compiler(count, vocab or count + 1).begin(Grammar.regex(pattern), [count])
    mask.extend(text)
    return mask


@cache
def allowed(pattern, text, count):
    """Tokens that may follow `text`, by another library; `count` stands for the end."""
    language = regex.compile(pattern)
    tokens = {
        i
        for i, letter in enumerate(LETTERS[:count])
        if language.fullmatch(text + letter, partial=True)
    }
    return frozenset(tokens | ({count} if language.fullmatch(text) else set()))


def ids(text):
    return [LETTERS.index(letter) for letter in text]


def spelt(tokens):
    return "".join("." if token >= V - 1 else LETTERS[token] for token in tokens)


@pytest.mark.parametrize("pattern", [FORKS, WORDS])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_place_allows_what_the_language_does_wherever_one_came_from(pattern, seed):
    """Random walks through a growing answer and paths below it."""
    rng, mask, text = random.Random(seed), masks(pattern, V - 1, vocab=9), list[int]()
    for _ in range(120):
        path = list[int]()
        for _ in range(rng.randrange(6)):
            place = mask.allowed(path)
            free = [token for token in range(V - 1) if not place.banned[token]]
            path.append(rng.choice(free or [V - 1]))
            if path[-1] == V - 1:
                break
        if path[-1:] == [V - 1]:
            assert mask.allowed(path) is None
            assert mask.forced(path) is None
            assert mask.follows(path, [0]) == 0
            continue
        expected = allowed(pattern, spelt([*text, *path]), V - 1)
        if (question := rng.randrange(3)) == 0:
            mask.forced(path)
        elif question == 1:
            mask.follows(path, [rng.randrange(V) for _ in range(3)])
        place = mask.allowed(path)
        # 6 to 8 are padding
        assert {token for token in range(9) if not place.banned[token]} == expected
        assert (place.left, place.first) == (len(expected), min(expected))
        only = min(expected) if len(expected) == 1 else None
        assert mask.forced(path) == (None if only == V - 1 else only)
        if rng.random() < 0.15 and path and len(text) < 12:
            mask.extend(path)
            text += path


def test_paths_that_are_banned_or_behind_the_end_spoil_nothing():
    mask = masks("ab(cd)*", V - 1)
    refuses("no token can come after 2 tokens", mask.allowed, ids("ac"), error=DeadEnd)
    assert mask.find(ids("ac")) is None and mask.forced(ids("ac")) is None
    assert mask.forced(ids("a")) == 1
    mask.extend(ids("ab"))
    place = mask.allowed()
    assert place is not None and place.left == 2
    mask = masks("a+", V - 1)
    mask.extend([0, V - 1])
    assert mask.allowed() is None and mask.allowed([3]) is None
    assert torch.equal(mask.ban(torch.zeros(V)), torch.zeros(V))


def test_a_grammar_that_cannot_be_read_backwards_is_read_anew():
    """Lark's `max_tokens` counts tokens, and llguidance has no way back from there."""
    grammar = Grammar.lark('start: gen "e"\ngen[max_tokens=2]: /[ab]*/')
    mask = compiler(V - 1, V).begin(grammar, [V - 1])
    for text in ("a", "ab", "b", "", "ba"):
        banned = mask.allowed(ids(text)).banned
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
    """The exact distribution; what is allowed is found by brute force."""
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
        noise, rng = Noise(seed, 0, V), random.Random(seed)
        sampler, context = sampler_of(params, [0]), [0]
        while len(context) <= length:
            tree = TokenTree(context[-1])
            for _ in range(6):
                node, token = rng.randrange(len(tree)), rng.randrange(V)
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
        place = self.grammar.allowed(path)
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
    """The p-value of drawn trees. `wrong`: a child's distribution is that before the mask."""
    model = ToyModel(V, seed=5, noise=3.0, zeros=0.0)
    params = SamplingParams(temperature=1.0, grammar=Grammar.regex(FORKS))
    drafter, generator = KnownDrafter(model.draft), torch.Generator().manual_seed(3)
    method = DRAFTED[name](drafter)

    def make_tree(context, rng):
        sampler = sampler_of(params, context)
        where = Context(list(context), torch.zeros(V), 1.0, generator, grammar=sampler.grammar)
        tree = finish(constrained(method.propose(where, 6, 4), where, 6, 4), drafter.answer).tree
        for node in range(1, len(tree)):
            if wrong and tree.probs[node] is not None:
                tree.probs[node] = model.draft([*context, *path_tokens(tree, tree.parent[node])])
        return tree

    def probs(context):
        return sampler_of(params, context).probs(model.target(context).log())

    known = cache(lambda *context: probs(context))
    given = dict(count=count, length=length, probs=lambda context: known(*context))
    counts = samples(model, make_tree, **given)
    return chi_square(counts, exact_probs(probs_of(model, params), V, length))


@pytest.mark.parametrize("name", few(list(DRAFTED), ["specinfer"]))
def test_drawn_trees_keep_the_exact_distribution(name):
    assert residual_p(name) > 1e-3


def test_a_drafters_distribution_before_the_mask_is_found_out():
    assert residual_p("specinfer", wrong=True) < 1e-4


def draft(method, pattern, text, budget, temperature=0.0, depth=9):
    mask = masks(pattern, V - 1, ids(text))
    context = Context([0, *ids(text)], torch.zeros(V), temperature, grammar=mask)
    steps = method.propose(context.begin(method.sources), budget, depth)
    return finish(constrained(steps, context, budget, depth), method.sources[0].answer)


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
    rng = random.Random(0)
    method = Auto(known()) if name == "auto" else DRAFTED[name](known())
    for _ in range(5):
        text = list[int]()
        for _ in range(rng.randrange(8)):
            place = masks(pattern, V - 1, text).allowed()
            options = [token for token in range(V - 1) if not place.banned[token]]
            text += [rng.choice(options)] if options else []
        tree = draft(method, pattern, spelt(text), 10, temperature, 6).tree
        assert len(tree) <= 10 and max(tree.depth) <= 6
        for node in range(1, len(tree)):
            keep = allowed(pattern, spelt([*text, *tree.tokens(tree.parent[node])]), V - 1)
            assert tree.token[node] in keep
            forced = len(keep) == 1 and tree.source[node] != Ngram.name
            assert (tree.source[node] == GRAMMAR) == forced
