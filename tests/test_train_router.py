"""Training a router: labels, and what it learns from them.

pytest tests/test_train_router.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.shortlist.layout import ABSENT, FREQUENT, Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.train import labels
from quickbeam.train import router as training
from quickbeam.train.drafter import split
from quickbeam.train.labels import Labeller, Rows, collect
from quickbeam.train.router import RouterRecipe
from quickbeam.train.shards import Conversation, Shards, ShardWriter

VOCAB, D, CLUSTER = 60, 16, 8
CONFIG = EagleConfig(D, 24, 4, 2, 4, (1, 3), D, VOCAB, feature_norms=True)
HEAD = torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(99))
ORDER = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))
LAYOUT = Layout(ORDER, 10, CLUSTER, VOCAB)  # six clusters of 8 and one of 2
CPU = torch.device("cpu")


def conversations(count: int, seed: int = 0) -> list[Conversation]:
    """Text whose next token is told by the last one: (last + 3) modulo the vocabulary, as the
    hidden state says too."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        n = int(torch.randint(8, 30, (1,), generator=generator))
        tokens = (torch.randint(VOCAB, (1,), generator=generator) + 3 * torch.arange(n)) % VOCAB
        hidden = torch.cat(
            [torch.randn(n, D, generator=generator), 0.7 * HEAD[(tokens + 3) % VOCAB]], 1
        )
        found.append(Conversation(tokens.int(), torch.arange(n) >= 4, hidden.bfloat16(), 0.0))
    return found


def written(folder: Path, text: list[Conversation]) -> Shards:
    writer = ShardWriter(folder)
    for conversation in text:
        writer.add(conversation)
    writer.flush()
    return Shards(folder)


def network() -> EagleHead:
    torch.manual_seed(0)
    net = EagleHead(CONFIG, torch.nn.Embedding(VOCAB, D)).requires_grad_(False)
    for parameter in net.parameters():
        parameter.mul_(2)
    return net


