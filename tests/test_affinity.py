"""Requests of one conversation have one name, by which they go to one replica."""

import json
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quickbeam.config import ServerOptions
from quickbeam.serve.affinity import FIRST_WORDS, HEAD, conversation_key, ranked
from quickbeam.serve.metrics import ReplicaMetrics, expose
from quickbeam.serve.runner import Runner

ASK = {"role": "user", "content": "Name three rivers."}
LATER = [ASK, {"role": "assistant", "content": "Rhine …"}, {"role": "user", "content": "More."}]
OTHER = {"role": "user", "content": "Name three colours."}
SYSTEM = {"role": "system", "content": "Be brief."}
NAMES = [f"replica{i}" for i in range(8)]


def key(tenant="me", **body):
    return conversation_key(tenant, json.dumps(body, ensure_ascii=False).encode())


@pytest.mark.parametrize(("first", "later"), [
    ({"messages": [ASK]}, {"messages": LATER, "temperature": 0}),
    ({"messages": [SYSTEM, ASK], "model": "toy"}, {"model": "toy", "messages": [SYSTEM, *LATER]}),
    ({"input": "abc", "stream": True}, {"stream": False, "input": "abc"}),
    ({"instructions": "Be brief.", "input": [ASK]}, {"input": LATER}),
    ({"prompt": "é" * FIRST_WORDS}, {"prompt": "é" * FIRST_WORDS + "and more"}),
    ({"prompt": [5] * FIRST_WORDS}, {"prompt": [5] * FIRST_WORDS + [6]}),
    ({"messages": [ASK]}, {"messages": [*LATER, {"role": "user", "content": "é" * HEAD}]}),
])  # fmt: skip
def test_later_turns_have_the_key_of_the_first(first, later):
    assert key(**first) == key(**later) != ""


def test_other_conversations_and_other_tenants_have_other_keys():
    keys = [key(messages=[SYSTEM, ASK]), key(messages=[SYSTEM, OTHER])]
    keys += [key("you", messages=[SYSTEM, ASK]), key(prompt="abc"), key(prompt="abd")]
    assert len({*keys}) == len(keys) and "" not in keys


@pytest.mark.parametrize("body", [
    b"", b"abc", b"[1]", b"{}", b'{"messages": []}', b'{"prompt": ""}', b'{"messages": 5.0e',
    json.dumps({"messages": [SYSTEM]}).encode(),
    json.dumps({"model": "a" * HEAD, "prompt": "b"}).encode(),
])  # fmt: skip
def test_what_is_no_conversation_has_no_key(body):
    assert conversation_key("me", body) == ""


def test_conversations_spread_and_only_those_of_a_lost_replica_move():
    keys = [key(prompt=f"abc {i}") for i in range(800)]
    first = {each: ranked(each, NAMES)[0] for each in keys}
    assert all(60 < count < 140 for count in Counter(first.values()).values())
    for each in keys:
        assert sorted(ranked(each, NAMES)) == NAMES
        left = ranked(each, NAMES[1:])
        assert left == [name for name in ranked(each, reversed(NAMES)) if name != NAMES[0]]


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_metrics_of_replicas_stand_side_by_side(accept):
    registries = {name: Runner(ServerOptions()).metrics for name in ("a", "b")}
    for i, metrics in enumerate(registries.values()):
        metrics.metric("vllm:prompt_tokens").inc(i + 1)
        metrics.metric("vllm:time_to_first_token_seconds").observe(0.003)
    families = {name: list(each.registry.collect()) for name, each in registries.items()}
    text = expose(ReplicaMetrics(families), accept)[0].decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len({*types}) > 20
    samples = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    assert [line.rpartition(" ")[2] for line in samples] == ["1.0", "2.0"]
    assert 'replica="a"' in samples[0] and 'replica="b"' in samples[1]
    if not accept:
        alone = expose(registries["a"].registry, "")[0].decode()
        assert count_samples(text) == 2 * count_samples(alone)


def count_samples(text):
    return sum(len(family.samples) for family in text_string_to_metric_families(text))
