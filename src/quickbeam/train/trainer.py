"""The training loop of a drafter: steps, checkpoints, reports.

All random choices depend on the seed and the number of the step or round. So a training that was
killed and goes on from its last checkpoint ends with the same weights as one that was not. On a GPU
they are the same up to rounding, because the target's hidden states are computed anew, in other
batches.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from quickbeam.drafters.loss import LossVocabulary, autocast
from quickbeam.drafters.unrolled import rounded_up
from quickbeam.errors import InvalidInput, QuickbeamError, first_line
from quickbeam.models.torch.pages import to_device
from quickbeam.train.base import Anchors, DrafterTraining
from quickbeam.train.held_out import HeldOutMetrics, measure_held_out
from quickbeam.train.muon import Muon
from quickbeam.train.recipes import HIDDEN_FOLDER, Recipe
from quickbeam.train.shards import Shards, collate, split, spread_lengths, token_counts
from quickbeam.train.states import StateCache
from quickbeam.train.target import FrozenTarget, TrainingBatch

# The first share of the run, in which all tokens are trained on, those of users too: text is
# expensive, and what users write holds what answers don't. After that only answers are.
ALL_TOKENS_SHARE = 0.5
CLIP = 1.0  # the largest norm of the gradient
CHECK_TOKENS, CHECK_SPACING = 5_000, 16  # held-out tokens of a report, and tokens an anchor
FINAL_TOKENS, FINAL_SPACING = 50_000, 4  # and of the final figures


class Report(NamedTuple):
    """Where a training stands.

    `seen`: tokens trained on so far. `done`: the share of the run that is over, 0 to 1. `loss`: the
    mean since the last report. `rate`: tokens per second. `held`: held-out figures.
    """

    step: int
    seen: int
    done: float
    loss: float
    rate: float
    seconds: float
    held: HeldOutMetrics


def optimizers(network: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for all else, without learning rates.

    Muon makes a step's singular values equal. Scaled to AdamW's size of steps it takes the same
    learning rate, and needs fewer steps. All else are vectors, and matrices of heads.
    """
    matrices = list[torch.nn.Parameter]()
    others = list[torch.nn.Parameter]()
    for name, parameter in network.named_parameters():
        is_matrix = parameter.dim() == 2 and "_head." not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        Muon(matrices, 0.0),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def step_loss(
    drafter: DrafterTraining,
    target: FrozenTarget,
    batch: TrainingBatch,
    anchors: Anchors,
    sampled: tuple[torch.Tensor, torch.Tensor],
    done: float,
) -> torch.Tensor:
    """Return the loss of a step, a scalar.

    `batch`: with hidden states. `sampled`: of `LossVocabulary.sample`. `done`: how much of the run
    is over, 0 to 1.
    """
    device = target.device
    tokens, shift = (to_device(column, device) for column in sampled)
    with autocast(device):
        drafted = drafter.draft(batch, anchors)
        return drafter.loss(drafted, target.head, tokens, shift, done)


