"""What `/metrics` counts, held against the answers themselves, and the dashboard that reads it."""

import asyncio
import json
import re
from dataclasses import replace
from importlib.resources import files

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from quickbeam import LLM, SamplingParams
from quickbeam.config import ServerOptions
from quickbeam.serve.metrics import expose
from quickbeam.serve.runner import Runner
from running import LONG, begun, braked, idle, job, served, until

pytestmark = pytest.mark.anyio

# of vLLM, as its dashboards and autoscalers ask for them
VLLM = """
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total
prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket request_prompt_tokens_bucket request_generation_tokens_bucket
"""
PROMQL = "sum rate by le avg max increase histogram_quantile on group_left"
LABELS = {"model_name", "finished_reason", "reason", "source", "position"}
ASKED = {"model": "tiny", "prompt": "hello"}


@pytest.fixture(scope="module")
def llm(toy_folder):
    with LLM(toy_folder, "pld", budget=6) as llm:
        yield llm


async def read(client):
    """Samples by name, then by the labels that aren't the model's, joined."""
    response = await client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    metrics = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert sample.name.startswith("process_") or labels.pop("model_name") == "tiny"
            metrics.setdefault(sample.name, {})[",".join(labels.values())] = sample.value
    return metrics


async def answered(runner, jobs):
    """The completions of jobs that run side by side, each a request."""
    streams = [stream for one in jobs for stream in await begun(runner, one)]
    for stream in streams:
        async for _ in stream.deltas():
            pass
    await until(lambda: idle(runner))
    return [stream.completion for stream in streams]


