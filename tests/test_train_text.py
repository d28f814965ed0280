"""Text for training: many sequences side by side are what each is alone, conversations say what was said.

pytest tests/test_train_text.py
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from models import VOCAB, tiny
from quickbeam.errors import InvalidInput
from quickbeam.train import decoder as decoder_module
from quickbeam.train import text
from quickbeam.train.decoder import BatchDecoder
from quickbeam.train.shards import Conversation
from quickbeam.train.text import Circles, Quote, Recipe, Template, Writer

LENGTH, QUESTION = 80, 12


@torch.inference_mode()
def plain(model: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[n, vocab]` and hidden states `[n, L * d]` by transformers (not the one before the final norm)."""
    out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    count = len(out.hidden_states) - 1
    return out.logits[0], torch.cat([out.hidden_states[min(layer, count)][0] for layer in layers], -1)


# --- sequences side by side ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gemma3-window", "gpt2", "phi3"])
def test_every_slot_is_on_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "CHUNK", 5)
    model, rng = tiny(name), random.Random(1)
    count = model.config.num_hidden_layers
    layers = (count + 1, 1, 2)
    decoder = BatchDecoder(copy.deepcopy(model), slots=4, length=20, layers=layers)
    held: list[list[int]] = [[] for _ in range(4)]
    for _ in range(60):
        for slot, ids in enumerate(held):
            if len(ids) == 20 or rng.random() < 0.07:
                decoder.restart(slot)
                ids.clear()
            if rng.random() < 0.1 and (count := min(rng.randrange(1, 12), 19 - len(ids))) > 0:
                ids += (known := [rng.randrange(VOCAB) for _ in range(count)])
                got, expected = decoder.fill(slot, known), plain(model, ids, layers)[1][-count:]
                torch.testing.assert_close(got / expected.abs().max(), expected / expected.abs().max(), atol=2e-5, rtol=0)
            ids.append(rng.randrange(VOCAB))
        logits, hidden = decoder.step(torch.tensor([ids[-1] for ids in held]))
        assert decoder.position.tolist() == [len(ids) for ids in held]
        for slot, ids in enumerate(held):
            for got, expected in zip((logits[slot], hidden[slot]), plain(model, ids, layers), strict=True):
                scale = expected[-1].abs().max()
                torch.testing.assert_close(got / scale, expected[-1] / scale, atol=2e-5, rtol=0)


def test_memory_is_what_the_keys_and_values_take() -> None:
    for name in ("llama", "qwen3", "gpt2"):
        model = tiny(name)
        wanted = BatchDecoder.memory(model, 3, 11)
        tap = BatchDecoder(model, 3, 11, (1,))._tap
        assert sum(tensor.nbytes for tensor in (*tap._keys, *tap._values)) == wanted


@pytest.mark.parametrize("name", ["gemma2-softcap-window", "gpt-oss-sinks"])
def test_scores_that_are_capped_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="can't write text in bulk"):
        BatchDecoder(tiny(name), 2, 8, (1,))


# --- conversations -------------------------------------------------------------------------------------------------------------------


