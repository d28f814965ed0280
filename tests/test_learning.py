"""A drafter that learns while nothing is asked: from what, for whom, and what it never changes."""

import copy
import subprocess
import sys
import time
from collections import deque

import pytest
import torch

from answers import answer, request, run
from cases import refuses
from docs import save_drafter
from features import page_size
from quickbeam import LLM
from quickbeam.cli.inspect import summary
from quickbeam.config import ServerOptions
from quickbeam.drafters.eagle import EagleState, eagle_drafter
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.learning import CONTEXT, DEPTH, Excerpt, LearnedNetwork
from quickbeam.drafters.unrolled import unroll
from quickbeam.engine import learning
from quickbeam.engine.commit import Commit
from quickbeam.engine.engine import Engine
from quickbeam.engine.learned_file import LearnedFile
from quickbeam.engine.learning import Learned, Learner, best_version
from quickbeam.engine.loop import EngineLoop
from quickbeam.engine.trace import Trace
from quickbeam.methods import make_method
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Batch, Chain
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import Gate
from quickbeam.serve.metrics import Metrics, expose
from test_train_block import VOCAB, D, model

CONFIG = EagleConfig(D, 24, 4, 2, 4, (1, 2), D, VOCAB)
OWN_HEAD = EagleConfig(D, 24, 4, 2, 4, (3, 1), D, VOCAB, draft_vocab_size=30)


pages = page_size(6)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    """Rounds begin after few tokens, and steps have the same size on every machine."""
    monkeypatch.setattr(learning, "ROUND_TOKENS", 80)
    monkeypatch.setattr(learning, "STEP_TOKENS", (16, 16))
    monkeypatch.setattr(learning, "LR", 1e-2)


