"""Tree policies on the same text: the chances of verification, the command.

pytest tests/test_bench_trees.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cases import few
from quickbeam.bench.trees import Results, emitted, reached
from quickbeam.cli.app import app
from quickbeam.tree import TokenTree
from quickbeam.verify import verify_sampled
from toy import ToyModel, path_tokens, random_tree


@pytest.mark.parametrize("seed", few(range(4), [0, 1]))
def test_nodes_are_reached_as_often_as_verification_accepts_them(seed: int) -> None:
    model, rng, generator = ToyModel(vocab=5, seed=seed), random.Random(seed), torch.Generator().manual_seed(seed)
    tree = max((random_tree(model, [0], rng) for _ in range(30)), key=len)
    assert len(tree) > 6 and {law is None for law in tree.law[1:]} == {True, False}
    count, hits = 6000, [0] * len(tree)

    def law(node: int) -> torch.Tensor:
        return model.target([0, *path_tokens(tree, node)])

    for _ in range(count):
        for node in verify_sampled(tree, law, generator)[0]:
            hits[node] += 1
    for chance, hit in zip(reached(tree, law), hits, strict=True):
        assert hit / count == pytest.approx(chance, abs=4.5 * (chance * (1 - chance) / count) ** 0.5 + 1e-9)


def test_a_perfect_drafter_is_always_accepted() -> None:
    model = ToyModel(vocab=5, seed=1, noise=0.0, zeros=0.0)
    tree = TokenTree(0)
    tree.add(tree.add(0, 3, "drawn", law=model.target([0])), 1, "drawn", law=model.target([0, 3]))
    tree.add(0, 2, "drawn", law=model.target([0]))
    assert reached(tree, lambda node: model.target([0, *path_tokens(tree, node)])) == pytest.approx([1, 1, 1, 0])


def test_differences_are_place_by_place_and_their_errors_by_answers() -> None:
    results = Results({0.0: {("a", 8): [2.0, 3.0, 4.0, 9.0], ("b", 8): [1.0, 3.0, 2.0]}}, {0.0: [0, 1, 2, 3]})
    results.drop_unfinished()
    assert results.places(0.0) == len(results.answer[0.0]) == 3 and results.mean(0.0, ("a", 8)) == 3
    assert results.difference(0.0, ("b", 8), ("a", 8)) == (-1.0, pytest.approx(3**-0.5))  # a place an answer: the textbook's
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


@pytest.fixture(scope="module")
def pair(toy_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return toy_folder, toy_folder


def run(pair: tuple[str, str], *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "trees", "--model", pair[0], "--drafter", pair[1], "--dtype", "float32", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_command_compares_policies_at_the_same_places(pair: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "trees.json"
    arguments = ["--limit", "3", "--max-tokens", "9", "--every", "2", "--trees", "greedy,drafted-chain", "--budgets", "3,5"]
    code, shown = run(pair, *arguments, "--json", str(out))
    assert code == 0 and "tokens a step at temperature 0.6" in shown
    record = json.loads(out.read_text())
    assert record["complete"] and record["prompts"] > 0
    for found in record["temperatures"]:
        tokens = {(tree["tree"], tree["budget"]): tree["tokens"] for tree in found["trees"]}
        assert found["places"] > 2 and set(tokens) == {(name, size) for name in ("greedy", "drafted-chain") for size in (3, 5)}
        if found["temperature"] == 0:  # the model drafts for itself: a chain is always right
            assert tokens["drafted-chain", 3] == 3 and tokens["drafted-chain", 5] == 5
        else:
            assert tokens["drafted-chain", 5] == pytest.approx(5, abs=1e-3)


def test_one_answer_has_a_difference_without_an_error(pair: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "trees.json"
    arguments = ["--limit", "1", "--max-tokens", "5", "--temperatures", "0", "--trees", "greedy,drafted-chain", "--budgets", "3"]
    code, shown = run(pair, *arguments, "--json", str(out))
    assert code == 0 and "±" not in shown
    assert all(tree["difference"]["error"] is None for tree in json.loads(out.read_text())["temperatures"][0]["trees"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trees", "greedy,oak"), "must be of greedy"),
        (("--budgets", "1,8"), "at least 2 nodes"),
        (("--budgets", "x"), "at least 2 nodes"),
        (("--temperatures", "hot"), "must be numbers"),
    ],
)
def test_bad_input_to_the_command(pair: tuple[str, str], arguments: tuple[str, str], words: str) -> None:
    code, shown = run(pair, *arguments)
    assert code == 2 and words in shown
