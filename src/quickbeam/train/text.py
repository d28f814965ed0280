"""Text to train on, written by the target itself: user turns sampled from the chat template, then answered.

The way of "Magpie" (2406.08464): given the template up to where a user speaks, an instruct model writes what a user would ask. Some users
bring a longer text along (`QUOTES`), which is made of earlier answers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from quickbeam.errors import InvalidInput
from quickbeam.train.decoder import FEW, BatchDecoder
from quickbeam.train.shards import Conversation

Message = dict[str, str]

# How half of the questions begin, so that the text covers what users ask for and not only what the model likes to ask. Ours: whoever
# adds one sees to it that no benchmark that we measure with words its questions so.
OPENERS = (
    "Write a", "Write a short story about", "Write an email", "Write a Python function", "Write a program that", "Explain", "Explain how",
    "What is", "What are the", "How do I", "How can", "How many", "Why", "Who was", "When did", "Where is", "Which", "Can you", "Give me",
    "List", "Name three", "Describe", "Compare", "Translate to English:", "Translate the following sentence from Spanish to English:",
    "Translate to French:", "Summarize the following article:\n\n", "Sum up what follows.\n\n", "Give a summary of this text:\n\n",
    "Rewrite",
    "Correct the mistakes in this text:", "Continue this story:", "Answer the question using the text below.\n\n", "Passage:", "Document:",
    "Read the text and answer the question.\n\n", "Solve", "Calculate", "If a", "A train", "There are", "John has", "Maria buys",
    "A farmer", "A shop sells", "Find the", "Prove that", "Let x", "Classify", "Extract", "Imagine you are", "You are", "Pretend",
    "Act as", "Create a", "Design", "Plan", "Suggest", "Tell me about", "Tell me a", "Is it", "Should I", "I want to", "I have a",
    "Here is a", "Given the", "Complete this function:\n\ndef ", "def ", "What does this code do?\n\n", "Fix this code:\n\n", "In the",
    "Translate into English: Die", "Translate this to English: Er",
    "What does this mean in English: Ich", "Translate into English: Il", "Translate this to English: El", "Translate English to German:",
    "How would you say in French:",
)  # fmt: skip

# How documents begin. Ours.
DOCUMENTS = (
    "LONDON --", "NEW YORK --", "By Sarah", "By James", "The mayor of", "Police said", "A man was", "A woman from", "Scientists at",
    "In 19", "On Monday,", "According to", "The company", "The president", "Once upon a time", "Chapter 1\n\n", "Dear", "Abstract:",
    "The history of", "He was born in", "She is a", "Located in", "The film", "The team", "Researchers", "How to", "The average",
    "There are several", "When I", "For many years", "Officials in", "The river", "The band", "Doctors", "The court", "Parents of",
    "The novel", "During the war", "Der", "Die",
)  # fmt: skip


class Quote(NamedTuple):
    """What a user says around a text of several sentences. `open`: and then something more, which the model writes."""

    before: str
    after: str = ""
    open: bool = False


# What users do with a text at hand: the answer says again much of what stands far before it, which no short question teaches. Ours.
QUOTES = (
    Quote("Summarize the following article:\n\n"), Quote("Summarize this in two sentences: "), Quote("", "\n\nTL;DR"),
    Quote("", "\n\nWrite a summary of the text above."), Quote("List the main points of this text.\n\n"), Quote("Shorten this:\n\n"),
    Quote("Rewrite the following text in simpler words.\n\n"), Quote("Correct the mistakes in this text:\n\n"),
    Quote("Make this more formal:\n\n"), Quote("Translate to French:\n\n"), Quote("Translate the following text to German.\n\n"),
    Quote("Continue this text:\n\n"), Quote("Extract all names and numbers from this text:\n\n"), Quote("Give this text a title:\n\n"),
    Quote("Read the text and answer the question.\n\n", "\n\nQuestion:", True), Quote("Context:\n", "\n\nQuestion:", True),
    Quote("Answer by the documents below.\n\n", "\n\nQ:", True), Quote("Here is a draft of mine:\n\n", "\n\nPlease", True),
    Quote("", "\n\nWhat", True), Quote("", "\n\nBased on the text above,", True), Quote("", "\n\nWho", True), Quote("", "\n\nIs", True),
)  # fmt: skip
REMEMBERED, LEAST = 256, 32  # how many answers may be quoted, and documents, of more than so many tokens


@dataclass(frozen=True)
class Recipe:
    """How text is written. A conversation holds at most `length` tokens, a user turn at most `question` beside what it quotes. Half of the
    answers are greedy, the others sampled at a temperature between 0 and 1. One that goes in circles for `circle` tokens (`Circles`) ends
    there. `quote`: the share of conversations that begin with a text, made of earlier answers or documents, that fills up to two thirds of
    `length`; half as many documents are written, of at most `document` tokens, which are both quoted and trained on.
    """

    length: int = 512
    question: int = 192
    quote: float = 0.15
    circle: int = 32
    document: int = 256
    user_temperature: float = 0.9
    document_temperature: float = 0.8  # higher, and small models write no sentences
    openers: Sequence[str] = OPENERS
    quotes: Sequence[Quote] = QUOTES
    documents: Sequence[str] = DOCUMENTS
    seed: int = 0


@dataclass(frozen=True)
class Template:
    """A chat template in token ids: what stands before a user turn, between it and the answer, and between an answer and the next turn."""

    begin: list[int]
    reply: list[int]
    again: list[int]
    stops: frozenset[int]  # what ends a turn
    raw: list[int] = field(default_factory=list)  # what stands before a text without a template

    @staticmethod
    def of(tokenizer: Any, eos_ids: set[int]) -> Template:
        """Read off a tokenizer. Raises `InvalidInput` for one without a chat template, or whose template hides what was said."""
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidInput("the model has no chat template to write questions from: give --prompts FILE.jsonl")
        marks = "⟦user⟧", "⟦answer⟧", "⟦more⟧"
        turns = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks, strict=True)]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        pieces = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise InvalidInput("the model's chat template changes what users say: give --prompts FILE.jsonl")
            pieces.append(tokenizer(before, add_special_tokens=False)["input_ids"])
        begin, reply, again = pieces
        if not begin or not reply:
            raise InvalidInput("the model's chat template says nothing before or after what users say: give --prompts FILE.jsonl")
        return Template(begin, reply, again, frozenset({*eos_ids, reply[0]}), list(tokenizer("")["input_ids"]))


class Circles:
    """Tells when a text goes in circles, as small models' answers do: what repeats itself is soon drafted right and teaches no more."""

    def __init__(self) -> None:
        self.run = 0  # the last so many tokens each ended three that had stood in a row before
        self._seen: set[tuple[int, ...]] = set()
        self._last: tuple[int, ...] = ()

    def read(self, token: int) -> None:
        """Take the next token."""
        self._last = (*self._last[-2:], token)
        self.run = self.run + 1 if self._last in self._seen else 0
        self._seen.add(self._last)