class School:
    """A target whose next token is told by its last one, and a drafter that knows nothing yet."""

    def __init__(self, config=CONFIG, native=False, file=None):
        self.model = model().to(torch.bfloat16).float() if native else model()
        dtype = torch.bfloat16 if native else torch.float32
        self.target = make_model(copy.deepcopy(self.model).to(dtype), native=native, chunk=8)
        kernels = library.kernels() if native else None
        self.network = self._network(config)
        self.drafter = eagle_drafter(self._network(config), self.target, kernels)
        self.learned = LearnedNetwork(self.drafter, self._network(config), self.target, kernels)
        self.engine = Engine(self.target)
        self.engine.learner = self.learner = Learner(self.learned, file)

    def _network(self, config):
        torch.manual_seed(1)
        network = EagleHead(config, self.target.embedding, self.target.head)
        if config.own_head:
            network.tokens.copy_(torch.randperm(VOCAB)[: config.draft_vocab_size])
        return network.requires_grad_(False)

    def ask(self, prompt, tenant=None, method="dyspec", count=24, **params):
        """The sequence of an answer, and the trees that drafted it."""
        steps = []
        params = SamplingParams(max_tokens=count, ignore_eos=True, **params)
        how = dict(budget=6, tenant=tenant, observer=steps.append)
        made = make_method(method, self.drafter)
        sequence = answer(self.target, made, params, prompt, engine=self.engine, **how)
        trees = [(step.tree.token, [round(x, 5) for x in step.tree.value]) for step in steps]
        return sequence, trees

    def teach(self, tenant=None, texts=8, seed=0):
        """Answers of one tenant, and all that can be learned from them."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(texts):
            prompt = torch.randint(VOCAB - 1, (3,), generator=generator).tolist()
            self.ask(prompt, tenant)
        while self.engine.use_idle_time():
            pass


@pytest.mark.parametrize("native", [False, True])
def test_what_was_learned_drafts_better_and_changes_no_token(native):
    school, prompt = School(native=native), [5, 9, 3]
    plain = {}
    for temperature in (0.0, 0.9):
        params = SamplingParams(24, temperature, seed=3, ignore_eos=True)
        engine = Engine(school.target, share=False)
        alone = answer(school.target, NoDraft(), params, prompt, engine=engine)
        plain[temperature] = alone.output.token_ids
        assert (
            school.ask(prompt, temperature=temperature, seed=3)[0].output.token_ids
            == (plain[temperature])
        )
    before = school.ask(prompt)[0].statistics.steps
    school.teach()
    school.teach(seed=1)
    figures = school.learner.figures
    assert figures.taken and not figures.pending and figures.tokens > 100
    assert figures.accepted_after > 2 * figures.accepted_before
    assert school.ask(prompt)[0].statistics.steps < before
    for method, temperature in [("dyspec", 0.0), ("auto", 0.0), ("dyspec", 0.9), ("auto", 0.9)]:
        sequence, _ = school.ask(prompt, None, method, temperature=temperature, seed=3)
        assert sequence.output.token_ids == plain[temperature]
    school.engine.close()
    assert school.target.pool.used == school.drafter.pool.used == 0


def test_metrics_show_what_was_learned():
    school = School()
    metrics = Metrics("tiny", Gate(ServerOptions()))
    metrics.watch(school.engine, lambda: 0.0)
    school.teach()
    shown = expose(metrics.registry, "")[0].decode()
    figures = school.learner.figures
    assert f'quickbeam:learnable_tokens{{model_name="tiny"}} {figures.tokens}.0' in shown
    assert 'quickbeam:learned_versions{model_name="tiny"} 1.0' in shown
    assert f'quickbeam:learned_gain{{model_name="tiny"}} {figures.gain}' in shown


def test_answers_side_by_side_of_different_keys_stay_the_same():
    """Each is drafted by what was learned for its key, in passes of its own."""
    school = School()
    school.teach("a")
    school.teach("b", seed=5)
    prompts = [[5, 9, 3], [7, 1, 1], [5, 9, 3], [2, 8, 8]]
    params = SamplingParams(24, 0.7, seed=3, ignore_eos=True)
    plain = [
        answer(school.target, NoDraft(), params, prompt, engine=Engine(school.target))
        for prompt in prompts
    ]
    running = [
        school.engine.add(
            request(school.target, Auto(school.drafter), params, prompt, budget=6, tenant=tenant)
        )
        for prompt, tenant in zip(prompts, ["a", "b", "c", "a"], strict=True)
    ]
    passes = [sequence.learned.passes for sequence in running]
    assert passes[0] is passes[3] is not None and passes[1] is not passes[0] and passes[2] is None
    run(school.engine, *running)
    for one, other in zip(running, plain, strict=True):
        assert one.output.token_ids == other.output.token_ids


@torch.inference_mode()
def own_states(target, ids):
    """The target's hidden states `[n, width]` of a text that one pass reads."""
    cache = target.pool.new()
    (passed,) = target.forward(Batch([Chain(cache, ids, wanted=0)]))
    cache.release()
    return passed.hidden


def recorded_far(school):
    """How far the hidden states that are learned from are from the target's own, at most."""
    sequence, _ = school.ask([3, 1, 4, 1, 5] * 60)
    assert sequence.statistics.nodes > 2 * sequence.statistics.steps  # some of them rejected
    (text,) = school.learner.of(None).texts
    expected = own_states(school.target, sequence.ids[:-1])[-len(text.tokens) :]
    begin = len(sequence.ids) - 1 - len(text.tokens)
    assert text.tokens.tolist() == sequence.ids[begin:-1]
    assert text.first == CONTEXT and begin + text.first == 300
    return float((text.hidden - expected).abs().max())


def test_only_what_was_committed_is_learned_from(monkeypatch):
    assert recorded_far(School()) < 1e-4

    # wrong versions: the row of a node that was rejected, and that of the token before
    rows, append = Commit._rows, EagleState.append_hidden

    def of_the_next_node(self, sequence, path, passed):
        if len(path) < len(passed.hidden):
            passed = passed._replace(hidden=passed.hidden.roll(-1, 0))
        rows(self, sequence, path, passed)

    with monkeypatch.context() as patch:
        patch.setattr(Commit, "_rows", of_the_next_node)
        assert recorded_far(School()) > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(EagleState, "append_hidden", lambda self, x: append(self, x.roll(1, 0)))
        assert recorded_far(School()) > 1e-2


