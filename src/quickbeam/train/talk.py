"""One conversation on its way through the engine, as a single request in which a user, the model
and the template take turns.

What the template says between turns is drafted: it is certain, so that one pass runs all of it and
no token is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from quickbeam.draft.base import Context, Drafter, DrafterState, DraftRequest
from quickbeam.engine.output import Output
from quickbeam.engine.sequence import Request
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.shortlist.shortlist import Shortlist
from quickbeam.train.shards import Conversation
from quickbeam.tree import TokenTree
from quickbeam.trees.base import Undrafted

# while words are known, laws decide, and not the likeliest token that a pass may tell
MIXED = SamplingParams(temperature=1.0)


class Circles:
    """Tells when a text goes in circles, as small models' answers do: what repeats itself is soon
    drafted right and teaches no more."""

    def __init__(self) -> None:
        self.run = 0  # the last so many tokens each ended three that had stood in a row before
        self._seen: set[tuple[int, ...]] = set()
        self._last: tuple[int, ...] = ()

    def read(self, token: int) -> None:
        """Take the next token."""
        self._last = (*self._last[-2:], token)
        self.run = self.run + 1 if self._last in self._seen else 0
        self._seen.add(self._last)


class Talk:
    """One conversation in the making. `temperature`: of its answers. `document`: all of it but how
    it begins is an answer, to nothing.

    It begins with `tokens`, and the one who speaks then goes on: the model if `answering`, else a
    user.
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
        self.known: list[int] = []  # what comes next, whoever speaks afterwards
        self.spoken = 0  # tokens of the turn under way
        self.over = False
        self.circles = Circles()
        self.heard: list[torch.Tensor] = []  # hidden states
        self.read = 0  # of so many tokens

    @property
    def done(self) -> bool:
        """Whether it is over and its last token was read."""
        return self.over and self.read >= len(self.tokens)

    def say(self, token: int) -> None:
        """Take the next token."""
        said = not self.known
        if not said:
            del self.known[0]
        self.tokens.append(token)
        self.answer.append(said and self.answering)
        if said:
            self.spoken += 1
            self.circles.read(token)

    def conversation(self) -> Conversation:
        """Once it is done."""
        tokens, answer = torch.tensor(self.tokens, dtype=torch.int32), torch.tensor(self.answer)
        return Conversation(tokens, answer, torch.cat(self.heard).cpu(), self.temperature)

    def request(
        self,
        turn: Callable[[Talk], None],
        length: int,
        user_temperature: float,
        seed: int,
        vocab_size: int,
    ) -> Request:
        """What the engine is asked for: at most `length` tokens, and one more that nobody reads, so
        that the last one is run.

        `turn` is called after every token: it lets another one speak, or says that the conversation
        is over.
        """
        params = SamplingParams(
            max_tokens=length + 1 - len(self.tokens), seed=seed, ignore_eos=True
        )
        voice = _Voice(self, turn, user_temperature, vocab_size)
        return Request(
            self.tokens, params, _Template(self), Output(_Silent(), params), voice, budget=length
        )


class _Voice(Sampler):
    """The law of a conversation: certain where words are known, else the model's at the temperature
    of who speaks."""

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
                self._talk.say(token)
                self._turn(self._talk)
        self.params = MIXED if self._talk.known else self._speakers[self._talk.answering].params

    def law(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        if len(path) < len(known := self._talk.known):
            law = torch.zeros(len(logits), device=logits.device)
            law[known[len(path)]] = 1.0
            return law
        return self._speakers[self._talk.answering].law(logits)


class _Template(Undrafted):
    """Drafts the words that are known. Its source listens to the model."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.sources = (_Listener(talk),)

    def tree(self, context: Context, budget: int, max_depth: int) -> TokenTree:
        tree = TokenTree(context.ids[-1])
        for token in self._talk.known[: min(budget - 1, max_depth)]:
            tree.add(len(tree) - 1, token, _Listener.name)
        return tree


class _Listener(Drafter):
    """Keeps the hidden states of a conversation. Knows no laws."""

    name = "template"
    needs_hidden = True

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def begin(self, ids: Sequence[int], shortlist: Shortlist | None = None) -> DrafterState:
        self._talk.heard, self._talk.read = [], 0
        return _Ear(self._talk)

    def answer(self, requests: Sequence[DraftRequest]) -> NoReturn:
        raise NotImplementedError("nobody asks it")


class _Ear(DrafterState):
    """Hears one conversation."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def hear(self, hidden: torch.Tensor) -> None:
        self._talk.heard.append(hidden.clone())  # the rest of the pass is let go
        self._talk.read += len(hidden)


class _Silent:
    """A tokenizer for those who don't look at the text."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""
