"""Streams: answers piece by piece, and answers run to their ends."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from quickbeam.engine.engine import Engine
from quickbeam.engine.result import Completion, Logprob
from quickbeam.engine.sequence import SequenceState, Times


class Delta(NamedTuple):
    """The new part of an answer."""

    text: str  # text that became certain; it may lag behind the tokens
    token_ids: list[int]
    logprobs: list[Logprob]  # one for each token if they are asked for, else none
    steps: list[dict[str, Any]]  # records as in a trace, if one is kept

    def plus(self, later: Delta) -> Delta:
        """Return this part and a later one as one."""
        return Delta(
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.steps + later.steps,
        )


class Stream(Iterator[str]):
    """The pieces of an answer's text as they come.

    `completion` gives the whole answer afterwards, or the answer so far at any time. Any number of
    streams may be open at once, in any threads. A step that one of them takes advances all. A
    stream that is dropped frees what it held.
    """

    def __init__(self, engine: Engine, sequence: SequenceState, model: str, method: str) -> None:
        self._engine, self._sequence = engine, sequence
        self._model, self._method = model, method
        self._given = 0  # how many tokens `new` has returned
        weakref.finalize(self, engine.drop, sequence)

    def __next__(self) -> str:
        while True:
            with self._engine.lock:
                if piece := self._sequence.output.take():
                    return piece
                if not self.advance():
                    raise StopIteration

    def advance(self) -> bool:
        """Take a step, unless the answer is over. Returns whether it was taken.

        Raises the error that ended the answer.
        """
        sequence = self._sequence
        with self._engine.lock:
            if sequence.error is not None:
                raise sequence.error
            if not sequence.over:
                self._engine.step()
                return True
        return False

    def close(self) -> None:
        """Stop here. The answer ends as `interrupted` unless it had ended."""
        self._engine.cancel(self._sequence)

    def taken(self) -> str:
        """Return the text since the last call, without taking a step."""
        return self._sequence.output.take()

    def new(self) -> Delta:
        """Return the new part of the answer since the last call, without taking a step."""
        sequence, start = self._sequence, self._given
        text, ids = sequence.output.take(), sequence.output.token_ids[start:]
        self._given += len(ids)
        return Delta(
            text,
            ids,
            [] if sequence.logprobs is None else sequence.logprobs[start : self._given],
            [],
        )

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids of the answer so far."""
        return self._sequence.output.token_ids

    @property
    def times(self) -> Times:
        """When the request arrived, was taken up, and had its first token."""
        return self._sequence.times

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._sequence.over

    @property
    def error(self) -> BaseException | None:
        """The error that ended the answer, or None."""
        return self._sequence.error

    @property
    def completion(self) -> Completion:
        """The answer so far. Its `finish_reason` is `interrupted` unless it came to its end."""
        sequence = self._sequence
        output = sequence.output
        return Completion(
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason or "interrupted",
            statistics=sequence.statistics,
            model=self._model,
            method=self._method,
            logprobs=sequence.logprobs,
            seed=None if sequence.params.greedy else sequence.seed,
            prompt_logprobs=sequence.prompt_logprobs,
        )


def finish(stream: Stream) -> Completion:
    """Run an answer to its end and return it. Raises the error that ended it."""
    while stream.advance():
        pass
    return stream.completion


def finish_all(engine: Engine, streams: Sequence[Stream], shown: bool) -> None:
    """Run answers side by side, in order of arrival, to their ends.

    `shown`: whether to show a bar. Raises the error that ended one of them.
    """
    running, later = list[Stream](), deque(streams)
    with tqdm(total=len(streams), disable=not shown, unit="answer", leave=False) as bar:
        while running or later:
            # no later one can be over yet, since sequences run in order of arrival
            while later and len(running) < engine.scheduler.most:
                running.append(later.popleft())
            with engine.lock:
                if not any(one.over for one in running):
                    engine.step()
            before, running = running, []
            for one in before:
                if one.over:
                    finish(one)
                    bar.update(1)
                else:
                    running.append(one)
