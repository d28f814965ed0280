"""The drafter learns from the answers of each tenant while the engine has nothing else to do.

What it learns from was computed for the answers: the hidden states of committed tokens. It learns
in short steps, between which requests are looked for. What was learned from a tenant's texts drafts
for that tenant alone, since drafts change how long an answer takes.

The manner is that of OSD (2310.07177) and OnlineSPEC (2603.12617): the latest texts are learned
from again, and new weights are taken only if texts that were held out show that they are better.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quickbeam.drafters.base import DrafterState
from quickbeam.drafters.eagle import EagleState
from quickbeam.drafters.feature import HiddenRecord
from quickbeam.drafters.learning import (
    CONTEXT,
    Changes,
    Excerpt,
    LearnedNetwork,
    LossRows,
    LowRank,
)
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.drafters.texts import TENANTS, tenant_name
from quickbeam.engine.learned_file import LearnedFile

logger = logging.getLogger(__name__)

TEXT_BYTES = 128 << 20  # of the texts of all tenants, with their hidden states
HELD_OUT = 10  # one text in so many is never learned from
ROUND_TOKENS = 256  # new tokens after which a round of learning begins
NEW_VISITS = 2  # how often a round visits each new text; as many old ones are visited once
VERSIONS = 3  # that are kept of a tenant's changes: those in use and two before them
LR = 1e-3  # Adam's
CLIP = 0.5  # the largest norm of the gradient
STEP_SECONDS = 0.05  # that a step should take
STEP_TOKENS = (8, 64)  # the least and the most that a step learns from


@dataclass(frozen=True)
class LearningFigures:
    """What was learned so far, by all tenants together.

    - `texts`, `tokens`: answers that may be learned from, and their tokens.
    - `steps`, `seconds`: of learning, those that measured included. `longest_step`: in seconds.
    - `rounds`: how many were begun. `taken`: after how many new weights were taken;
      `returned`: after how many older ones were taken again.
    - `accepted_before`, `accepted_after`: how many tokens of a draft were accepted in held-out
      texts when weights were last changed, by those that were loaded and by the new ones.
    - `pending`: whether a round has begun or is due.
    """

    texts: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    longest_step: float = 0.0
    rounds: int = 0
    taken: int = 0
    returned: int = 0
    accepted_before: float = 0.0
    accepted_after: float = 0.0
    pending: bool = False

    @property
    def gain(self) -> float:
        """The tokens of a step by `accepted_after` over those by `accepted_before`."""
        return (1 + self.accepted_after) / (1 + self.accepted_before)


class Learned:
    """What one tenant's answers are, and what was learned from them.

    - `passes`: draft for the tenant; None: the drafter as it was loaded does.
    - `versions`: the changes that were taken, those in use last.
    - `texts`, `held_out`: the latest ones, the newest last.
    - `new_texts`, `new_tokens`: how many came since the last round. `last_round`: its number.
    - `owner`: a large number of its own, for keys of the prefix cache.
    """

    def __init__(self, tenant: Hashable) -> None:
        self.passes: NativePasses | TorchPasses | None = None
        self.versions: list[Changes] = []
        self.texts = deque[Excerpt]()
        self.held_out = deque[Excerpt]()
        self.new_texts = 0
        self.new_tokens = 0
        self.last_round = 0
        self.owner = int(hashlib.sha256(f"{tenant_name(tenant)}".encode()).hexdigest()[:16], 16)
        self._count = 0

    def begin(self, state: DrafterState | None) -> None:
        """Let the drafter's state of a sequence draft with what was learned, and record."""
        if isinstance(state, EagleState):
            state.passes = self.passes
            state.record = HiddenRecord()

    def add(self, text: Excerpt) -> None:
        """Append a text. One in `HELD_OUT` is held out, the second one first."""
        self._count += 1
        if self._count % HELD_OUT == 2:
            self.held_out.append(text)
        else:
            self.texts.append(text)
            self.new_texts += 1
            self.new_tokens += text.anchors

    @property
    def bytes(self) -> int:
        return sum(text.hidden.nbytes for text in (*self.texts, *self.held_out))

    def forget_oldest(self) -> None:
        """Forget the oldest text, or the oldest one that is held out where these are too many."""
        held_out_too_long = len(self.held_out) * HELD_OUT > len(self.texts) + HELD_OUT
        (self.held_out if held_out_too_long or not self.texts else self.texts).popleft()

    @property
    def due(self) -> bool:
        """Whether there is enough to learn from, and to measure it by."""
        return self.new_tokens >= ROUND_TOKENS and bool(self.held_out)


