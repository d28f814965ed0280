"""Text for training: conversations say what was said, whoever else speaks beside them."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quickbeam.errors import InvalidInput
from quickbeam.models.opening import make_model
from quickbeam.train import stages, text
from quickbeam.train.recipes import LANGUAGES, OPENERS, Plan, opening_words
from quickbeam.train.text import Quote, Recipe, Talk, Template, Writer

LENGTH, QUESTION = 80, 12


@torch.inference_mode()
def plain(model, ids):
    """Logits `[n, vocab]` by transformers."""
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


# --- conversations --------------------------------------------------------------------------------


class Chat:
    """A tiny chat model and what writes with it."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for layer in self.model.model.layers:
            # what came before matters
            torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.5)
        self.end = self.model.config.eos_token_id
        self.template = Template.of(self.tokenizer, {self.end})
        self.model.lm_head.bias = torch.nn.Parameter(torch.zeros(self.model.config.vocab_size))
        self.model.lm_head.bias.data[list(self.template.stops)] = 2.0  # turns end now and then
        self.openers = [self.encode("Why"), self.encode("Tell me")]

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def writer(self, prompts=None, fond=0.0, **recipe):
        model = copy.deepcopy(self.model)
        model.lm_head.bias.data[20:24] += fond  # of saying the same few things
        template = self.template if prompts is None else None
        settings = Recipe(
            LENGTH,
            QUESTION,
            openers=("Why", "Tell me"),
            **{"repetition": LENGTH, "quote": 0.0, **recipe},
        )
        return Writer(
            make_model(model), 4, self.encode, template, self.template.stops, settings, prompts
        )


@pytest.fixture(scope="module")
def chat(toy_folder):
    torch.manual_seed(2)
    return Chat(toy_folder)


@pytest.fixture(scope="module")
def written(chat):
    return list(itertools.islice(chat.writer(), 48))


def test_greedy_answers_are_greedy(chat, written):
    kinds = set()
    for tokens, answer, temperature in written:
        assert len(tokens) == len(answer) <= LENGTH
        logits = plain(chat.model, tokens.tolist())
        said = answer.nonzero()[:, 0]
        kinds.add(greedy := temperature == 0)
        assert temperature < 1
        assert not greedy or torch.equal(logits[said - 1].argmax(-1), tokens[said].long())
    assert kinds == {True, False}
    assert 0 < sum(len(c.tokens) == LENGTH for c in written) < len(written)


def turns(chat, ids):
    """Where each turn is said, from and to, and whether it is an answer; in between stands what the
    template and openers force."""
    t, at, forced, answering = chat.template, 0, chat.template.begin, False
    while at < len(ids):
        assert ids[at : at + len(forced)] == forced[: len(ids) - at]
        at = min(at + len(forced), len(ids))
        at += (
            0
            if answering
            else max(len(words) * (ids[at : at + len(words)] == words) for words in chat.openers)
        )
        last = min(LENGTH if answering else at + QUESTION, len(ids))
        end = next((i + 1 for i in range(at, last) if ids[i] in t.stops), last)
        yield at, end, answering
        forced = t.again if answering else t.reply
        forced = forced[1:] if ids[end - 1] == forced[0] and end > at else forced
        at, answering = end, not answering


def test_turns_follow_the_template_and_answers_are_marked(chat, written):
    answers = list[int]()
    for tokens, answer, _ in written:
        ids, marks = tokens.tolist(), [False] * len(tokens)
        for begin, end, answering in turns(chat, ids):
            marks[begin:end] = [answering] * (end - begin)
        assert marks == answer.tolist()
        assert len(ids) == LENGTH or (marks[-1] and ids[-1] in chat.template.stops)
        answers.append(sum(b and not a for a, b in itertools.pairwise(marks)))
    assert {1, 2} <= set(answers)


def test_users_speak_at_a_temperature_of_their_own(chat):
    spoken = 0
    for tokens, _, _ in itertools.islice(chat.writer(user_temperature=1e-4), 16):
        ids, likeliest = tokens.tolist(), plain(chat.model, tokens.tolist()).argmax(-1).tolist()
        for begin, end, answering in turns(chat, ids):
            if not answering:
                assert ids[begin:end] == likeliest[begin - 1 : end - 1]
                spoken += end - begin
    assert spoken > 60


