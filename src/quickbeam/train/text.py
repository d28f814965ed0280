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
from typing import Any, NamedTuple

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
from quickbeam.train.recorder import Recorded
from quickbeam.train.shards import ConversationTokens
from quickbeam.train.states import StateCache

# What users say before and after a longer text, and whether the model goes on with their turn. The
# answer repeats much of what stands far before it.
QUOTES: Sequence[tuple[str, str, bool]] = WORDS["quotes"]
QUOTABLE = 256  # how many answers, and how many documents, may be quoted
LEAST_QUOTABLE = 32  # tokens; shorter ones are not quoted
DOCUMENT = 256  # tokens of a document
# At higher temperatures, small models write no sentences.
USER_TEMPERATURE = 0.9
DOCUMENT_TEMPERATURE = 0.8


@dataclass(frozen=True)
class TextRecipe:
    """How text is written.

    A conversation holds at most `length` tokens, a user turn at most `question` beside what it
    quotes. Half of the answers are greedy, the others sampled at a temperature between 0 and 1. An
    answer that repeats itself for `repetition` tokens ends the conversation.

    `quote`: the share of conversations that begin with a text, which is made of earlier answers or
    documents and fills up to two thirds of `length`. Half as many conversations are documents,
    which are both quoted and trained on. User turns and documents begin with one of `openers` and
    `documents`.
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
        marks = ("⟦user⟧", "⟦answer⟧", "⟦more⟧")
        messages = [
            {"role": role, "content": mark}
            for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
        ]
        messages = for_template(tokenizer.get_chat_template(), messages)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        pieces = list[list[int]]()
        for mark in marks:
            before, separator, text = text.partition(mark)
            if not separator:
                break
            pieces.append(tokenizer(before, add_special_tokens=False)["input_ids"])
        if len(pieces) < 3 or not pieces[0] or not pieces[1]:
            raise InvalidInput(
                "the model's chat template changes what users say, or says nothing before or after "
                "it: give --prompts FILE.jsonl"
            )
        begin, reply, again = pieces
        return Template(
            begin=begin,
            reply=reply,
            again=again,
            stops=frozenset({*eos_ids, reply[0]}),
            raw=list(tokenizer("")["input_ids"]),
        )


class Dialogue:
    """One conversation that is being written.

    It begins with `tokens`. Then the model goes on if `answering`, else a user. `temperature`: of
    the model's answers. `document`: the conversation is one document, which counts as an answer
    after its first words.

    - `answer`: for each token, whether it belongs to an answer.
    - `turn_length`: tokens of the current turn so far.
    - `repeated`: tokens in a row, up to the last, that each end a trigram which occurred before.
      Small models' answers repeat themselves, and that is soon drafted right.
    - `over`: whether the conversation is complete.
    - `hidden`: the hidden states `[n, layers * d]` of its first n tokens, where they are recorded.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        temperature: float,
        *,
        answering: bool = False,
        document: bool = False,
    ) -> None:
        self.tokens = list(tokens)
        self.answer = [False] * len(tokens)
        self.temperature = temperature
        self.answering = answering
        self.document = document
        self.turn_length = 0
        self.over = False
        self.repeated = 0
        self.hidden = torch.empty(0)
        self._trigrams = set[tuple[int, ...]]()
        self._last = tuple[int, ...]()

    def append(self, token: int) -> None:
        """Append the next token of the one who speaks."""
        self.tokens.append(token)
        self.answer.append(self.answering)
        self.turn_length += 1
        self._last = (*self._last[-2:], token)
        self.repeated = self.repeated + 1 if self._last in self._trigrams else 0
        self._trigrams.add(self._last)

    def add_hidden(self, rows: torch.Tensor, end: int) -> None:
        """Take the hidden states of the last tokens before `end`.

        The prefix cache may have had the tokens before them, whose states an earlier turn brought.
        """
        begin = end - len(rows)
        if begin <= len(self.hidden):
            self.hidden = torch.cat([self.hidden[:begin], rows])

    def conversation(self) -> ConversationTokens:
        """Return the conversation, once it is `over`."""
        tokens = torch.tensor(self.tokens, dtype=torch.int32)
        return ConversationTokens(tokens, torch.tensor(self.answer), self.temperature)


