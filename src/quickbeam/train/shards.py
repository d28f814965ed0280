"""Conversations on disk: they are written in shards and read one conversation at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.train.target import TrainingBatch

SHARD = 20_000  # a file is written once there are so many tokens for it
HELD_OUT = 50  # one conversation in this many is never trained on


class ConversationTokens(NamedTuple):
    """A conversation of n tokens.

    `tokens`: `[n]` int32. `answer`: `[n]` bool, which of them the model says as an answer; a
    drafter is for those. `temperature`: of the answer.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    temperature: float


class ShardWriter:
    """Collects conversations, and writes a file whenever they have `SHARD` tokens or more.

    Files are named `text-00000.safetensors` and so on. Files that are there stay: a second run
    adds to them. A file is complete or absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.files = len(list(folder.glob("text-*.safetensors")))
        self._held: list[ConversationTokens] = []

    def add(self, conversation: ConversationTokens) -> None:
        self._held.append(conversation)
        if sum(len(c.tokens) for c in self._held) >= SHARD:
            self.flush()

    def flush(self) -> None:
        """Write the conversations that are held. Raises `QuickbeamError` if that fails."""
        if not self._held:
            return
        tensors = {
            "tokens": torch.cat([c.tokens for c in self._held]),
            "answer": torch.cat([c.answer for c in self._held]),
            "length": torch.tensor([len(c.tokens) for c in self._held]),
            "temperature": torch.tensor([c.temperature for c in self._held]),
        }
        # the number may be taken, if another file was deleted
        while (path := self.folder / f"text-{self.files:05}.safetensors").exists():
            self.files += 1
        part = path.with_suffix(".part")
        try:
            save_file(tensors, part)
            os.replace(part, path)
        except (OSError, SafetensorError) as error:  # the latter for a full disk
            part.unlink(missing_ok=True)
            raise QuickbeamError(
                f"{self.folder}: not written ({error}); what is there stays: make room and run "
                "again"
            ) from error
        self._held, self.files = [], self.files + 1


class Shards(list[ConversationTokens]):
    """The conversations of a folder, in order.

    Raises `InvalidInput` for a file that is no shard, and for a folder without any.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for path in sorted(folder.glob("*.safetensors")):
            try:
                tensors: Any = load_file(path)
                lengths = tensors["length"].tolist()
                parts = (tensors[name].split(lengths) for name in ("tokens", "answer"))
                self.extend(map(ConversationTokens, *parts, tensors["temperature"].tolist()))
            except Exception as error:  # safetensors raises its own kinds
                raise InvalidInput(f"{path} is not a shard of text ({error}): delete it") from error
        if not self:
            raise InvalidInput(f"{folder} holds no text (*.safetensors)")

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) for one in self)

    def counts(self, vocab: int) -> torch.Tensor:
        """Return how often each token occurs, `[vocab]` int64."""
        return torch.bincount(torch.cat([one.tokens for one in self]).long(), minlength=vocab)

    def answered_prompts(self, prompts: Sequence[list[int]]) -> list[bool]:
        """Return for each of the `prompts` (token ids) whether the text holds an answer to it.

        Of equal prompts, as many are answered as there are answers.
        """
        there = Counter(tuple(c.tokens[: int(c.answer.int().argmax())].tolist()) for c in self)
        answered = []
        for prompt in map(tuple, prompts):
            answered.append(there[prompt] > 0)
            there[prompt] -= 1
        return answered


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """Read conversations to answer from a file with one JSON object per line.

    An object is `{"prompt": "…"}`, `{"turns": ["…", …]}` (user turns, of which the first is taken)
    or `{"messages": [{"role": …, "content": …}, …]}`. Raises `InvalidInput`, which names the line.
    """
    prompts = list[list[dict[str, str]]]()  # one a line
    if not path.is_file():
        raise InvalidInput(f"--prompts {path} can't be read: there is no such file")
    try:
        for line in path.read_text(encoding="utf-8-sig").split("\n"):
            record = json.loads(line) if line.strip() else {"messages": []}
            turns = record.get("messages")
            if turns is None:
                first = record["prompt"] if "prompt" in record else record["turns"][0]
                turns = [{"role": "user", "content": first}]
            prompts.append([{name: str(m[name]) for name in ("role", "content")} for m in turns])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"--prompts {path}, line {len(prompts) + 1}: can't be read ({error!r}); want "
            '{"prompt": …}, {"turns": […]} or {"messages": […]}'
        ) from error
    if not any(prompts):
        raise InvalidInput(f"--prompts {path}: holds no prompts")
    return [one for one in prompts if one]


def spread_lengths(
    lengths: Sequence[int], batch: int, generator: torch.Generator
) -> list[list[int]]:
    """Return batches of indices of about `batch` tokens, padding counted.

    Indices of similar length go together. The batches are in random order.
    """
    noise = torch.rand(len(lengths), generator=generator).tolist()
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] * (0.9 + 0.2 * noise[i]))
    batches: list[list[int]] = [[]]
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if batches[-1] and longest * (len(batches[-1]) + 1) > batch:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def collate(conversations: Sequence[ConversationTokens]) -> TrainingBatch:
    """Return conversations as a batch, padded to the longest, without hidden states."""
    tokens, answer = (
        pad_sequence(list(column), batch_first=True)
        for column in zip(*((c.tokens, c.answer) for c in conversations), strict=True)
    )
    lengths = torch.tensor([len(c.tokens) for c in conversations])
    return TrainingBatch(tokens.long(), answer, lengths)


def split(shards: Shards) -> tuple[list[int], list[int]]:
    """Return the numbers of the conversations to train on, and of those that are held out.

    Both are at least one. Raises `InvalidInput` for fewer than two conversations.
    """
    if len(shards) < 2:
        raise InvalidInput(
            "the text is a single conversation, which can't be both trained on and held out: run "
            "`quickbeam train` with more --tokens, a smaller --length, or more --prompts"
        )
    held = [i for i in range(len(shards)) if i % HELD_OUT == HELD_OUT - 1] or [len(shards) - 1]
    return sorted(set(range(len(shards))) - set(held)), held
