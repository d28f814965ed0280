"""One tree of what the text repeats and what a drafter says.

pytest tests/test_merged.py
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import KnownDrafter, context_of, paths, toy_laws, zipf_drafter
from models import VOCAB, tiny
from quickbeam import LLM, SamplingParams
from quickbeam.draft.base import Laws
from quickbeam.draft.ngram import Ngram
from quickbeam.draft.prices import Prices
from quickbeam.engine.budget import CostModel
from quickbeam.engine.loop import Generation
from quickbeam.engine.market import Market
from quickbeam.engine.output import Output
from quickbeam.llm import Setting
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree
from quickbeam.trees import make_policy
from quickbeam.trees.acceptance import Likeliest, Printed
from quickbeam.trees.draws import Draws, drawn
from quickbeam.trees.greedy import Greedy
from quickbeam.trees.hybrid import LONGEST, Merged, Repeats
from quickbeam.verify import Verdict, verify_greedy, verify_sampled
from toy import ToyModel, chi_square, exact_law, path_tokens, sample_sequences


class Letters:
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def merged(drafter: KnownDrafter, ids: list[int]) -> Merged:
    policy = Merged(drafter, Ngram())
    policy.ngram.reset(ids)
    return policy


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 40), st.integers(0, 9), st.lists(st.integers(0, 7), min_size=1))
def test_every_tree_keeps_the_contract(seed: int, vocab: int, budget: int, max_depth: int, text: list[int]) -> None:
    model, ids = ToyModel(vocab, seed), [token % vocab for token in text]
    drafter = KnownDrafter(model.draft)
    policy = merged(drafter, ids)
    policy.likeliest = Printed()
    tree = policy.grow(context_of(ids, 0.0), budget, max_depth)
    assert 1 <= len(tree) <= budget and max(tree.depth) <= max_depth
    assert set(tree.source[1:]) <= {"drafter", "ngram"} and not any(law is not None for law in tree.law)
    for node in range(1, len(tree)):
        assert 0 < tree.value[node] <= tree.value[tree.parent[node]] + 1e-9
    for children, value in zip(tree.children, tree.value, strict=True):
        assert sum(tree.value[child] for child in children.values()) <= value + 1e-6
    assert tree.value[1:] == sorted(tree.value[1:], reverse=True)


def test_without_repeats_the_tree_is_the_drafters() -> None:
    ids = [7, 3]
    both, alone = merged(zipf_drafter(), ids), Greedy(zipf_drafter())
    for budget in (2, 9, 30):
        trees = [policy.grow(context_of(ids, 0.0), budget, 12) for policy in (both, alone)]
        assert paths(trees[0]) == paths(trees[1]) and trees[0].value == pytest.approx(trees[1].value)


def test_a_token_that_both_propose_is_one_child_and_the_others_share_the_rest() -> None:
    law = torch.tensor([0.1, 0.5, 0.3, 0.1])
    ids = [0, 2, 3, 0]  # 0 was followed by 2
    policy = merged(KnownDrafter(lambda context: law), ids)
    chance = policy.repeats.chance(1)
    tree = policy.grow(context_of(ids, 0.0), 5, 1)
    found = {token: tree.value[child] for token, child in tree.children[0].items()}
    both = 1 - (1 - 0.3) * (1 - chance)
    first = Likeliest.usual(0, 0.5)
    assert found == pytest.approx({2: both, 1: first * (1 - both) / 0.7, 0: 0.1 * (1 - both) / 0.7, 3: 0.1 * (1 - both) / 0.7})
    assert tree.source[tree.children[0][2]] == "ngram" and tree.source[tree.children[0][1]] == "drafter"


def test_where_the_text_repeats_itself_for_long_the_drafter_is_not_asked() -> None:
    period = [5, 9, 2, 7, 1, 8, 3]
    ids = period * 4
    policy = merged(zipf_drafter(20), ids)
    context = context_of(ids, 0.0)
    context.prices = Prices([1, 64], [0.0, 63 * 0.01], 0.3)
    tree = policy.grow(context, 64, 12)
    assert policy.calls == 0 and path_tokens(tree, len(tree) - 1) == (period * 2)[:12]
    context = context_of([1, 2, 3, 4], 0.0)
    context.prices = Prices([1, 64], [0.0, 63 * 0.01], 0.3)
    policy.ngram.reset([1, 2, 3, 4])
    policy.grow(context, 64, 12)
    assert policy.calls > 0


def test_a_tree_without_a_call_ends_where_nodes_cost_more_than_they_promise() -> None:
    ids = [5, 9, 2, 7, 1, 8, 3] * 4
    policy = merged(zipf_drafter(20), ids)
    context = context_of(ids, 0.0)
    context.prices = Prices([1, 4, 64], [0.0, 0.03, 0.03 + 60 * 2.0], 5.0)
    tree = policy.grow(context, 64, 12)
    assert policy.calls == 0 and len(tree) == 4


def test_likely_paths_are_continued_from_the_text() -> None:
    """The drafter is sure of one token; what followed it earlier hangs below it without a further call."""
    law = torch.full((30,), 0.001)
    law[4] = 1 - 0.029
    text = [1, 4, 11, 12, 13, 14, 9, 8, 1]
    ids = [*text[:-1], 20, 1]
    policy = merged(KnownDrafter(lambda context: law), ids)
    context = context_of(ids, 0.0)
    context.prices = Prices([1, 64], [0.0, 63 * 0.02], 0.75)
    tree = policy.grow(context, 64, 9)
    assert (4, 11, 12) in paths(tree) and policy.calls <= 1


def test_how_often_the_text_repeats_itself_is_learned() -> None:
    repeats = Repeats()
    assert [repeats.chance(length) for length in (1, 2, 3, 4, 8, 16, 99)] == pytest.approx([0.25, 0.45, 0.45, 0.65, 0.8, 0.9, 0.9])
    rng = random.Random(0)
    for _ in range(2000):
        repeats.observe(5, rng.random() < 0.1)
    assert repeats.chance(4) == pytest.approx(0.1, abs=0.06) and repeats.chance(3) == pytest.approx(0.45)


def test_policies_tell_how_repeats_came_out_and_thank_the_drafter_for_its_own() -> None:
    period = [5, 9, 2, 7]
    ids = period * 3
    policy = merged(zipf_drafter(20), ids)
    policy.repeats = repeats = Repeats()
    told: list[tuple[int, bool]] = []
    repeats.observe = lambda length, right: told.append((length, right))  # type: ignore[method-assign]
    promised: list[int] = []
    policy.promises.observe = lambda accepted, *_: promised.append(accepted)  # type: ignore[method-assign]
    context = context_of(ids, 0.0)
    context.prices = Prices([1, 12], [0.0, 0.0], -1.0)
    tree = policy.grow(context, 12, 8)
    chain = (period * 3)[:8]
    following = {tuple(chain[:i]): chain[i] for i in range(3)}
    path, _ = verify_greedy(tree, lambda node: following.get(tuple(path_tokens(tree, node)), 19))
    policy.verified(tree, path)
    assert len(path) == 4 and told[:3] == [(8, True), (9, True), (10, True)] and all(not right for _, right in told[3:])
    assert promised == [0]


@pytest.mark.parametrize("budget", [1, 2, 7, 24, "market"])
def test_output_is_plain_decodings(budget: int | str) -> None:
    """A text that goes in circles now and then, a drafter that is right now and then."""
    target, params = Target(tiny("llama")), SamplingParams(max_tokens=60, ignore_eos=True)
    model = ToyModel(VOCAB, 3)
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]

    def answer(policy: object, nodes: object) -> list[int]:
        target.reset()
        output = Output(Letters(), params, ())
        for _ in Generation(target, policy, output, prompt, params, nodes):  # type: ignore[arg-type]
            pass
        return output.token_ids

    plain = answer(make_policy((), "none"), 1)

    def law(context: list[int]) -> torch.Tensor:
        if random.Random(str(context[-3:])).random() < 0.5 and len(context) - len(prompt) < len(plain):
            return torch.nn.functional.one_hot(torch.tensor(plain[len(context) - len(prompt)]), VOCAB) * 0.8 + 0.2 / VOCAB
        return model.draft(context)

    nodes = Market(CostModel({1: 1.0, 64: 2.0}), 64) if budget == "market" else budget
    policy = Merged(KnownDrafter(law), Ngram())
    assert answer(policy, nodes) == plain


def test_auto_takes_what_is_at_hand(toy_folder: str) -> None:
    short = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = LLM(toy_folder, dtype="float32")
    answer = alone.generate("abc abc", short)
    assert alone.method == answer.method == "logitspec"
    both = LLM(toy_folder, dtype="float32", drafter=toy_folder)
    drafted = both.generate("abc abc", short)
    assert drafted.method == "auto" and drafted.token_ids == answer.token_ids
    assert set(both._markets) == {Setting("auto", "full", None)}  # a smaller model has no router
    assert both.generate("abc abc", SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)).method == "auto"


def test_either_source_of_the_tree_can_be_left_out() -> None:
    assert type(make_policy(("drafter",), "merged", zipf_drafter())) is Greedy
    both = make_policy(("drafter", "ngram"), "merged", zipf_drafter())
    assert type(both) is Merged and [source.name for source in both.sources] == ["drafter", "ngram"]


PAST = [0, 1, 2, 3, 0, 1, 2, 0, 3, 1, 2, 3, 0, 1, 2, 3]  # what an answer may repeat


def sampled(temperature: float, count: int, budget: int = 7) -> tuple[float, Merged, int]:
    """The p-value of two sampled tokens after [0] having the target's law, the policy, and how many trees had children of both kinds."""
    model = ToyModel(vocab=4, seed=5, noise=1.2)
    target, law = toy_laws(model, temperature)
    policy, generator, mixed = Merged(KnownDrafter(law), Ngram()), torch.Generator().manual_seed(1), 0

    def grow(ids: list[int], rng: random.Random) -> TokenTree:
        policy.ngram.reset([*PAST, *ids])
        return policy.grow(context_of(ids, temperature, generator), budget, 5)

    def verify(tree: TokenTree, law: Callable[[int], torch.Tensor], generator: torch.Generator) -> Verdict:
        nonlocal mixed
        verdict = verify_sampled(tree, law, generator)
        policy.verified(tree, verdict.path)
        mixed += any(len({tree.source[child] for child in children.values()}) == 2 for children in tree.children)
        return verdict

    counts = sample_sequences(model, grow, verify, count, 2, 1, target)
    return chi_square(counts, exact_law(target, model.vocab, 2)), policy, mixed


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_output_has_the_targets_law(temperature: float) -> None:
    """Continuations before draws, by chances that are learned on the way."""
    p, policy, mixed = sampled(temperature, 4000)
    assert p > 1e-3 and mixed > 500
    assert policy.sampled_repeats.chance(2) != Repeats().chance(2) and policy.repeats.chance(2) == Repeats().chance(2)


