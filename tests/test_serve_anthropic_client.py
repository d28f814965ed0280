"""Anthropic's official client against this server: every response and event that it gives is one
that the client reads."""

from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from quickbeam import LLM, SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.serve.runner import Runner
from running import serving
from serving import ScriptedRunner

USER = {"role": "user", "content": "the cat sat on the mat and the cat"}
TEMPLATE = (
    '{% if tools %}{{ tools | tojson }}<tool_call>"arguments"{% endif %}{% for m in messages %}{{ '
    "m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
X = {"x": {"type": "integer", "minimum": 0, "maximum": 99}}
TOOL = {
    "name": "f",
    "description": "Add one.",
    "input_schema": {"type": "object", "properties": X, "required": ["x"]},
}
TOOL["input_schema"]["additionalProperties"] = False
KEY = "known"


@pytest.fixture(scope="module")
def calling(toy_folder):
    with LLM(toy_folder, "pld") as llm:
        llm.tokenizer.chat_template = TEMPLATE
        yield llm


@pytest.fixture(scope="module")
def api(calling):
    """A client of a server with that model. Responses are held against the client's types."""
    runner = Runner(ServerOptions(served_names=("toy",), api_keys=(KEY,)), calling)
    with serving(runner) as (address, _), client(address) as api:
        yield api


@pytest.fixture
def hermes(calling):
    """A server whose answers are given, and its client."""
    runner = ScriptedRunner(ServerOptions(served_names=("toy",)), calling)
    with serving(runner) as (address, _), client(address) as api:
        yield runner, api


def client(address, **settings):
    settings = {"api_key": KEY, "max_retries": 0, **settings}
    return anthropic.Anthropic(base_url=address, _strict_response_validation=True, **settings)


def test_every_field_of_a_message(api, calling):
    fields = dict(temperature=0.8, top_p=0.9, top_k=40)
    asked = dict(
        model="toy", max_tokens=16, messages=[USER], stop_sequences=["zzz"],
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "me"}, service_tier="auto", thinking={"type": "disabled"},
        tools=[TOOL], tool_choice={"type": "none"}, output_config={"effort": "low"},
        extra_headers={"anthropic-beta": "context-1m-2025-08-07"}, extra_body={"seed": 5, **fields},
    )  # fmt: skip
    right = calling.chat(
        [{"role": "system", "content": "be brief"}, USER],
        SamplingParams(max_tokens=16, seed=5, **fields),
        method="ar",
    )
    message = api.messages.create(**asked)
    assert [block.text for block in message.content] == [right.text]
    usage = message.usage
    assert usage.output_tokens == len(right.token_ids) and usage.model_extra["steps"] > 0
    assert message.model_extra["seed"] == 5

    events = [*api.messages.create(**asked, stream=True)]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == right.text
    with api.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == right.text
        last = stream.get_final_message()
    assert last.content[0].text == right.text and last.stop_reason == message.stop_reason
    read = last.usage.input_tokens + last.usage.cache_read_input_tokens
    counted = api.messages.count_tokens(
        **{name: asked[name] for name in ("model", "messages", "system", "tools", "tool_choice")}
    )
    assert counted.input_tokens == read == usage.input_tokens + usage.cache_read_input_tokens
    beta = api.beta.messages.create(**{**asked, "context_management": {"edits": []}})
    assert beta.content[0].text == right.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_agents_loop(api, calling, stream):
    """Calls are forced, so that the model makes one; its result is part of the next prompt."""
    fields = {"model": "toy", "max_tokens": 64, "tools": [TOOL], "extra_body": {"seed": 3}}

    def ask(**asked):
        if not stream:
            return api.messages.create(**fields, **asked)
        with api.messages.stream(**fields, **asked) as events:
            return events.get_final_message()

    choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    message = ask(messages=[USER], tool_choice=choice)
    (call,) = message.content
    assert message.stop_reason == "tool_use" and 0 <= call.input["x"] <= 99
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["x"] + 1)}
    again = [USER, {"role": "assistant", "content": message.content}]
    again += [{"role": "user", "content": [result]}]
    message = ask(messages=again, tool_choice={"type": "none"})
    called = {"id": call.id, "function": {"name": "f", "arguments": call.input}}
    chat = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": result["content"]},
    ]
    params = SamplingParams(max_tokens=64, temperature=1, seed=3)
    assert message.content[0].text == calling.chat(chat, params, method="ar").text


def test_all_that_the_client_returns_may_be_sent_back(hermes):
    runner, api = hermes
    runner.script = f"<think>Hm.</think>See. {CALL}"
    asked = {"model": "toy", "max_tokens": 99, "tools": [TOOL]}
    with api.messages.stream(**asked, messages=[USER]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= {*kinds}
    for message in (api.messages.create(**asked, messages=[USER]), streamed):
        thought, text, call = message.content
        assert (thought.thinking, text.text, call.input) == ("Hm.", "See.", {"x": 3})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "4", "is_error": False}
        for content in (message.content, message.model_dump()["content"]):
            turns = [{"role": "assistant", "content": content}]
            turns += [{"role": "user", "content": [result]}]
            api.messages.create(**asked, messages=[USER, *turns])
            prompt = runner.llm.tokenizer.decode(runner.jobs[0].prompt)
            assert prompt.endswith(f"user: {USER['content']}assistant: See.3tool: 4")


def test_the_clients_own_loop_runs_tools(hermes):
    runner, api = hermes

    @anthropic.beta_tool
    def f(x: int) -> str:
        """Add one."""
        runner.script = "It is 4."
        return str(x + 1)

    runner.script = CALL
    loop = api.beta.messages.tool_runner(
        model="toy", max_tokens=99, tools=[f], messages=[USER], thread=False
    )
    assert loop.until_done().content[0].text == "It is 4."


class Size(BaseModel):
    size: Literal["small", "large"]


def test_structured_output_by_the_clients_helper(api):
    asked = {"model": "toy", "max_tokens": 200, "messages": [USER]}
    assert isinstance(api.messages.parse(**asked, output_format=Size).parsed_output, Size)


def test_errors_are_the_clients_own(api, hermes):
    asked = {"model": "toy", "max_tokens": 16, "messages": [USER]}
    with pytest.raises(anthropic.BadRequestError) as refused:
        api.messages.create(**asked, extra_body={"temperature": -1})
    assert refused.value.type == "invalid_request_error" and refused.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(**{**asked, "model": "claude"})
    with (
        client(api.base_url, api_key="unknown") as stranger,
        pytest.raises(anthropic.AuthenticationError, match="x-api-key"),
    ):
        stranger.messages.create(**asked)
    with client(api.base_url, api_key=None, auth_token=KEY) as bearer:
        assert bearer.messages.create(**asked).content
    runner, scripted = hermes
    runner.gate.phase = "draining"
    with pytest.raises(anthropic.OverloadedError):
        scripted.messages.create(**asked)
    runner.gate.phase, runner.script, runner.end = "ready", "one", RuntimeError("x")
    with pytest.raises(anthropic.InternalServerError):
        scripted.messages.create(**asked)
    with pytest.raises(anthropic.APIStatusError, match="log says why"):
        [*scripted.messages.create(**asked, stream=True)]


def test_models(api):
    (model,) = api.models.list()
    assert model.id == "toy" and model.max_input_tokens == 512
    assert api.models.retrieve("toy") == model