class Learner:
    """Learns for each tenant, and keeps what was learned of the latest `TENANTS`.

    `step` is called over and over while there is nothing else to do. All methods must be called
    from the engine's thread; `figures` may be read from any. `file`: keeps what was learned from
    one process to the next; None: nothing is written.
    """

    def __init__(self, network: LearnedNetwork, file: LearnedFile | None = None) -> None:
        self._network = network
        self._file = file
        self._generator = torch.Generator().manual_seed(0)
        self._learned = OrderedDict[Hashable, Learned]()
        self._round: Iterator[None] | None = None
        self._step_tokens = STEP_TOKENS[0]
        self._failed = False
        self._figures = LearningFigures()
        for tenant, versions in ({} if file is None else file.read()).items():
            if all(network.fits(changes) for changes in versions):
                learned = self.of(tenant)
                learned.versions = versions
                learned.passes = network.passes(versions[-1])

    @property
    def figures(self) -> LearningFigures:
        return replace(self._figures, pending=self._round is not None or bool(self._due()))

    def _due(self) -> list[Learned]:
        """Return the tenants whose next round is due. May be called from any thread."""
        return [learned for learned in list(self._learned.values()) if learned.due]

    def of(self, tenant: Hashable) -> Learned:
        """Return what was learned for a tenant; the one asked for least recently is forgotten."""
        if tenant not in self._learned:
            if len(self._learned) >= TENANTS:
                self._learned.popitem(last=False)
            self._learned[tenant] = Learned(tenant)
        self._learned.move_to_end(tenant)
        return self._learned[tenant]

    def add(
        self, learned: Learned, ids: Sequence[int], prompt: int, read: int, state: DrafterState
    ) -> None:
        """Keep what a sequence leaves to learn from.

        `ids`: of its text, of which the first `prompt` are not the model's, and the first `read`
        have hidden states.
        """
        if self._failed or not isinstance(state, EagleState) or not state.record:
            return
        hidden = state.record.first(len(state.record))
        recorded_from = read - len(hidden)
        begin = max(recorded_from, prompt - CONTEXT)
        text = Excerpt(
            torch.tensor(ids[begin:read]),
            hidden[begin - recorded_from :].clone(),
            max(0, prompt - begin),
        )
        if text.anchors <= 0:
            return
        learned.add(text)
        figures = self._figures
        self._figures = replace(
            figures, texts=figures.texts + 1, tokens=figures.tokens + text.anchors
        )
        # the tenant that has the most loses the oldest, so nobody can crowd out the others
        while sum(of_tenant.bytes for of_tenant in self._learned.values()) > TEXT_BYTES:
            max(self._learned.values(), key=lambda of_tenant: of_tenant.bytes).forget_oldest()

    def forget(self) -> None:
        """Forget all texts and what was learned from them. What is kept in a file stays there."""
        self._learned.clear()
        self._round = None

    def step(self) -> bool:
        """Learn for about `STEP_SECONDS`. Returns whether there was anything to learn."""
        if self._round is None:
            due = self._due()
            if not due:
                return False
            # tenants take turns, however much they ask
            self._round = self._learn(min(due, key=lambda learned: learned.last_round))
        began = time.perf_counter()
        try:
            next(self._round)
        except StopIteration:
            self._round = None
        except Exception:
            logger.exception("the drafter stops learning")
            self._round = None
            self._failed = True
            self._learned.clear()
        seconds = time.perf_counter() - began
        figures = self._figures
        self._figures = replace(
            figures,
            steps=figures.steps + 1,
            seconds=figures.seconds + seconds,
            longest_step=max(figures.longest_step, seconds),
        )
        return True

    def _learn(self, learned: Learned) -> Iterator[None]:
        """Carry out a round for one tenant, and yield after each step."""
        network = self._network
        texts = self._visits(learned)
        held_out = list(learned.held_out)
        learned.new_texts = learned.new_tokens = 0
        learned.last_round = self._figures.rounds + 1
        self._figures = replace(self._figures, rounds=learned.last_round)
        rows = network.loss_rows([*texts, *held_out], self._generator)
        yield
        # learn
        trained = self._trainable(learned)
        matrices = [matrix for change in trained.values() for matrix in change]
        optimizer = torch.optim.AdamW(matrices, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        for text in texts:
            for part in text.parts(self._step_tokens):
                if not self._train(trained, part, rows, optimizer):
                    logger.warning("a drafter's loss is not finite: its texts are dropped")
                    learned.texts.clear()
                    learned.held_out.clear()
                    return
                yield
        for matrix in matrices:
            matrix.requires_grad_(False)
        # measure: the new version, those before it, and the network as it was loaded
        versions = [trained, *reversed(learned.versions), Changes()]
        accepted = list[list[float]]()
        for text in held_out:
            for part in text.parts(self._step_tokens):
                of_part = list[float]()
                for changes in versions:
                    of_part.append(network.accepted(changes, part, rows))
                    yield
                accepted.append(of_part)
        # take the best one, if that is not the one in use
        measured = torch.tensor(accepted)
        best = best_version(measured, in_use=1)
        if best == 0:
            self._take(learned, [*learned.versions, trained][-VERSIONS:])
            self._figures = replace(self._figures, taken=self._figures.taken + 1)
        elif best > 1:
            self._take(learned, learned.versions[: len(versions) - 1 - best])
            self._figures = replace(self._figures, returned=self._figures.returned + 1)
        if best != 1:
            loaded, now = measured[:, [-1, best]].mean(0).tolist()
            self._figures = replace(self._figures, accepted_before=loaded, accepted_after=now)

    def _visits(self, learned: Learned) -> list[Excerpt]:
        """Return the texts that a round learns from, in random order."""
        texts = list(learned.texts)
        first_new = max(0, len(texts) - learned.new_texts)
        old = torch.randperm(first_new, generator=self._generator)[: learned.new_texts]
        visits = [texts[index] for index in old.tolist()] + texts[first_new:] * NEW_VISITS
        order = torch.randperm(len(visits), generator=self._generator)
        return [visits[index] for index in order.tolist()]

    def _trainable(self, learned: Learned) -> Changes:
        """Return a copy of the changes in use, whose matrices are trained."""
        start = (
            learned.versions[-1] if learned.versions else self._network.no_changes(self._generator)
        )
        return {
            name: LowRank(*(matrix.clone().requires_grad_() for matrix in change))
            for name, change in start.items()
        }

    def _train(
        self, trained: Changes, part: Excerpt, rows: LossRows, optimizer: torch.optim.Optimizer
    ) -> bool:
        """Make a step of the optimizer. Returns whether the loss and its gradient are finite."""
        began = time.perf_counter()
        optimizer.zero_grad()
        loss, _ = self._network.loss(trained, part, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        matrices = [matrix for change in trained.values() for matrix in change]
        norm = torch.nn.utils.clip_grad_norm_(matrices, CLIP)
        optimizer.step()
        seconds = time.perf_counter() - began
        least, most = STEP_TOKENS
        if seconds > STEP_SECONDS:
            self._step_tokens = max(least, self._step_tokens // 2)
        elif seconds < STEP_SECONDS / 2:
            self._step_tokens = min(most, self._step_tokens * 2)
        return math.isfinite(loss.item()) and math.isfinite(norm.item())

    def _take(self, learned: Learned, versions: list[Changes]) -> None:
        """Let the last of these versions draft for a tenant from its next sequence on."""
        learned.versions = versions
        learned.passes = self._network.passes(versions[-1]) if versions else None
        if self._file is not None:
            self._file.write({tenant: of.versions for tenant, of in self._learned.items()})


def best_version(accepted: torch.Tensor, in_use: int) -> int:
    """Return which version to take: the best one, or else the one `in_use`.

    `accepted`: `[n, versions]`, the tokens that are accepted in each of n held-out parts. Another
    version is taken only if it is better by more than a standard error of the difference.
    """
    if len(accepted) < 2:
        return in_use
    best = int(accepted.mean(0).argmax())
    difference = accepted[:, best] - accepted[:, in_use]
    error = difference.std() / math.sqrt(len(difference))
    return best if bool(difference.mean() > error) else in_use
