"""From the texts and conversations of requests to token ids."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from quickbeam.llm import LLM
from quickbeam.models.vision.base import MAX_ROWS
from quickbeam.serve.admission import BYTES_A_TOKEN
from quickbeam.serve.errors import Refused
from quickbeam.serve.messages import Conversation, Message, ToolMessage, images_of, text_of
from quickbeam.serve.tool_fields import Tool

# What stands before a prefix, between it and a suffix, and behind that, in the models that fill in.
INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek-Coder)
)
# fields of a tool that a model is not shown
NOT_SHOWN = {"function": {"strict", "allowed_callers", "defer_loading", "output_schema"}}


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    return len(text) // BYTES_A_TOKEN + 1


def estimate_conversation(conversation: Conversation, tools: Sequence[Tool]) -> int:
    """Return about how many tokens a conversation's prompt has."""
    characters = len(json.dumps(conversation.chat_template_kwargs))
    characters += sum(len(tool.model_dump_json()) for tool in tools)
    for message in conversation.messages:
        characters += len(text_of(message.content))
        for call in getattr(message, "tool_calls", None) or ():
            characters += len(call.function.arguments)
    return characters // BYTES_A_TOKEN + 1 + MAX_ROWS * len(conversation.images)


def encode_text(llm: LLM, prompt: str | list[int], suffix: str | None) -> list[int]:
    """Return a prompt's token ids; with a `suffix` those that ask for the text before it."""
    if not isinstance(prompt, str):
        return prompt
    if suffix:
        added = llm.tokenizer.get_added_vocab()
        marks = next((marks for marks in INFILL if added.keys() >= {*marks}), None)
        if marks is None:
            raise Refused(
                "suffix: this model's tokenizer has no tokens for filling in; leave it out, or "
                "serve a model that was trained for that, such as Qwen2.5-Coder or StarCoder2",
                "suffix",
            )
        before, between, behind = marks
        prompt = f"{before}{prompt}{between}{suffix}{behind}"
    return list(llm.tokenizer(prompt)["input_ids"])


def encode_conversation(llm: LLM, conversation: Conversation, tools: Sequence[Tool]) -> list[int]:
    """Return the token ids of a conversation's prompt."""
    variables = conversation.chat_template_kwargs or {}
    reserved = {
        *inspect.signature(LLM.encode_chat).parameters,
        *inspect.signature(llm.tokenizer.apply_chat_template).parameters,
    }
    if taken := sorted(variables.keys() & reserved):
        raise Refused(
            f"chat_template_kwargs: {taken[0]!r} is the server's own; give variables of "
            "the template",
            "chat_template_kwargs",
        )
    shown = [tool.model_dump(exclude_none=True, exclude=NOT_SHOWN) for tool in tools]
    effort = _effort_variables(str(llm.tokenizer.chat_template), conversation.reasoning_effort)
    return llm.encode_chat(
        template_messages(conversation.messages),
        tools=shown or None,
        continue_final_message=bool(conversation.continue_final_message),
        **{**effort, **variables},
    )


def knows_effort(template: str, effort: str | None) -> bool:
    """Return whether a chat template can do what an effort to reason asks for."""
    return effort in (None, "none") or "reasoning_effort" in template


def _effort_variables(template: str, effort: str | None) -> dict[str, Any]:
    """Return the variables by which a chat template is told how much to reason."""
    if effort is not None and "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False}
    return {}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: contents as text, arguments as objects.

    A content with images is a list of parts. `developer` becomes `system`, and a tool's answer gets
    the tool's name.
    """
    shown = list[dict[str, Any]]()
    names = dict[str, str]()  # of the called tools, by the calls' ids
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        if not images_of(message):
            fields["content"] = text_of(message.content)
        if message.role == "developer":
            fields["role"] = "system"
        calls = fields.get("tool_calls", ())
        for call in calls:
            function = call["function"]
            names[call["id"]] = function["name"]
            function["arguments"] = arguments_object(function["arguments"])
        if not calls:  # some templates take the field for a call
            fields.pop("tool_calls", None)
        if isinstance(message, ToolMessage) and message.tool_call_id in names:
            fields.setdefault("name", names[message.tool_call_id])
        shown.append(fields)
    return shown


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object, which chat templates need.

    Models make mistakes, and a history is what it is. What is no object becomes the only member of
    one, `arguments`. So does what no template can write: halves of surrogate pairs, and what nests
    too deep. Nothing, and null, are an object without members.
    """
    try:
        value = from_json(arguments.strip() or "null")
    except ValueError:
        value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}
