"""What other answers know: the index against a plain reading, what it forgets, whose it is, and
that answers stay the same."""

import random

import pytest

from answers import request, run
from cases import before, refuses
from models import tiny
from quickbeam import LLM, SamplingParams
from quickbeam.drafters.texts import AGREED, GRAM, SCAN, AnswerMemory, Texts
from quickbeam.engine.engine import Engine
from quickbeam.methods import make_method
from quickbeam.models.opening import make_model
from scripts import cli


def plainly(texts, suffix):
    """How many tokens agree with the best of the newest occurrences, and what follows it."""
    places = [
        (text, end)
        for text in texts
        for end in range(GRAM, len(text))
        if text[end - GRAM : end] == suffix[-GRAM:]
    ]
    best: tuple[int, list[int]] = 0, []
    for text, end in places[::-1][:SCAN]:
        length = 0
        while length < min(end, len(suffix)) and text[end - 1 - length] == suffix[-1 - length]:
            length += 1
        if length > best[0]:
            best = length, text[end:]
    return best


def test_finds_what_a_plain_reading_finds():
    rng = random.Random(1)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(2, 60))] for _ in range(40)]
    known = Texts(1 << 14)
    for text in texts:
        known.add(text)
    matches = 0
    for _ in range(500):
        suffix = [rng.randrange(3) for _ in range(rng.randrange(GRAM, AGREED))]
        length, rest = plainly(texts, suffix)
        match = known.match(suffix)
        drafted = rng.randrange(len(suffix))
        assert known.match(suffix[:drafted], suffix[drafted:]) == match
        assert (match.length if match else 0) == length
        if match is not None:
            assert known.continuation(match, 100) == rest
            matches += 1
    assert matches > 300


def test_the_oldest_texts_are_forgotten_and_nothing_wrong_is_found():
    rng, known, texts = random.Random(2), Texts(300), list[list[int]]()
    for _ in range(200):
        texts.append([rng.randrange(6) for _ in range(rng.randrange(5, 90))])
        known.add(texts[-1])
        newest = texts[-1]
        match = known.match(newest[:-1][-AGREED:])
        assert match is not None and known.continuation(match, 1) == newest[-1:]
        for _ in range(5):
            suffix = [rng.randrange(6) for _ in range(8)]
            if (match := known.match(suffix)) is not None:
                seen = [*suffix[-match.length :], *known.continuation(match, 4)]
                # what a ring of 300 tokens holds may begin in the middle of a text
                joined = [",".join(map(str, text)) for text in texts[-100:]]
                assert any(",".join(map(str, seen)) in text for text in joined)
    alone = Texts(300)
    alone.add(list(range(100, 120)))
    for _ in range(10):
        alone.add([rng.randrange(90) for _ in range(60)])
    assert alone.match(list(range(100, 110))) is None


def test_the_latest_tokens_are_given_the_newest_last():
    rng, known, written = random.Random(3), Texts(100), list[int]()
    assert known.latest(9) == []
    for _ in range(30):
        text = [rng.randrange(90) for _ in range(rng.randrange(5, 30))]
        known.add(text)
        written += text
        for count in (1, 5, 200):
            latest = known.latest(count)
            # the end of a text takes a place, too
            assert len(latest) <= min(count, 99) and {*latest} <= {*written}
            assert count > 5 or latest == written[len(written) - len(latest) :]
    assert len(known.latest(200)) > 60 and known.latest(len(text) + 1) == text


def test_each_tenant_has_a_memory_of_its_own_and_few_have_one():
    memory = AnswerMemory(1 << 20)
    memory.of("a").add(list(range(100)))
    assert memory.of("a").match(list(range(50))) is not None
    assert memory.of("b").match(list(range(50))) is None
    assert memory.of(None).match(list(range(50))) is None
    for number in range(20):
        memory.of(number)
    assert memory.of("a").match(list(range(50))) is None