def overlaps_far(school, change=lambda text: text):
    """How far the acceptance rates that are learned from are from those of the equations."""
    ids = torch.randint(VOCAB - 1, (20,), generator=torch.Generator().manual_seed(2))
    text = Excerpt(ids, own_states(school.target, ids.tolist()).clone(), first=6)
    network = school.network
    vocabulary = network.tokens if network.config.own_head else torch.arange(VOCAB)
    with torch.no_grad():
        logits = school.model(ids[None]).logits[0][:, vocabulary]
        p = logits.softmax(-1)
        expected = list[torch.Tensor]()
        for depth, (_, out) in enumerate(unroll(network, ids[None], text.hidden[None], DEPTH)):
            q = network.head(network.feature(out[0])).softmax(-1)
            rows = slice(4, 20 - DEPTH)  # the first drafts the token at 6
            following = slice(4 + depth + 1, 20 - DEPTH + depth + 1)
            expected.append(torch.minimum(p[following], q[rows]).sum(-1))
        rows = school.learned.loss_rows([text], torch.Generator())
        _, overlap = school.learned.loss({}, change(text), rows)
    return float((overlap - torch.stack(expected)).abs().max())


@pytest.mark.parametrize("config", [CONFIG, OWN_HEAD])
def test_rates_are_those_of_the_drafter_s_and_the_target_s_distributions(config):
    school = School(config)
    assert overlaps_far(school) < 5e-3
    # wrong versions: hidden states off by one, and another token for each row of its head
    late = lambda text: text._replace(hidden=text.hidden.roll(1, 0))  # noqa: E731
    assert overlaps_far(school, late) > 2e-2
    if config.own_head:
        school.learned._tokens = school.learned._tokens.roll(1)
        assert overlaps_far(school) > 2e-2


def test_a_drafter_with_a_head_of_its_own_learns():
    school = School(OWN_HEAD)
    school.teach()
    figures = school.learner.figures
    assert figures.taken and figures.accepted_after > 1.5 * figures.accepted_before


@pytest.mark.parametrize("shared", [False, True])
def test_what_one_key_taught_drafts_for_no_other(shared, monkeypatch):
    """Not by weights, and not by rows of the prefix cache (`shared`), which the weights made."""
    prompt = [5, 9, 3] * 8
    _, fresh = School().ask(prompt, "b")

    def of_b():
        school = School()
        school.teach("a")
        if shared:
            school.ask(prompt, "a")
        assert school.learner.figures.taken
        sequence, trees = school.ask(prompt, "b")
        assert not sequence.statistics.cached_tokens or wrong
        assert school.ask([5, 9], "a")[1] != School().ask([5, 9], "a")[1]
        return trees

    wrong = False
    assert of_b() == fresh
    wrong = True
    if shared:
        begin = Learned.__init__
        same = lambda self, tenant: (begin(self, tenant), setattr(self, "owner", 1))[0]  # noqa: E731
        monkeypatch.setattr(Learned, "__init__", same)
    else:
        of = Learner.of
        monkeypatch.setattr(Learner, "of", lambda self, tenant: of(self, None))
    assert of_b() != fresh


def test_a_seed_repeats_answers_of_drawn_drafts_whatever_was_learned():
    school = School()
    how = dict(method="specinfer", temperature=0.9, coupling="residual")
    seeded, trees = school.ask([5, 9, 3], seed=1, **how)
    school.teach()
    assert school.learner.figures.taken
    again, same_trees = school.ask([5, 9, 3], seed=1, **how)
    assert again.output.token_ids == seeded.output.token_ids and same_trees == trees
    assert school.ask([5, 9, 3], **how)[0].learned is not None