def test_draws_behind_a_continuation_that_are_not_drawn_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    strike = Draws.strike

    def likeliest_first(self: Draws, token: int) -> None:
        strike(self, token)
        self._stream = iter(sorted(self._stream, key=lambda one: -one[1]))

    monkeypatch.setattr(Draws, "strike", likeliest_first)
    assert sampled(1.0, 4000)[0] < 1e-6


def test_continuations_of_a_sampled_text_come_first_and_their_token_is_not_drawn() -> None:
    ids = [5, 9, 2, 7, 1, 8, 3] * 4
    policy = merged(zipf_drafter(20), ids)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        tree = policy.grow(context_of(ids, 1.0, generator), 24, 12)
        for node, children in enumerate(tree.children):
            kinds = [tree.source[child] for child in children.values()]
            assert "ngram" not in kinds[1:]
            for child in children.values():
                assert (tree.law[child] is None) == (tree.source[child] == "ngram")
                assert tree.value[child] <= tree.value[node]
        assert next(iter(tree.children[0])) == 5
    told: list[tuple[int, bool]] = []
    policy.sampled_repeats.observe = lambda length, right: told.append((length, right))  # type: ignore[method-assign]
    first = tree.children[0][5]
    policy.verified(tree, [0, first])
    second = tree.children[first].get(9)
    assert told == [(16, True)] + ([(17, False)] if second is not None and tree.source[second] == "ngram" else [])