class Trainer:
    """Trains a drafter on `tokens` tokens of the text in the folder `text`, again and again.

    `folder` gets `checkpoint.pt`, from which a next run resumes, and the drafter, both every
    `save_every` seconds. It gets a line of `log.jsonl` every `report_every` seconds, and the hidden
    states of the text, if the CPU trains (`StateCache`). The text may grow meanwhile: each round
    takes what is there when it begins. `trained`: the network is no new one, and needs no first
    phase (`ALL_TOKENS_SHARE`, `loss.ENTROPY_SHARE`).

    Raises `InvalidInput` for a checkpoint of another training.
    """

    def __init__(
        self,
        drafter: DrafterTraining,
        target: FrozenTarget,
        text: Path,
        recipe: Recipe,
        tokens: int,
        folder: Path,
        save_every: float = 50.0,
        report_every: float = 300.0,
        trained: bool = False,
        states: StateCache | None = None,
    ) -> None:
        self.drafter = drafter
        self.network = drafter.network.to(target.device)
        self.target = target
        self.recipe = recipe
        self.text = text
        self.folder = folder
        self.save_every = save_every
        self.report_every = report_every
        self.total = tokens
        self._trained = trained
        self.checkpoint = folder / "checkpoint.pt"
        # where the training stands, as the checkpoint holds it
        self.step = 0
        self.seen = 0
        self.round = 0
        self.batch = 0  # batches of this round that were begun
        self.seconds = 0.0
        self.shards = Shards(text)
        self.conversations = len(self.shards)  # of this round
        self._optimizers = optimizers(self.network)
        self._resume()
        self._begin_round()
        self._states = states or StateCache.of(target, folder / HIDDEN_FOLDER)
        # of each step since the last report: loss and norm of the gradient: [2]
        self._losses_and_norms = list[torch.Tensor]()

    def _begin_round(self) -> None:
        """Find the held-out conversations and the frequent tokens of the text of this round."""
        text = self.shards[: self.conversations]
        held = split(text)[1]
        # a drafter is for what the model writes
        self._held = [index for index in held if text[index].own] or held
        self._vocabulary = LossVocabulary(
            token_counts(text, len(self.target.head)), self.recipe.loss_vocab
        )

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            self.network.load_state_dict(state["network"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            for name, value in state["counters"].items():
                setattr(self, name, value)
        except Exception as error:  # of any kind, by what the file holds
            raise InvalidInput(
                f"{self.checkpoint} is not of this training ({first_line(error)}): take another "
                "--out, or the --model, --kind, --depth, --block and --rank that it began with"
            ) from error

    def save(self) -> None:
        """Write the checkpoint and the drafter, each completely or not at all.

        Raises `QuickbeamError` as `run` does, and then writes nothing.
        """
        self._finite_losses()
        counters = {
            "step": self.step,
            "seen": self.seen,
            "round": self.round,
            "batch": self.batch,
            "conversations": self.conversations,
            "seconds": self.seconds,
        }
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "counters": counters,
        }
        part = self.checkpoint.with_suffix(".part")
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, part)
        os.replace(part, self.checkpoint)
        self.drafter.save(self.folder)

    def batches(self) -> Iterator[TrainingBatch]:
        """Yield batches without hidden states, from where the training stands.

        Each round has a new random order.
        """
        while True:
            indices = split(self.shards[: self.conversations])[0]
            generator = torch.Generator().manual_seed(self.recipe.seed + self.round)
            lengths = [len(self.shards[i].tokens) for i in indices]
            groups = spread_lengths(lengths, self.recipe.batch, generator)
            for group in groups[self.batch :]:
                self.batch += 1
                yield collate([self.shards[indices[i]] for i in group], rounded_up)
            self.shards = Shards(self.text)
            self.round += 1
            self.batch = 0
            self.conversations = len(self.shards)
            self._begin_round()

    def run(self, report: Callable[[Report], None], until: float = 1.0) -> HeldOutMetrics:
        """Train up to a share of the run, and return the held-out figures of the result.

        Raises `QuickbeamError` for a loss or a gradient that is not finite. Both are checked only
        for a report and before a checkpoint, because a check waits for the device. A training that
        ends early leaves its last checkpoint.
        """
        batches = self.batches()
        saved = reported = began = time.perf_counter()
        seconds_before = self.seconds
        seen_before = self.seen
        end = self.total * until
        while self.seen < end:
            batch = next(batches)
            self._losses_and_norms.append(self._step(batch))
            self.step += 1
            self.seen += int(batch.lengths.sum())
            now = time.perf_counter()
            self.seconds = seconds_before + now - began
            if now - saved >= self.save_every or self.seen >= end:
                self.save()
                saved = now
            if now - reported >= self.report_every:
                losses = self._finite_losses()
                loss = sum(losses) / len(losses)
                rate = (self.seen - seen_before) / (now - began)
                self._losses_and_norms.clear()
                self._log(report, loss, rate)
                reported = time.perf_counter()
        if until < 1:
            return self.check(CHECK_TOKENS, CHECK_SPACING)
        return self.check(FINAL_TOKENS, FINAL_SPACING)

    def _step(self, batch: TrainingBatch) -> torch.Tensor:
        """Make a step, and return its loss and its gradient's norm: `[2]`, on the device."""
        recipe, device = self.recipe, self.target.device
        done = self.seen / self.total
        phase = 1.0 if self._trained else done
        answers_only = phase >= ALL_TOKENS_SHARE
        generator = torch.Generator().manual_seed((recipe.seed << 32) + self.step)
        anchors = self.drafter.sample(batch, answers_only, generator)
        if not anchors.mask.any():
            return torch.zeros(2, device=device)
        sampled = self._vocabulary.sample(batch.tokens, generator)
        batch = self._states.read(batch)
        loss = step_loss(self.drafter, self.target, batch, anchors, sampled, phase)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        lr = recipe.rate(self.step, done, self.target.head.shape[1])
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([loss.detach(), norm])

    def _finite_losses(self) -> list[float]:
        """Return the losses since the last report. Raises `QuickbeamError` if one is not finite."""
        if not self._losses_and_norms:
            return []
        figures = torch.stack(self._losses_and_norms).tolist()
        for step, (loss, norm) in enumerate(figures, self.step - len(figures)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise QuickbeamError(
                    f"the loss of step {step} is {loss}, its gradient's norm {norm}: take a "
                    "smaller --lr; the last checkpoint stands"
                )
        return [loss for loss, _ in figures]

    def check(self, tokens: int, spacing: int) -> HeldOutMetrics:
        """Return figures on held-out conversations of about `tokens` tokens.

        `spacing`: tokens of text an anchor.
        """
        indices = list[int]()
        count = 0
        for index in self._held:
            if count >= tokens:
                break
            indices.append(index)
            count += len(self.shards[index].tokens)
        return measure_held_out(
            self.drafter, self.target, self._states, self.shards, indices, spacing
        )

    def _log(self, report: Callable[[Report], None], loss: float, rate: float) -> None:
        record = Report(
            step=self.step,
            seen=self.seen,
            done=self.seen / self.total,
            loss=loss,
            rate=rate,
            seconds=self.seconds,
            held=self.check(CHECK_TOKENS, CHECK_SPACING),
        )
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({**record._asdict(), "held": record.held._asdict()}) + "\n")
        report(record)