def test_nonsense_is_not_taken(monkeypatch):
    school = School()
    school.teach()
    passes = school.learner.of(None).passes
    assert passes is not None
    monkeypatch.setattr(learning, "LR", 30.0)
    school.teach(seed=1)
    assert school.learner.figures.rounds == 2 and school.learner.figures.taken == 1
    assert school.learner.of(None).passes is passes


def test_older_weights_come_back_where_they_are_better(monkeypatch):
    school = School()
    school.teach()
    learned = school.learner.of(None)
    good = learned.versions[-1]
    worse = {name: change._replace(up=-9 * change.up) for name, change in good.items()}
    monkeypatch.setattr(learning, "LR", 0.0)

    def round_with(versions):
        learned.versions = list(versions)
        learned.passes = school.learned.passes(versions[-1])
        learned.new_texts, learned.new_tokens = 1, 80
        while school.engine.use_idle_time():
            pass
        return list(map(id, learned.versions))

    assert round_with([good, worse]) == [id(good)]
    assert round_with([good, worse, worse]) == [id(good)] and learned.passes is not None
    assert round_with([worse, good]) == [id(worse), id(good)]
    monkeypatch.setattr(learning, "best_version", lambda accepted, in_use: accepted.shape[1] - 1)
    assert round_with([worse, good]) == [] and learned.passes is None  # as it was loaded
    assert school.learner.figures.returned == 3


def test_no_more_versions_are_kept_than_two_before_the_one_in_use(monkeypatch):
    school = School()
    monkeypatch.setattr(learning, "best_version", lambda *_, **__: 0)
    for seed in range(4):
        school.teach(seed=seed, texts=6)
    assert school.learner.figures.taken == 4
    assert len(school.learner.of(None).versions) == 3


def test_a_version_is_better_by_more_than_chance():
    noise = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    in_use = torch.ones(50, 1)
    assert best_version(torch.cat([in_use + 0.01 + noise, in_use], 1), 1) == 1
    assert best_version(torch.cat([in_use + 1 + noise, in_use], 1), 1) == 0
    assert best_version(torch.cat([in_use, in_use, in_use + 0.1], 1), 1) == 2
    assert best_version(torch.cat([in_use + 1, in_use], 1)[:1], 1) == 1


def test_a_request_waits_for_one_step_at_most():
    class Steps:
        """Always has something to learn. A request comes in its third step."""

        count = 0

        def step(self):
            self.count += 1
            if self.count == 3:
                loop.inbox.put(None)
            return True

    school = School()
    loop = EngineLoop(school.engine)
    school.engine.learner = steps = Steps()
    loop.run()
    assert steps.count == 3


def test_steps_that_take_long_become_shorter(monkeypatch):
    school = School()
    monkeypatch.setattr(learning, "STEP_TOKENS", (4, 64))
    for seconds, size in ((1e9, 64), (0.0, 4)):
        monkeypatch.setattr(learning, "STEP_SECONDS", seconds)
        school.teach(seed=size)
        assert school.learner._step_tokens == size


def test_memory_is_bounded_and_the_tenant_with_the_most_texts_loses(monkeypatch):
    school = School()
    school.teach("a", texts=4)
    small = school.learner.of("a").bytes
    monkeypatch.setattr(learning, "TEXT_BYTES", 4 * small)
    school.teach("b", texts=14)
    assert school.learner.of("a").bytes == small
    assert 2 * small < school.learner.of("b").bytes <= 3 * small
    assert school.learner.of("b").held_out
    for number in range(learning.TENANTS):
        school.learner.of(number)
    assert not school.learner.of("a").texts  # it was asked for least recently


def test_numbers_that_are_not_finite_are_dropped(caplog):
    school = School()
    school.teach(texts=2)
    learned = school.learner.of(None)
    (text,) = learned.texts
    learned.texts = deque([text._replace(hidden=text.hidden * float("nan"))])
    learned.new_texts, learned.new_tokens = 1, 80
    while school.engine.use_idle_time():
        pass
    assert "not finite" in caplog.text and not learned.texts and learned.passes is None
    school.teach(texts=11)
    assert school.learner.figures.rounds == 2 and learned.held_out


