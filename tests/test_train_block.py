"""Training a block drafter: its mask, its loss, checkpoints, the command."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cases import raising, refuses
from models import tiny
from quickbeam import LLM, SamplingParams
from quickbeam.drafters import loss
from quickbeam.drafters.base import Context, DraftRequest
from quickbeam.drafters.block import BlockDrafter
from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_files import load_block
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.shortlist.shortlist import Artefact
from quickbeam.errors import QuickbeamError
from quickbeam.models.families import describe
from quickbeam.models.opening import LoadedModel, make_model
from quickbeam.models.weights.parameters import ModelParameters
from quickbeam.train import block
from quickbeam.train.base import Anchors, sample_anchors
from quickbeam.train.block import BlockTraining, new_block_network
from quickbeam.train.recipes import Plan, Recipe
from quickbeam.train.router import ranking
from quickbeam.train.shards import ConversationTokens, Shards, collate, split, token_counts
from quickbeam.train.stages import TextStage, block_config
from quickbeam.train.target import FrozenTarget, OpenTarget, open_target
from quickbeam.train.trainer import Trainer
from quickbeam.tree import TokenTree
from scripts import cli
from test_train_shortlist import written

VOCAB, D, SIZE = 40, 16, 4
SIZES = {"block_size": SIZE, "mask_token": 39, "markov_rank": 4, "confidence": True}
CONFIG = BlockConfig(D, 24, 4, 2, 4, 2, (1, 2), D, VOCAB, **SIZES)
SMALL = Recipe(batch=128, lr=5e-3, warmup=2, loss_vocab=VOCAB, spacing=2)


def model():
    """A target whose next token is told by the last one."""
    torch.manual_seed(3)
    sizes = dict(vocab_size=VOCAB, hidden_size=D, intermediate_size=24, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4)
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    made.lm_head.weight.data.mul_(4)
    return made


def own_text(target, count, seed=0):
    """Greedy text of the target, behind three random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB - 1, (count, 3), generator=generator)
    greedy = dict(max_length=29, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = target.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    lengths = torch.randint(10, 30, (count,), generator=generator).tolist()
    cut = [row[:n].int() for row, n in zip(ids, lengths, strict=True)]
    return [ConversationTokens(row, torch.arange(len(row)) >= 3, 0.0) for row in cut]


def test_a_drafter_for_gemma_has_its_scale_and_one_kind_of_angles(toy_folder):
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    config = block_config(opened(tiny("gemma3-window"), tokenizer), SMALL)
    assert math.isclose(config.embedding_scale, 32**0.5, rel_tol=1e-3)
    assert BlockConfig.of(config.record(), 32, config.vocab_size) == config


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "text"
    written(folder, own_text(model(), 60))
    return folder


def opened(made, tokenizer=None):
    """A model of transformers as `open_target` opens one."""
    stack, parameters = describe(made), ModelParameters(copy.deepcopy(made))
    return OpenTarget(LoadedModel(make_model(made), tokenizer, set(), {}), parameters, stack)


def frozen(made, aux_layers):
    target = opened(made)
    return FrozenTarget(target.loaded.model, target.parameters, target.stack, aux_layers)


def target():
    return frozen(model(), (*CONFIG.aux_layers, 3))


def trainer(text, folder, tokens=4000, recipe=SMALL, every=0.0):
    of = target()
    drafter = BlockTraining(new_block_network(CONFIG, of, 0), recipe.spacing)
    return Trainer(drafter, of, text, recipe, tokens, folder, every, report_every=0.0)


def lively(of, config=CONFIG):
    """A network whose weights are large enough for all of its inputs to show."""
    torch.manual_seed(0)
    made = new_block_network(config, of, 0)
    for parameter in made.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return made.requires_grad_(False)


def drafted_alone(of, made, ids, chain):
    """What the block drafter itself says along a `chain` behind `ids`: `[len(chain), vocab]`."""
    served = make_model(model())
    network = BlockNetwork(made.config, served.embedding, served.head)
    network.load_state_dict(made.state_dict())
    drafter = BlockDrafter(network, served, None)
    state = drafter.begin(ids)
    text = ConversationTokens(torch.tensor(ids[:-1]), torch.ones(len(ids) - 1), 0.0)
    state.append_hidden(of.read(collate([text])).hidden[0, :, : len(CONFIG.aux_layers) * D])
    tree, node = TokenTree(ids[-1]), 0
    for token in chain[1:]:
        node = tree.add(node, token, "x")
    context = Context(ids, torch.empty(0), temperature=1.0)
    context.states[drafter.name] = state
    (probs,) = drafter.answer([DraftRequest(context, tree, range(len(tree)))])
    return probs.dense()


def trained_probs(of, made, conversations, anchors):
    """The same by the pass that training makes of many blocks, `[b, a, k, vocab]`."""
    batch = of.read(collate(conversations))
    counts = torch.ones(*anchors.shape, SIZE, dtype=torch.bool)
    drafter = BlockTraining(made, 1)
    drafted = drafter.draft(batch, Anchors.of(anchors, counts))
    return drafter.logits(drafted, of.head).softmax(-1).view(*counts.shape, VOCAB)


def difference_to_drafting(config=CONFIG):
    of = target()
    made, conversations = lively(of, config), own_text(model(), 2, seed=5)
    anchors = torch.tensor([[1, 4, 5], [2, 3, 4]])
    trained = trained_probs(of, made, conversations, anchors)
    gaps = []
    for b, conversation in enumerate(conversations):
        ids = conversation.tokens.tolist()
        for a, anchor in enumerate(anchors[b].tolist()):
            alone = drafted_alone(of, made, ids[: anchor + 1], ids[anchor : anchor + SIZE])
            gaps.append(float((alone - trained[b, a]).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(
    "kind",
    [{}, {"causal": True}, {"causal": None, "windows": (3, None)}, {"windows": (None, 4)}],
    ids=str,
)
def test_a_pass_of_training_is_what_drafting_computes_behind_each_anchor(kind):
    assert difference_to_drafting(replace(CONFIG, **kind)) < 5e-3


def test_a_wrong_mask_is_noticed(monkeypatch):
    for wrong in (
        lambda anchors, n: torch.arange(n) <= anchors[..., None],  # the anchor's own hidden state
        lambda anchors, n: torch.arange(n) < anchors[..., None] - 1,
        lambda anchors, n: torch.ones(*anchors.shape, n, dtype=torch.bool),  # all that follows
    ):
        monkeypatch.setattr(block, "visible_context", wrong)
        assert difference_to_drafting() > 1e-2


@pytest.mark.parametrize("rows", [7, 10_000])
def test_the_loss_and_its_gradients_are_those_of_the_formula(rows, monkeypatch):
    monkeypatch.setattr(loss, "CPU_ROWS", rows)
    of = target()
    made, batch = lively(of).requires_grad_(True), of.read(collate(own_text(model(), 3, seed=2)))
    anchors = sample_anchors(batch, SIZE, 2, False, torch.Generator().manual_seed(0))
    chosen, shift = torch.arange(VOCAB), torch.rand(VOCAB)
    drafter = BlockTraining(made, 2)
    drafted = drafter.draft(batch, anchors)
    value = drafter.loss(drafted, of.head, chosen, shift)
    p = (drafted.target_hidden @ of.head.T + shift).softmax(-1)
    log = (drafter.logits(drafted, of.head) + shift).log_softmax(-1)
    distance = (p - log.exp()).abs().sum(-1)
    taken = 1 - distance.detach() / 2
    certain = made.confidence(drafted.hidden, drafted.previous).sigmoid()
    plain, weights = torch.zeros(()), 0.0
    for i, k in enumerate(drafted.position.tolist()):
        weight = math.exp(-k / 4)
        sure = taken[i] * certain[i].log() + (1 - taken[i]) * (1 - certain[i]).log()
        plain = plain + weight * (-0.1 * p[i] @ log[i] + 0.9 * distance[i] - sure)
        weights += weight
    torch.testing.assert_close(value, plain / weights)
    inputs = list(made.parameters())
    gradients = torch.autograd.grad(value, inputs, retain_graph=True)
    right = torch.autograd.grad(plain / weights, inputs)
    torch.testing.assert_close(gradients, right, atol=1e-6, rtol=1e-3)


def test_a_toy_target_is_learnt(tmp_path):
    text = tmp_path / "text"
    written(text, own_text(model(), 400))
    recipe = replace(SMALL, batch=512, lr=2e-2, spacing=1)
    run = trainer(text, tmp_path / "out", 20_000, recipe, every=1e9)
    run.report_every = 1e9
    before = run.check(10**6, 4)
    held = run.run(lambda report: None)
    # layers that begin as the target's know the first position already
    assert min(before.overlap[1:]) < 0.5 and before.mat < 2.3
    assert min(held.overlap) > 0.75 and held.mat_drawn > 3.5, held
    assert min(held.agreement) > 0.5 and held.mat > 2.7, held  # where two tokens tie, less
    parts = TargetParts(2, D, VOCAB, run.target.embedding, torch.nn.Identity())
    loaded = load_block(tmp_path / "out", parts)
    assert loaded.config == CONFIG
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, run.network.state_dict()[name].bfloat16())


def test_a_killed_training_goes_on_as_if_it_had_not_been(text, tmp_path):
    """From a checkpoint in the middle of a round, whatever was done after it; bit for bit."""
    whole = trainer(text, tmp_path / "whole", 2000)
    whole.run(lambda report: None)

    def stop(report):
        if report.step in (1, 3, 15):  # in the midst of the next step, which is lost
            cut.network.fc.weight.register_hook(raising(KeyboardInterrupt))

    for _ in range(3):
        cut = trainer(text, tmp_path / "cut", 2000)
        with pytest.raises(KeyboardInterrupt):
            cut.run(stop)
    last = trainer(text, tmp_path / "cut", 2000)
    assert last.step == 15 and last.round > 0 and last.batch > 1 and last.seconds > 0
    last.run(lambda report: None)
    assert (last.step, last.seen, last.round) == (whole.step, whole.seen, whole.round)
    for one, other in zip(whole.network.parameters(), last.network.parameters(), strict=True):
        assert torch.equal(one, other)
    log = (tmp_path / "cut" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == list(range(1, whole.step + 1))


def test_nothing_held_out_is_trained_on(text, tmp_path):
    run, seen = trainer(text, tmp_path / "out"), set[tuple[int, ...]]()
    batches = run.batches()
    while run.round < 2:
        batch = next(batches)
        for ids, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True):
            seen.add(tuple(ids[:n]))
    train, held = split(run.shards)
    texts = [tuple(conversation.tokens.tolist()) for conversation in run.shards]
    assert held and seen == {texts[i] for i in train} and not seen & {texts[i] for i in held}


def test_what_goes_wrong_is_named(text, tmp_path, toy_folder):
    for what in ("loss", "gradient"):
        run = trainer(text, tmp_path / what)

        def diverge(report, run=run, what=what):
            weight = run.network.fc.weight
            if what == "loss":
                weight.data.fill_(float("nan"))
            else:
                weight.register_hook(lambda gradient: gradient * float("inf"))

        refuses("take a smaller --lr", run.run, diverge, error=QuickbeamError)
        left = torch.load(tmp_path / what / "checkpoint.pt", weights_only=True)
        assert left["counters"]["step"] == 1
        assert all(weight.isfinite().all() for weight in left["network"].values())
    (tmp_path / "loss" / "checkpoint.pt").write_bytes(b"nonsense")
    refuses("take another --out", trainer, text, tmp_path / "loss")

    def error_of(*arguments):
        given = command("--model", toy_folder, "--out", str(tmp_path / "out"), *arguments)
        result = cli(*given)
        assert result.exit_code == 2
        return " ".join(result.output.split())

    assert "can't be read" in error_of("--prompts", str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    assert "line 1" in error_of("--prompts", str(tmp_path / "bad.jsonl"))
    assert "choose among" in error_of("--languages", "xx")


def test_weights_after_a_loss_that_is_not_finite_are_never_saved(text, tmp_path):
    run, steps = trainer(text, tmp_path, every=1e9), []
    run.report_every = 1e9

    def diverge(gradient):
        steps.append(1)
        return gradient * float("inf") if len(steps) == 3 else gradient

    run.network.fc.weight.register_hook(diverge)
    refuses("the loss of step 2 is .*norm inf", run.run, pytest.fail, error=QuickbeamError)
    refuses("the loss of step 2 is", run.save, error=QuickbeamError)
    assert len(steps) > 3 and not (tmp_path / "checkpoint.pt").exists()


def command(*arguments):
    sizes = "--tokens 1500 --length 64 --slots 8 --batch 256 --loss-vocab 128 --rank 8 --block 5"
    sizes += " --kind block"
    return ["train", *sizes.split(), *arguments]


def test_one_command_writes_trains_and_measures(toy_folder, prompts, tmp_path):
    out, further = tmp_path / "out", tmp_path / "more"
    arguments = command("--model", toy_folder, "--prompts", str(prompts), "--epochs", "2")
    bench = ["--limit", "2", "--max-tokens", "8"]
    result = cli(*arguments, *bench, "--out", out)
    assert result.exit_code == 0, result.output
    assert "held-out agreement by position" in result.output
    methods = json.loads((out / "bench.json").read_text())["methods"]
    assert {"ar", "logitspec", "dyspec", "auto"} <= set(methods)
    assert all(row["identical"] == row["prompts"] for row in methods.values() if row["prompts"])
    ranked = Artefact.load(out).ranking
    assert torch.equal(ranked, ranking(token_counts(Shards(out / "text"), len(ranked))))
    # text and training are done: nothing but the figures
    made = (out / "model.safetensors").read_bytes()
    again = cli(*arguments, "--only", "drafter", "--out", out)
    assert again.exit_code == 0 and (out / "model.safetensors").read_bytes() == made
    assert json.loads((out / "training.json").read_text())["recipe"]["epochs"] == 2

    more = [*arguments[:-1], "0.01", "--lr", "1e-7", "--only", "drafter", "--out", further]
    refused = cli(*more)
    assert refused.exit_code == 2 and "holds no text" in " ".join(refused.output.split())
    further.mkdir()
    (further / "text").symlink_to(out / "text")
    assert cli(*more, "--start", out).exit_code == 0
    record = json.loads((further / "training.json").read_text())
    assert record["start"] == str(out) and len(record["held_out"]["agreement"]) == 5
    (further / "checkpoint.pt").unlink()
    other = cli(*more, "--start", out, "--depth", "1")
    assert other.exit_code == 2 and "of another shape" in " ".join(other.output.split())

    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(toy_folder, "ar", dtype="float32") as plain:
        expected = plain.generate("abc", params).token_ids
    with LLM(toy_folder, "dyspec", dtype="float32", drafter=str(out)) as llm:
        for method in ("dyspec", "chain", "auto"):
            answer = llm.generate("abc", params, method=method)
            assert answer.token_ids == expected, method
            assert method == "auto" or answer.statistics.sources["drafter"].drafted > 0


def test_prompts_are_answered_once_over_all_runs(toy_folder, prompts, tmp_path):
    sizes = dict(tokens=10**6, slots=4, length=64)
    plan, counts = Plan(toy_folder, tmp_path / "out", prompts=prompts, **sizes), list[int]()

    def stop(tokens, rate):
        if tokens > 4 * 64:  # more than four unfinished ones can have
            raise KeyboardInterrupt

    target = open_target(toy_folder, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        TextStage(plan, target).run(stop, plan.tokens)
    assert 1 <= len(Shards(plan.text)) < 60
    TextStage(plan, target).run(lambda tokens, rate: counts.append(tokens), plan.tokens)
    assert len(Shards(plan.text)) == 60 and counts[-1] == Shards(plan.text).tokens
    TextStage(plan, target).run(lambda tokens, rate: pytest.fail("none is left"), plan.tokens)
    encode = AutoTokenizer.from_pretrained(toy_folder).encode
    asked = [encode(f"user: say {i}\n> ") for i in range(60)]
    begun = [one.tokens[: int(one.answer.int().argmax())].tolist() for one in Shards(plan.text)]
    assert sorted(begun) == sorted(asked)