QUOTES = (Quote("aaa ", " bbb"), Quote("ccc ", " ddd", open=True))


def test_quotes_stand_between_their_words_and_are_what_was_answered_before(chat):
    t, found, longer, earlier = chat.template, [0, 0], 0, list[str]()
    words = [(chat.encode(quote.before), chat.encode(quote.after)) for quote in QUOTES]
    for tokens, answer, _ in itertools.islice(
        chat.writer(quote=0.7, quotes=QUOTES, documents=(), seed=1), 60
    ):
        ids, said = tokens.tolist(), int(answer.nonzero()[0])
        assert ids[: len(t.begin)] == t.begin
        asked = ids[len(t.begin) : said]
        for kind, (before, after) in enumerate(words):
            if asked[: len(before)] != before:
                continue
            end = next(i for i in range(len(before), said) if asked[i : i + len(after)] == after)
            passage, rest = asked[len(before) : end], asked[end + len(after) :]
            assert 0.1 * LENGTH - 1 <= len(passage) <= 2 / 3 * LENGTH
            parts = [",".join(map(str, part)) for part in pieces(passage, chat.encode("\n\n"))]
            assert all(part in " ".join(earlier) for part in parts)
            assert len(set(parts)) == len(parts)
            assert rest[1 - len(t.reply) :] == t.reply[1:] and len(rest) <= QUESTION + len(t.reply)
            assert rest == t.reply or kind == 1
            longer += len(rest) > len(t.reply)
            found[kind] += 1
        earlier += [",".join(map(str, ids[begin:end])) for begin, end in spans(answer.tolist())]
    assert min(found) > 5 and longer > 2


def test_documents_are_written_without_the_template_and_quoted(chat, monkeypatch):
    monkeypatch.setattr(text, "LEAST", 3)
    writer = chat.writer(quote=0.6, quotes=QUOTES[:1], documents=("zzz",), document=20)
    before, opening = chat.encode("aaa "), chat.encode("zzz")
    raw, begin, quoted, documents = chat.template.raw, chat.template.begin, 0, list[list[int]]()
    conversations = iter(writer)
    for tokens, answer, temperature in itertools.islice(conversations, 80):
        ids = tokens.tolist()
        # trained on as they are: all but how they begin is the model's own
        if ids[: len(raw + opening)] == raw + opening:
            documents.append(ids[len(raw) :])
            assert answer.tolist() == [i >= len(raw + opening) for i in range(len(ids))]
            assert temperature == text.Recipe.document_temperature
            continue
        assert ids[: len(begin)] == begin and answer.any()
        asked = ids[len(begin) :]
        quoted += asked[: len(before)] == before and asked[len(before) :][: len(opening)] == opening
    written = list(writer._written)
    # the last of them were under way
    documents += [c.tokens.tolist()[len(raw) :] for c in itertools.islice(conversations, 8)]
    assert quoted > 5 and len(written) > 5
    assert all(words in [ids[: len(words)] for ids in documents] for words in written)
    for words in written:
        assert words[: len(opening)] == opening and len(words) <= len(opening) + 20
        assert not chat.template.stops & set(words[:-1])


def spans(marks):
    """Where runs of True begin and end."""
    edges = [i for i, (a, b) in enumerate(itertools.pairwise([False, *marks, False])) if a != b]
    return zip(edges[::2], edges[1::2], strict=True)


def pieces(ids, between):
    """Split at every `between`."""
    for i in range(len(ids)):
        if ids[i : i + len(between)] == between:
            return [ids[:i], *pieces(ids[i + len(between) :], between)]
    return [ids]


def test_pieces_make_up_what_the_template_says(chat):
    t = chat.template
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "x"))
    ]
    whole = chat.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    made = [
        *t.begin,
        *chat.encode("hi"),
        *t.reply,
        *chat.encode("yo"),
        *t.again,
        *chat.encode("so"),
        *t.reply,
        *chat.encode("x"),
    ]
    assert whole[: len(made)] == made and chat.tokenizer.decode(whole[len(made) :]) == "\n"
    assert t.stops == {chat.end, t.reply[0]}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "no chat template"),
        ("{{ messages | length }} turns", "changes what users say"),
        (
            "{% for m in messages %}{{ m.content | upper | reverse }};{% endfor %}",
            "changes what users say",
        ),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "says nothing before"),
        (
            "-{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% "
            "endfor %}",
            "says nothing before",
        ),
    ],
)
def test_templates_that_cannot_be_read_off_are_refused(chat, monkeypatch, source, words):
    monkeypatch.setattr(chat.tokenizer, "chat_template", source)
    with pytest.raises(InvalidInput, match=f"{words}.*give --prompts"):
        Template.of(chat.tokenizer, {7})


