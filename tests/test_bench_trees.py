"""Tree policies on the same text: the chances of verification, the command.

pytest tests/test_bench_trees.py
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cases import few
from drafters import KnownDrafter
from quickbeam import LLM, SamplingParams
from quickbeam.bench.questions import Question
from quickbeam.bench.trees import Results, Step, emitted, following, measure, parse_trees, reached
from quickbeam.cli.app import app
from quickbeam.draft.base import Context
from quickbeam.errors import InvalidInput
from quickbeam.noise import Noise
from quickbeam.sampling import Sampler
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree
from quickbeam.trees.base import Grown, Growth
from quickbeam.trees.dyspec import DySpec
from quickbeam.verify import verify_residual
from toy import ToyModel, path_tokens, random_tree


@pytest.mark.parametrize("seed", few(range(4), [0, 1]))
def test_nodes_are_reached_as_often_as_verification_accepts_them(seed: int) -> None:
    model, rng, generator = (
        ToyModel(vocab=5, seed=seed),
        random.Random(seed),
        torch.Generator().manual_seed(seed),
    )
    tree = max((random_tree(model, [0], rng) for _ in range(30)), key=len)
    assert len(tree) > 6 and {law is None for law in tree.law[1:]} == {True, False}
    count, hits = 6000, [0] * len(tree)

    def law(node: int) -> torch.Tensor:
        return model.target([0, *path_tokens(tree, node)])

    for _ in range(count):
        for node in verify_residual(tree, law, generator)[0]:
            hits[node] += 1
    for chance, hit in zip(reached(tree, law), hits, strict=True):
        assert hit / count == pytest.approx(
            chance, abs=4.5 * (chance * (1 - chance) / count) ** 0.5 + 1e-9
        )


def test_a_perfect_drafter_is_always_accepted() -> None:
    model = ToyModel(vocab=5, seed=1, noise=0.0, zeros=0.0)
    tree = TokenTree(0)
    tree.add(tree.add(0, 3, "drawn", law=model.target([0])), 1, "drawn", law=model.target([0, 3]))
    tree.add(0, 2, "drawn", law=model.target([0]))
    assert reached(tree, lambda node: model.target([0, *path_tokens(tree, node)])) == pytest.approx(
        [1, 1, 1, 0]
    )


def test_differences_are_place_by_place_and_their_errors_by_answers() -> None:
    results = Results(
        {0.0: {("a", 8): [2.0, 3.0, 4.0, 9.0], ("b", 8): [1.0, 3.0, 2.0]}}, {0.0: [0, 1, 2, 3]}
    )
    results.drop_unfinished()
    assert results.places(0.0) == len(results.answer[0.0]) == 3 and results.mean(0.0, ("a", 8)) == 3
    # a place an answer: the textbook's
    assert results.difference(0.0, ("b", 8), ("a", 8)) == (-1.0, pytest.approx(3**-0.5))
    results.answer[0.0] = [0, 1, 1]  # the deviations 0, 1, -1 cancel out within an answer
    assert results.difference(0.0, ("b", 8), ("a", 8)) == (-1.0, 0.0)
    results.answer[0.0] = [4, 4, 4]  # one answer tells nothing of others
    assert results.difference(0.0, ("b", 8), ("a", 8)) == (-1.0, None)
    results.answer[0.0] = [0, 0, 1]
    assert results.difference(0.0, ("b", 8), ("a", 8)) == (-1.0, pytest.approx(2 / 3))


def test_nothing_is_emitted_after_an_answer_s_end() -> None:
    tree = TokenTree(0)
    end = tree.add(tree.add(0, 3, "certain"), 9, "certain")
    tree.add(end, 4, "certain")
    assert emitted(tree, [1.0] * 4, {7}) == 4
    assert emitted(tree, [1.0, 0.5, 0.25, 0.25], {9}) == 1.5


class Watched(DySpec):
    """Keeps the trees, and the paths that it is told of."""

    def __init__(self, drafter: KnownDrafter) -> None:
        super().__init__(drafter)
        self.trees: list[TokenTree] = []
        self.paths: list[list[int]] = []

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        found: Grown = yield from super().grow(context, budget, max_depth)
        self.trees.append(found.tree)
        return found._replace(learn=lambda tree, path: self.paths.append(list(path)))


class ToyTarget:
    def __init__(self, model: ToyModel, ids: list[int]) -> None:
        self.model, self.ids = model, ids

    def depth_limit(self) -> int:
        return 6

    def verify(self, tree: TokenTree) -> torch.Tensor:
        return torch.stack(
            [
                self.model.target([*self.ids, *path_tokens(tree, node)]).log()
                for node in range(len(tree))
            ]
        )


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_coupled_trees_figure_is_the_length_of_the_path_that_its_noise_takes(
    temperature: float,
) -> None:
    lengths = set()
    for seed in range(40):
        model, ids = ToyModel(vocab=70, seed=seed % 5, noise=0.4), [seed, 3, 1]
        policy, sampler = (
            Watched(KnownDrafter(model.draft)),
            Sampler(SamplingParams(temperature=temperature), ids, 70),
        )
        noise = Noise(seed, 0, 70) if temperature else None
        context = Context(ids, torch.zeros(1), temperature, noise=noise).begin(policy.sources)
        target: Any = ToyTarget(model, ids)
        after = following(target, ids[-1])
        found = Step(target, policy.drafter, policy, 12, sampler, {69}, after).coupled(context)

        (tree,), node, path, whole = policy.trees, 0, [0], 1
        # word for word: what the noise of each place emits, as long as it is in the tree
        while True:
            scores = model.target([*ids, *path_tokens(tree, node)]).double().log().numpy() / (
                temperature or 1.0
            )
            if temperature:
                scores = scores + Noise(seed, 0, 70).of(
                    np.arange(70), np.full(70, len(ids) + tree.depth[node])
                )
            child = tree.child(node, int(scores.argmax()))
            if child is None:
                break
            node = child
            path.append(node)
            whole += not any(tree.token[one] == 69 for one in path[1:])
        assert (found, policy.paths) == (whole, [path])
        lengths.add(whole)
    assert len(lengths) > 3


def test_logits_behind_a_place_are_those_of_a_tree_and_computed_once(
    toy_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(toy_folder, "ar", dtype="float32") as llm:
        target, tree = Target(llm.model), TokenTree(5)
        target.prefill([3, 1, 4, 1])
        for parent, token in ((0, 9), (0, 2), (1, 6), (1, 5), (3, 3), (2, 9)):
            tree.add(parent, token, "any")
        whole, passes, verify = target.verify(tree), [], target.verify

        def counted(chain: TokenTree) -> torch.Tensor:
            passes.append(tuple(chain.token))
            return verify(chain)

        monkeypatch.setattr(target, "verify", counted)
        after = following(target, 5)
        for _ in range(2):
            for node in reversed(range(len(tree))):
                assert torch.equal(after(tree.tokens(node)), whole[node])
        assert len(passes) == len(set(passes)) == len(tree)


def test_the_text_is_the_seeds_and_trees_are_grown_with_other_noise(
    toy_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], int | None, bool]] = []

    def grown(self: Step, context: Context, *_: object) -> float:
        seen.append((list(context.ids), context.noise and context.noise.seed, context.draws))
        return float(len(seen))

    monkeypatch.setattr(Step, "coupled", grown)
    monkeypatch.setattr(Step, "residual", grown)
    questions = [Question(i, "x", (text,)) for i, text in enumerate(("abc abc", "hello"))]
    params = SamplingParams(max_tokens=10, temperature=0.6, seed=5)
    with LLM(toy_folder, "dyspec", dtype="float32", drafter=toy_folder) as llm:
        items = [("greedy", 4), ("eagle2", 4), ("greedy+residual", 4)]
        results = Results({0.6: {item: [] for item in items}})
        for number, _ in enumerate(measure(llm, questions, [params], items, 2, results, draws=3)):
            prompt = llm.encode_chat([{"role": "user", "content": questions[number].turns[0]}])
            text = [
                *prompt,
                *llm.generate(prompt, replace(params, seed=5 + number), method="ar").token_ids,
            ]
            places = len(seen) // 7
            assert places >= 3 and all(
                ids == text[: len(prompt) + 1 + 2 * (i // 7)] for i, (ids, _, _) in enumerate(seen)
            )
            first, second, last = (seen[:3], seen[3:6], seen[6])
            seeds = [seed for _, seed, _ in first]
            assert seeds == [seed for _, seed, _ in second] and len({*seeds, 5 + number}) == 4, (
                "the same for all, not the text's"
            )
            assert last[1:] == (None, True) and not any(draws for _, _, draws in first)
            assert results.tokens[0.6]["greedy", 4][-places] == 2.0, "the mean of three"
            seen.clear()


def test_names_of_trees() -> None:
    assert parse_trees("greedy, specinfer+residual,greedy+residual,greedy+coupled") == [
        "greedy",
        "specinfer+residual",
        "greedy+residual",
    ]
    assert parse_trees("greedy,eagle2+coupled,greedy+residual", "residual") == [
        "greedy+residual",
        "eagle2",
    ]
    for text in ("", "greedy+drawn", "+residual", "greedy+", "greedy+residual+coupled"):
        with pytest.raises(InvalidInput, match="--trees"):
            parse_trees(text)


@pytest.fixture(scope="module")
def pair(toy_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return toy_folder, toy_folder


def run(pair: tuple[str, str], *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app,
        [
            "bench",
            "trees",
            "--model",
            pair[0],
            "--drafter",
            pair[1],
            "--dtype",
            "float32",
            *arguments,
        ],
    )
    return result.exit_code, " ".join(result.output.split())


NAMES = "greedy,drafted-chain,drafted-chain+residual"


def test_the_command_compares_policies_at_the_same_places(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "trees.json"
    arguments = [
        "--limit",
        "3",
        "--max-tokens",
        "9",
        "--every",
        "2",
        "--trees",
        NAMES,
        "--budgets",
        "3,5",
    ]
    code, shown = run(pair, *arguments, "--json", str(out))
    assert code == 0 and "tokens a step at temperature 0.6" in shown
    record = json.loads(out.read_text())
    assert record["complete"] and record["prompts"] > 0
    for found in record["temperatures"]:
        tokens = {(tree["tree"], tree["budget"]): tree["tokens"] for tree in found["trees"]}
        assert found["places"] > 2 and set(tokens) == {
            (name, size) for name in NAMES.split(",") for size in (3, 5)
        }
        assert tokens["drafted-chain", 3] == 3 and tokens["drafted-chain", 5] == 5, (
            "the model drafts for itself: a chain is always right"
        )
        assert tokens["drafted-chain+residual", 5] == pytest.approx(5, abs=1e-3)
    assert record["settings"]["draws"] == 4


def test_all_are_drawn_where_that_is_asked_for(pair: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "trees.json"
    arguments = [
        "--limit",
        "1",
        "--max-tokens",
        "5",
        "--temperatures",
        "1",
        "--trees",
        "greedy,eagle2+coupled",
        "--budgets",
        "3",
    ]
    code, _ = run(pair, *arguments, "--coupling", "residual", "--draws", "2", "--json", str(out))
    record = json.loads(out.read_text())
    assert code == 0 and [tree["tree"] for tree in record["temperatures"][0]["trees"]] == [
        "greedy+residual",
        "eagle2",
    ]


def test_one_answer_has_a_difference_without_an_error(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "trees.json"
    arguments = [
        "--limit",
        "1",
        "--max-tokens",
        "5",
        "--temperatures",
        "0",
        "--trees",
        "greedy,drafted-chain",
        "--budgets",
        "3",
    ]
    code, shown = run(pair, *arguments, "--json", str(out))
    assert code == 0 and "±" not in shown
    assert all(
        tree["difference"]["error"] is None
        for tree in json.loads(out.read_text())["temperatures"][0]["trees"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trees", "greedy,oak"), "must be of greedy"),
        (("--trees", "greedy+drawn"), "alone or with +residual"),
        (("--draws", "0"), "--draws"),
        (("--budgets", "1,8"), "at least 2 nodes"),
        (("--budgets", "x"), "at least 2 nodes"),
        (("--temperatures", "hot"), "must be numbers"),
    ],
)
def test_bad_input_to_the_command(
    pair: tuple[str, str], arguments: tuple[str, str], words: str
) -> None:
    code, shown = run(pair, *arguments)
    assert code == 2 and words in shown
