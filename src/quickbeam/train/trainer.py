"""The training loop of a feature drafter: steps, checkpoints, reports."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from quickbeam.drafters.eagle_model import EagleHead
from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.train.drafter import (
    Held,
    LossVocabulary,
    Objective,
    Recipe,
    for_products,
    hold_out,
    split,
)
from quickbeam.train.shards import Shards, side_by_side, spread_lengths
from quickbeam.train.unroll import Batch, collate

CHECK_DEPTHS = 5  # depths of the held-out figures
CHECK_TOKENS = 5_000  # held-out tokens of a report; the final figures look at all of them


class _Diverged(QuickbeamError):
    """A loss or a gradient that is not finite."""


class Report(NamedTuple):
    """Where a training stands.

    `done`: the share of the run that is over, 0 to 1. `loss`: the mean since the last report.
    `rate`: tokens per second. `held`: held-out figures.
    """

    step: int
    done: float
    loss: float
    rate: float
    seconds: float
    seconds_left: float
    held: Held | None


class Trainer:
    """Trains `network` on the text of `shards`. `head`: the target's, `[vocab, d]`.

    `folder` gets `checkpoint.pt` (from which a next run resumes), `log.jsonl` (a line per report),
    and the network itself at every checkpoint. So an interrupted training leaves a drafter that can
    be used. `every`: seconds between checkpoints.

    Raises `InvalidInput` for a checkpoint of another training.
    """

    def __init__(
        self,
        network: EagleHead,
        head: torch.Tensor,
        shards: Shards,
        recipe: Recipe,
        folder: Path,
        accelerator: Accelerator,
        every: float = 180.0,
    ) -> None:
        self.network, self.shards, self.recipe, self.folder, self.every = (
            network,
            shards,
            recipe,
            folder,
            every,
        )
        self._accelerator = accelerator
        self._device = accelerator.device
        self._head = for_products(head.to(self._device))
        self._train, self._held = split(shards)
        self._lengths, self._answered = (
            [shards.length(i) for i in self._train],
            [shards.answered[i] for i in self._train],
        )
        self._total = max(1, int(sum(self._lengths) * recipe.epochs))  # tokens of the run
        self._vocabulary = LossVocabulary(
            shards.counts(len(head)), recipe.loss_vocab, recipe.seed + accelerator.process_index
        )
        self.step = self.seen = self.round = 0
        self.seconds = 0.0
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self._objective, self._optimizer = accelerator.prepare(
            Objective(network.to(self._device), recipe), optimizer
        )
        self._resume()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            self.network.load_state_dict(state["network"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.seen, self.round, self.seconds = (
                state["step"],
                state["seen"],
                state["round"] + 1,
                state["seconds"],
            )
        except (
            OSError,
            RuntimeError,
            KeyError,
            ValueError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            reason = str(error).splitlines()[0]
            raise InvalidInput(
                f"{self.checkpoint} is not of this training ({reason}): take "
                "another --out, or delete it"
            ) from error

    def save(self) -> None:
        """Write the checkpoint and the network, each completely or not at all.

        Only the main process writes. Raises `QuickbeamError` if they can't be written.
        """
        if not self._accelerator.is_main_process:
            return
        state = {
            "network": self.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seen": self.seen,
            "round": self.round,
            "seconds": self.seconds,
        }
        part = self.checkpoint.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, part)
            os.replace(part, self.checkpoint)
            self.network.save(self.folder)
        # for a full disk, torch's writer raises RuntimeError and safetensors' SafetensorError
        except (OSError, RuntimeError, SafetensorError) as error:
            with suppress(OSError):
                for left in self.folder.glob("*.part"):
                    left.unlink()
            raise QuickbeamError(
                f"{self.folder}: the checkpoint can't be written ({error}); the last one stands"
            ) from error

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """Yield this process's batches, and how many tokens all processes have in that step.

        Each round has a new random order.
        """
        rank, count = self._accelerator.process_index, self._accelerator.num_processes
        for number in itertools.count(self.round):
            self.round = number
            generator = torch.Generator().manual_seed(self.recipe.seed + number)
            order = spread_lengths(self._lengths, self.recipe.batch, generator)
            if count > 1:  # by answers, which are most of the work once only they count
                order = side_by_side(order, self._answered, count, generator)
            for first in range(0, len(order), count):
                step = [order[(first + i) % len(order)] for i in range(count)]
                tokens = sum(self._lengths[i] for chosen in step for i in chosen)
                yield collate([self.shards[self._train[i]] for i in step[rank]]), tokens

    def run(self, report: Callable[[Report], None]) -> Held:
        """Train to the end of the recipe, and return the held-out figures of the result.

        Whatever ends it early leaves a checkpoint of the last step. The exception is a loss or a
        gradient that is not finite (`QuickbeamError`), after which the checkpoint before stays.
        """
        if self.seen >= self._total:
            return self._check(None)
        batches = self._batches()
        began = reported = time.perf_counter()
        before, losses, fresh = self.seconds, list[float](), self.seen
        try:
            while self.seen < self._total:
                batch, tokens = next(batches)
                losses.append(self._step(batch))
                self.step, self.seen = self.step + 1, self.seen + tokens
                now = time.perf_counter()
                self.seconds = before + now - began
                if now - reported < self.every or not self._accelerator.is_main_process:
                    continue
                self.save()
                rate = (self.seen - fresh) / (now - began)
                left = (self._total - self.seen) / rate
                mean = sum(losses) / len(losses)
                self._log(
                    Report(
                        self.step,
                        self.seen / self._total,
                        mean,
                        rate,
                        self.seconds,
                        left,
                        self._check(CHECK_TOKENS),
                    ),
                    report,
                )
                reported, losses = time.perf_counter(), []
        except _Diverged:
            raise  # what made the loss infinite is in the weights: no checkpoint
        except BaseException:
            self.save()
            raise
        self.save()
        return self._check(None)

    def _step(self, batch: Batch) -> float:
        tokens, shift = self._vocabulary.choose(batch)
        rows = self._head[tokens.to(self._device)]
        loss = self._objective(
            batch.to(self._device), rows, shift.to(self._device), self.seen / self._total
        )
        value = float(loss.detach())
        if not value < float("inf"):
            raise _Diverged(
                f"the loss of step {self.step} is {value}: take a smaller --lr; the "
                "last checkpoint stands"
            )
        self._accelerator.backward(loss)
        norm = self._accelerator.clip_grad_norm_(self.network.parameters(), self.recipe.clip)
        # under a scaler (float16), such a step is left out and the scale lowered
        if self._accelerator.scaler is None and not float(norm) < float("inf"):
            raise _Diverged(
                f"the gradient of step {self.step} is {float(norm)}: take a smaller --lr; the "
                "last checkpoint stands"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step, self.seen / self._total)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return value

    def _check(self, tokens: int | None) -> Held:
        chosen, count = [], 0
        for i in self._held:
            if tokens is not None and count >= tokens:
                break
            chosen.append(i)
            count += self.shards.length(i)
        return hold_out(self.network, self.shards, chosen, self._head, CHECK_DEPTHS)

    def _log(self, record: Report, report: Callable[[Report], None]) -> None:
        fields: dict[str, Any] = record._asdict()
        if record.held is not None:
            fields["held"] = record.held._asdict()
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(fields) + "\n")
        report(record)