def test_an_error_ends_learning_and_no_answer(caplog, monkeypatch):
    school = School()
    monkeypatch.setattr(LearnedNetwork, "loss", lambda *_: 1 / 0)
    school.teach()
    assert "stops learning" in caplog.text and not school.engine.use_idle_time()
    assert len(school.ask([5, 9, 3])[0].output.token_ids) == 24


def test_what_was_learned_is_kept_for_the_next_process(tmp_path, caplog):
    path = tmp_path / "answers.learned"
    school = School(file=LearnedFile(path, "model drafter"))
    school.teach(b"key")
    school.teach("address", seed=3)
    _, trees = school.ask([5, 9, 3], b"key")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

    def trees_again(identity="model drafter"):
        return School(file=LearnedFile(path, identity)).ask([5, 9, 3], b"key")[1]

    assert trees_again() == trees and not caplog.records
    _, fresh = School().ask([5, 9, 3], b"key")
    assert fresh != trees and trees_again("another") == fresh
    assert "of another model" in caplog.text
    kept = path.read_bytes()
    middle = len(kept) // 2
    for damaged in (kept[:-100], b"", kept[:middle] + b"\0\1\2\3" + kept[middle + 4 :]):
        caplog.clear()
        path.write_bytes(damaged)
        assert trees_again() == fresh
        assert "is damaged" in caplog.text
    path.unlink()
    assert trees_again() == fresh


def test_a_process_that_is_killed_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "answers.learned"
    school = School(file=LearnedFile(path, ""))
    school.teach()
    kept = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("quickbeam.engine.learned_file.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        school.teach(seed=1)
    assert path.read_bytes() == kept
    monkeypatch.undo()
    assert School(file=LearnedFile(path, "")).learner.of(None).versions


WRITES_ON = """
import sys
from itertools import count
from pathlib import Path
import torch
from quickbeam.drafters.learning import LowRank
from quickbeam.engine.learned_file import LearnedFile

for version in count():
    change = LowRank(torch.full((400, 16), float(version)), torch.full((16, 400), float(version)))
    LearnedFile(Path(sys.argv[1]), "").write({b"key": [{"fc.weight": change}]})
    print(version, flush=True)
"""


def test_kill_9_at_any_moment_leaves_the_last_save_whole(tmp_path):
    path = tmp_path / "answers.learned"
    for milliseconds in (0, 3, 7, 20):
        command = [sys.executable, "-c", WRITES_ON, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "0\n"
            time.sleep(milliseconds / 1000)
            process.kill()
            said = process.stdout.read().split()
        saved = int(said[-1]) if said else 0
        change = LearnedFile(path, "").read()[b"key"][0]["fc.weight"]
        (there,) = set(change.up.flatten().tolist())
        assert there in (saved, saved + 1)  # killed before it could say so
        assert set(change.down.flatten().tolist()) == {there}


def test_an_llm_learns_while_nothing_is_asked(toy_folder, tmp_path, monkeypatch):
    save_drafter(tmp_path / "drafter", 257, 32, 2)
    kept = tmp_path / "kept"
    options = dict(dtype="float32", drafter=str(tmp_path / "drafter"), learn=True, keep=kept)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(toy_folder, "dyspec", **options) as llm:
        assert llm.learning.texts == 0
        plain = llm.generate("abc abc", params, method="ar")
        for number in range(6):
            llm.generate(f"abc {number}", params)
        for _ in range(2000):
            if not llm.learning.pending:
                break
            llm.thread.call(lambda: None)
        assert llm.learning.rounds and llm.learning.texts == 6
        again = llm.generate("abc abc", params)
        assert again.token_ids == plain.token_ids
        trace = Trace().to_json(again, llm.tokenizer, llm.learning)
        assert "tokens" in summary(trace)["learned"]
        llm.reset()
        assert not llm.learning.pending
    refuses("learn=True: the method ar", LLM, toy_folder, "ar", dtype="float32", learn=True)