class Chat:
    """A tiny chat model and what writes with it."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for layer in self.model.model.layers:
            torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.5)  # what came before matters
        self.end = self.model.config.eos_token_id
        self.template = Template.of(self.tokenizer, {self.end})
        self.model.lm_head.bias = torch.nn.Parameter(torch.zeros(self.model.config.vocab_size))
        self.model.lm_head.bias.data[list(self.template.stops)] = 2.0  # turns end now and then
        self.openers = [self.encode("Why"), self.encode("Tell me")]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def writer(self, prompts: list[list[int]] | None = None, fond: float = 0.0, **recipe: Any) -> Writer:
        model = copy.deepcopy(self.model)
        model.lm_head.bias.data[20:24] += fond  # of saying the same few things
        decoder = BatchDecoder(model, 4, LENGTH, (1, 3))
        template = self.template if prompts is None else None
        settings = Recipe(LENGTH, QUESTION, openers=("Why", "Tell me"), **{"circle": LENGTH, "quote": 0.0, **recipe})
        return Writer(decoder, self.encode, template, self.template.stops, settings, prompts)


@pytest.fixture(scope="module")
def chat(toy_folder: str) -> Chat:
    torch.manual_seed(2)
    return Chat(toy_folder)


@pytest.fixture(scope="module")
def written(chat: Chat) -> list[Conversation]:
    return list(itertools.islice(chat.writer(), 24))


def test_hidden_states_are_those_of_a_plain_run_and_greedy_answers_are_greedy(chat: Chat, written: list[Conversation]) -> None:
    kinds = set()
    for tokens, answer, hidden, temperature in written:
        assert len(tokens) == len(answer) == len(hidden) <= LENGTH and hidden.dtype == torch.float32
        logits, states = plain(chat.model, tokens.tolist(), (1, 3))
        torch.testing.assert_close(hidden, states, atol=1e-4, rtol=1e-4)
        said = answer.nonzero()[:, 0]
        kinds.add(greedy := temperature == 0)
        assert temperature < 1 and (not greedy or torch.equal(logits[said - 1].argmax(-1), tokens[said].long()))
    assert kinds == {True, False} and 0 < sum(len(c.tokens) == LENGTH for c in written) < len(written)


def turns(chat: Chat, ids: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Where each turn is said, from and to, and whether it is an answer; in between stands what the template and openers force."""
    t, at, forced, answering = chat.template, 0, chat.template.begin, False
    while at < len(ids):
        assert ids[at : at + len(forced)] == forced[: len(ids) - at]
        at = min(at + len(forced), len(ids))
        at += 0 if answering else max(len(words) * (ids[at : at + len(words)] == words) for words in chat.openers)
        last = min(LENGTH if answering else at + QUESTION, len(ids))
        end = next((i + 1 for i in range(at, last) if ids[i] in t.stops), last)
        yield at, end, answering
        forced = t.again if answering else t.reply
        forced = forced[1:] if ids[end - 1] == forced[0] and end > at else forced
        at, answering = end, not answering


def test_turns_follow_the_template_and_answers_are_marked(chat: Chat, written: list[Conversation]) -> None:
    answers = list[int]()
    for tokens, answer, _, _ in written:
        ids, marks = tokens.tolist(), [False] * len(tokens)
        for begin, end, answering in turns(chat, ids):
            marks[begin:end] = [answering] * (end - begin)
        assert marks == answer.tolist() and (len(ids) == LENGTH or (marks[-1] and ids[-1] in chat.template.stops))
        answers.append(sum(b and not a for a, b in itertools.pairwise(marks)))
    assert {1, 2} <= set(answers)


QUOTES = (Quote("aaa ", " bbb"), Quote("ccc ", " ddd", open=True))


def test_quotes_stand_between_their_words_and_are_what_was_answered_before(chat: Chat) -> None:
    t, found, longer, earlier = chat.template, [0, 0], 0, list[str]()
    words = [(chat.encode(quote.before), chat.encode(quote.after)) for quote in QUOTES]
    for tokens, answer, hidden, _ in itertools.islice(chat.writer(quote=0.7, quotes=QUOTES, documents=()), 60):
        ids, said = tokens.tolist(), int(answer.nonzero()[0])
        torch.testing.assert_close(hidden, plain(chat.model, ids, (1, 3))[1], atol=1e-4, rtol=1e-4)
        assert ids[: len(t.begin)] == t.begin
        asked = ids[len(t.begin) : said]
        for kind, (before, after) in enumerate(words):
            if asked[: len(before)] != before:
                continue
            end = next(i for i in range(len(before), said) if asked[i : i + len(after)] == after)
            passage, rest = asked[len(before) : end], asked[end + len(after) :]
            assert 0.1 * LENGTH - 1 <= len(passage) <= 2 / 3 * LENGTH
            parts = [",".join(map(str, part)) for part in pieces(passage, chat.encode("\n\n"))]
            assert all(part in " ".join(earlier) for part in parts) and len(set(parts)) == len(parts)
            assert rest[1 - len(t.reply) :] == t.reply[1:] and len(rest) <= QUESTION + len(t.reply)
            assert rest == t.reply or kind == 1
            longer += len(rest) > len(t.reply)
            found[kind] += 1
        earlier += [",".join(map(str, ids[begin:end])) for begin, end in spans(answer.tolist())]
    assert min(found) > 5 and longer > 2


