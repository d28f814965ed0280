"""Answers by an engine of one's own, from a model, a policy and a prompt in token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.engine.engine import Engine
from quickbeam.engine.output import Output
from quickbeam.engine.sequence import Request, SequenceState
from quickbeam.engine.trace import StepRecord
from quickbeam.methods.base import Method
from quickbeam.models.base import Model
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def request(
    model: Model,
    policy: Method,
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    budget: int | None = 16,
    eos: Iterable[int] = (),
    tokenizer: Any = None,
    shortlist: Shortlist | None = None,
    observer: Callable[[StepRecord], None] | None = None,
    setting: Any = None,
) -> Request:
    """What an engine is asked. `budget`: nodes a tree; None: the measured budget."""
    output = Output(tokenizer or Letters(), params, eos)
    sampler = Sampler(params, prompt, model.vocab_size, ends=output.ends)
    return Request(prompt, params, policy, output, sampler, budget, setting, shortlist, observer)


def answer(
    model: Model,
    policy: Method,
    params: SamplingParams,
    prompt: Sequence[int],
    *,
    engine: Engine | None = None,
    **options: Any,
) -> SequenceState:
    """One answer, run to its end. Raises what ended it."""
    engine = engine or Engine(model)
    sequence = engine.add(request(model, policy, params, prompt, **options))
    while not sequence.over:
        engine.step()
    if sequence.error is not None:
        raise sequence.error
    return sequence
