"""How long a training will take on this machine, by a few passes of each kind."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from quickbeam.drafters.loss import LossVocabulary
from quickbeam.engine.engine import Engine
from quickbeam.engine.output import NullTokenizer, Output
from quickbeam.engine.sequence import Request, SequenceState
from quickbeam.methods.base import NoDraft
from quickbeam.models.base import Model
from quickbeam.params import SamplingParams
from quickbeam.sampling import Sampler
from quickbeam.train.base import DrafterTraining
from quickbeam.train.recipes import Plan, Recipe
from quickbeam.train.target import FrozenTarget, TrainingBatch
from quickbeam.train.trainer import optimizers, step_loss

WRITTEN = 5  # passes in which every sequence writes a token
PROMPT = 64  # tokens before them
LENGTH = 320  # tokens of a conversation that is read and trained on: about the mean of texts
FILLED = 0.95  # of the tokens that a batch may have; the others are padding


class Rates(NamedTuple):
    """Tokens a second: of text that is written, read, and trained on (a visit of a token).

    `records`: whether the hidden states of what is written are kept, so that it need not be read.
    """

    write: float
    read: float
    train: float
    records: bool = True

    def seconds(self, plan: Plan, there: int = 0) -> tuple[float, float, float]:
        """Return how long a plan writes, reads and trains, if `there` tokens of text are there."""
        own = 1.0 if plan.given is None else plan.own
        to_write = own * max(0, plan.tokens - there)
        to_read = plan.tokens - (to_write if self.records else 0)
        return to_write / self.write, to_read / self.read, plan.visits / self.train


def measure_rates(
    plan: Plan, model: Model, target: FrozenTarget, drafter: DrafterTraining
) -> Rates:
    """Measure the rates of a plan's passes."""
    recipe = plan.recipe
    drafter.network.to(target.device)
    generator = torch.Generator().manual_seed(0)
    shape = max(1, recipe.batch // LENGTH), min(recipe.batch, LENGTH)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    lengths = torch.full(shape[:1], shape[1])
    batch = TrainingBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), lengths)
    read = train = 0.0
    for _ in range(2):  # the first pass is slower
        began = time.perf_counter()
        hidden = target.read(batch).hidden
        read = tokens.numel() / _seconds_since(began, hidden)
        seconds = _step_seconds(recipe, target, drafter, batch, hidden)
        train = FILLED * tokens.numel() / seconds
    records = target.device.type == "cpu"
    return Rates(write_rate(plan, model), read, train, records)


def _seconds_since(began: float, result: torch.Tensor) -> float:
    """Return the seconds since `began`, once the device has computed `result`."""
    float(result.detach().flatten()[0])
    return time.perf_counter() - began


def _step_seconds(
    recipe: Recipe,
    target: FrozenTarget,
    drafter: DrafterTraining,
    batch: TrainingBatch,
    hidden: torch.Tensor,
) -> float:
    """Return how long a training step takes.

    `batch`: on the CPU. `hidden`: its hidden states.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = LossVocabulary(torch.ones(len(target.head)), recipe.loss_vocab)
    both = optimizers(drafter.network)
    began = time.perf_counter()
    anchors = drafter.sample(batch, False, generator)
    sampled = vocabulary.sample(batch.tokens, generator)
    read = batch.to(target.device)._replace(hidden=hidden)
    loss = step_loss(drafter, target, read, anchors, sampled, 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in both:
        optimizer.step()
        optimizer.zero_grad()
    return _seconds_since(began, next(drafter.network.parameters()))


def write_rate(plan: Plan, model: Model) -> float:
    """Measure the tokens a second of `slots` sequences that are written side by side."""
    engine = Engine(model, max_running=plan.slots)
    params = SamplingParams(max_tokens=plan.length // 2, temperature=0.0, ignore_eos=True)
    sequences = list[SequenceState]()

    def written() -> int:
        return sum(len(sequence.output.token_ids) for sequence in sequences)

    try:
        for slot in range(plan.slots):
            prompt = [(slot + i) % model.vocab_size for i in range(min(PROMPT, plan.length // 2))]
            sampler = Sampler(params, (), model.vocab_size)
            output = Output(NullTokenizer(), params)
            sequences.append(engine.add(Request(prompt, params, NoDraft(), output, sampler)))
        while not sequences[-1].output.token_ids:  # prompts are being read
            engine.step()
        began, before = time.perf_counter(), written()
        for _ in range(WRITTEN):
            engine.step()
        return (written() - before) / (time.perf_counter() - began)
    finally:
        engine.close()
