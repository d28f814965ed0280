"""One conversation that runs through the engine as a single request.

A user, the model and the template take turns in it. The template's tokens between turns are known
in advance. They are drafted as deterministic proposals with probability 1, so one pass runs all of
them and no token is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quickbeam.drafters.base import Context, Source, SourceState
from quickbeam.engine.output import NullTokenizer, Output
from quickbeam.engine.sequence import Request
from quickbeam.methods.base import Growth, Method, without_calls
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.train.shards import Conversation
from quickbeam.tree import TokenTree

# While known tokens are left, the params are not greedy: `probs` then decides, and not the
# likeliest token that a pass may report.
MIXED = SamplingParams(temperature=1.0)


class RepetitionDetector:
    """Tells when a text repeats itself, as small models' answers do.

    A repetition is soon drafted right, and there is no more to learn from it.
    """

    def __init__(self) -> None:
        self.run = 0  # tokens in a row, up to the last, that each ended a known trigram
        self._seen: set[tuple[int, ...]] = set()
        self._last: tuple[int, ...] = ()

    def read(self, token: int) -> None:
        """Take the next token of the text."""
        self._last = (*self._last[-2:], token)
        self.run = self.run + 1 if self._last in self._seen else 0
        self._seen.add(self._last)


class Talk:
    """One conversation in the making.

    It begins with `tokens`. Then the model goes on if `answering`, else a user. `temperature`: of
    the model's answers. `document`: the conversation is one document, which counts as an answer
    after its first words.
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
        self.known: list[int] = []  # tokens that come next, before anyone speaks
        self.turn_tokens = 0  # tokens of the current turn
        self.over = False
        self.repetition = RepetitionDetector()

    def append(self, token: int) -> None:
        """Append the next token."""
        generated = not self.known
        if not generated:
            del self.known[0]
        self.tokens.append(token)
        self.answer.append(generated and self.answering)
        if generated:
            self.turn_tokens += 1
            self.repetition.read(token)

    def conversation(self) -> Conversation:
        """Return the conversation, once it is `over`."""
        tokens, answer = torch.tensor(self.tokens, dtype=torch.int32), torch.tensor(self.answer)
        return Conversation(tokens, answer, self.temperature)

    def request(
        self,
        turn: Callable[[Talk], None],
        length: int,
        user_temperature: float,
        seed: int,
        vocab_size: int,
    ) -> Request:
        """Return the request for the engine.

        It is for at most `length` tokens in all. `turn` is called after every token. It lets the
        other speaker go on, or says that the conversation is over.
        """
        params = SamplingParams(max_tokens=length - len(self.tokens), seed=seed, ignore_eos=True)
        voice = _Speakers(self, turn, user_temperature, vocab_size)
        return Request(
            self.tokens,
            params,
            _Template(self),
            Output(NullTokenizer(), params),
            voice,
            budget=length,
        )


class _Speakers(Sampler):
    """The sampler of a conversation.

    A known token has probability 1. Otherwise the distribution is the model's, at the speaker's
    temperature.
    """

    def __init__(
        self, talk: Talk, turn: Callable[[Talk], None], user_temperature: float, vocab_size: int
    ) -> None:
        self._talk, self._turn = talk, turn
        heats = user_temperature, talk.temperature
        self._speakers = [
            Sampler(SamplingParams(temperature=heat), (), vocab_size) for heat in heats
        ]
        super().__init__(self._speakers[talk.answering].params, (), vocab_size)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._talk.over:
                self._talk.append(token)
                self._turn(self._talk)
        self.params = MIXED if self._talk.known else self._speakers[self._talk.answering].params

    def probs(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        if len(path) < len(known := self._talk.known):
            probs = torch.zeros(len(logits), device=logits.device)
            probs[known[len(path)]] = 1.0
            return probs
        return self._speakers[self._talk.answering].probs(logits)


class _Known(Source):
    """Names the template's tokens in statistics."""

    name = "template"

    def begin(self, ids: Sequence[int]) -> SourceState:
        return SourceState()


class _Template(Method):
    """Drafts the known tokens as a chain."""

    sources = (_Known(),)

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def grow(self, context: Context, budget: int, max_depth: int) -> Growth:
        tree = TokenTree(context.ids[-1])
        for token in self._talk.known[: min(budget - 1, max_depth)]:
            tree.add(len(tree) - 1, token, _Known.name)
        return without_calls(tree)
