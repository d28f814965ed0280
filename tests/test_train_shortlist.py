"""Places of text, clusters of tokens, the router over them, and the command for shortlists."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from cases import before, refuses
from checkpoints import LLAMA, configure, eagle1, rewrite, write
from features import causal
from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.eagle_files import save_eagle
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import RouterConfig
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.errors import QuickbeamError
from quickbeam.train import places, shortlist
from quickbeam.train.places import collect_places
from quickbeam.train.recipes import HIDDEN_FOLDER, ShortlistPlan
from quickbeam.train.router import CLUSTERINGS, halve, routed, train_router
from quickbeam.train.shards import ConversationTokens, Shards, ShardWriter, collate, split
from quickbeam.train.shortlist import ShortlistTraining
from quickbeam.train.states import StateCache
from scripts import cli, script

VOCAB, D = 60, 16
CONFIG = EagleConfig(D, 24, 4, 2, 4, (1, 3), D, VOCAB, feature_norms=True)
HEAD = torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(99))
REST = torch.arange(5, VOCAB)  # all but five frequent tokens
RECIPE = {"width": 64, "epochs": 30, "lr": 5e-3, "batch": 64}


class CodedTarget:
    """A target whose last hidden state tells the next token, (last + 3) modulo the vocabulary."""

    device, head = torch.device("cpu"), HEAD

    def read(self, batch):
        tokens = batch.tokens
        noise = torch.randn(1, 99, D, generator=torch.Generator().manual_seed(1))
        noise = noise[:, : tokens.shape[1]] + 0.01 * tokens[..., None]
        last = 0.7 * HEAD[(tokens + 3) % VOCAB]
        return batch._replace(hidden=torch.cat([noise, last], -1).bfloat16())

    def hidden(self, conversation):
        return self.read(collate([conversation])).hidden[0]


def conversations(count, seed=0):
    """Text whose next token is told by the last one."""
    generator = torch.Generator().manual_seed(seed)
    text = []
    for _ in range(count):
        n = int(torch.randint(8, 30, (1,), generator=generator))
        tokens = (torch.randint(VOCAB, (1,), generator=generator) + 3 * torch.arange(n)) % VOCAB
        text.append(ConversationTokens(tokens.int(), torch.arange(n) >= 4, 0.0))
    return text


def written(folder, text):
    writer = ShardWriter(folder)
    for conversation in text:
        writer.add(conversation)
    writer.flush()
    return Shards(folder)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    net = EagleHead(CONFIG, torch.nn.Embedding(VOCAB, D)).requires_grad_(False)
    for parameter in net.parameters():
        parameter.mul_(2)
    return net


@pytest.fixture(scope="module")
def collected(network, tmp_path_factory):
    shards = written(tmp_path_factory.mktemp("text"), conversations(40))
    return collect_places(network, CodedTarget(), shards, range(len(shards)), 2, 10**6)


def layout_of(order, size):
    return Layout(torch.cat([torch.arange(5), REST[order]]), 5, size, VOCAB)


@torch.no_grad()
def read(net, conversation, at, depth):
    """What the layer reads at row `at` after `depth` drafts, over the rows that it sees."""
    hidden = list(net.fuse(CodedTarget().hidden(conversation)[: at + 1].float()))
    embedded = net.embedding(conversation.tokens.long()).float()
    for _ in range(depth):
        n = len(hidden)
        hidden.append(net(torch.stack(hidden), embedded[1 : n + 1], torch.arange(n), causal)[-1])
    return hidden[-1]


def test_places_are_those_of_the_text(network, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "OFFERED", 2)
    monkeypatch.setattr(places, "autocast", lambda device: torch.autocast("cpu", enabled=False))
    text = conversations(5)
    shards = written(tmp_path, text)
    got = collect_places(network, CodedTarget(), shards, range(5), 2, 10**6)
    expected, states = [], []
    for one in text:
        last = CodedTarget().hidden(one)[:, -D:]
        likely = (last.float() @ HEAD.T).argsort(dim=1, descending=True)[:, : places.LIKELY]
        for at in range(len(one.tokens)):
            known = {*one.tokens[: at + 2].tolist(), *likely[at, :2].tolist()}
            for earlier in range(0, at + 1, places.TOKENS_PER_STEP):
                if earlier + 1 < len(one.tokens) and one.answer[earlier + 1]:
                    known |= set(likely[earlier, :2].tolist())
            for depth in range(2):
                if at + 2 + depth < len(one.tokens) and one.answer[at + 2 + depth]:
                    there = [candidate in known for candidate in likely[at + 1 + depth].tolist()]
                    target, token = int(likely[at + 1 + depth, 0]), int(one.tokens[at + 1 + depth])
                    expected.append((token, depth, target, there[0], sum(there)))
                    states.append((token, depth, read(network, one, at, depth)))
    columns = got.tokens, got.depth, got.target, got.in_context[:, 0], got.in_context.sum(1)
    assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(expected)
    assert 0.1 < float(got.in_context[:, 0].float().mean()) < 0.95
    for token, depth, hidden in states[::7]:
        same = (got.tokens == token) & (got.depth == depth)
        distance = (got.hidden[same].float() - hidden).abs().amax(1)
        assert float(distance.min()) < 0.02 * float(hidden.abs().max())
    assert torch.allclose(got.mass.sum(1), torch.ones(len(got.tokens)), atol=0.1)
    assert bool((got.mass[:, 0] >= got.mass[:, 1]).all())
    assert len(collect_places(network, CodedTarget(), shards, range(5), 2, 7).tokens) == 7


def test_text_without_answers_is_refused(network, tmp_path):
    silent = [c._replace(answer=torch.zeros_like(c.answer)) for c in conversations(3)]
    shards = written(tmp_path, silent)
    for chosen in ([0, 1, 2], []):
        refuses("no answers", collect_places, network, CodedTarget(), shards, chosen, 3, 100)


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_a_router_finds_what_the_context_lacks(network, collected, name):
    features = CLUSTERINGS[name](network, HEAD, collected)
    layout = layout_of(halve(features[REST], 4), 4)
    cluster_of = layout.cluster_of
    clustered = cluster_of[collected.target] >= 0
    lacked = clustered & ~collected.in_context[:, 0]
    shares = {}
    for kind, recipe in (("trained", RECIPE), ("not", RECIPE | {"epochs": 1, "lr": 1e-9})):
        router = train_router(network, collected, cluster_of, **recipe)
        hit = routed(network, router, collected, cluster_of, 2)
        assert not bool(hit[~clustered].any())
        shares[kind] = float(hit[lacked].float().mean())
    assert shares["trained"] > shares["not"] + 0.2, shares
    assert torch.equal(routed(network, router, collected, cluster_of, layout.clusters), clustered)


def test_a_seed_repeats_a_router_and_rows_that_are_not_finite_end_its_training(network, collected):
    cluster_of = layout_of(torch.arange(len(REST)), 5).cluster_of
    one, again, other = (
        train_router(network, collected, cluster_of, epochs=1, seed=seed).down.weight
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)
    broken = collected._replace(hidden=torch.full_like(collected.hidden, float("nan")))
    refuses("epoch 1", train_router, network, broken, cluster_of, error=QuickbeamError)


@pytest.fixture(scope="module")
def made(toy_folder, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter")
    given = "--only text --tokens 1500 --length 64 --slots 8"
    run(folder, toy_folder, "--prompts", str(prompts), *given.split())
    save_eagle(EagleHead(EagleConfig(32, 64, 4, 2, 8, (1, 2), 32, 257)), folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "drafter"))


def run(folder, model, *arguments, code=0):
    result = cli("train", "--out", str(folder), "--model", model, *arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("kind", CLUSTERINGS)
def test_the_command_makes_a_shortlist(toy_folder, folder, kind):
    if kind == "kmeans":  # a published layout
        write(folder, LLAMA | {"vocab_size": 257}, eagle1())
    given = f"--only shortlist --clusters {kind} --listed 6 --size 12 --depths 2"
    given += " --rows 400 --router-epochs 3 --width 32"
    assert "held-out recall of 64 rows" in run(folder, toy_folder, *given.split())
    artefact = Artefact.load(folder)
    layout, router = artefact.layout, artefact.router
    assert (layout.frequent, layout.size, len(layout.order)) == (6, 12, 257)
    assert torch.equal(layout.order[:6], artefact.ranking[:6])
    assert router is not None and router.config == RouterConfig(32, 32, 32, 21)
    record = json.loads((folder / "router.json").read_text())
    assert record["places"] == 400 and "64" in record["held_out"]
    assert not list(folder.glob("*.part"))


def test_nothing_held_out_is_trained_on(toy_folder, folder, monkeypatch):
    taken: list[list[int]] = []
    note = lambda net, of, shards, chosen, *_: taken.append(list(chosen))  # noqa: E731
    before(monkeypatch, shortlist, "collect_places", note)
    plan = ShortlistPlan(rows=100, router_epochs=1, depths=1)
    stage = ShortlistTraining(toy_folder, folder, plan)
    stage.run(lambda what, done: None)
    train, held = taken
    assert held == split(stage.shards)[1] and not set(held) & set(train)
    assert sorted(held + train) == list(range(len(stage.shards)))
    texts = torch.cat([stage.shards[i].tokens for i in train]).long()
    assert torch.equal(stage.counts(), torch.bincount(texts, minlength=len(stage.target.head)))


def test_hidden_states_that_a_training_left_are_not_read_again(toy_folder, folder, monkeypatch):
    plan = ShortlistPlan(rows=100, router_epochs=1)

    def recalls():
        stage = ShortlistTraining(toy_folder, folder, plan)
        reads = list[int]()
        before(monkeypatch, stage.target, "read", lambda batch: reads.append(len(batch.tokens)))
        return stage.run(lambda what, done: None), reads

    anew, reads = recalls()
    assert reads
    stage = ShortlistTraining(toy_folder, folder, plan)
    states = StateCache.of(stage.target, folder / HIDDEN_FOLDER)
    for conversation in stage.shards:
        states.read(collate([conversation]))
    kept, reads = recalls()
    assert not reads and kept == anew


def test_bad_input_to_the_command(toy_folder, folder, monkeypatch):
    def refused(*arguments):
        return run(folder, toy_folder, "--only", "shortlist", *arguments, code=2)

    assert "--listed 257: must be 1 to 256" in refused("--listed", "257")
    configure(folder, vocab_size=300)
    assert "it was made for another model" in refused()
    configure(folder, vocab_size=257, draft_vocab_size=40, quickbeam_target_head=False)
    rewrite(folder, {"lm_head.weight": torch.randn(40, 32), "d2t": torch.zeros(40).long()})
    assert "without a head of its own" in refused()
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refused()
    monkeypatch.setattr(shortlist, "open_target", None)  # what follows is refused without the model
    BlockNetwork(BlockConfig(32, 64, 4, 2, 8, 1, (1,), 32, 257, 4, 256)).save(folder)
    assert "holds a block drafter" in refused()
    shutil.rmtree(folder / "text")
    assert "no text" in refused()


def test_ways_to_choose_are_held_against_each_other(toy_folder, folder, tmp_path, monkeypatch):
    """The script: `benchmarks/recall.py`."""
    out = tmp_path / "r.json"
    given = ["--drafter", str(folder), "--model", toy_folder, "--train", "300", "--held", "200"]
    given += ["--rows", "51,128", "--listed", "20", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["recall.py", *given])
    refuses("no whole shortlist", script("recall").main)
    of = torch.arange(257)
    Artefact(Layout(of, 4, 8, 257), of, None).save(folder)
    script("recall").main()
    ways = json.loads(out.read_text())["ways"]
    assert {"frequency", "16 a cluster, places", "16 a cluster, rows"} < {w["name"] for w in ways}
    for one in ways:
        assert 0 < one["recall"] <= 1 and one["rows"] in (51, 128)
