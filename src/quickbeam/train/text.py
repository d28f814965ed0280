"""Training text that the target writes itself: sampled user turns, and answers to them.

This is the method of "Magpie" (2406.08464). Given the chat template up to where a user speaks, an
instruct model writes what a user would ask. Some users bring a longer text along (`QUOTES`), which
is made of earlier answers or documents.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quickbeam.engine.engine import Engine
from quickbeam.engine.output import NullTokenizer, Output
from quickbeam.engine.sequence import Request, SequenceState
from quickbeam.errors import InvalidInput
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Model
from quickbeam.models.text.chat_template import for_template
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.train.recipes import WORDS, opening_words
from quickbeam.train.shards import ConversationTokens

# What users say before and after a longer text, and whether the model goes on with their turn. The
# answer repeats much of what stands far before it.
QUOTES: Sequence[tuple[str, str, bool]] = WORDS["quotes"]
# how many answers, and how many documents, are kept for quotes; shorter ones are not kept
REMEMBERED, LEAST = 256, 32
DOCUMENT = 256  # tokens of a document
# of users' turns and of documents: at a higher one, small models write no sentences
USER_TEMPERATURE, DOCUMENT_TEMPERATURE = 0.9, 0.8


@dataclass(frozen=True)
class TextRecipe:
    """How text is written.

    A conversation holds at most `length` tokens, a user turn at most `question` beside what it
    quotes. Half of the answers are greedy, the others sampled at a temperature between 0 and 1. One
    that repeats itself for `repetition` tokens ends the conversation.

    `quote`: the share of conversations that begin with a text, which is made of earlier answers or
    documents and fills up to two thirds of `length`. Half as many conversations are documents,
    which are both quoted and trained on.
    """

    length: int = 512
    question: int = 192
    quote: float = 0.15
    repetition: int = 32
    openers: Sequence[str] = tuple(opening_words("questions", "en"))
    documents: Sequence[str] = tuple(opening_words("documents", "en"))
    seed: int = 0


@dataclass(frozen=True)
class Template:
    """A chat template in token ids.

    `begin`: what stands before a user turn. `reply`: between it and the answer. `again`: between an
    answer and the next user turn.
    """

    begin: list[int]
    reply: list[int]
    again: list[int]
    stops: frozenset[int]  # what ends a turn
    raw: list[int] = field(default_factory=list)  # what stands before a text without a template

    @staticmethod
    def of(tokenizer: Any, eos_ids: set[int]) -> Template:
        """Read the template off a tokenizer.

        Raises `InvalidInput` for a tokenizer without a chat template, and for a template that
        changes what users say or puts nothing before or after it.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidInput(
                "the model has no chat template to write questions from: give --prompts FILE.jsonl"
            )
        marks = "⟦user⟧", "⟦answer⟧", "⟦more⟧"
        turns = [
            {"role": role, "content": mark}
            for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
        ]
        turns = for_template(tokenizer.get_chat_template(), turns)
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        pieces = []
        for mark in marks:
            before, mark_there, text = text.partition(mark)
            if not mark_there:
                break
            pieces.append(tokenizer(before, add_special_tokens=False)["input_ids"])
        if len(pieces) < 3 or not pieces[0] or not pieces[1]:
            raise InvalidInput(
                "the model's chat template changes what users say, or says nothing before or after "
                "it: give --prompts FILE.jsonl"
            )
        begin, reply, again = pieces
        return Template(
            begin, reply, again, frozenset({*eos_ids, reply[0]}), list(tokenizer("")["input_ids"])
        )