def full_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    shared = query.shape[1] // key.shape[1]
    q, k, v = (
        query.transpose(0, 1),
        *(x.repeat_interleave(shared, 1).transpose(0, 1) for x in (key, value)),
    )
    scores = (q @ k.transpose(1, 2)) / query.shape[2] ** 0.5
    scores += torch.full_like(scores, float("-inf")).triu(1)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def drafted(
    net: EagleHead, conversation: Conversation, i: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of the layer at row i after `depth` drafts, over the sequence of rows that
    it sees, one more a draft."""
    hidden = list(net.fuse(conversation.hidden[: i + 1].float()))
    embedded = net.embed(conversation.tokens.long()).float()
    for _ in range(depth):
        hidden.append(
            net(
                torch.stack(hidden),
                embedded[1 : len(hidden) + 1],
                torch.arange(len(hidden)),
                full_causal,
            )[-1]
        )
    out = net(
        torch.stack(hidden), embedded[1 : len(hidden) + 1], torch.arange(len(hidden)), full_causal
    )
    return hidden[-1], out[-1]


@torch.no_grad()
@pytest.mark.parametrize("mix", [0.0, 0.3])
def test_labels_are_those_of_single_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mix: float
) -> None:
    """Each row's input and the masses of clusters, against a loop over positions, drafts and
    tokens."""
    monkeypatch.setattr(labels, "autocast", lambda device: torch.autocast("cpu", enabled=False))
    net, text = network(), conversations(3, seed=5)
    text.append(Conversation(*(column[:6] for column in text[0][:3]), 0.0))  # short: few rows count
    absent = Layout(ORDER[:50], 10, CLUSTER, VOCAB)
    rows = collect(
        net, written(tmp_path, text), range(4), Labeller(HEAD, absent, mix), 3, 10_000, seed=0
    )
    count = 0
    for conversation in text:
        for depth in range(3):
            for i in range(len(conversation.tokens) - depth - 2):
                if not conversation.answer[i + depth + 2]:
                    continue
                count += 1
                hidden, out = drafted(net, conversation, i, depth)
                p = (HEAD @ conversation.hidden[i + depth + 1, -D:].float()).softmax(-1)
                q = (HEAD @ net.feature(out)).softmax(-1)
                top = sorted(range(VOCAB), key=lambda token: -float(q[token]))[:10]
                expected = torch.zeros(absent.clusters)
                for token in range(VOCAB):
                    if (cluster := int(absent.cluster_of[token])) >= 0:
                        expected[cluster] += (1 - mix) * float(p[token])
                        if token in top:
                            expected[cluster] += mix * float(q[token] / q[top].sum())
                same = (rows.tokens == conversation.tokens[i + depth + 1]) & (rows.depth == depth)
                at = torch.where(
                    same, (rows.hidden.float() - hidden).abs().sum(1), torch.inf
                ).argmin()
                assert same[at] and torch.allclose(
                    rows.hidden[at].float(), hidden, rtol=0.01, atol=0.01
                )
                assert torch.allclose(rows.masses[at].float(), expected, atol=2e-3)
                assert float(rows.common[at]) == pytest.approx(
                    float(p[absent.order[:10]].sum()), abs=1e-4
                )
                assert int(rows.best[at]) == int(absent.cluster_of[p.argmax()])
    assert count == len(rows.tokens) > 100
    assert {int(best) for best in rows.best} >= {FREQUENT, ABSENT, 0}


def test_masses_and_the_frequent_block_are_the_whole_law() -> None:
    features = torch.randn(20, D, generator=torch.Generator().manual_seed(1))
    found = Labeller(HEAD, LAYOUT, 0.0)(features, features)
    assert torch.allclose(found.masses.sum(1) + found.common, torch.ones(20), atol=1e-3)
    ours = Labeller(HEAD, LAYOUT, 1.0)(features, torch.zeros(20, D))  # nothing but the candidates
    tokens = (features.bfloat16() @ HEAD.bfloat16().T).float().topk(10).indices
    assert (
        (ours.masses > 0).sum(1)
        == torch.tensor([len(set(LAYOUT.cluster_of[row].tolist()) - {FREQUENT}) for row in tokens])
    ).all()


def test_rows_are_as_many_as_asked_for_of_all_depths_and_progress_is_told(tmp_path: Path) -> None:
    shards = written(tmp_path, conversations(40))
    told: list[float] = []
    rows = collect(
        network(), shards, range(40), Labeller(HEAD, LAYOUT, 0.3), 3, 200, 0, told.append
    )
    assert len(rows.tokens) == 200 and torch.bincount(rows.depth).min() > 30
    assert told == sorted(told) and told[-1] == 1.0
    assert sum(column.numel() * column.element_size() for column in rows) == Rows.memory(
        200, D, LAYOUT.clusters
    )
    again, other = (
        collect(network(), shards, range(40), Labeller(HEAD, LAYOUT, 0.3), 3, 200, seed)
        for seed in (0, 1)
    )
    assert torch.equal(again.tokens, rows.tokens) and not torch.equal(other.tokens, rows.tokens)
    few = collect(network(), shards, [3, 4], Labeller(HEAD, LAYOUT, 0.3), 2, 10_000, 0)
    assert set(few.tokens.tolist()) <= {
        *shards[3].tokens.tolist(),
        *shards[4].tokens.tolist(),
    } and set(few.depth.tolist()) == {0, 1}


def test_text_without_answers_is_refused(tmp_path: Path) -> None:
    silent = [
        c._replace(answer=torch.zeros(len(c.tokens), dtype=torch.bool)) for c in conversations(3)
    ]
    for chosen in ([0, 1, 2], []):
        with pytest.raises(InvalidInput, match="no answers"):
            collect(
                network(),
                written(tmp_path / str(len(chosen)), silent),
                chosen,
                Labeller(HEAD, LAYOUT, 0.3),
                3,
                100,
                0,
            )


@pytest.fixture
def learned(tmp_path: Path) -> tuple[EagleHead, Rows, Rows]:
    """A drafter, rows of conversations, and rows of others with the target's law alone."""
    net, shards = network(), written(tmp_path / "text", conversations(150))
    train, held = split(shards)
    return (
        net,
        collect(net, shards, train, Labeller(HEAD, LAYOUT, 0.3), 3, 5000, 0),
        collect(net, shards, held, Labeller(HEAD, LAYOUT, 0.0), 3, 5000, 0),
    )


SMALL = RouterRecipe(epochs=12, width=64, lr=5e-3, batch=64)


def test_a_router_learns_what_tells_the_cluster(learned: tuple[EagleHead, Rows, Rows]) -> None:
    net, rows, held = learned
    torch.manual_seed(1)
    untrained = training.evaluate(
        Router(RouterConfig(D, D, 64, LAYOUT.clusters)), net.embed, held, 3, CPU
    )
    *_, last = training.train_router(net.embed, rows, held, SMALL, CPU)
    assert last.held.choices == [0, 1, 2, 4]
    for depth in range(3):
        alone, one, two, _ = last.held.recall[depth]
        assert alone < 0.4 and one > 0.9 and one > untrained.recall[depth][1] + 0.3 and two >= one
        assert last.held.covered[depth][1] > untrained.covered[depth][1] + 0.2
    assert last.held.loss < untrained.loss - 1


def test_the_figures_are_those_of_single_rows(learned: tuple[EagleHead, Rows, Rows]) -> None:
    net, _, held = learned
    held = held.take(slice(40))
    held.best[3] = ABSENT
    router = Router(RouterConfig(D, D, 8, LAYOUT.clusters))
    found = training.evaluate(router, net.embed, held, 3, CPU)
    loss = mass = 0.0
    recall = {(depth, k): [] for depth in range(3) for k in found.choices}
    covered: dict[tuple[int, int], list[float]] = {key: [] for key in recall}
    for i in range(40):
        with torch.no_grad():
            scores = router(held.hidden[i], net.embed(held.tokens[i].long()))
        loss -= float((held.masses[i].float() * scores.log_softmax(-1)).sum())
        mass += float(held.masses[i].float().sum())
        for k in found.choices:
            called = sorted(range(LAYOUT.clusters), key=lambda c: -float(scores[c]))[:k]
            recall[int(held.depth[i]), k].append(int(held.best[i]) in [FREQUENT, *called])
            covered[int(held.depth[i]), k].append(
                float(held.common[i]) + sum(float(held.masses[i, c]) for c in called)
            )
    assert found.loss == pytest.approx(loss / mass, rel=1e-4) and sum(found.rows) == 40
    for depth in range(3):
        for at, k in enumerate(found.choices):
            n = max(1, found.rows[depth])
            assert found.recall[depth][at] == pytest.approx(sum(recall[depth, k]) / n)
            assert found.covered[depth][at] == pytest.approx(sum(covered[depth, k]) / n, abs=1e-4)


def test_the_loss_is_the_cross_entropy_weighted_by_mass() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, masses = (
        torch.randn(5, 4, generator=generator),
        torch.rand(5, 4, generator=generator) / 4,
    )
    masses[2] = 0  # all of it in the frequent block
    loss, weight = training.loss_of(scores, masses)
    expected = 0.0
    for row, mass in zip(scores, masses, strict=True):
        if (total := float(mass.sum())) > 0:
            expected += total * float(torch.nn.functional.cross_entropy(row, mass / total))
    assert float(loss) == pytest.approx(expected, rel=1e-5) and float(weight) == pytest.approx(
        float(masses.sum())
    )


def test_the_best_router_is_kept_and_a_seed_repeats_it(
    learned: tuple[EagleHead, Rows, Rows],
) -> None:
    net, rows, held = learned
    recipe = RouterRecipe(epochs=6, width=64, lr=0.05, batch=8)  # too fast: it gets worse again
    epochs = list(training.train_router(net.embed, rows.take(slice(100)), held, recipe, CPU))
    losses = [epoch.held.loss for epoch in epochs]
    assert [epoch.better for epoch in epochs] == [
        loss == min(losses[: i + 1]) for i, loss in enumerate(losses)
    ]
    assert losses[-1] > min(losses)
    kept = training.evaluate(epochs[-1].router, net.embed, held, 3, CPU)
    assert kept.loss == pytest.approx(min(losses), rel=1e-6)
    again = list(training.train_router(net.embed, rows.take(slice(100)), held, recipe, CPU))
    assert [epoch.held.loss for epoch in again] == losses


def test_rows_that_are_not_finite_end_the_training(learned: tuple[EagleHead, Rows, Rows]) -> None:
    net, rows, held = learned
    rows.hidden[0] = float("nan")
    with pytest.raises(QuickbeamError, match="epoch 1"):
        list(training.train_router(net.embed, rows, held, SMALL, CPU))


def test_the_rate_falls_to_zero_and_recipes_are_checked() -> None:
    recipe = RouterRecipe(lr=2.0)
    assert [recipe.rate(0), recipe.rate(0.5), recipe.rate(1)] == pytest.approx([2, 1, 0])
    for wrong in ({"rows": 0}, {"epochs": 0}, {"mix": 1.5}, {"lr": 0.0}):
        with pytest.raises(InvalidInput):
            RouterRecipe(**wrong)  # type: ignore[arg-type]
