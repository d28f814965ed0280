"""Prompts and conversations as token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence, Set
from operator import index
from typing import Any

from quickbeam.errors import InvalidInput
from quickbeam.models.text.chat_template import as_messages, for_template

Prompt = str | Sequence[int]
Message = dict[str, Any]
Conversation = str | Sequence[Message]  # a text is one message of the user's


def prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Return a prompt's token ids. Raises `InvalidInput` for what is neither text nor ids."""
    try:
        if isinstance(prompt, bytes | Mapping | Set):
            raise TypeError("its elements are no token ids")
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        ids = [index(token) for token in ids]
    except TypeError as error:
        raise InvalidInput(
            "a prompt is a text of whole characters, or a list of token ids, not "
            f"{reprlib.repr(prompt)} (messages go to `chat`)"
        ) from error
    if not ids:
        raise InvalidInput("an empty prompt: give some text")
    return ids


def chat_ids(
    tokenizer: Any,
    model: str,
    messages: Conversation,
    *,
    tools: Sequence[Any] | None = None,
    continue_final_message: bool = False,
    **arguments: Any,
) -> list[int]:
    """Return the token ids of a conversation, as `LLM.encode_chat` explains.

    `model`: the model's name for errors.
    """
    messages = as_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            f"{model} has no chat template: give it raw text (--raw on the "
            "command line, `generate` in Python)"
        )
    try:
        template = tokenizer.get_chat_template(arguments.get("chat_template"), tools=tools)
        ids = tokenizer.apply_chat_template(
            for_template(template, messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            tokenize=True,
            return_dict=False,
            **arguments,
        )
    except InvalidInput:
        raise
    except Exception as error:  # a template may raise anything, often a jinja2 error
        raise InvalidInput(f"the model's chat template refuses these messages: {error}") from error
    return [int(token) for token in ids]


def is_list(value: Any) -> bool:
    """Whether a value is a list or an array of prompts or messages, and not one of them."""
    is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return is_list and not isinstance(value, str | bytes | Mapping)


def is_single_prompt(prompts: Any) -> bool:
    """Whether this is a text or a list of token ids, and not a list of such prompts."""
    if not is_list(prompts):
        return True
    if not len(prompts):
        return False
    first = prompts[0]
    return not isinstance(first, str | Sequence) and not getattr(first, "ndim", 0)


def is_single_conversation(messages: Any) -> bool:
    """Whether this is a text or a list of messages, and not a list of conversations."""
    if not is_list(messages) or not len(messages):
        return True
    return not isinstance(messages[0], str | Sequence)