class Dialogue:
    """One conversation in the making.

    It begins with `tokens`. Then the model goes on if `answering`, else a user. `temperature`: of
    the model's answers. `document`: the conversation is one document, which counts as an answer
    after its first words. `turn`: tokens of the current turn. `repeated`: tokens in a row, up to
    the last, that each ended a known trigram: small models' answers repeat themselves, and that is
    soon drafted right.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        temperature: float,
        *,
        answering: bool = False,
        document: bool = False,
    ) -> None:
        self.tokens, self.answer = list(tokens), [False] * len(tokens)
        self.temperature, self.answering, self.document = temperature, answering, document
        self.turn, self.over, self.repeated = 0, False, 0
        self._seen, self._last = set[tuple[int, ...]](), tuple[int, ...]()

    def append(self, token: int) -> None:
        """Append the next token of the one who speaks."""
        self.tokens.append(token)
        self.answer.append(self.answering)
        self.turn += 1
        self._last = (*self._last[-2:], token)
        self.repeated = self.repeated + 1 if self._last in self._seen else 0
        self._seen.add(self._last)

    def conversation(self) -> ConversationTokens:
        """Return the conversation, once it is `over`."""
        tokens, answer = torch.tensor(self.tokens, dtype=torch.int32), torch.tensor(self.answer)
        return ConversationTokens(tokens, answer, self.temperature)


class Writer:
    """Writes conversations, `slots` of them side by side.

    Iterating over it yields them, until all `prompts` are answered or all `tokens` written.
    `prompts`: conversations in token ids whose last turn is the user's, in place of the model's own
    questions. `tokens`: how many are wanted; no conversation is begun that is likely not needed.
    `stepped` is called after every pass with the number of tokens in conversations that are not
    complete yet.

    Raises `InvalidInput` if the template or all prompts are longer than a conversation may be.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        encode: Callable[[str], list[int]],
        template: Template | None,
        stops: frozenset[int],
        recipe: TextRecipe,
        prompts: Sequence[list[int]] | None = None,
        tokens: int | None = None,
        stepped: Callable[[int], None] = lambda unfinished: None,
    ) -> None:
        if (limit := model.context_length) is not None:
            recipe = replace(recipe, length=min(recipe.length, limit))
        if template is not None and len(template.begin + template.reply) >= recipe.length:
            raise InvalidInput(
                f"the chat template alone fills {recipe.length} tokens: raise --length"
            )
        self._model, self._slots = model, slots
        self._template, self._stops, self._recipe = template, stops, recipe
        self._openers = [encode(opener) for opener in recipe.openers]
        self._quotes = [(encode(before), encode(after), more) for before, after, more in QUOTES]
        self._between = encode("\n\n")  # stands between passages of a quote
        self._documents = [encode(words) for words in recipe.documents]
        # kept for quotes; `_written` are documents
        self._answers, self._written = (deque[list[int]](maxlen=REMEMBERED) for _ in range(2))
        self._prompts: list[list[int]] | None = None
        if prompts is not None:
            self._prompts = [ids for ids in prompts if len(ids) < recipe.length - 1]
            if not self._prompts:
                raise InvalidInput(
                    f"every prompt is longer than {recipe.length} tokens: raise --length"
                )
        self._random = random.Random(recipe.seed)
        self._next = 0
        self._wanted, self._stepped = tokens, stepped
        self._complete = 0  # tokens of complete conversations

    def __iter__(self) -> Iterator[ConversationTokens]:
        # each turn is a request; the cache holds what stands before it
        engine = Engine(self._model, most=self._slots)
        running, done = dict[SequenceState, Dialogue](), 0
        try:
            self._fill(engine, running)
            while running:
                engine.step()
                for sequence, dialogue in list(running.items()):
                    if sequence.error is not None:
                        raise sequence.error
                    if len(sequence.output.token_ids) == dialogue.turn:  # it is being read
                        continue
                    dialogue.append(sequence.output.token_ids[-1])
                    if not self._turn_ends(dialogue):
                        continue
                    engine.cancel(sequence)
                    del running[sequence]
                    if not dialogue.over:
                        running[engine.add(self._request(dialogue))] = dialogue
                        continue
                    if (done := done + 1) % self._slots == 0:
                        engine.forget()  # what is kept of all conversations would fill the memory
                    if any(dialogue.answer):
                        self._complete += len(dialogue.tokens)
                        yield dialogue.conversation()
                self._fill(engine, running)
                self._stepped(sum(len(dialogue.tokens) for dialogue in running.values()))
        finally:
            engine.close()

    def _request(self, dialogue: Dialogue) -> Request:
        temperature = dialogue.temperature if dialogue.answering else USER_TEMPERATURE
        room, seed = self._recipe.length - len(dialogue.tokens), self._random.getrandbits(63)
        params = SamplingParams(room, temperature, seed=seed, ignore_eos=True)
        sampler = Sampler(params, (), self._model.vocab_size)
        return Request(dialogue.tokens, params, NoDraft(), Output(NullTokenizer(), params), sampler)

    def _fill(self, engine: Engine, running: dict[SequenceState, Dialogue]) -> None:
        while len(running) < self._slots and not self._enough(running.values()):
            if (dialogue := self._fresh()) is None:
                break
            if len(dialogue.tokens) < self._recipe.length:
                running[engine.add(self._request(dialogue))] = dialogue

    def _enough(self, running: Iterable[Dialogue]) -> bool:
        """Return whether the conversations so far likely come to the tokens that are asked for.

        Each of those that run counts as half of the room at least. (The mean of the complete ones
        is too short for them, because short ones are complete first.)
        """
        if self._wanted is None:
            return False
        half = self._recipe.length // 2
        coming = sum(max(half, len(dialogue.tokens)) for dialogue in running)
        return self._complete + coming >= self._wanted

    def _fresh(self) -> Dialogue | None:
        temperature = 0.0 if self._random.random() < 0.5 else self._random.random()
        if self._prompts is not None:
            if self._next == len(self._prompts):
                return None
            ids = self._prompts[self._next]
            self._next += 1
            return Dialogue(ids, temperature, answering=True)
        assert self._template is not None
        kind, quote = self._random.random(), self._recipe.quote
        if self._documents and quote <= kind < 1.5 * quote:
            words = self._template.raw + self._random.choice(self._documents)
            return Dialogue(words, DOCUMENT_TEMPERATURE, answering=True, document=True)
        if self._answers and kind < quote:
            words, complete = self._quote()
            reply = self._template.reply if complete else []
            return Dialogue(self._template.begin + words + reply, temperature, answering=complete)
        return Dialogue(self._template.begin + self._opener(), temperature)

    def _quote(self) -> tuple[list[int], bool]:
        """Return a user turn around a text, and whether the turn is complete.

        The text is made of one or several earlier answers or documents.
        """
        before, after, open_end = self._random.choice(self._quotes)
        passage, room = list[int](), int(self._recipe.length * self._random.uniform(0.1, 2 / 3))
        texts = self._written if self._written and self._random.random() < 2 / 3 else self._answers
        for text in self._random.sample(texts, len(texts)):
            if len(passage) < room:
                passage += (self._between if passage else []) + text
        return before + passage[:room] + after, not open_end

    def _opener(self) -> list[int]:
        opens = self._openers and self._random.random() < 0.5
        return self._random.choice(self._openers) if opens else []

    def _turn_ends(self, dialogue: Dialogue) -> bool:
        """Return whether a turn has ended. Then the other speaker goes on, or all is `over`."""
        recipe, template = self._recipe, self._template
        ended = dialogue.tokens[-1] in self._stops
        dialogue.over = len(dialogue.tokens) >= recipe.length
        repeating = dialogue.repeated >= recipe.repetition
        if dialogue.over:
            return True
        if dialogue.document:
            dialogue.over = ended or repeating or dialogue.turn >= DOCUMENT
            if dialogue.over and dialogue.turn > LEAST:
                begin = len(template.raw) if template else 0
                self._written.append(dialogue.tokens[begin : len(dialogue.tokens) - ended])
        elif dialogue.answering:
            if repeating or not ended:
                dialogue.over = repeating
                return repeating
            if dialogue.turn > LEAST:
                self._answers.append(dialogue.tokens[-dialogue.turn : -1])
            # Half of the conversations that have room go on.
            full = template is None or len(dialogue.tokens) > recipe.length * 0.6
            dialogue.over = full or self._random.random() < 0.5
            if template is not None and not dialogue.over:
                self._hand_over(dialogue, template.again, self._opener())
            return True
        elif ended or dialogue.turn >= recipe.question:
            assert template is not None
            self._hand_over(dialogue, template.reply)
            return True
        return dialogue.over

    def _hand_over(self, dialogue: Dialogue, between: list[int], words: Sequence[int] = ()) -> None:
        """Give the turn to the other speaker, who begins with `words`.

        The template says `between` before them, whose first token may be there already.
        """
        known = between[:1] == dialogue.tokens[-1:]
        words = [*between[known:], *words][: self._recipe.length - len(dialogue.tokens)]
        dialogue.tokens += words
        dialogue.answer += [False] * len(words)
        dialogue.answering, dialogue.turn = not dialogue.answering, 0
        dialogue.over = len(dialogue.tokens) >= self._recipe.length
