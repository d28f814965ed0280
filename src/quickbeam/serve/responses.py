"""The endpoint `/v1/responses`, without state: whole, or as a stream of events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from quickbeam.engine.result import Completion, Logprob
from quickbeam.grammar.token_texts import TokenTexts
from quickbeam.serve import convert
from quickbeam.serve.answers import AnsweredRequest, Json, Streams
from quickbeam.serve.calls import ParsedCall
from quickbeam.serve.errors import problem
from quickbeam.serve.logprobs import chat_logprobs
from quickbeam.serve.responses_request import ResponsesRequest
from quickbeam.serve.runner import Runner
from quickbeam.serve.tool_fields import OfferedTool, custom_input, flat, flat_tools
from quickbeam.serve.tools import ToolUse

STATUS = {"stop": "completed", "length": "incomplete"}  # by how an answer ended
INCOMPLETE = {"reason": "max_output_tokens"}
# fields of every response
FIXED: Json = {
    "object": "response",
    "background": False,
    "error": None,
    "store": False,
    "previous_response_id": None,
    "service_tier": "default",
    "truncation": "disabled",
}
# fields of the request that a response repeats, with their defaults
REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "user": None,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "temperature": 1.0,
    "top_p": 1.0,
}


async def begin(runner: Runner, request: ResponsesRequest) -> Responses:
    """Have the engine begin with a request to `/v1/responses`."""
    answers, tools = await convert.begin_conversation(runner, request, request.conversation)
    return Responses(runner, request, answers, tools)


class Responses(AnsweredRequest):
    """A request to the Responses API while it is answered."""

    def __init__(
        self, runner: Runner, request: ResponsesRequest, answers: Streams, tools: ToolUse
    ) -> None:
        self.answers = answers
        self._runner = runner
        self._request = request
        tokenizer = runner.llm.tokenizer
        (prompt,) = answers.prompts
        self._parser = tools.parser(prompt, tokenizer)
        texts = None if request.num_logprobs is None else TokenTexts(tokenizer)
        self._items = Items(texts, request.offered)
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())

    def response(self, completions: Sequence[Completion]) -> Json:
        (completion,) = completions
        pieces = [*self._parser.feed(completion.text), *self._parser.finish()]
        for _ in self._items.add(pieces, completion.logprobs or []):
            pass
        for _ in self._items.end(completion.finish_reason):
            pass
        return self._response(completion)

    async def chunks(self) -> AsyncIterator[Json]:
        with self.answers as answers:
            for kind in ("response.created", "response.in_progress"):
                yield {"type": kind, "response": self._response(None)}
            async for _, delta in answers.parts():
                if delta is not None:
                    for event in self._items.add(self._parser.feed(delta.text), delta.logprobs):
                        yield event
            (completion,) = answers.completions
            for event in self._items.add(self._parser.finish(), []):
                yield event
            for event in self._items.end(completion.finish_reason):
                yield event
            response = self._response(completion)
            yield {"type": f"response.{response['status']}", "response": response}

    async def events(self) -> AsyncIterator[dict[str, str]]:
        """Yield the events with numbers, as server-sent events; an error becomes the last one."""
        number = 0
        try:
            async for event in self.chunks():
                numbered = {**event, "sequence_number": number}
                yield {"event": event["type"], "data": json.dumps(numbered)}
                number += 1
        except Exception as error:
            refusal = problem(error)
            event = {
                "type": "error",
                "code": refusal.code or refusal.type,
                "message": refusal.message,
                "param": refusal.param,
                "sequence_number": number,
            }
            yield {"event": "error", "data": json.dumps(event)}

    def _response(self, completion: Completion | None) -> Json:
        """Return the response object; `completion` is None while the answer is not complete."""
        status = "in_progress"
        if completion is not None:
            status = STATUS[completion.finish_reason]
        repeated = self._request.model_dump(
            by_alias=True, exclude_none=True, include={*REPEATED, "tools"}
        )
        repeated["tools"] = flat_tools(repeated.get("tools", ()))
        choice = repeated.get("tool_choice")
        if isinstance(choice, dict):
            repeated["tool_choice"] = flat(choice)
        defaults = self._runner.defaults
        return {
            **FIXED,
            **REPEATED,
            **{name: defaults[name] for name in ("temperature", "top_p") if name in defaults},
            **repeated,
            "id": self._id,
            "created_at": self._created,
            "status": status,
            "incomplete_details": INCOMPLETE if status == "incomplete" else None,
            "model": self._runner.name,
            "output": [] if completion is None else self._items.output,
            "usage": None if completion is None else self._usage(),
            "system_fingerprint": self._runner.fingerprint,
            "seed": self.answers.seeds[0],
        }

    def _usage(self) -> Json:
        usage = self.answers.usage("input", "output")
        usage["input_tokens_details"]["cache_write_tokens"] = 0
        return usage


class Items:
    """The output items of a response, and the events that tell how they grow.

    - `texts`: for log-probabilities; None where they are not asked for.
    - `tools`: those that may be called, by the names that the model knows.
    """

    def __init__(self, texts: TokenTexts | None, tools: Mapping[str, OfferedTool]) -> None:
        self.output = list[Json]()
        self._texts = texts
        self._tools = tools
        self._open: Json | None = None  # the message that text is added to
        self._logprobs = list[Json]()  # of tokens whose text has not come yet

    def add(
        self, pieces: Sequence[str | ParsedCall], logprobs: Sequence[Logprob]
    ) -> Iterator[Json]:
        """Add text and tool calls, and yield their events."""
        if self._texts is not None:
            self._logprobs += chat_logprobs(logprobs, self._texts)
        for i, piece in enumerate(pieces):
            if isinstance(piece, ParsedCall):
                yield from self._call(piece)
            else:
                # what comes after it has log-probabilities of its own
                is_last = i == len(pieces) - 1
                yield from self._text(piece, None if is_last else len(piece.encode()))

    def end(self, finish_reason: str) -> Iterator[Json]:
        """End the output, and yield the events of that."""
        if self._open is None and not self.output:
            yield from self._begin_message()
        yield from self._end_message(STATUS[finish_reason])

    def _text(self, text: str, size: int | None) -> Iterator[Json]:
        """Add text. It takes the log-probabilities of `size` bytes; None stands for all."""
        if self._open is None:
            yield from self._begin_message()
        assert self._open is not None
        part = self._open["content"][0]
        logprobs = self._take_logprobs(size)
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._text_event("output_text.delta", delta=text, logprobs=logprobs)

    def _begin_message(self) -> Iterator[Json]:
        item: Json = {
            "type": "message",
            "id": f"msg_{secrets.token_hex(12)}",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self.output.append(item)
        yield self._item_event("added")
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        self._open = item
        yield self._text_event("content_part.added", part={**part, "logprobs": []})

    def _end_message(self, status: str) -> Iterator[Json]:
        if self._open is None:
            return
        part = self._open["content"][0]
        part["logprobs"] += self._take_logprobs()
        self._open["status"] = status
        yield self._text_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._text_event("content_part.done", part=part)
        yield self._item_event("done")
        self._open = None

    def _call(self, call: ParsedCall) -> Iterator[Json]:
        self._take_logprobs()  # those of the call's tokens, which no text shows
        yield from self._end_message("completed")
        tool = self._tools[call.name]
        if tool.custom:
            kind, field = "custom_tool_call", "input"
            id_prefix, text = "ctc", custom_input(call.arguments)
        else:
            kind, field = "function_call", "arguments"
            id_prefix, text = "fc", call.arguments
        item: Json = {
            "type": kind,
            "id": f"{id_prefix}_{secrets.token_hex(12)}",
            "call_id": call.id,
            "name": tool.name,
            field: "",
            "status": "in_progress",
        }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self.output.append(item)
        yield self._item_event("added")
        position = {"item_id": item["id"], "output_index": len(self.output) - 1}
        event = f"response.{kind}_{field}"
        yield {"type": f"{event}.delta", "delta": text, **position}
        yield {"type": f"{event}.done", "name": tool.name, field: text, **position}
        item[field] = text
        item["status"] = "completed"
        yield self._item_event("done")

    def _item_event(self, what: str) -> Json:
        """Return an event with a copy of the last item, as the item itself grows further."""
        item = {
            name: [*value] if isinstance(value, list) else value
            for name, value in self.output[-1].items()
        }
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.output) - 1,
            "item": item,
        }

    def _text_event(self, kind: str, **fields: Any) -> Json:
        """Return an event about the text of the message that is open."""
        assert self._open is not None
        return {
            "type": f"response.{kind}",
            "item_id": self._open["id"],
            "output_index": len(self.output) - 1,
            "content_index": 0,
            **fields,
        }

    def _take_logprobs(self, size: int | None = None) -> list[Json]:
        """Take the log-probabilities of the first tokens, which have `size` bytes, or all."""
        end = seen = 0
        while end < len(self._logprobs) and (size is None or seen < size):
            seen += len(self._logprobs[end]["bytes"])
            end += 1
        taken = self._logprobs[:end]
        self._logprobs = self._logprobs[end:]
        return taken
