"""Training text that users give: files of text, and chats."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.train.shards import ConversationTokens
from quickbeam.train.text import Template

Chat = list[tuple[str, str]]
"""Turns of a user, each with the answer."""


def read_given(path: Path) -> list[str | Chat]:
    """Return the texts and chats of a file, or of all files below a folder.

    A line of a `.jsonl` file is a JSON object: `{"messages": [{"role": …, "content": …}, …]}` is a
    chat, of which system messages are left out, and `{"text": …}` a text. Any other file is a text
    if it is in UTF-8. Raises `InvalidInput` naming a line that can't be read, and where there is no
    text at all.
    """
    if not path.exists():
        raise InvalidInput(f"--text {path} can't be read: there is no such file or folder")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    given = list[str | Chat]()
    for file in files:
        try:
            content = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:  # an image or the like
            continue
        given += _lines(file, content) if file.suffix == ".jsonl" else [content]
    given = [one for one in given if one]
    if not given:
        raise InvalidInput(f"--text {path} holds no text")
    return given


def _lines(file: Path, content: str) -> Iterator[str | Chat]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield _chat(record["messages"]) if "messages" in record else str(record["text"])
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInput(
                f"--text {file}, line {number}: can't be read ({error!r}); want "
                '{"messages": […]}, of a user and an assistant by turns, or {"text": …}'
            ) from error


def _chat(messages: Sequence[dict[str, Any]]) -> Chat:
    spoken = [message for message in messages if message["role"] != "system"]
    chat: Chat = []
    for user, assistant in zip(spoken[::2], spoken[1::2], strict=False):
        if (user["role"], assistant["role"]) != ("user", "assistant"):
            raise ValueError("the roles are not user and assistant by turns")
        chat.append((str(user["content"]), str(assistant["content"])))
    return chat


def conversations(
    given: Sequence[str | Chat],
    encode: Callable[[str], list[int]],
    template: Template | None,
    raw: Sequence[int],
    length: int,
    seed: int,
) -> Iterator[ConversationTokens]:
    """Yield texts and chats as tokens, in a random order.

    A longer text is divided, a longer chat is cut off. All tokens of a text count as an answer.
    `template`: of chats. `raw`: what stands before a text. `length`: the most tokens of a
    conversation. Raises `InvalidInput` for a chat without a template.
    """
    shuffled = list(given)
    random.Random(seed).shuffle(shuffled)
    for one in shuffled:
        if not isinstance(one, str):
            if template is None:
                raise InvalidInput("--text has chats, and the model has no chat template for them")
            yield _conversation(*chat_tokens(one, encode, template, length))
            continue
        tokens = encode(one)
        step = max(1, length - len(raw))
        for begin in range(0, len(tokens), step):
            part = tokens[begin : begin + step]
            yield _conversation([*raw, *part], [False] * len(raw) + [True] * len(part))


def chat_tokens(
    chat: Chat, encode: Callable[[str], list[int]], template: Template, length: int
) -> tuple[list[int], list[bool]]:
    """Return a chat's tokens as the model reads them, and which belong to answers.

    The token that ends an answer belongs to it.
    """
    tokens, answer = list[int](), list[bool]()
    for number, (question, reply) in enumerate(chat):
        before = template.again[1:] if number else template.begin
        prompt = [*before, *encode(question), *template.reply]
        spoken = [*encode(reply), *template.again[:1]]
        tokens += prompt + spoken
        answer += [False] * len(prompt) + [True] * len(spoken)
    return tokens[:length], answer[:length]


def _conversation(tokens: list[int], answer: list[bool]) -> ConversationTokens:
    return ConversationTokens(
        torch.tensor(tokens, dtype=torch.int32), torch.tensor(answer), 0.0, own=False
    )
