"""The parts of tool calls that are the same in each call of a tool: names, keys and quotes.

They are drafted (`drafters/prediction.py`), so they may be wrong: no answer depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quickbeam.serve.calls import ARGUMENT_KEYS, ToolFormat
from quickbeam.serve.tool_fields import Tool

MAX_CHARACTERS = 2**16  # of all skeletons of a request; later tools have none
MAX_DEPTH = 8  # of objects in objects
# stand for the values of an example, which no tool has
TEXT, VALUE = "\0text", "\0value"
HOLE = "\1"


def call_skeletons(form: ToolFormat, tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return the fixed parts of the calls of these tools, in order; anything may stand between two.

    A call comes as the chat template writes it, and as indented JSON: models that were not trained
    on the template write that.
    """
    parts = list[str]()
    characters = 0
    for tool in tools:
        of_tool = [part for text in _examples(form, tool) for part in _parts(text)]
        characters += sum(len(part) for part in of_tool)
        if characters > MAX_CHARACTERS:
            break
        parts += of_tool
    return tuple(parts)


def _examples(form: ToolFormat, tool: Tool) -> Iterator[str]:
    """Yield a call of a tool in each layout, with `TEXT` and `VALUE` for its values."""
    name = tool.function.name
    arguments = _example(tool.function.parameters or {})
    key = ARGUMENT_KEYS[0]
    if form.syntax is not None:
        begin, middle, end = form.syntax.parts
        key = next((key for key in ARGUMENT_KEYS if key in middle), key)
        yield f"{begin}{name}{middle}{json.dumps(arguments, ensure_ascii=False)}{end}"
    yield json.dumps({"name": name, key: arguments}, ensure_ascii=False, indent=2)


def _example(schema: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value of a schema: an object with all its keys, else `TEXT` or `VALUE`."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and properties and depth < MAX_DEPTH:
        return {
            key: _example(value, depth + 1) if isinstance(value, dict) else VALUE
            for key, value in properties.items()
        }
    return TEXT if schema.get("type") == "string" else VALUE


def _parts(example: str) -> list[str]:
    """Return the text around the values of an example; the quotes of texts belong to it."""
    marked = example.replace(json.dumps(VALUE), HOLE).replace(json.dumps(TEXT)[1:-1], HOLE)
    whole = marked.encode(errors="ignore").decode()  # no tokenizer takes half surrogate pairs
    return whole.split(HOLE)
