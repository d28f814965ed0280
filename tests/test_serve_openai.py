"""The official clients against this server: every response and chunk that it gives is one that they
read."""

import asyncio
import inspect

import openai
import pytest
from pydantic import BaseModel, Field

from quickbeam import LLM, SamplingParams
from quickbeam.config import ServerOptions
from serving import ScriptedRunner, client

MESSAGES = [{"role": "user", "content": "the cat sat on the mat and the cat"}]
TEMPLATE = (
    '{% if tools %}{{ tools | tojson }}<tool_call>"arguments"{% endif %}{% for m in messages %}{{ '
    "m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}

FLAT = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": None}


@pytest.fixture(scope="module")
def scripted(toy_folder):
    with LLM(toy_folder, "ar") as llm:
        llm.tokenizer.chat_template = TEMPLATE
        # answers are scripted: their model need not know the token
        llm.tokenizer.backend_tokenizer.add_tokens(["<tool_call>"])
        yield ScriptedRunner(ServerOptions(served_names=("toy",)), llm)


def using(runner, work, strict=True):
    """What `work` makes of an official client. `strict`: held against the client's types."""

    async def go():
        async with client(runner) as web:
            how = dict(base_url="http://localhost/v1", api_key="none", max_retries=0)
            how["_strict_response_validation"] = strict
            return await work(openai.AsyncOpenAI(http_client=web, **how))

    return asyncio.run(go())


async def gathered(stream):
    return [one async for one in await stream]


def test_every_field_of_a_chat(runner, llm):
    fields = dict(
        temperature=0.8, top_p=0.9, seed=7, n=2, stop=["zzz"], presence_penalty=0.1,
        frequency_penalty=0.1,
    )  # fmt: skip
    ours = dict(
        top_k=40, min_p=0.01, repetition_penalty=1.1, min_tokens=2, ignore_eos=True,
        bad_words=["b"], stop_token_ids=[3], skip_special_tokens=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=12, logit_bias={5: -100}, logprobs=2, **fields, **ours)
    right = llm.chat(MESSAGES, params, method="ar")
    extra = {"speculation": {"method": "logitspec"}, "return_token_ids": True, **ours}
    asked = dict(
        model="toy", messages=MESSAGES, max_completion_tokens=12, logit_bias={"5": -100},
        logprobs=True, top_logprobs=2, response_format={"type": "text"}, parallel_tool_calls=True,
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="me",
        prompt_cache_key="k", extra_body=extra, **fields,
    )  # fmt: skip
    response = using(runner, lambda api: api.chat.completions.create(**asked))
    assert [one.message.content for one in response.choices] == [one.text for one in right]
    ids = [one.model_extra["token_ids"] for one in response.choices]
    assert ids == [one.token_ids for one in right]
    logprobs = [entry.logprob for entry in response.choices[0].logprobs.content]
    assert logprobs == pytest.approx([one.logprob for one in right[0].logprobs])
    usage = response.usage
    assert usage.completion_tokens_details.accepted_prediction_tokens >= 0
    assert usage.prompt_tokens_details.cached_tokens >= 0 and usage.model_extra["steps"] > 0
    assert response.system_fingerprint == runner.fingerprint

    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = using(runner, lambda api: gathered(api.chat.completions.create(**asked)))
    for index, one in enumerate(right):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == one.text
        assert mine[-1].finish_reason == one.finish_reason
    assert chunks[-1].usage.total_tokens == usage.total_tokens


def test_every_field_of_a_completion(runner, llm):
    fields = dict(max_tokens=8, temperature=0.8, seed=3, n=2)
    asked = dict(model="toy", prompt=["one two one", "a b a b"], best_of=2, logprobs=2, **fields)
    asked |= dict(user="me", suffix=None, stop=None, logit_bias=None)
    right = llm.generate(asked["prompt"], SamplingParams(**fields), method="ar")
    response = using(runner, lambda api: api.completions.create(**asked))
    assert [one.text for one in response.choices] == [one.text for one in right]
    assert len(response.choices[0].logprobs.tokens) == len(right[0].token_ids)
    # The client's type of a whole completion, which chunks have, too, wants a finish reason: not
    # even OpenAI gives chunks one.
    asked |= {"logprobs": None, "echo": True, "stream": True}
    echoed = using(runner, lambda api: gathered(api.completions.create(**asked)), strict=False)
    for index, one in enumerate(right):
        mine = [choice for chunk in echoed for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == asked["prompt"][index // 2] + one.text


def test_every_field_of_a_response(runner, llm):
    fields = dict(temperature=0.8, top_p=0.9)
    asked = dict(
        model="toy", input=[{"role": "user", "content": "the cat"}], instructions="be brief",
        max_output_tokens=16, store=False, truncation="disabled", metadata={"a": "b"},
        top_logprobs=1, parallel_tool_calls=True, user="me",
        include=["message.output_text.logprobs"], text={"format": {"type": "text"}},
        extra_body={"seed": 5}, **fields,
    )  # fmt: skip
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat"}]
    right = llm.chat(messages, SamplingParams(max_tokens=16, seed=5, **fields), method="ar")
    whole = using(runner, lambda api: api.responses.create(**asked))
    assert whole.output_text == right.text and whole.usage.output_tokens == len(right.token_ids)
    events = using(runner, lambda api: gathered(api.responses.create(**asked, stream=True)))
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == right.text == events[-1].response.output_text


class Answer(BaseModel):
    x: int


def names_in(value):
    if isinstance(value, dict):
        return {*value}.union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("tools", [False, True])
def test_all_that_the_client_returns_may_be_sent_back(scripted, tools):
    """Fields of its own included: `parsed`, `parsed_arguments`, the `index` of a call, nulls."""
    scripted.script = f"See. {CALL}" if tools else '{"x": 3}'
    chat = dict(model="toy", messages=MESSAGES) | ({"tools": [TOOL]} if tools else {})
    items = dict(model="toy", input=MESSAGES) | ({"tools": [FLAT]} if tools else {})

    async def streamed(stream, end):
        async with stream as events:
            return await getattr(events, end)()

    async def go(api):
        completions, responses = api.chat.completions, api.responses
        form = {} if tools else {"response_format": Answer}
        chats = [await completions.create(**chat)]
        chats += [await streamed(completions.stream(**chat, **form), "get_final_completion")]
        if not tools:  # it takes strict tools only
            chats += [await completions.parse(**chat, **form)]
        for message in [one.choices[0].message.model_dump(warnings=False) for one in chats]:
            calls = [one["id"] for one in message["tool_calls"] or []]
            outputs = [{"role": "tool", "tool_call_id": one, "content": "4"} for one in calls]
            await completions.create(**{**chat, "messages": [*MESSAGES, message, *outputs]})
        form = {} if tools else {"text_format": Answer}
        given = [await responses.create(**items)]
        given += [await streamed(responses.stream(**items, **form), "get_final_response")]
        given += [await responses.parse(**items, **form)]
        for answer in [one.model_dump(by_alias=True, warnings=False) for one in given]:
            output = answer["output"]
            calls = [one["call_id"] for one in output if one["type"] == "function_call"]
            kind = {"type": "function_call_output", "output": "4"}
            outputs = [{**kind, "call_id": one} for one in calls]
            settings = {*answer} & {*inspect.signature(responses.create).parameters}
            again = {**{name: answer[name] for name in settings}, **items}
            await responses.create(**{**again, "input": [*MESSAGES, *output, *outputs]})
        return chats, given

    chats, given = using(scripted, go)
    seen = names_in([one.model_dump(warnings=False) for one in (*chats, *given)])
    own = {"parsed_arguments", "index"} if tools else {"parsed", "annotations", "refusal"}
    assert seen >= own


def test_errors_are_the_clients_own(runner, scripted):
    asked = {"model": "toy", "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError) as refused:
        using(runner, lambda api: api.chat.completions.create(**asked, temperature=-1))
    assert refused.value.param == "temperature" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        using(runner, lambda api: api.chat.completions.create(**{**asked, "model": "gpt-9"}))
    assert missing.value.code == "model_not_found"
    scripted.script, scripted.end = "one", RuntimeError("x")
    try:
        with pytest.raises(openai.InternalServerError):
            using(scripted, lambda api: api.chat.completions.create(**asked))
        with pytest.raises(openai.APIError, match="log says why"):
            using(scripted, lambda api: gathered(api.chat.completions.create(**asked, stream=True)))
    finally:
        scripted.end = "stop"


class Size(BaseModel):
    size: int = Field(ge=0, le=99)


def test_structured_output_by_the_clients_helper(runner):
    asked = {"model": "toy", "temperature": 0}

    async def work(api):
        size = dict(response_format=Size, max_tokens=200)
        chat = await api.chat.completions.parse(**asked, messages=MESSAGES, **size)
        size = dict(text_format=Size, max_output_tokens=200)
        response = await api.responses.parse(**asked, input="x", **size)
        return chat.choices[0].message.parsed, response.output_parsed

    assert all(0 <= one.size <= 99 for one in using(runner, work))
