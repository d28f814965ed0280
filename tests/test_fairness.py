"""Tenants take turns: nobody's many requests, nor a long prompt, hold another's short one up."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from answers import answer, request, run
from cases import before, refuses
from models import tiny
from quickbeam.config import ServerOptions
from quickbeam.engine.engine import Engine
from quickbeam.engine.scheduler import FairQueue
from quickbeam.methods.base import NoDraft
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import TENANT, Busy, Gate
from quickbeam.serve.security import Guard


@pytest.fixture(scope="module")
def model():
    return make_model(tiny("llama", torch.bfloat16, seed=3))


def add(engine, tenant, prompt, tokens):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    asked = request(engine.model, NoDraft(), params, prompt, budget=1)
    asked.tenant = tenant
    return engine.add(asked)


def steps_until_started(engine, one):
    steps = 0
    while not one.started:
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_tenants_get_equal_shares_whatever_the_size_of_their_requests(seed):
    """At any time, two that wait have been served the same, but for a request."""
    rng, queue, served = random.Random(seed), FairQueue(), Counter[str]()
    largest = {"small": 40, "large": 1500, "mixed": 600}
    for arrival in range(600):
        tenant = rng.choice(list(largest))
        asked, cost = SimpleNamespace(tenant=tenant), rng.randint(1, largest[tenant])
        queue.add(SimpleNamespace(arrival=arrival, cost=cost, request=asked))
    while len(queue.heads()) == len(largest):
        one = queue.heads()[0]
        queue.take(one)
        served[one.request.tenant] += one.cost
        assert max(served.values()) - min(served[name] for name in largest) <= 1500


def test_who_was_served_much_is_next_when_others_were_who_come_again_and_again():
    queue, costs, taken = FairQueue(), {"large": 300, "a": 40, "b": 40, "c": 40}, list[str]()

    def add(tenant):
        asked = SimpleNamespace(tenant=tenant)
        queue.add(SimpleNamespace(arrival=len(taken), cost=costs[tenant], request=asked))

    for tenant in ("large", "large", *costs):
        add(tenant)
    for _ in range(60):
        queue.take(one := queue.heads()[0])
        taken.append(one.request.tenant)
        add(taken[-1])  # it waits for nothing else in the meantime
    assert taken.count("large") == 3 and 15 <= taken.count("a") <= 20


@pytest.mark.parametrize(("tenants", "most_steps"), [(("many", "few"), 3), (("same", "same"), 60)])
def test_a_short_request_need_not_wait_for_anothers_many(model, tenants, most_steps):
    """The second case is the wrong version: without tenants, it waits for half of the others."""
    engine = Engine(model, max_running=8, share=False)
    others = [add(engine, tenants[0], [3 + i, 4, 5], 60) for i in range(24)]
    for _ in range(10):
        engine.step()
    one = add(engine, tenants[1], [9, 8, 7], 8)
    steps = steps_until_started(engine, one)
    assert steps <= most_steps if tenants[0] != tenants[1] else steps > most_steps
    run(engine)
    alone = answer(model, NoDraft(), one.params, [9, 8, 7], budget=1)
    assert one.output.token_ids == alone.output.token_ids
    assert all(len(other.output.token_ids) == 60 for other in others)
    engine.close()


def test_a_long_request_does_not_take_the_kept_place(model):
    engine = Engine(model, max_running=8, share=False)
    for i in range(20):
        add(engine, "many", [3 + i, 4, 5], 30)
    engine.step()
    long = add(engine, "long", [7] * 3, 2000)
    assert steps_until_started(engine, add(engine, "short", [8] * 3, 5)) <= 3
    assert not long.started
    assert steps_until_started(engine, long) < 60  # it is next when a place is free
    engine.close()


def test_a_short_request_is_read_beside_a_long_prompt(model, monkeypatch):
    if not model.exact:
        pytest.skip("no native kernels on this machine")
    engine, rows = Engine(model, share=False), list[int]()
    count = lambda batch: rows.append(sum(part.rows for part in batch.parts))  # noqa: E731
    before(monkeypatch, model, "forward", count)
    long = add(engine, "long", [3 + i * 7 % 90 for i in range(1500)], 2)
    for _ in range(3):
        engine.step()
    rows.clear()
    one = add(engine, "short", [9, 8, 7] * 5, 4)
    assert steps_until_started(engine, one) <= 2 and not long.started
    assert sum(rows) <= 3 * model.mixed_chunk < model.chunk
    run(engine, long)
    engine.close()


def test_a_tenant_leaves_a_part_of_the_places_and_of_the_queue(model):
    gate = Gate(ServerOptions(max_waiting=16))
    gate.max_running, gate.phase = 1, "ready"
    tickets = [gate.enter(1, 1, "many") for _ in range(15)]
    refuses("of this client", gate.enter, 1, 1, "many", error=Busy)
    gate.enter(1, 2, "few")
    with pytest.raises(Busy):  # all is full
        gate.enter(1, 1, "few")
    with tickets[0]:  # it goes away before it is answered
        pass
    gate.enter(1, 1, "many")
    assert gate.inside == 17
    for tenant, most, used in (("a", 8, 7), ("a", 4, 4), (None, 8, 8)):
        engine = Engine(model, max_running=most, share=False)
        for i in range(20):
            add(engine, tenant, [3 + i, 4, 5], 30)
        for _ in range(5):
            engine.step()
        assert len(engine.scheduler.active) == used
        engine.close()


def test_tenants_are_keys_or_addresses():
    async def tenant_of(keys, key, address):
        seen = []

        async def app(scope, receive, send):
            seen.append(TENANT.get())

        scope = {"type": "http", "path": "/x", "method": "GET", "client": (address, 1)}
        scope["headers"] = [(b"authorization", f"Bearer {key}".encode())]
        await Guard(app, ServerOptions(host="0.0.0.0", api_keys=keys))(scope, None, None)
        return seen[0]

    def run(*given):
        return asyncio.run(tenant_of(*given))

    keys = ("a", "b")
    assert run(keys, "a", "1.1.1.1") == run(keys, "a", "2.2.2.2") != run(keys, "b", "1.1.1.1")
    assert run((), "a", "1.1.1.1") == run((), "b", "1.1.1.1") != run((), "a", "2.2.2.2")
    assert TENANT.get() is None
