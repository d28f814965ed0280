"""Chat templates: from messages to the text that a model was trained on, as transformers writes it.

Templates come with models, so they run in a sandbox and see plain data alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from quickbeam.errors import NOT_READ, InvalidInput

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning
ASKING = ("system", "developer", "user")  # roles whose messages say something in any template
EXAMPLE = '{"role": "user", "content": "…"}'
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character
PROBE = "What is said"  # a message that shows how a template takes content
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers, in case a template looks for it


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks for training what a model writes; its body is written."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without names that lead to Python's own objects."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name}")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Unlike Jinja's filter, this doesn't escape what HTML would read."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> jinja2.Template:
    """Return a template that is ready to be rendered. Raises `jinja2.TemplateError`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *values, **named: dict(*values, **named),
        "namespace": Namespace,
    }
    return environment.from_string(template)


def plain(value: Any) -> Any:
    """Return a value as what JSON has; a word in angle brackets for anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(plain, value)) if type(value) is tuple else [*map(plain, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    model_dump = getattr(value, "model_dump", None)
    if callable(model_dump):
        return plain(model_dump())
    return f"<{type(value).__name__}>"


def _messages(conversation: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as plain data without fields that are None.

    Reasoning stands under `thinking` and `reasoning_content`.
    """
    messages = []
    for message in conversation:
        fields = plain(message)
        if not isinstance(fields, dict):
            raise TypeError(f"a message is a dict such as {EXAMPLE}, not {reprlib.repr(message)}")
        fields = {name: value for name, value in fields.items() if value is not None}
        reasoning = next((fields[name] for name in REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        messages.append(fields)
    return messages


def _tagged(content: Any) -> tuple[Any, str]:
    """Return a message's content with `TAG` behind its last text, and that text."""
    if isinstance(content, str):
        return content + TAG, content
    for i in reversed(range(len(content))):
        if "text" in content[i]:
            text = content[i]["text"]
            return [*content[:i], {**content[i], "text": text + TAG}, *content[i + 1 :]], text
    raise ValueError("continue_final_message: the final message has no text to continue")


def render(
    template: str,
    conversation: Sequence[Any],
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return a conversation as text.

    The arguments are those of transformers' `apply_chat_template`; `variables` are the template's.
    Raises `ValueError` for what can't be continued, and whatever the template raises.
    """
    if not conversation:
        raise ValueError("an empty conversation: give at least one message")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt: give one of them")
    messages, final = _messages(conversation), ""
    if continue_final_message:
        content = messages[-1].get("content")
        if content is None:
            raise ValueError("continue_final_message: the final message has no content to continue")
        messages[-1]["content"], final = _tagged(content)
    text: str = compiled(template).render(
        messages=messages,
        tools=None if tools is None else [plain(tool) for tool in tools],
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **{name: plain(value) for name, value in variables.items()},
    )
    if not continue_final_message:
        return text
    if final.strip() not in text or TAG.strip() not in text:
        raise ValueError("continue_final_message: the template leaves out the final message")
    end = text.rindex(TAG.strip())
    # where the template stripped the tag's space, it would have stripped the message's
    return text[:end] if text[end : end + len(TAG)] == TAG else text[:end].rstrip()


def as_messages(conversation: Any) -> list[Any]:
    """Return the messages of a conversation; a text is one message of the user's.

    Raises `InvalidInput`, with the number of the message that can't be used.
    """
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    if isinstance(conversation, bytes | Mapping) or not isinstance(conversation, Iterable):
        raise InvalidInput(
            f"a conversation is a text, or a list of messages such as {EXAMPLE}, not "
            f"{reprlib.repr(conversation)}"
        )
    messages = list(conversation)
    if not messages:
        raise InvalidInput("an empty conversation: give at least one message")
    for number, message in enumerate(messages):
        _check_message(number, message)
    return messages


def _check_message(number: int, message: Any) -> None:
    fields = message if isinstance(message, Mapping) else plain(message)
    if not isinstance(fields, Mapping):
        raise InvalidInput(
            f"message {number}: a dict such as {EXAMPLE}, not {reprlib.repr(message)}"
        )
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str):
        raise InvalidInput(
            f"message {number} has role={reprlib.repr(role)}: give who speaks, as 'system', 'user' "
            "or 'assistant'"
        )
    if role not in (*ASKING, "assistant"):
        return  # what a tool returns may be anything that the template writes
    if content is None and role in ASKING:
        raise InvalidInput(f"message {number} has no content: give its text, as in {EXAMPLE}")
    in_parts = isinstance(content, list | tuple) and all(map(_is_part, content))
    if not (content is None or in_parts or _is_text(content)):
        raise InvalidInput(
            f"message {number} has content={reprlib.repr(content)}: give a text of whole "
            'characters, or a list of parts such as {"type": "text", "text": "…"}'
        )


def _is_part(part: Any) -> bool:
    return _is_text(part.get("text", "") if isinstance(part, Mapping) else part)


def _is_text(text: Any) -> bool:
    return isinstance(text, str) and SURROGATE.search(text) is None


def for_template(template: str, conversation: Sequence[Any], mark: str = "") -> list[Any]:
    """Return messages with their content as the template takes it: as a text, or as parts.

    Templates of models that read images as well may take parts alone, and leave texts out. `mark`:
    the text that stands for an image where images are read. Raises `InvalidInput` for a part that
    is neither a text nor such an image.
    """
    messages = []
    for number, message in enumerate(conversation):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            if _takes(template, parts=True) and not _takes(template, parts=False):
                message = {**message, "content": [{"type": "text", "text": content}]}
        elif isinstance(content, list | tuple):
            texts = [_text_of(part, number, mark) for part in content]
            if _takes(template, parts=False) and not _takes(template, parts=True):
                message = {**message, "content": "\n".join(texts)}
        messages.append(message)
    return messages


def _text_of(part: Any, number: int, mark: str) -> Any:
    """Return the text of a part of message `number`: `mark`, if there is one, for an image.

    Raises `InvalidInput` for other parts.
    """
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type", "text")
    if kind == "image" and mark:
        return mark
    if kind != "text":
        raise InvalidInput(
            f"message {number} has a part of type {kind!r}, which is not read for this model: "
            f"{NOT_READ}"
        )
    return part.get("text", "")


@functools.lru_cache(maxsize=16)
def _takes(template: str, parts: bool) -> bool:
    """Whether a template writes what a message says, given as parts or as a text."""
    content = [{"type": "text", "text": PROBE}] if parts else PROBE
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    try:
        text = render(template, [{"role": "user", "content": content}], None, True, False, tokens)
    except Exception:  # a template may raise anything
        return False
    return PROBE in text and "'text'" not in text
