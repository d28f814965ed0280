"""Prompts and conversations as token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence, Set
from operator import index
from typing import Any

from quickbeam.errors import InvalidInput
from quickbeam.models.text.chat_template import as_messages, for_template
from quickbeam.models.vision.image import IMAGE_PARTS, PromptImage, image_of
from quickbeam.models.vision.reader import ImageReader

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
    images: ImageReader | None = None,
    most: int = 0,
    **arguments: Any,
) -> list[int]:
    """Return the token ids of a conversation, as `LLM.encode_chat` explains.

    `model`: the model's name for errors. `images`: reads images; None where the model reads none.
    `most`: how many ids a prompt with images may have.
    """
    messages = as_messages(messages)
    prompt_images = list[PromptImage]()
    if images is not None:
        messages, prompt_images = take_images(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            f"{model} has no chat template: give it raw text (--raw on the "
            "command line, `generate` in Python)"
        )
    try:
        template = tokenizer.get_chat_template(arguments.get("chat_template"), tools=tools)
        mark = images.placeholder if images is not None and prompt_images else ""
        prompt = tokenizer.apply_chat_template(
            for_template(template, messages, mark),
            tools=None if tools is None else list(tools),
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
            tokenize=not mark,
            return_dict=False,
            **arguments,
        )
    except InvalidInput:
        raise
    except Exception as error:  # a template may raise anything, often a jinja2 error
        raise InvalidInput(f"the model's chat template refuses these messages: {error}") from error
    if images is not None and prompt_images:
        return images.read(prompt, prompt_images, most)
    return [int(token) for token in prompt]


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[PromptImage]]:
    """Return messages whose images are parts `{"type": "image"}` alone, and the images in order.

    Raises `InvalidInput` for an image that can't be read.
    """
    images = list[PromptImage]()
    taken = list[Any]()
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = list[Any]()
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
                    images.append(image_of(part, number))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    return taken, images


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