class Quote(NamedTuple):
    """What a user says `before` and `after` a longer text, in token ids.

    `complete`: whether the user's turn ends there. Otherwise the model goes on with it.
    """

    before: list[int]
    after: list[int]
    complete: bool


class DialogueSource:
    """Begins conversations, and decides when a turn ends and who speaks next.

    - `encode`: returns the token ids of a text.
    - `template`: what the model's own questions need. None: the `prompts` are answered.
    - `stops`: the ids that end a turn.
    - `prompts`: conversations in token ids whose last turn is the user's, in place of the model's
      own questions.
    - `random`: makes all choices.

    Raises `InvalidInput` if the template or all prompts are longer than a conversation may be.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        template: Template | None,
        stops: frozenset[int],
        recipe: TextRecipe,
        prompts: Sequence[list[int]] | None,
    ) -> None:
        if template is not None and len(template.begin + template.reply) >= recipe.length:
            raise InvalidInput(
                f"the chat template alone fills {recipe.length} tokens: raise --length"
            )
        self.random = random.Random(recipe.seed)
        self._template = template
        self._stops = stops
        self._recipe = recipe
        self._openers = [encode(opener) for opener in recipe.openers]
        self._documents = [encode(words) for words in recipe.documents]
        self._quotes = [
            Quote(encode(before), encode(after), not goes_on) for before, after, goes_on in QUOTES
        ]
        self._paragraph = encode("\n\n")  # stands between passages of a quote
        self._past_answers = deque[list[int]](maxlen=QUOTABLE)
        self._past_documents = deque[list[int]](maxlen=QUOTABLE)
        self._prompts: Iterator[list[int]] | None = None
        if prompts is not None:
            fitting = [ids for ids in prompts if len(ids) < recipe.length - 1]
            if not fitting:
                raise InvalidInput(
                    f"every prompt is longer than {recipe.length} tokens: raise --length"
                )
            self._prompts = iter(fitting)

    def begin(self) -> Dialogue | None:
        """Return a conversation to begin with; None if all prompts are answered."""
        temperature = 0.0 if self.random.random() < 0.5 else self.random.random()
        if self._prompts is not None:
            prompt = next(self._prompts, None)
            return None if prompt is None else Dialogue(prompt, temperature, answering=True)
        assert self._template is not None
        begin = self._template.begin
        share = self._recipe.quote
        draw = self.random.random()
        if self._documents and share <= draw < 1.5 * share:
            words = self._template.raw + self.random.choice(self._documents)
            return Dialogue(words, DOCUMENT_TEMPERATURE, answering=True, document=True)
        if self._past_answers and draw < share:
            words, complete = self._quote()
            reply = self._template.reply if complete else []
            return Dialogue(begin + words + reply, temperature, answering=complete)
        return Dialogue(begin + self._opener(), temperature)

    def end_turn(self, dialogue: Dialogue) -> bool:
        """Return whether a turn has ended. Then the other speaker goes on, or all is `over`."""
        if len(dialogue.tokens) >= self._recipe.length:
            dialogue.over = True
            return True
        if dialogue.document:
            return self._end_document(dialogue)
        if dialogue.answering:
            return self._end_answer(dialogue)
        return self._end_question(dialogue)

    def _end_document(self, dialogue: Dialogue) -> bool:
        stopped = dialogue.tokens[-1] in self._stops
        repeating = dialogue.repeated >= self._recipe.repetition
        dialogue.over = stopped or repeating or dialogue.turn_length >= DOCUMENT
        if dialogue.over and dialogue.turn_length > LEAST_QUOTABLE:
            begin = len(self._template.raw) if self._template else 0
            end = len(dialogue.tokens) - stopped
            self._past_documents.append(dialogue.tokens[begin:end])
        return dialogue.over

    def _end_answer(self, dialogue: Dialogue) -> bool:
        if dialogue.repeated >= self._recipe.repetition:
            dialogue.over = True
            return True
        if dialogue.tokens[-1] not in self._stops:
            return False
        if dialogue.turn_length > LEAST_QUOTABLE:
            self._past_answers.append(dialogue.tokens[-dialogue.turn_length : -1])
        # half of the conversations that are not too long go on
        too_long = len(dialogue.tokens) > self._recipe.length * 0.6
        if self._template is None or too_long or self.random.random() < 0.5:
            dialogue.over = True
        else:
            self._hand_over(dialogue, self._template.again, self._opener())
        return True

    def _end_question(self, dialogue: Dialogue) -> bool:
        stopped = dialogue.tokens[-1] in self._stops
        if not stopped and dialogue.turn_length < self._recipe.question:
            return False
        assert self._template is not None
        self._hand_over(dialogue, self._template.reply)
        return True

    def _hand_over(self, dialogue: Dialogue, between: list[int], words: Sequence[int] = ()) -> None:
        """Give the turn to the other speaker, who begins with `words`.

        The template says `between` before them. Its first token may be there already.
        """
        is_there = between[:1] == dialogue.tokens[-1:]
        capacity = self._recipe.length - len(dialogue.tokens)
        words = [*between[is_there:], *words][:capacity]
        dialogue.tokens += words
        dialogue.answer += [False] * len(words)
        dialogue.answering = not dialogue.answering
        dialogue.turn_length = 0
        dialogue.over = len(dialogue.tokens) >= self._recipe.length

    def _quote(self) -> tuple[list[int], bool]:
        """Return a user turn around a text, and whether the turn is complete.

        The text is made of one or several earlier answers or documents.
        """
        quote = self.random.choice(self._quotes)
        length = int(self._recipe.length * self.random.uniform(0.1, 2 / 3))
        texts = self._past_answers
        if self._past_documents and self.random.random() < 2 / 3:
            texts = self._past_documents
        passage = list[int]()
        for text in self.random.sample(texts, len(texts)):
            if len(passage) >= length:
                break
            passage += (self._paragraph if passage else []) + text
        return quote.before + passage[:length] + quote.after, quote.complete

    def _opener(self) -> list[int]:
        """Return words with which a user begins, for half of the turns none."""
        if self._openers and self.random.random() < 0.5:
            return self.random.choice(self._openers)
        return []


def beginning_of_all(texts: Sequence[list[int]]) -> list[int]:
    """Return the tokens that all texts begin with."""
    first = min(texts, default=list[int]())
    last = max(texts, default=list[int]())
    count = 0  # what the first and the last in order have in common, all between have, too
    while count < len(first) and first[count] == last[count]:
        count += 1
    return first[:count]


class Writer:
    """Writes conversations, `slots` of them side by side.

    Iterating over it yields them, until all `prompts` are answered or all `tokens` written.

    - `encode`, `template`, `stops`, `prompts`: see `DialogueSource`.
    - `tokens`: how many are wanted. No conversation is begun that is likely not needed.
    - `stepped`: called after every pass with the number of tokens in conversations that are not
      complete yet.
    - `states`: gets the hidden states of complete conversations, if the model gives them.

    Raises `InvalidInput` as `DialogueSource` does.
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
        states: StateCache | None = None,
    ) -> None:
        if (limit := model.context_length) is not None:
            recipe = replace(recipe, length=min(recipe.length, limit))
        self._model = model
        self._slots = slots
        self._recipe = recipe
        self._source = DialogueSource(encode, template, stops, recipe, prompts)
        self._wanted = tokens
        self._stepped = stepped
        self._states = states
        # what conversations begin with, and its hidden states, where these are recorded
        self._opening = template.begin if template is not None else beginning_of_all(prompts or [])
        self._opening_hidden = torch.empty(0)
        self._complete_tokens = 0  # of complete conversations

    def __iter__(self) -> Iterator[ConversationTokens]:
        # each turn is a request; the prefix cache holds what stands before it
        engine = Engine(self._model, max_running=self._slots)
        running = dict[SequenceState, Dialogue]()
        done = 0
        try:
            if self._states is not None and self._opening:
                self._opening_hidden = self._read_opening(engine)
            self._fill(engine, running)
            while running:
                engine.step()
                for sequence, dialogue in list(running.items()):
                    if not self._turn_ended(sequence, dialogue):
                        continue
                    engine.cancel(sequence)
                    if isinstance(sequence.method, Recorded):
                        # the last token was not read
                        dialogue.add_hidden(sequence.method.rows(), len(sequence.ids) - 1)
                    del running[sequence]
                    if not dialogue.over:
                        running[engine.add(self._request_of_turn(dialogue))] = dialogue
                        continue
                    done += 1
                    if done % self._slots == 0:
                        engine.forget()  # the prefixes of all conversations would fill the memory
                    if any(dialogue.answer):
                        self._complete_tokens += len(dialogue.tokens)
                        conversation = dialogue.conversation()
                        if self._states is not None:
                            self._states.add(conversation.tokens, dialogue.hidden)
                        yield conversation
                self._fill(engine, running)
                self._stepped(sum(len(dialogue.tokens) for dialogue in running.values()))
        finally:
            engine.close()

    def _read_opening(self, engine: Engine) -> torch.Tensor:
        """Return the hidden states of `_opening`, which the prefix cache has from then on.

        So conversations do not read it, and record nothing of it.
        """
        sequence = engine.add(self._request(self._opening, SamplingParams(max_tokens=1)))
        while not sequence.over:
            engine.step()
        if sequence.error is not None:
            raise sequence.error
        assert isinstance(sequence.method, Recorded)
        return sequence.method.rows()

    def _turn_ended(self, sequence: SequenceState, dialogue: Dialogue) -> bool:
        """Append the token that a pass brought, and return whether a turn ended with it.

        Raises the error of a sequence that failed.
        """
        if sequence.error is not None:
            raise sequence.error
        token_ids = sequence.output.token_ids
        if len(token_ids) == dialogue.turn_length:  # its prompt is being read
            return False
        dialogue.append(token_ids[-1])
        return self._source.end_turn(dialogue)

    def _request_of_turn(self, dialogue: Dialogue) -> Request:
        """Return the request of a turn."""
        params = SamplingParams(
            max_tokens=self._recipe.length - len(dialogue.tokens),
            temperature=dialogue.temperature if dialogue.answering else USER_TEMPERATURE,
            seed=self._source.random.getrandbits(63),
            ignore_eos=True,
        )
        return self._request(dialogue.tokens, params)

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        sampler = Sampler(params, (), self._model.vocab_size)
        output = Output(NullTokenizer(), params)
        method = NoDraft() if self._states is None else Recorded()
        return Request(prompt, params, method, output, sampler)

    def _fill(self, engine: Engine, running: dict[SequenceState, Dialogue]) -> None:
        """Begin conversations while slots are free and text is wanted."""
        while len(running) < self._slots and not self._enough(running.values()):
            dialogue = self._source.begin()
            if dialogue is None:
                break
            if dialogue.tokens[: len(self._opening)] == self._opening:
                dialogue.hidden = self._opening_hidden
            if len(dialogue.tokens) < self._recipe.length:
                running[engine.add(self._request_of_turn(dialogue))] = dialogue

    def _enough(self, running: Iterable[Dialogue]) -> bool:
        """Return whether the conversations so far likely come to the tokens that are asked for.

        Each running conversation counts as half of the longest one at least. (The mean of the
        complete ones is too short for them, because short ones are complete first.)
        """
        if self._wanted is None:
            return False
        half = self._recipe.length // 2
        expected = sum(max(half, len(dialogue.tokens)) for dialogue in running)
        return self._complete_tokens + expected >= self._wanted
