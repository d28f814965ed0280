"""Who is let in, who waits, who is turned away, and that nothing of it is left behind."""

import asyncio
from dataclasses import replace

import pytest

from cases import refuses
from quickbeam import LLM, InvalidInput, SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.serve.admission import Busy, Gate
from running import LONG, begun, braked, idle, job, served, until

pytestmark = pytest.mark.anyio

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(toy_folder):
    with LLM(toy_folder, "pld", max_running=2) as llm:
        yield llm


def gate(max_running=1, **settings):
    gate = Gate(ServerOptions(**settings))
    gate.max_running, gate.phase = max_running, "ready"
    return gate


def counts(one):
    return one.inside, one.waiting, one.waiting_tokens


def test_what_waits_is_counted_until_it_is_over_and_turned_away():
    one = gate(max_running=1, max_waiting=3)
    with one.enter(100, 3) as ticket:
        assert counts(one) == (3, 3, 100)
        ticket.taken = 2
    assert counts(one) == (2, 2, 100)  # the third was not taken
    ticket.begin()
    assert counts(one) == (2, 1, 0)  # what they begin with is read once
    ticket.begin()
    ticket.end()
    assert counts(one) == (1, 0, 0)
    ticket.end()
    assert counts(one) == (0, 0, 0)
    one = gate(max_running=9, max_waiting_tokens=100)
    # its turn would never come if they were too many
    with one.enter(1000), pytest.raises(Busy, match="about 1000 tokens wait"):
        one.enter(1)
    first = one.enter(60)
    refuses("this one has about 41", one.enter, 41, error=Busy)
    first.weigh(40)
    with one.enter(60), pytest.raises(Busy):
        one.enter(1)
    first.weigh(0)
    first.weigh(500)  # it waits no longer
    assert one.waiting_tokens == 0
    one.enter(100)


def test_settings_that_can_not_be():
    for given, words in (
        ({"port": 70000}, "port=70000"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"max_body": "0"}, "size of memory"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"queue_timeout": float("nan")}, "queue_timeout=nan"),
        ({"served_names": ("toy", " ")}, "is empty"),
        ({"drain_timeout": -1.0}, "drain_timeout=-1"),
        ({"api_keys": ("good", "")}, "API key"),
        ({"api_keys": ("schlüssel",)}, "API key"),
        ({"cors_origins": ("example.com",)}, "example.com"),
    ):
        refuses(words, ServerOptions, **given)


async def test_a_full_server_tells_when_to_come_back(llm):
    alone = llm.generate("hello", LONG, method="ar").token_ids
    async with served(llm, max_waiting=1) as (runner, client):
        with braked(llm.engine) as brake:
            asked = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
            asked |= {"temperature": 0, "return_token_ids": True}
            posts = [client.post("/v1/completions", json=asked) for _ in range(3)]
            posts = [asyncio.create_task(post) for post in posts]
            await until(lambda: runner.gate.inside == 3)
            refused = await client.post("/v1/completions", json=asked)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            more = asked | {"n": 3, "temperature": 1}
            assert (await client.post("/v1/completions", json=more)).status_code == 429
            never = await client.post("/v1/completions", json=more | {"n": 9})
            assert never.status_code == 400 and "takes at most 3" in never.text
            brake.release()
            for response in await asyncio.gather(*posts):
                assert response.status_code == 200
                assert response.json()["choices"][0]["token_ids"] == alone
        await until(lambda: idle(runner))
        assert (await client.post("/v1/completions", json=asked)).status_code == 200


async def test_who_waits_for_too_long_is_turned_away_and_who_runs_is_not(llm):
    async with served(llm) as (runner, client):
        with braked(llm.engine) as brake:
            tasks = [asyncio.create_task(begun(runner, job(llm))) for _ in range(2)]
            await until(lambda: runner.gate.inside == len(runner.under_way) == 2)
            brake.release(3)  # answers need 200 steps
            running = [stream for task in tasks for stream in await task]
            runner.options = replace(runner.options, queue_timeout=0.3)
            asked = {"model": runner.name, "prompt": "hello", "max_tokens": 4}
            late = await client.post("/v1/completions", json=asked)
            assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1
            assert "0.3 seconds" in late.json()["error"]["message"]
            await until(lambda: all(stream.times.began for stream in running))
            # those that run; the engine may not have seen yet that one left
            assert runner.gate.inside in (2, 3)
            brake.release()
            for stream in running:
                assert [delta async for delta in stream.deltas()]
                assert stream.completion.finish_reason == "length"
        await until(lambda: idle(runner))


async def test_what_the_engine_refuses_leaves_nothing(llm):
    async with served(llm, max_prompt_tokens=20) as (runner, _):
        for bad, words in (
            (job(llm, "x" * 21, SHORT), "at most 20"),
            (job(llm, "hello", SamplingParams(max_tokens=5000)), "context of 512"),
            (job(llm, "", SHORT), "empty prompt"),
            (job(llm, "hello", SHORT, method="lgitspec"), "lgitspec"),
            (job(llm, "hello", SHORT, budget=-1), "budget=-1"),
            (job(llm, "hello", SamplingParams(logit_bias={9999: 1.0})), "logit_bias"),
        ):
            with pytest.raises(InvalidInput, match=words):
                await begun(runner, job(llm, "hello", SHORT), bad)
        await until(lambda: idle(runner))


async def test_nothing_on_the_event_loop_waits_for_a_step(llm):
    async with served(llm) as (runner, client):
        with braked(llm.engine) as brake:
            task = asyncio.create_task(begun(runner, job(llm)))
            await until(brake.waits.is_set)
            for path in ("/health", "/metrics", "/v1/models", "/"):
                assert (await client.get(path)).status_code == 200
            other = asyncio.create_task(begun(runner, job(llm, "another")))
            await until(lambda: runner.gate.waiting == 2 and len(runner.under_way) == 2)
            assert not task.done() and not other.done()
        for stream in await task + await other:
            stream.close()
        await until(lambda: idle(runner))
