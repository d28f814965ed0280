"""Training a feature drafter: the loss, checkpoints, the command.

pytest tests/test_train_drafter.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from typer.testing import CliRunner

from quickbeam import LLM, SamplingParams
from quickbeam.cli.app import app
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.train import drafter, stages
from quickbeam.train.shards import Conversation, Shards, ShardWriter
from quickbeam.train.trainer import Report, Trainer
from quickbeam.train.unroll import collate, unroll

VOCAB, SIZE, D = 40, 16, 16
CONFIG = EagleConfig(D, 24, 4, 2, 4, (1, 3), SIZE, VOCAB, feature_norms=True)
SMALL = drafter.Recipe(epochs=2, batch=128, depths=2, lr=3e-3, warmup=2, loss_vocab=VOCAB)


def conversations(count: int, seed: int = 0) -> list[Conversation]:
    """Text whose next token is told by the hidden state: (last + 3) modulo the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(99))
    found = []
    for _ in range(count):
        n = int(torch.randint(8, 30, (1,), generator=generator))
        tokens = (torch.randint(VOCAB, (1,), generator=generator) + 3 * torch.arange(n)) % VOCAB
        hidden = torch.cat(
            [torch.randn(n, SIZE, generator=generator), 4 * codes[(tokens + 3) % VOCAB]], 1
        )
        found.append(Conversation(tokens.int(), torch.arange(n) >= 4, hidden.bfloat16(), 0.0))
    return found


HEAD = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(99))


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    writer = ShardWriter(tmp_path / "text")
    for conversation in conversations(60):
        writer.add(conversation)
    writer.flush()
    return Shards(tmp_path / "text")


def network(seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    embedding, head = torch.nn.Embedding(VOCAB, D), torch.nn.Linear(D, VOCAB, bias=False)
    head.weight.data = HEAD.clone()
    return EagleHead(CONFIG, embedding, head)


def trainer(
    shards: Shards, folder: Path, recipe: drafter.Recipe = SMALL, every: float = 1e9
) -> Trainer:
    return Trainer(network(), HEAD, shards, recipe, folder, Accelerator(cpu=True), every)


def test_the_loss_is_the_cross_entropy_with_the_targets_law_at_every_depth() -> None:
    """Against a loop over single positions, in the whole vocabulary."""
    recipe = drafter.Recipe(depths=3, decay=0.5, loss_vocab=VOCAB)
    net = network()
    batch = collate(conversations(3, seed=5))
    expected = 0.0
    with torch.no_grad(), drafter.autocast(torch.device("cpu")):
        for depth, step in enumerate(unroll(net, batch, 3)):
            scores, target = (
                net.feature(step.out).bfloat16() @ HEAD.bfloat16().T,
                step.target @ HEAD.bfloat16().T,
            )
            rows = [
                -(target[i].float().softmax(-1) @ scores[i].float().log_softmax(-1))
                for i in range(len(scores))
            ]
            expected += 0.5**depth * float(sum(rows)) / len(rows)
    loss = drafter.Objective(net, recipe)(batch, HEAD.bfloat16(), torch.zeros(VOCAB))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3)


def test_the_losss_gradient_is_that_of_its_formula() -> None:
    generator = torch.Generator().manual_seed(4)
    features, shift = (
        torch.randn(7, D, generator=generator, requires_grad=True),
        torch.randn(VOCAB, generator=generator),
    )
    laws, weights = (
        torch.randn(7, VOCAB, generator=generator).softmax(-1),
        torch.randn(7, generator=generator),
    )
    plain = -(laws * (features @ HEAD.T + shift).log_softmax(-1)).sum(-1)
    own = drafter.CrossEntropy.apply(features, HEAD, shift, *drafter.mean_rows(laws, HEAD, shift))
    torch.testing.assert_close(own, plain)
    torch.testing.assert_close(
        *(torch.autograd.grad(each @ weights, features)[0] for each in (own, plain))
    )