def test_text_that_repeats_itself_for_long_has_budgets_of_its_own() -> None:
    short, long = [1, 2, 3, 4, 1, 2], [5, 9, 2, 7, 1, 8, 3] * 3
    assert [merged(zipf_drafter(20), ids).situation(context_of(ids, 1.0)) for ids in (short, long)] == [3, 4]


def test_continuations_that_seldom_come_true_are_not_tried_first() -> None:
    ids = [5, 9, 2, 7, 1, 8, 3] * 4
    policy = merged(zipf_drafter(20), ids)
    for _ in range(500):
        policy.sampled_repeats.observe(16, False)
    tree = policy.grow(context_of(ids, 1.0, torch.Generator()), 24, 12)
    assert tree.source[next(iter(tree.children[0].values()))] == "drafter"


def test_a_law_without_a_token_is_drawn_from_until_nothing_is_left() -> None:
    law = torch.tensor([[0.5, 0.25, 0.125, 0.125, 0.0]])
    (draws,) = drawn(Laws(law), torch.Generator().manual_seed(0))
    draws.strike(0)
    found = [draws.draw(i) for i in range(4)]
    assert sorted(token for token, _ in found[:3]) == [1, 2, 3] and found[3] is None
    assert draws.chance(0) == pytest.approx(found[0][1] / 0.5) and draws.worth(0) == 0.5 and draws.peak(0) == pytest.approx(0.5)


@pytest.mark.parametrize("prices", [None, Prices([1, 64], [0.0, 63 * 0.03], 0.01)])
def test_a_continuation_without_a_place_leaves_its_token_to_the_drafter(prices: Prices | None) -> None:
    ids = [5, 9, 2, 7, 1, 8, 3] * 4
    law = torch.full((20,), 0.1 / 19)
    law[5] = 0.9  # what followed the text's end before
    policy = merged(KnownDrafter(lambda context: law), ids)
    for _ in range(5000):
        for length in range(1, 40):
            policy.repeats.observe(length, False)
    context = context_of(ids, 0.0)
    context.prices = prices
    tree = policy.grow(context, 6, 12)
    assert [tree.token[child] for child in tree.children[0].values()][:1] == [5]
    assert tree.value[tree.children[0][5]] > 0.8


def test_continuations_are_not_endless() -> None:
    ids = [1] * 40
    policy = merged(zipf_drafter(20), ids)
    assert max(policy.grow(context_of(ids, 0.0), 64, 60).depth) <= 2 * LONGEST
