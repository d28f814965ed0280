"""Conversations on disk: they are written in shards and read one conversation at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quickbeam.errors import InvalidInput, QuickbeamError
from quickbeam.train.target import TrainingBatch, padded

SHARD = 20_000  # a file is written once there are so many tokens for it
HELD_OUT = 25  # one conversation in this many is never trained on


class ConversationTokens(NamedTuple):
    """A conversation of n tokens.

    `tokens`: `[n]` int32. `answer`: `[n]` bool, the tokens of the model's answers, which a drafter
    is for. `temperature`: of the answers. `own`: whether the model wrote the answers.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    temperature: float
    own: bool = True


class ShardWriter:
    """Collects conversations, and writes a file whenever they have `SHARD` tokens or more.

    Files are named `text-00000.safetensors` and so on. Files of an earlier run stay. A file is
    complete or absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.files = len(list(folder.glob("text-*.safetensors")))
        self._unwritten: list[ConversationTokens] = []

    def add(self, conversation: ConversationTokens) -> None:
        self._unwritten.append(conversation)
        if sum(len(c.tokens) for c in self._unwritten) >= SHARD:
            self.flush()

    def flush(self) -> None:
        """Write the conversations since the last file. Raises `QuickbeamError` if that fails."""
        if not self._unwritten:
            return
        tensors = {
            "tokens": torch.cat([c.tokens for c in self._unwritten]),
            "answer": torch.cat([c.answer for c in self._unwritten]),
            "length": torch.tensor([len(c.tokens) for c in self._unwritten]),
            "temperature": torch.tensor([c.temperature for c in self._unwritten]),
            "own": torch.tensor([c.own for c in self._unwritten]),
        }
        path = self._next_path()
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
        self._unwritten = []
        self.files += 1

    def _next_path(self) -> Path:
        """Return the path of a new file, whose number may be taken if another file was deleted."""
        while True:
            path = self.folder / f"text-{self.files:05}.safetensors"
            if not path.exists():
                return path
            self.files += 1


class Shards(list[ConversationTokens]):
    """The conversations of a folder, in order.

    Raises `InvalidInput` for a file that is no shard, and for a folder without any.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for path in sorted(folder.glob("*.safetensors")):
            try:
                tensors = load_file(path)
                lengths = tensors["length"].tolist()
                tokens = torch.split(tensors["tokens"], lengths)
                answers = torch.split(tensors["answer"], lengths)
                temperatures = tensors["temperature"].tolist()
                own = tensors["own"].tolist() if "own" in tensors else [True] * len(lengths)
                self.extend(map(ConversationTokens, tokens, answers, temperatures, own))
            except Exception as error:  # safetensors raises its own kinds
                raise InvalidInput(f"{path} is not a shard of text ({error}): delete it") from error
        if not self:
            raise InvalidInput(f"{folder} holds no text (*.safetensors)")

    @property
    def tokens(self) -> int:
        """How many tokens all conversations have together."""
        return sum(len(c.tokens) for c in self)

    def answered_prompts(self, prompts: Sequence[list[int]]) -> list[bool]:
        """Return for each of the `prompts` (token ids) whether the text holds an answer to it.

        Of equal prompts, as many are answered as there are answers.
        """
        answers = Counter[tuple[int, ...]]()
        for conversation in self:
            begin = int(conversation.answer.int().argmax())
            answers[tuple(conversation.tokens[:begin].tolist())] += 1
        answered = list[bool]()
        for prompt in map(tuple, prompts):
            answered.append(answers[prompt] > 0)
            answers[prompt] -= 1
        return answered


def token_counts(conversations: Sequence[ConversationTokens], vocab: int) -> torch.Tensor:
    """Return how often each token occurs, `[vocab]` int64."""
    return torch.bincount(torch.cat([c.tokens for c in conversations]).long(), minlength=vocab)


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """Read conversations to answer from a file with one JSON object per line.

    An object is `{"prompt": "…"}`, `{"turns": ["…", …]}` (user turns, of which the first is taken)
    or `{"messages": [{"role": …, "content": …}, …]}`. Raises `InvalidInput`, which names the line.
    """
    conversations = list[list[dict[str, str]]]()  # of each line; none of an empty one
    if not path.is_file():
        raise InvalidInput(f"--prompts {path} can't be read: there is no such file")
    try:
        for line in path.read_text(encoding="utf-8-sig").split("\n"):
            record = json.loads(line) if line.strip() else {"messages": []}
            conversations.append(_conversation(record))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"--prompts {path}, line {len(conversations) + 1}: can't be read ({error!r}); want "
            '{"prompt": …}, {"turns": […]} or {"messages": […]}'
        ) from error
    if not any(conversations):
        raise InvalidInput(f"--prompts {path}: holds no prompts")
    return [conversation for conversation in conversations if conversation]


def _conversation(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a line's object. Raises an error of any kind for another object."""
    messages = record.get("messages")
    if messages is None:
        question = record["prompt"] if "prompt" in record else record["turns"][0]
        messages = [{"role": "user", "content": question}]
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]


def spread_lengths(
    lengths: Sequence[int], batch: int, generator: torch.Generator
) -> list[list[int]]:
    """Return batches of indices of about `batch` tokens, padding counted.

    Indices of similar length go together. The batches are in random order. A batch takes one more
    where that comes nearer to `batch`, so it may be larger by half a conversation.
    """
    noise = torch.rand(len(lengths), generator=generator).tolist()
    noisy = [length * (0.9 + 0.2 * noise[i]) for i, length in enumerate(lengths)]
    batches: list[list[int]] = [[]]
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: noisy[i]):
        longest = max(longest, lengths[i])
        if batches[-1] and longest * (2 * len(batches[-1]) + 1) > 2 * batch:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def collate(
    conversations: Sequence[ConversationTokens], length: Callable[[int], int] = int
) -> TrainingBatch:
    """Return conversations as a batch, without hidden states.

    They are padded to the `length` of the longest, by default to the longest.
    """
    lengths = [len(c.tokens) for c in conversations]
    longest = length(max(lengths))
    tokens = padded([c.tokens for c in conversations], longest)
    answer = padded([c.answer for c in conversations], longest)
    return TrainingBatch(tokens.long(), answer, torch.tensor(lengths))


def split(shards: Sequence[ConversationTokens]) -> tuple[list[int], list[int]]:
    """Return the indices of the conversations to train on, and of those that are held out.

    There is at least one of each. Raises `InvalidInput` for fewer than two conversations.
    """
    if len(shards) < 2:
        raise InvalidInput(
            "the text is a single conversation, which can't be both trained on and held out: run "
            "`quickbeam train` with more --tokens, a smaller --length, or more --prompts"
        )
    count = len(shards)
    held_out = list(range(HELD_OUT - 1, count, HELD_OUT)) or [count - 1]
    return sorted(set(range(count)) - set(held_out)), held_out