def test_answers_from_the_first_token_on_have_fewer_rows_in_later_passes() -> None:
    """What the target said is looked up in the first pass: the same as asking it at each."""
    early = [
        conversation._replace(answer=torch.arange(len(conversation.tokens)) >= i)
        for i, conversation in enumerate(conversations(3))
    ]
    batch, counts = collate(early), []
    with torch.no_grad():
        for depth, step in enumerate(unroll(network(), batch, 4)):
            if depth == 0:
                first = step.target
            assert torch.equal(drafter.kept(first, batch, depth), step.target)
            counts.append(len(step.out))
    assert counts[0] > counts[1] > counts[2] > counts[3]


def test_padding_changes_no_loss() -> None:
    alone = conversations(1, seed=1)
    longer = Conversation(
        torch.zeros(40, dtype=torch.int32),
        torch.zeros(40, dtype=torch.bool),
        torch.randn(40, 2 * SIZE).bfloat16(),
        0.0,
    )
    net, recipe = network(), drafter.Recipe(depths=2, loss_vocab=VOCAB)
    losses = [
        drafter.Objective(net, recipe)(collate(batch), HEAD, torch.zeros(VOCAB))
        for batch in (alone, [*alone, longer])
    ]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-3)


def test_a_sampled_vocabulary_estimates_the_whole_softmax() -> None:
    vocab = 2000
    counts = torch.arange(vocab).flip(0)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    chooser = drafter.LossVocabulary(counts, 400, seed=0)
    batch = collate(
        [
            Conversation(
                torch.tensor([1990, 1991]).int(),
                torch.ones(2, dtype=torch.bool),
                torch.zeros(2, 4),
                0.0,
            )
        ]
    )
    sums = []
    for _ in range(300):
        tokens, shift = chooser.choose(batch)
        assert len(tokens.unique()) == len(tokens) <= 400 and {*range(200), 1990, 1991} <= set(
            tokens.tolist()
        )
        sums.append(float((logits[tokens] + shift).exp().sum()))
    assert sum(sums) / len(sums) == pytest.approx(float(logits.exp().sum()), rel=0.02)
    whole, shift = drafter.LossVocabulary(counts, 9999, seed=0).choose(batch)
    assert whole.tolist() == list(range(vocab)) and not shift.any()


def test_training_learns_what_the_text_holds(shards: Shards, tmp_path: Path) -> None:
    before = drafter.hold_out(network(), shards, drafter.split(shards)[1], HEAD, 2)
    run = trainer(
        shards,
        tmp_path / "out",
        drafter.Recipe(epochs=40, batch=128, depths=2, lr=5e-3, warmup=2, loss_vocab=VOCAB),
    )
    held = run.run(lambda report: None)
    assert before.agreement[0] < 0.4 and held.agreement[0] > 0.9 and held.agreement[1] > 0.8
    assert held.overlap[0] > before.overlap[0] and held.loss < before.loss
    saved = EagleHead.load(tmp_path / "out")
    assert all(
        torch.equal(p, q.bfloat16().float())
        for p, q in zip(saved.parameters(), run.network.parameters(), strict=True)
    )