@dataclass
class _Slot:
    """One conversation in the making."""

    forced: list[int]  # tokens still to be read, last first
    temperature: float
    tokens: list[int] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)
    answering: bool = False
    document: bool = False  # all of it but how it begins is an answer, to nothing
    spoken: int = 0  # tokens of the turn under way
    circles: Circles = field(default_factory=Circles)


class Writer:
    """Writes conversations with a `BatchDecoder`: iterate for them, without end (with `prompts`: until all are answered).

    `prompts`: conversations whose last turn is the user's, in token ids, instead of own questions.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        encode: Callable[[str], list[int]],
        template: Template | None,
        stops: frozenset[int],
        recipe: Recipe,
        prompts: Sequence[list[int]] | None = None,
    ) -> None:
        if template is None and prompts is None:
            raise ValueError("text needs a chat template or prompts")
        self._decoder, self._template, self._stops, self._recipe = decoder, template, stops, recipe
        self._openers = [encode(opener) for opener in recipe.openers]
        self._quotes = [(encode(quote.before), encode(quote.after), quote.open) for quote in recipe.quotes]
        self._between = encode("\n\n")  # passages
        self._documents = [encode(words) for words in recipe.documents]
        self._answers, self._written = (deque[list[int]](maxlen=REMEMBERED) for _ in range(2))  # `_written`: documents
        self._prompts = None if prompts is None else [ids for ids in prompts if len(ids) < recipe.length - 1]
        if self._prompts is not None and not self._prompts:
            raise InvalidInput(f"every prompt is longer than {recipe.length} tokens: raise --length")
        self._random = random.Random(recipe.seed)
        self._generator = torch.Generator(decoder.device).manual_seed(recipe.seed)
        self._next = 0

    def _fresh(self) -> _Slot | None:
        temperature = 0.0 if self._random.random() < 0.5 else self._random.random()
        if self._prompts is not None:
            if self._next == len(self._prompts):
                return None
            ids = self._prompts[self._next]
            self._next += 1
            return _Slot(ids[::-1], temperature, answering=True)
        assert self._template is not None
        kind, quote = self._random.random(), self._recipe.quote
        if self._documents and quote <= kind < 1.5 * quote:
            words = self._template.raw + self._random.choice(self._documents)
            return _Slot(words[::-1], self._recipe.document_temperature, answering=True, document=True)
        if self._answers and kind < quote:
            words, complete = self._quote()
            reply = self._template.reply if complete else []
            return _Slot((self._template.begin + words + reply)[::-1], temperature, answering=complete)
        return _Slot((self._template.begin + self._opener())[::-1], temperature)

    def _quote(self) -> tuple[list[int], bool]:
        """Words around a text, which is one earlier answer or document, or several; whether nothing follows them."""
        before, after, open_end = self._random.choice(self._quotes)
        passage, room = list[int](), int(self._recipe.length * self._random.uniform(0.1, 2 / 3))
        texts = self._written if self._written and self._random.random() < 2 / 3 else self._answers
        for text in self._random.sample(texts, len(texts)):
            if len(passage) < room:
                passage += (self._between if passage else []) + text
        return before + passage[:room] + after, not open_end

    def _opener(self) -> list[int]:
        return self._random.choice(self._openers) if self._openers and self._random.random() < 0.5 else []

    def __iter__(self) -> Iterator[Conversation]:
        decoder, recipe = self._decoder, self._recipe
        slots = [self._fresh() for _ in range(decoder.slots)]
        hidden: torch.Tensor | None = None
        chosen = [0] * decoder.slots
        while any(slots):
            fed = []
            for i, slot in enumerate(slots):
                if slot is None:
                    decoder.restart(i)
                    fed.append(0)
                    continue
                begin = len(slot.tokens)
                if (count := min(len(slot.forced), recipe.length - begin) - 1) >= FEW:
                    known = [slot.forced.pop() for _ in range(count)]
                    states = decoder.fill(i, known)
                    if hidden is None:
                        hidden = states.new_zeros(decoder.slots, recipe.length, states.shape[1])
                    hidden[i, begin : begin + count] = states
                    slot.tokens += known
                    slot.answer += [False] * count
                said = not slot.forced
                token = chosen[i] if said else slot.forced.pop()
                slot.tokens.append(token)
                slot.answer.append(said and slot.answering)
                slot.spoken += said
                if said:
                    slot.circles.read(token)
                fed.append(token)
            logits, states = decoder.step(torch.tensor(fed, device=decoder.device))
            if hidden is None:
                hidden = states.new_zeros(decoder.slots, recipe.length, states.shape[1])
            at = torch.tensor([len(slot.tokens) - 1 if slot else 0 for slot in slots], device=decoder.device)
            hidden[torch.arange(decoder.slots, device=decoder.device), at] = states
            over = [slot is not None and self._turn(slot) for slot in slots]
            chosen = self._choose(logits, slots)  # by who speaks now
            for i, slot in enumerate(slots):
                if slot is None or not over[i]:
                    continue
                if any(slot.answer):
                    n = len(slot.tokens)
                    tokens, answer = torch.tensor(slot.tokens, dtype=torch.int32), torch.tensor(slot.answer)
                    yield Conversation(tokens, answer, hidden[i, :n].to("cpu", copy=True), slot.temperature)
                slots[i] = self._fresh()
                decoder.restart(i)

    def _turn(self, slot: _Slot) -> bool:
        """Let the other one speak where a turn has ended; whether the conversation is over."""
        full = len(slot.tokens) >= self._recipe.length
        if slot.forced or full:
            return full
        ended = slot.spoken > 0 and slot.tokens[-1] in self._stops
        if slot.document:
            over = ended or slot.spoken >= self._recipe.document or slot.circles.run >= self._recipe.circle
            if over and slot.spoken > LEAST:
                self._written.append(slot.tokens[len(self._template.raw) if self._template else 0 : len(slot.tokens) - ended])
            return over
        if slot.answering:
            if slot.circles.run >= self._recipe.circle:
                return True
            # Half of the conversations that have room go on.
            if not ended:
                return False
            if slot.spoken > LEAST:
                self._answers.append(slot.tokens[-slot.spoken : -1])
            if self._template is None or len(slot.tokens) > self._recipe.length * 0.6 or self._random.random() < 0.5:
                return True
            after = self._template.again
            slot.forced = ((after[1:] if after and after[0] == slot.tokens[-1] else after) + self._opener())[::-1]
            slot.answering, slot.spoken = False, 0
            return False
        assert self._template is not None
        if ended or slot.spoken >= self._recipe.question:
            reply = self._template.reply
            slot.forced = (reply[1:] if ended and reply[0] == slot.tokens[-1] else reply)[::-1]
            slot.answering, slot.spoken = True, 0
        return False

    def _choose(self, logits: torch.Tensor, slots: Sequence[_Slot | None]) -> list[int]:
        """The next token of every slot, by its temperature: one uniform number against the summed law."""
        heat = torch.tensor([0.0 if slot is None else self._temperature(slot) for slot in slots])
        tokens = logits.argmax(-1)
        warm = heat.nonzero()[:, 0].to(logits.device)
        if len(warm):
            law = (logits[warm].float() / heat.to(logits.device)[warm, None]).softmax(-1).cumsum(-1)
            uniform = torch.rand(len(warm), 1, generator=self._generator, device=logits.device) * law[:, -1:]
            tokens[warm] = torch.searchsorted(law, uniform, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        return tokens.tolist()

    def _temperature(self, slot: _Slot) -> float:
        return slot.temperature if slot.answering else self._recipe.user_temperature