@pytest.mark.parametrize(
    ("temperature", "coupling"), [(0.0, "coupled"), (0.8, "coupled"), (0.8, "residual")]
)
def test_answers_stay_the_same_and_take_fewer_steps(temperature, coupling):
    given = dict(temperature=temperature, coupling=coupling)
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=5, **given)
    model, prompt = make_model(tiny("llama", seed=3)), [*range(1, 30)]
    answers, steps, method = [], [], make_method("logitspec")
    for memory in (None, AnswerMemory(1 << 20)):
        engine = Engine(model, memory=memory)
        for tenant in "aab":
            asked = request(model, method, params, prompt, budget=16)
            asked.tenant = tenant
            one = engine.add(asked)
            run(engine)
            answers.append(one.output.token_ids)
            steps.append(one.statistics.steps)
            assert one.statistics.sources["answers"].accepted <= 39
        engine.close()
    assert len(answers[0]) == 40 and all(answer == answers[0] for answer in answers)
    without, first, again, others = steps[0], *steps[3:]
    assert first == others == without > 5
    # a seed repeats a residual answer only with the same drafts
    assert again <= 5 if coupling == "coupled" else again == without


def test_off_by_zero_and_on_by_default_and_kept_by_a_model(toy_folder, tmp_path):
    params, prompt, steps = SamplingParams(max_tokens=30, ignore_eos=True), "a b c d e f", []
    keep = {"keep": tmp_path / "kept"}
    for given in ({"memory_of_answers": "0"}, {"memory_of_answers": "1MB"}, {}, keep, keep):
        with LLM(toy_folder, "logitspec", budget=8, **given) as llm:
            first, again = (llm.generate(prompt, params) for _ in range(2))
            assert first.token_ids == again.token_ids
            steps.append((first.statistics.steps, again.statistics.steps))
    (slow, same), learned, *others = steps
    assert same == slow == learned[0] > learned[1]
    assert others == [learned, learned, (learned[1], learned[1])]
    words = "a memory of answers of 0 keeps none"
    refuses(words, LLM, toy_folder, memory_of_answers=0, keep=tmp_path / "kept")


def test_kept_from_one_process_to_the_next(tmp_path, caplog, monkeypatch):
    path = tmp_path / "answers"
    memory, rng = AnswerMemory(1 << 20, path, "m"), random.Random(4)
    texts = {who: [rng.randrange(90) for _ in range(80)] for who in (None, "1.2.3.4", b"key")}
    for who, text in texts.items():
        memory.of(who).add(text)
    memory.close()
    added = list[int]()
    before(monkeypatch, Texts, "add", lambda self, ids: added.append(len(ids)))
    again = AnswerMemory(1 << 20, path, "m")
    assert added == [80] * 3  # what is still empty is not read
    for who, text in texts.items():
        match = again.of(who).match(text[:40])
        assert match is not None and again.of(who).continuation(match, 99) == text[40:]
        assert all(again.of(other).match(text[:40]) is None for other in texts if other != who)
    refuses("keeps answers of m, not of other: name", AnswerMemory, 1 << 20, path, "other")
    for content in (b"", b"no such file", path.read_bytes()[:-7]):
        (tmp_path / "wrong").write_bytes(content)
        refuses("no file of kept answers", AnswerMemory, 1 << 20, tmp_path / "wrong", "m")
    refuses("there is no folder .*missing; make it", AnswerMemory, 1, tmp_path / "missing" / "a")
    refuses("more than this machine has", AnswerMemory, 1 << 60)
    (tmp_path / "folder").mkdir()
    gone = AnswerMemory(1 << 20, tmp_path / "folder" / "a")
    gone.of(None).add(text)
    (tmp_path / "folder").rmdir()
    gone.close()
    assert "answers are not kept" in caplog.text
    again.check(90)
    refuses("another vocabulary, or is damaged", again.check, 60)
    # what was forgotten meanwhile stays in the file, the new behind it
    again.forget()
    new = [rng.randrange(90) for _ in range(50)]
    again.of(None).add(new)
    again.close()
    last = AnswerMemory(1 << 20, path, "m")
    for text in (texts[None], new):
        match = last.of(None).match(text[:40])
        assert match is not None and last.of(None).continuation(match, 99) == text[40:]
    assert last.of(b"key").match(texts[b"key"][:40])


def test_commands_keep_their_answers(toy_folder, tmp_path):
    options = ["--model", toy_folder, "--keep", tmp_path / "kept", "--max-tokens", "8"]
    held = 0
    for command in (["generate", "a b c"], ["chat"]):
        done = cli(*command, *options, input="other words\n")
        kept = AnswerMemory(1 << 20, tmp_path / "kept", toy_folder).of(None).ring()
        assert done.exit_code == 0 and (kept > 0).sum() >= held + 8
        held = (kept > 0).sum()
