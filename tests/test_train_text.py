"""Text for training: conversations say what was said, whoever else speaks beside them."""

import copy
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PhiConfig

from cases import before, refuses
from quickbeam.cli import train
from quickbeam.engine.engine import Engine
from quickbeam.engine.scheduler import Scheduler
from quickbeam.errors import InvalidInput
from quickbeam.models.opening import make_model
from quickbeam.train import text
from quickbeam.train.recipes import Plan
from quickbeam.train.shards import collate
from quickbeam.train.states import StateCache
from quickbeam.train.target import FrozenTarget
from quickbeam.train.text import Dialogue, Template, TextRecipe, Writer
from test_train_block import opened

LENGTH, QUESTION = 80, 12
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SHARED = (*SIZES, "num_attention_heads", "max_position_embeddings", "bos_token_id", "eos_token_id")


@torch.inference_mode()
def plain(model, ids):
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


class Chat:
    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        fields = AutoConfig.from_pretrained(folder).to_dict()
        config = PhiConfig(**{name: fields[name] for name in SHARED})  # its head has a bias
        how = dict(dtype=torch.float32, attn_implementation="eager")
        self.model = AutoModelForCausalLM.from_config(config, **how).eval()
        for layer in self.model.model.layers:
            # what came before matters
            torch.nn.init.normal_(layer.self_attn.dense.weight, std=0.5)
        self.end = self.model.config.eos_token_id
        self.template = Template.of(self.tokenizer, {self.end})
        self.model.lm_head.bias.data[list(self.template.stops)] = 2.0  # turns end now and then
        self.openers = [self.encode("Why"), self.encode("Tell me")]

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def writer(self, prompts=None, fond=0.0, made=None, states=None, length=LENGTH, **recipe):
        model = copy.deepcopy(self.model)
        model.lm_head.bias.data[20:24] += fond  # of saying the same few things
        template = self.template if prompts is None else None
        given = {"repetition": LENGTH, "quote": 0.0, **recipe}
        settings = TextRecipe(length, QUESTION, openers=("Why", "Tell me"), **given)
        asked = self.encode, template, self.template.stops, settings, prompts
        return Writer(made or make_model(model), 4, *asked, states=states)


@pytest.fixture(scope="module")
def chat(toy_folder):
    torch.manual_seed(2)
    return Chat(toy_folder)


@pytest.fixture(scope="module")
def written(chat):
    return list(itertools.islice(chat.writer(), 48))


def test_greedy_answers_are_greedy(chat, written):
    kinds = set()
    for tokens, answer, temperature, _ in written:
        assert len(tokens) == len(answer) <= LENGTH
        logits = plain(chat.model, tokens.tolist())
        places = answer.nonzero()[:, 0]
        kinds.add(greedy := temperature == 0)
        assert temperature < 1
        assert not greedy or torch.equal(logits[places - 1].argmax(-1), tokens[places].long())
    assert kinds == {True, False}
    assert 0 < sum(len(c.tokens) == LENGTH for c in written) < len(written)


@pytest.mark.parametrize("pages", [None, 6])
def test_hidden_states_of_what_is_written_are_those_that_are_read(chat, pages, monkeypatch):
    """Also those of earlier turns, which the prefix cache has, and of what was preempted."""
    monkeypatch.setattr(text, "Engine", functools.partial(Engine, pages=pages))
    preempted, preempt = [], Scheduler.preempt
    monkeypatch.setattr(Scheduler, "preempt", lambda *of: (preempted.append(of), preempt(*of)))
    model = copy.deepcopy(chat.model)
    model.lm_head.bias.data[list(chat.template.stops)] = 1.0 if pages is None else -9.0
    target = opened(model)
    of = FrozenTarget(target.loaded.model, target.parameters, target.stack, (1, 2))
    states = StateCache(of, {}, 1 << 30)
    writer = chat.writer(made=target.loaded.model, states=states, length=200)
    turns_of = list[int]()
    for one in itertools.islice(writer, 24):
        read = of.read(collate([one])).hidden[0]
        cached = states.read(collate([one])).hidden[0]
        torch.testing.assert_close(cached[:-1], read[:-1], rtol=1e-4, atol=1e-4)
        if not cached[-1].any():  # it was recorded, and not read for want of it
            turns_of.append(int(one.answer.int().diff().clamp(min=0).sum()))
    assert len(turns_of) == 24
    assert preempted if pages else sum(turns > 1 for turns in turns_of) > 3


@pytest.mark.parametrize("asked", [True, False])
def test_what_all_conversations_begin_with_is_recorded_too(chat, asked, monkeypatch):
    """The template's words or a system prompt, which the prefix cache has for all but the first."""
    said = (chat.template.begin * 99)[:70]
    monkeypatch.setattr(chat, "template", replace(chat.template, begin=said))
    prompts = [said + chat.encode(f"say {i}") + chat.template.reply for i in range(12)]
    target = opened(copy.deepcopy(chat.model))
    of = FrozenTarget(target.loaded.model, target.parameters, target.stack, (1, 2))
    states = StateCache(of, {}, 1 << 30)
    how = dict(made=target.loaded.model, states=states, length=200)
    written = list(itertools.islice(chat.writer(prompts if asked else None, **how), 12))
    right = [of.read(collate([one])).hidden for one in written]
    before(monkeypatch, of, "read", lambda batch: pytest.fail("it was not recorded"))
    for one, hidden in zip(written, right, strict=True):
        recorded = states.read(collate([one])).hidden
        torch.testing.assert_close(recorded[:, :-1], hidden[:, :-1], rtol=1e-4, atol=1e-4)