def test_documents_are_written_without_the_template_and_quoted(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LEAST", 3)
    writer = chat.writer(quote=0.6, quotes=QUOTES[:1], documents=("zzz",), document=20)
    before, opening = chat.encode("aaa "), chat.encode("zzz")
    raw, begin, quoted, documents = chat.template.raw, chat.template.begin, 0, list[list[int]]()
    for tokens, answer, hidden, temperature in itertools.islice(writer, 80):
        ids = tokens.tolist()
        if ids[: len(raw + opening)] == raw + opening:  # trained on as they are: all but how they begin is the model's own
            documents.append(ids[len(raw) :])
            assert answer.tolist() == [i >= len(raw + opening) for i in range(len(ids))] and temperature == text.Recipe.document_temperature
            torch.testing.assert_close(hidden, plain(chat.model, ids, (1, 3))[1], atol=1e-4, rtol=1e-4)
            continue
        assert ids[: len(begin)] == begin and answer.any()
        asked = ids[len(begin) :]
        quoted += asked[: len(before)] == before and asked[len(before) :][: len(opening)] == opening
    assert quoted > 5 and len(writer._written) > 5 and len(documents) >= len(writer._written)
    assert all(words in [ids[: len(words)] for ids in documents] for words in writer._written)
    for words in writer._written:
        assert words[: len(opening)] == opening and len(words) <= len(opening) + 20
        assert not chat.template.stops & set(words[:-1])


def spans(marks: list[bool]) -> Iterator[tuple[int, int]]:
    """Where runs of True begin and end."""
    edges = [i for i, (a, b) in enumerate(itertools.pairwise([False, *marks, False])) if a != b]
    return zip(edges[::2], edges[1::2], strict=True)


def pieces(ids: list[int], between: list[int]) -> list[list[int]]:
    """Split at every `between`."""
    for i in range(len(ids)):
        if ids[i : i + len(between)] == between:
            return [ids[:i], *pieces(ids[i + len(between) :], between)]
    return [ids]


def test_pieces_make_up_what_the_template_says(chat: Chat) -> None:
    t = chat.template
    turns = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "x"))]
    whole = chat.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    made = [*t.begin, *chat.encode("hi"), *t.reply, *chat.encode("yo"), *t.again, *chat.encode("so"), *t.reply, *chat.encode("x")]
    assert whole[: len(made)] == made and chat.tokenizer.decode(whole[len(made) :]) == "\n"
    assert t.stops == {chat.end, t.reply[0]}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "no chat template"),
        ("{{ messages | length }} turns", "changes what users say"),
        ("{% for m in messages %}{{ m.content | upper | reverse }};{% endfor %}", "changes what users say"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "says nothing before"),
        ("-{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}", "says nothing before"),
    ],
)
def test_templates_that_cannot_be_read_off_are_refused(chat: Chat, monkeypatch: pytest.MonkeyPatch, source: str, words: str) -> None:
    monkeypatch.setattr(chat.tokenizer, "chat_template", source)
    with pytest.raises(InvalidInput, match=f"{words}.*give --prompts"):
        Template.of(chat.tokenizer, {7})


def test_a_seed_repeats_the_text(chat: Chat, written: list[Conversation]) -> None:
    again, other = ([c.tokens.tolist() for c in itertools.islice(chat.writer(seed=seed), 6)] for seed in (0, 1))
    assert again == [c.tokens.tolist() for c in written[:6]] != other