@pytest.mark.parametrize("fast", [False, True])
def test_products_are_in_float32_where_bfloat16_is_slow(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(drafter, "fast_bfloat16", lambda device: fast)
    seen = set[torch.dtype]()
    linear = torch.nn.functional.linear

    def watched(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        seen.add(weight.dtype)
        return linear(x, weight, *bias)

    run = Trainer(
        network(), HEAD.bfloat16(), shards, SMALL, tmp_path / "out", Accelerator(cpu=True)
    )
    monkeypatch.setattr(drafter.F, "linear", watched)
    run.run(lambda report: None)
    # torch's own modules give float32 weights; autocast multiplies them in bfloat16 where it is on
    assert seen == ({torch.bfloat16, torch.float32} if fast else {torch.float32})
    assert drafter.for_products(HEAD.half()).dtype is torch.float16  # other types stay


def test_nothing_held_out_is_trained_on(shards: Shards) -> None:
    train, held = drafter.split(shards)
    assert held and not set(train) & set(held) and sorted(train + held) == list(range(60))


def test_a_single_conversation_is_too_little(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "text")
    writer.add(conversations(1)[0])
    writer.flush()
    with pytest.raises(InvalidInput, match=r"a single conversation.*--tokens"):
        trainer(Shards(tmp_path / "text"), tmp_path / "out")


def test_a_second_run_goes_on_where_the_first_was_interrupted(
    shards: Shards, tmp_path: Path
) -> None:
    first = trainer(shards, tmp_path / "out", every=0.0)

    def stop(report: Report) -> None:
        if report.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(stop)
    second = trainer(shards, tmp_path / "out")
    assert (second.step, second.seen) == (first.step, first.seen) == (
        3,
        first.seen,
    ) and second.seconds > 0
    assert all(
        torch.equal(p, q)
        for p, q in zip(first.network.parameters(), second.network.parameters(), strict=True)
    )
    moments = [state["exp_avg"] for state in second._optimizer.state_dict()["state"].values()]
    assert any(m.any() for m in moments)
    second.run(lambda report: None)
    assert second.step > 3 and second.seen >= second._total
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and len(lines[0]["held"]["agreement"]) == 5


def test_the_rate_rises_stays_and_falls() -> None:
    recipe = drafter.Recipe(lr=1.0, warmup=10, cooldown=0.5)
    assert [
        recipe.rate(0, 0),
        recipe.rate(9, 0.1),
        recipe.rate(99, 0.5),
        recipe.rate(99, 0.75),
        recipe.rate(99, 1),
    ] == [0.1, 1, 1, 0.5, 0]


def test_steps_look_further_ahead_as_the_run_goes_on_and_hidden_states_lead_at_first() -> None:
    recipe = drafter.Recipe(depths=3)
    assert [recipe.ahead(done) for done in (0, 0.49, 0.5, 0.69, 0.71, 0.95, 1)] == [
        1,
        1,
        2,
        2,
        3,
        3,
        3,
    ]
    batch, losses = collate(conversations(2)), []
    for done in (0.0, 0.25, 0.49, 0.5):
        objective = drafter.Objective(
            network(), drafter.Recipe(depths=1, regression=4, lead=0.5, whole=0)
        )
        losses.append(float(objective(batch, HEAD, torch.zeros(VOCAB), done).detach()))
    with torch.no_grad(), drafter.autocast(torch.device("cpu")):
        (step,) = unroll(network(), batch, 1)
        distance = float(
            torch.nn.functional.smooth_l1_loss(
                network().feature(step.out).float(), step.target.float()
            )
        )
    assert losses[0] - losses[3] == pytest.approx(4 * distance, rel=0.02) and losses[1] - losses[
        3
    ] == pytest.approx(2 * distance, rel=0.02)


def test_all_tokens_count_at_first_and_then_answers_only() -> None:
    batch = collate(conversations(3))
    everything = batch.whole()
    lengths = [len(c.tokens) for c in conversations(3)]
    assert everything.answer.sum(1).tolist() == lengths and len(set(lengths)) > 1
    assert batch.answer.sum() < everything.answer.sum()
    objective = drafter.Objective(network(), drafter.Recipe(depths=1, regression=0, whole=0.5))
    losses = [
        float(objective(b, HEAD, torch.zeros(VOCAB), done).detach())
        for b in (batch, everything)
        for done in (0.4, 0.5)
    ]
    assert losses[0] == losses[2] == losses[3] != losses[1]


def test_what_goes_wrong_is_named(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(shards, tmp_path / "out", every=0.0)

    def diverge(report: Report) -> None:
        run.network.fc.weight.data.fill_(float("nan"))

    with pytest.raises(QuickbeamError, match="--lr"):
        run.run(diverge)
    left = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert left["step"] == 1 and left["network"]["fc.weight"].isfinite().all()
    assert EagleHead.load(tmp_path / "out").fc.weight.isfinite().all()
    (tmp_path / "out" / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(InvalidInput, match="take another --out"):
        trainer(shards, tmp_path / "out")

    (tmp_path / "out" / "checkpoint.pt").unlink()
    run = trainer(shards, tmp_path / "out")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    def full_too(tensors: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise SafetensorError("I/O error: No space left on device")

    for writer, failing in (
        ("quickbeam.drafters.folder.save_file", full_too),
        ("torch.save", full),
    ):
        monkeypatch.setattr(writer, failing)
        with pytest.raises(QuickbeamError, match="No space left"):
            run.save()
        assert not list((tmp_path / "out").glob("*.part"))


def test_a_gradient_that_is_not_finite_reaches_no_weights(shards: Shards, tmp_path: Path) -> None:
    run = trainer(shards, tmp_path / "out", every=0.0)

    def diverge(report: Report) -> None:
        run.network.fc.weight.register_hook(lambda gradient: gradient * float("inf"))

    with pytest.raises(QuickbeamError, match=r"the gradient of step 1 is (inf|nan): .*--lr"):
        run.run(diverge)
    left = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert left["step"] == 1 and all(weight.isfinite().all() for weight in left["network"].values())
    assert all(weight.isfinite().all() for weight in run.network.parameters())


def command(*arguments: str) -> list[str]:
    return [
        "train",
        "--only",
        "drafter",
        "--tokens",
        "1500",
        "--length",
        "64",
        "--slots",
        "8",
        "--batch",
        "256",
        "--loss-vocab",
        "128",
        *arguments,
    ]


def test_the_command_writes_trains_and_its_drafter_drafts(toy_folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(60)))
    out = tmp_path / "out"
    arguments = command(
        "--model", toy_folder, "--prompts", str(prompts), "--epochs", "2", "--out", str(out)
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "needs at most" in result.output and "held-out agreement" in result.output
    card = (out / "README.md").read_text()
    assert "--epochs 2" in card and "| 5 |" in card
    # text and training are done: nothing but the figures
    again = CliRunner().invoke(app, arguments)
    assert (
        again.exit_code == 0
        and json.loads((out / "training.json").read_text())["recipe"]["epochs"] == 2
    )
    more = CliRunner().invoke(
        app,
        [
            *arguments[:-1],
            str(tmp_path / "more"),
            "--start",
            str(out),
            "--lr",
            "1e-7",
            "--epochs",
            "0.01",
        ],
    )
    assert more.exit_code == 0 and "--start out" in (tmp_path / "more" / "README.md").read_text()
    first, second = (EagleHead.load(folder).state_dict() for folder in (out, tmp_path / "more"))
    # trained on, hardly at all
    assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)
    llm = LLM(toy_folder, "dyspec", dtype="float32", drafter=str(out))
    answer = llm.generate("abc", SamplingParams(max_tokens=16, ignore_eos=True))
    assert (
        answer.token_ids
        == llm.generate(
            "abc", SamplingParams(max_tokens=16, ignore_eos=True), method="ar"
        ).token_ids
    )
    assert answer.statistics.sources["drafter"].drafted > 0


def test_bad_input_to_the_command(
    toy_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: str) -> str:
        result = CliRunner().invoke(
            app, command("--model", toy_folder, "--out", str(tmp_path / "out"), *arguments)
        )
        assert result.exit_code == 2
        return " ".join(result.output.split())

    assert "can't be read" in told("--prompts", str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    assert "line 1" in told("--prompts", str(tmp_path / "bad.jsonl"))
    assert "--tokens" in told("--tokens", "1000000000000")  # no disk has room
    assert "not a drafter that" in told("--start", str(tmp_path))
    network().save(tmp_path / "other")
    assert "hidden_size 16 instead of" in told("--start", str(tmp_path / "other"))


def test_the_model_is_given_up_before_training(
    toy_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = drafter.Recipe(epochs=0.1, batch=64, depths=1, loss_vocab=64)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(20)))
    training = stages.DrafterTraining(
        stages.Plan(toy_folder, tmp_path / "out", 600, prompts, 4, 64, recipe=recipe)
    )
    training.write_text(lambda tokens, rate: None)
    layer = (
        weakref.ref(training.model.get_input_embeddings()),
        weakref.ref(training.model.base_model.layers[0]),
    )
    there: list[bool] = []
    made = stages.Trainer

    def watch(*arguments: object) -> Trainer:
        there.extend(ref() is not None for ref in layer)
        return made(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stages, "Trainer", watch)
    training.train(lambda report: None)
    assert there == [True, False]  # the drafter reads the embedding; nothing reads the layers


def test_prompts_are_answered_once_over_all_runs(toy_folder: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(20)))
    plan = stages.Plan(toy_folder, out, 10**6, prompts, 4, 64)
    told: list[int] = []

    def stop(tokens: int, rate: float) -> None:
        if tokens > 4 * 64:  # more than four unfinished ones can have
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.DrafterTraining(plan).write_text(stop)
    assert 1 <= len(Shards(plan.text)) < 20
    stages.DrafterTraining(plan).write_text(lambda tokens, rate: told.append(tokens))
    assert len(Shards(plan.text)) == 20 and told[-1] == Shards(plan.text).tokens
    stages.DrafterTraining(plan).write_text(lambda tokens, rate: pytest.fail("none is left"))
    training = stages.DrafterTraining(plan)
    asked = [training._encode([{"role": "user", "content": f"say {i}"}]) for i in range(20)]
    begun = [
        tuple(one.tokens[: int(one.answer.int().argmax())].tolist()) for one in Shards(plan.text)
    ]
    assert sorted(begun) == sorted(map(tuple, asked))


def test_a_full_disk_ends_the_text_with_what_to_do(
    toy_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, tried = tmp_path / "prompts.jsonl", list[Path]()
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(8)))
    plan = stages.Plan(toy_folder, tmp_path / "out", 10**6, prompts, 4, 64)

    def full(tensors: object, path: Path) -> None:
        tried.append(path)
        path.write_bytes(b"part")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("quickbeam.train.shards.SHARD", 64)
    with monkeypatch.context() as patch:
        patch.setattr("quickbeam.train.shards.save_file", full)
        with pytest.raises(QuickbeamError, match=r"No space left.*make room and run again"):
            stages.DrafterTraining(plan).write_text(lambda tokens, rate: None)
    assert len(tried) == 1 and not list(plan.text.iterdir())
    stages.DrafterTraining(plan).write_text(lambda tokens, rate: None)
    assert len(Shards(plan.text)) == 8


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_an_interrupted_command_keeps_its_text(
    toy_folder: str, tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "out"
    arguments = command(
        "--model", toy_folder, "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)
    )
    arguments[arguments.index("1500")] = "300000"
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(8_000))
    )
    with subprocess.Popen(
        [sys.executable, "-m", "quickbeam", *arguments], stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        for told in run.stderr:
            if told.startswith("text: "):
                break
        run.send_signal(how)
        rest = run.stderr.read()
    assert run.returncode == 130 and "Traceback" not in rest
    assert Shards(out / "text").tokens > 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_the_statement_of_memory_holds(tmp_path: Path, toy_folder: str) -> None:
    """The peak of a process of its own, against what it said."""
    out = tmp_path / "out"
    code = (
        "import pathlib, re, sys\n"
        "from quickbeam.cli.app import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "finally:\n    print('peak', int(re.search(r'VmHWM:\\s+(\\d+)', "
        "pathlib.Path('/proc/self/status').read_text())[1]) / 2**20)\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(60)))
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            *command(
                "--model", toy_folder, "--prompts", str(prompts), "--epochs", "1", "--out", str(out)
            ),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    said = " ".join(run.stderr.split()).split("needs at most ")[1]
    limits = float(said.split()[0]), float(said.split("text, ")[1].split()[0])
    assert float(run.stdout.split("peak ")[1]) <= max(limits)


@pytest.mark.long
def test_two_processes_train_one_drafter(toy_folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(80)))
    out = tmp_path / "out"
    # as accelerate's launcher does
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "quickbeam",
    ]
    arguments = command(
        "--model", toy_folder, "--prompts", str(prompts), "--epochs", "2", "--out", str(out)
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [*launch, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert {path.name[:5] for path in (out / "text").glob("*.safetensors")} == {"text0", "text1"}
    assert run.stderr.count("held-out agreement by depth") == 1
    EagleHead.load(out)