def turns(chat, ids):
    """Each turn's begin and end, and whether it answers; the template forces what is between."""
    t, at, forced, answering = chat.template, 0, chat.template.begin, False
    while at < len(ids):
        assert ids[at : at + len(forced)] == forced[: len(ids) - at]
        at = min(at + len(forced), len(ids))
        if not answering:
            at += max(len(words) * (ids[at : at + len(words)] == words) for words in chat.openers)
        last = min(LENGTH if answering else at + QUESTION, len(ids))
        end = next((i + 1 for i in range(at, last) if ids[i] in t.stops), last)
        yield at, end, answering
        forced = t.again if answering else t.reply
        forced = forced[1:] if ids[end - 1] == forced[0] and end > at else forced
        at, answering = end, not answering


def test_turns_follow_the_template_and_answers_are_marked(chat, written):
    answers = list[int]()
    for tokens, answer, *_ in written:
        ids, marks = tokens.tolist(), [False] * len(tokens)
        for begin, end, answering in turns(chat, ids):
            marks[begin:end] = [answering] * (end - begin)
        assert marks == answer.tolist()
        assert len(ids) == LENGTH or (marks[-1] and ids[-1] in chat.template.stops)
        answers.append(sum(b and not a for a, b in itertools.pairwise(marks)))
    assert {1, 2} <= set(answers)


def test_pieces_make_up_what_the_template_says(chat):
    t, texts = chat.template, ("hi", "yo", "so", "x")
    turns = [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(texts)]
    whole = chat.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    parts = zip((t.begin, t.reply, t.again, t.reply), map(chat.encode, texts), strict=True)
    made = [token for before, words in parts for token in (*before, *words)]
    assert whole[: len(made)] == made and chat.tokenizer.decode(whole[len(made) :]) == "\n"
    assert t.stops == {chat.end, t.reply[0]}


def test_templates_that_cannot_be_read_off_are_refused(chat, monkeypatch):
    for source, words in (
        (None, "no chat template"),
        ("{{ messages | length }} turns", "changes what users say"),
        ("@{{ m.content | upper | reverse }};@", "changes what users say"),
        ("@{{ m.content }};@", "says nothing before"),
        ("-@{{ m.content }}{% if m.role == 'assistant' %};{% endif %}@", "says nothing before"),
    ):
        if source is not None:  # between two @: said of each message
            source = source.replace("@", "{% for m in messages %}", 1).replace("@", "{% endfor %}")
        monkeypatch.setattr(chat.tokenizer, "chat_template", source)
        refuses(f"{words}.*give --prompts", Template.of, chat.tokenizer, {7})


def test_answers_that_go_in_circles_end(chat):
    cut = 0
    for tokens, *_ in itertools.islice(chat.writer(fond=6.0, repetition=5), 40):
        talk, ids, runs = Dialogue([], 0.0), tokens.tolist(), list[int]()
        for begin, end, answering in turns(chat, ids):
            for token in ids[begin:end]:
                talk.append(token)
                runs += [talk.repeated] * answering
        assert all(run < 5 for run in runs[:-1])
        cut += runs[-1] >= 5
    assert 0 < cut < 40
    talk, runs = Dialogue([], 0.0), []
    for token in [1, 2, 3, 1, 2, 3, 1, 9, 1, 2, 3, 4]:
        talk.append(token)
        runs.append(talk.repeated)
    assert runs == [0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0]


def test_every_prompt_is_answered_once(chat):
    prompts = [chat.encode(f"user: {word}\n> ") for word in ("a", "bb", "ccc", "d", "e", "ff", "g")]
    texts = list(chat.writer([*prompts, [1] * LENGTH, [1] * (LENGTH - 1)]))
    assert sorted(c.tokens[: int(c.answer.nonzero()[0])].tolist() for c in texts) == sorted(prompts)
    for tokens, answer, *_ in texts:
        reply = tokens[answer].tolist()
        assert answer[-len(reply) :].all()
        assert not any(token in chat.template.stops for token in reply[:-1])
        assert reply[-1] in chat.template.stops or len(tokens) == LENGTH
    refuses("raise --length", chat.writer, [[1] * LENGTH])


def test_a_conversation_ends_with_the_context_and_what_has_no_room_is_refused(chat):
    model = copy.deepcopy(chat.model)
    model.config.max_position_embeddings = 40
    recipe, prompts = TextRecipe(LENGTH, repetition=LENGTH), [chat.encode("say"), chat.encode("aa")]
    writer = Writer(make_model(model), 2, chat.encode, None, frozenset(), recipe, prompts)
    assert [len(c.tokens) for c in writer] == [40, 40]
    model, given = make_model(copy.deepcopy(chat.model)), (chat.template, chat.template.stops)
    with pytest.raises(InvalidInput, match="template alone fills 8 tokens: raise --length"):
        Writer(model, 2, chat.encode, *given, TextRecipe(8))


@pytest.mark.parametrize("languages", ["en,tlh", ""])
def test_an_unknown_language_is_named_before_the_model_is_loaded(languages, tmp_path):
    with pytest.raises(InvalidInput, match=r"language .* choose among en, code"):
        train.write_and_train(Plan("no such model", tmp_path, languages=languages), None)