def test_answers_that_go_in_circles_end(chat: Chat) -> None:
    cut = 0
    for tokens, _, _, _ in itertools.islice(chat.writer(fond=6.0, circle=5), 40):
        circles, ids, runs = Circles(), tokens.tolist(), list[int]()
        for begin, end, answering in turns(chat, ids):
            for token in ids[begin:end]:
                circles.read(token)
                runs += [circles.run] * answering
        assert all(run < 5 for run in runs[:-1])
        cut += runs[-1] >= 5
    assert 0 < cut < 40
    circles, runs = Circles(), []
    for token in [1, 2, 3, 1, 2, 3, 1, 9, 1, 2, 3, 4]:
        circles.read(token)
        runs.append(circles.run)
    assert runs == [0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0]


def test_every_prompt_is_answered_once(chat: Chat) -> None:
    prompts = [chat.encode(f"user: {word}\n> ") for word in ("a", "bb", "ccc", "d", "e", "ff", "g")]
    found = list(chat.writer([*prompts, [1] * LENGTH, [1] * (LENGTH - 1)]))
    assert sorted(c.tokens[: int(c.answer.nonzero()[0])].tolist() for c in found) == sorted(prompts)
    for tokens, answer, hidden, _ in found:
        torch.testing.assert_close(hidden, plain(chat.model, tokens.tolist(), (1, 3))[1], atol=1e-4, rtol=1e-4)
        said = tokens[answer].tolist()
        assert answer[-len(said) :].all() and not any(token in chat.template.stops for token in said[:-1])
        assert said[-1] in chat.template.stops or len(tokens) == LENGTH
    with pytest.raises(InvalidInput, match="raise --length"):
        chat.writer([[1] * LENGTH])


class Script:
    """A decoder whose model nearly always says what follows a token in `after`; any other token is a little less likely."""

    slots, device = 3, torch.device("cpu")
    after: ClassVar[dict[int, int]] = {1: 10, 10: 2, 3: 11, 2: 12, 12: 11, 11: 2, 4: 10}

    def restart(self, slot: int) -> None:
        pass

    def step(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.zeros(self.slots, 20)
        logits[range(self.slots), [self.after.get(token, 2) for token in tokens.tolist()]] = 8.0
        return logits, tokens[:, None].float()


@pytest.mark.parametrize("reply", [[2, 3], [2]])
def test_each_speaks_at_a_temperature_of_their_own(reply: list[int]) -> None:
    template = Template([1], reply, [2, 4], frozenset({2}))
    writer = Writer(Script(), lambda text: [], template, template.stops, Recipe(40, 5, user_temperature=30.0, openers=()))
    users = set()
    for tokens, answer, hidden, temperature in itertools.islice(writer, 60):
        assert torch.equal(hidden[:, 0], tokens.float())
        users |= set(tokens[~answer].tolist())
        if temperature == 0:
            follow = [Script.after.get(token, 2) for token in tokens.tolist()]
            assert all(b == a for a, b, said in zip(follow, tokens[1:].tolist(), answer[1:].tolist(), strict=False) if said)
    assert len(users) > 15


def test_documents_have_a_temperature_of_their_own() -> None:
    heats = {"document_temperature": 1e-3, "user_temperature": 30.0, "quote": 0.5, "document": 40}
    template = Template([1], [2, 3], [2, 4], frozenset({2}), raw=[9])
    writer = Writer(Script(), lambda text: [10], template, template.stops, Recipe(90, 5, openers=(), documents=("x",), **heats))
    Script.after[5], Script.after[10] = 6, 5
    Script.after[6] = 10  # 10 5 6 10 5 6 …
    try:
        for _ in itertools.islice(writer, 20):
            pass
    finally:
        del Script.after[5], Script.after[6]
        Script.after[10] = 2
    assert len(writer._written) > 2
    assert all(words == [(10, 5, 6)[i % 3] for i in range(len(words))] and len(words) > 30 for words in writer._written)