def test_a_seed_repeats_the_text(chat, written):
    again, other = (
        [c.tokens.tolist() for c in itertools.islice(chat.writer(seed=seed), 6)] for seed in (0, 1)
    )
    assert again == [c.tokens.tolist() for c in written[:6]] != other


def test_answers_that_go_in_circles_end(chat):
    cut = 0
    for tokens, _, _ in itertools.islice(chat.writer(fond=6.0, repetition=5), 40):
        talk, ids, runs = Talk([], 0.0), tokens.tolist(), list[int]()
        for begin, end, answering in turns(chat, ids):
            for token in ids[begin:end]:
                talk.append(token)
                runs += [talk.repeated] * answering
        assert all(run < 5 for run in runs[:-1])
        cut += runs[-1] >= 5
    assert 0 < cut < 40
    talk, runs = Talk([], 0.0), []
    for token in [1, 2, 3, 1, 2, 3, 1, 9, 1, 2, 3, 4]:
        talk.append(token)
        runs.append(talk.repeated)
    assert runs == [0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0]


def test_every_prompt_is_answered_once(chat):
    prompts = [chat.encode(f"user: {word}\n> ") for word in ("a", "bb", "ccc", "d", "e", "ff", "g")]
    found = list(chat.writer([*prompts, [1] * LENGTH, [1] * (LENGTH - 1)]))
    assert sorted(c.tokens[: int(c.answer.nonzero()[0])].tolist() for c in found) == sorted(prompts)
    for tokens, answer, _ in found:
        said = tokens[answer].tolist()
        assert answer[-len(said) :].all()
        assert not any(token in chat.template.stops for token in said[:-1])
        assert said[-1] in chat.template.stops or len(tokens) == LENGTH
    with pytest.raises(InvalidInput, match="raise --length"):
        chat.writer([[1] * LENGTH])


def test_who_stops_listening_gets_the_room_back(chat):
    made = make_model(copy.deepcopy(chat.model))
    settings = Recipe(LENGTH, QUESTION, quote=0.0)
    writer = Writer(made, 4, chat.encode, chat.template, chat.template.stops, settings)
    conversations = iter(writer)
    assert len(list(itertools.islice(conversations, 3))) == 3 and made.pool.used > 0
    conversations.close()
    assert made.pool.used == 0


def test_a_conversation_ends_with_the_context_and_what_has_no_room_is_refused(chat):
    model = copy.deepcopy(chat.model)
    model.config.max_position_embeddings = 40
    prompts = [chat.encode("say"), chat.encode("aa")]
    writer = Writer(
        make_model(model),
        2,
        chat.encode,
        None,
        frozenset(),
        Recipe(LENGTH, repetition=LENGTH),
        prompts,
    )
    assert [len(c.tokens) for c in writer] == [40, 40]
    with pytest.raises(InvalidInput, match="template alone fills 8 tokens: raise --length"):
        Writer(
            make_model(copy.deepcopy(chat.model)),
            2,
            chat.encode,
            chat.template,
            chat.template.stops,
            Recipe(8),
        )


# --- how text begins, by language ---


def test_every_language_has_questions_and_documents():
    assert set(OPENERS["questions"]) == set(OPENERS["documents"]) == set(LANGUAGES)


@pytest.mark.parametrize("kind", OPENERS)
def test_languages_have_equal_parts(kind):
    of = {opener: language for language in ("ar", "en", "ru") for opener in OPENERS[kind][language]}
    drawn = opening_words(kind, ["en", "ru", "ar"])
    assert len(set(Counter(of[opener] for opener in drawn).values())) == 1
    assert set(drawn) == set(of)


@pytest.mark.parametrize("languages", [["en", "tlh"], []])
def test_an_unknown_language_is_named_before_the_model_is_loaded(languages, tmp_path):
    with pytest.raises(InvalidInput, match=r"language .* choose among en, code"):
        stages.TextStage(Plan("no such model", tmp_path, languages=languages))