async def test_what_is_counted_is_what_was_answered(llm):
    prompts = ["the cat sat on the mat and the cat", "one two three one two", "hello", "a b " * 40]
    sampled = SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True)
    asked = [job(llm, text, params) for text in prompts for params in (LONG, sampled)]
    llm.reset()
    async with served(llm, served_names=("tiny",)) as (runner, client):
        counts = [one.statistics for one in await answered(runner, asked)]
        metrics = await read(client)
    read_tokens, new = sum(len(one.prompt) for one in asked), [one.new_tokens for one in counts]
    sources = [source for one in counts for source in one.sources.values()]
    plain = {
        "vllm:prompt_tokens_total": read_tokens,
        "vllm:generation_tokens_total": sum(new),
        "vllm:prefix_cache_queries_total": read_tokens,
        "vllm:prefix_cache_hits_total": sum(one.cached_tokens for one in counts),
        "vllm:spec_decode_num_draft_tokens_total": sum(one.nodes - one.steps for one in counts),
        "vllm:spec_decode_num_accepted_tokens_total": sum(one.accepted for one in sources),
        "vllm:time_to_first_token_seconds_count": len(counts),
        "vllm:e2e_request_latency_seconds_count": len(counts),
        "vllm:request_queue_time_seconds_count": len(counts),
        "vllm:inter_token_latency_seconds_count": sum(new) - len(counts),
        "vllm:time_per_output_token_seconds_count": sum(new) - len(counts),
        "vllm:request_generation_tokens_sum": sum(new),
        "quickbeam:nodes_per_step_count": sum(one.steps for one in counts),
        "quickbeam:nodes_per_step_sum": sum(one.nodes for one in counts),
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
    }
    assert {name: metrics[name][""] for name in plain} == plain
    accepted = plain["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted > 0 and plain["vllm:prefix_cache_hits_total"] > 0
    depths = metrics["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(depths.values()) == accepted
    falling = [
        metrics["vllm:spec_decode_num_drafts_total"][""],
        *(depths[str(i)] for i in range(5)),
    ]
    assert falling == sorted(falling, reverse=True)
    assert metrics["vllm:request_success_total"] == {"length": len(counts)}
    names = counts[0].sources
    drafted = {name: sum(one.sources[name].drafted for one in counts) for name in names}
    assert metrics["quickbeam:drafted_tokens_total"] == drafted


async def test_what_runs_and_waits_and_how_it_ends(llm, monkeypatch):
    async with served(llm, served_names=("tiny",), max_waiting=1) as (runner, client):
        monkeypatch.setattr(llm.engine.scheduler, "max_running", 1)
        runner.gate.max_running = 1
        with braked(llm.engine) as brake:
            task = asyncio.create_task(begun(runner, job(llm)))
            await until(brake.waits.is_set)
            assert (await read(client))["vllm:num_requests_waiting"] == {"": 1}
            brake.release(3)
            (stream,) = await task
            runner.options = replace(runner.options, queue_timeout=0.2)
            await until(lambda: bool(llm.engine.nodes))
            metrics = {name: by.get("") for name, by in (await read(client)).items()}
            assert (
                metrics["vllm:num_requests_running"]
                == 1 + metrics["vllm:num_requests_waiting"]
                == 1
            )
            share = llm.model.pool.used / llm.model.pool.limit
            assert metrics["vllm:kv_cache_usage_perc"] == share > 0
            assert 1 <= metrics["quickbeam:budget_nodes"] <= 6
            # after its time in the queue
            assert (await client.post("/v1/completions", json=ASKED)).status_code == 503
            assert (await client.post("/v1/completions", json=ASKED)).status_code == 429
        stream.close()
        await until(lambda: idle(runner))
        metrics = await read(client)
        assert metrics["quickbeam:refused_requests_total"] == {"busy": 1, "unavailable": 1}
        assert metrics["vllm:request_success_total"] == {"abort": 2}
        assert metrics["vllm:time_to_first_token_seconds_count"] == {"": 1}


async def test_preemptions_are_counted(toy_folder):
    with LLM(toy_folder, "ar", kv_memory=5 * LLM(toy_folder, "ar").model.pool.page_bytes) as llm:
        async with served(llm, served_names=("tiny",)) as (runner, client):
            every = await answered(runner, [job(llm, f"{i} " * 20) for i in range(4)])
            metrics, times = await read(client), sum(one.statistics.preemptions for one in every)
            assert metrics["vllm:num_preemptions_total"][""] == times > 0
            # plain decoding drafts nothing
            assert metrics["vllm:spec_decode_num_drafts_total"][""] == 0


OPENMETRICS = "application/openmetrics-text"
ACCEPTED = (
    *("", "*/*", "text/plain;version=0.0.4", "text/plain;version=1.0.0;escaping=allow-utf-8"),
    *(OPENMETRICS, f"{OPENMETRICS};version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5"),
    *(
        f"{OPENMETRICS};version=1.0.0;escaping={escaping},text/plain;version=1.0.0"
        for escaping in ("allow-utf-8", "underscores", "dots", "values")
    ),
)


def families(text, content_type):
    """By name, with the names and values of samples, as the reader of this format has them."""
    read = text_string_to_metric_families
    if content_type.startswith(OPENMETRICS):
        read = openmetrics_families
    return {
        one.name: [(sample.name, sample.labels, sample.value) for sample in one.samples]
        for one in read(text)
    }


async def test_names_are_the_same_in_every_format(llm):
    async with served(llm, served_names=("tiny",)) as (runner, client):
        await answered(runner, [job(llm)])
        responses = [await client.get("/metrics", headers={"accept": one}) for one in ACCEPTED]
    formats, names = set(), set()
    for response in responses:
        content_type = response.headers["content-type"]
        formats.add(content_type)
        every = families(response.text, content_type)
        assert every["vllm:generation_tokens"][0][0] == "vllm:generation_tokens_total"
        assert {"vllm:num_requests_running", "quickbeam:nodes_per_step"} <= every.keys()
        samples = {name for family in every.values() for name, _, _ in family}
        names.add(frozenset(name for name in samples if not name.endswith("_created")))
        about = set(re.findall(r"^# TYPE (\S+)", response.text, re.MULTILINE))
        assert all(any(name.startswith(one) for one in about) for name in samples)
    assert len(formats) == 3 and len(names) == 1


async def test_the_dashboard_asks_for_metrics_that_there_are(llm):
    board = json.loads(files("quickbeam.serve").joinpath("grafana.json").read_text())
    panels, variables = board["panels"], board["templating"]["list"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    defined = [one["definition"] for one in variables if "definition" in one]
    expressions += [one.partition("(")[2].partition(",")[0] for one in defined]
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", " ".join(expressions))
    asked = {*re.findall(r"[a-zA-Z_][\w:]*", bare)} - LABELS - {*PROMQL.split()}
    assert len(asked) > 15 and len({panel["id"] for panel in panels}) == len(panels)
    async with served(llm, served_names=("tiny",)) as (runner, client):
        assert not {f"vllm:{name}" for name in VLLM.split()} - {*await read(client)}
        await answered(runner, [job(llm)])
        runner.gate.inside += 1000
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 429
        runner.gate.inside -= 1000
        assert asked - {*await read(client)} == set()
    loading = Runner(ServerOptions(served_names=("tiny",)))
    text, _ = expose(loading.metrics.registry, "")
    assert b'vllm:num_requests_waiting{model_name="tiny"} 0.0' in text
