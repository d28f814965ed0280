"""The server's metrics for Prometheus, mostly under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from quickbeam.engine.engine import Engine
from quickbeam.engine.learning import LearningFigures
from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import Times
from quickbeam.engine.trace import StepRecord
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import Gate, RetryableError

MAX_DEPTH = 16  # depths below the root that are counted separately; deeper ones count as the last
VLLM_REASONS = {"interrupted": "abort"}  # finish reasons that have another name in vLLM
# upper bounds of histograms' buckets, as vLLM has them
SECONDS = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640"
A_TOKEN = ".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 10"
A_REQUEST = ".1 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000"
NODES = "1 2 3 4 6 8 12 16 24 32 48 64"
COUNTERS = {
    "vllm:prompt_tokens": "Tokens of prompts that were read.",
    "vllm:generation_tokens": "Tokens of answers.",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens of prompts that came from the prefix cache.",
    "vllm:num_preemptions": "Answers that were set back for lack of memory.",
    "vllm:spec_decode_num_drafts": "Draft trees.",
    "vllm:spec_decode_num_draft_tokens": "Tokens of draft trees.",
    "vllm:spec_decode_num_accepted_tokens": "Tokens of draft trees that were accepted.",
}
LABELLED = {  # counters with a label of their own
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("position", "Accepted tokens by depth."),
    "vllm:request_success": ("finished_reason", "Answers by how they ended."),
    "quickbeam:refused_requests": ("reason", "Requests turned away: busy, unavailable."),
    "quickbeam:drafted_tokens": ("source", "Tokens of draft trees by who proposed them."),
    "quickbeam:accepted_tokens": ("source", "Accepted tokens by who proposed them."),
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From the request to its first token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("Between tokens; a step's share its time.", A_TOKEN),
    "vllm:time_per_output_token_seconds": ("The same, by its later name.", A_TOKEN),
    "vllm:request_time_per_output_token_seconds": ("Mean time of a token, by request.", A_TOKEN),
    "vllm:e2e_request_latency_seconds": ("From the request to its end.", A_REQUEST),
    "vllm:request_queue_time_seconds": ("Until the engine takes a request up.", A_REQUEST),
    "vllm:request_prefill_time_seconds": ("From there to its first token.", A_REQUEST),
    "vllm:request_decode_time_seconds": ("From there to its end.", A_REQUEST),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of an answer.", TOKENS),
    "vllm:request_params_max_tokens": ("What max_tokens was.", TOKENS),
    "quickbeam:nodes_per_step": ("Nodes of a draft tree, the root included.", NODES),
}


class Metrics:
    """The metrics of one server, in a registry. Each is labelled with the model's name."""

    def __init__(self, model: str, gate: Gate) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._families: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            self._families[name] = self._family(Counter, name, text)
        for name, (label, text) in LABELLED.items():
            self._families[name] = self._family(Counter, name, text, label)
        for name, (text, bounds) in HISTOGRAMS.items():
            buckets = [float(bound) for bound in bounds.split()]
            self._families[name] = self._family(Histogram, name, text, buckets=buckets)
        for name in (*COUNTERS, *HISTOGRAMS):
            self.metric(name)  # shown from the beginning, as 0
        for depth in range(MAX_DEPTH):
            self.metric("vllm:spec_decode_num_accepted_tokens_per_pos", depth)
        waiting = "Requests that the engine has not taken up."
        self._gauge("vllm:num_requests_waiting", waiting, lambda: gate.waiting)

    def watch(self, engine: Engine, heartbeat: Callable[[], float]) -> None:
        """Add an engine's state. `heartbeat`: seconds since its thread last gave a sign of life."""
        age = "Since the engine's thread last gave a sign of life."
        self._gauge("quickbeam:heartbeat_age_seconds", age, heartbeat)
        running = "Answers that are being read or made."
        self._gauge("vllm:num_requests_running", running, lambda: len(engine.scheduler.active))
        used = "Share of the memory for keys and values that is in use (1 is all)."
        self._gauge("vllm:kv_cache_usage_perc", used, lambda: engine.used)
        nodes = "Nodes of the last draft tree, over the answers under way."
        self._gauge("quickbeam:budget_nodes", nodes, lambda: engine.nodes)
        self._watch_learning(engine)

    def _watch_learning(self, engine: Engine) -> None:
        """Add what drafters have learned."""

        def figures() -> LearningFigures:
            return LearningFigures() if engine.learner is None else engine.learner.figures

        tokens = "Tokens of answers that drafters may learn from."
        self._gauge("quickbeam:learnable_tokens", tokens, lambda: figures().tokens)
        seconds = "Idle time that drafters have learned in."
        self._gauge("quickbeam:learning_seconds", seconds, lambda: figures().seconds)
        taken = "How often a drafter's new weights were taken."
        self._gauge("quickbeam:learned_versions", taken, lambda: figures().taken)
        returned = "How often a drafter's older weights were taken again."
        self._gauge("quickbeam:learned_returns", returned, lambda: figures().returned)
        gain = (
            "Tokens a step of held-out texts by the latest weights, over those by the loaded ones."
        )
        self._gauge("quickbeam:learned_gain", gain, lambda: figures().gain)

    def metric(self, name: str, *labels: Any) -> Any:
        """Return a counter or histogram by its name, and its own label if it has one."""
        return self._families[name].labels(self._model, *labels)

    def refused(self, error: RetryableError) -> None:
        """Count a request that was turned away."""
        self.metric("quickbeam:refused_requests", type(error).__name__.lower()).inc()

    def _family(self, metric_class: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        return metric_class(name, text, ["model_name", *labels], registry=self.registry, **more)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        self._family(Gauge, name, text).labels(self._model).set_function(value)


class ReplicaMetrics(Collector):
    """The metrics of several servers, each labelled with its server's name as `replica`.

    `families`: what the registry of each server collects, by its name.
    """

    def __init__(self, families: Mapping[str, Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, those of one name together."""
        merged = dict[str, Metric]()
        for replica, families in self._families.items():
            for family in families:
                if family.name not in merged:
                    merged[family.name] = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    merged[family.name].samples.append(sample._replace(labels=labels))
        return merged.values()


def expose(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return what Prometheus reads, and its content type for this Accept header.

    Names are the same in every format: all hold letters that need no escaping, but one of the
    encoders escapes the colon, and only in samples.
    """
    encode: Any  # takes `escaping`, too, which its own type leaves out
    encode, content_type = choose_encoder(accept)
    content = encode(collector, escaping=openmetrics.ALLOWUTF8)
    return content, content_type.partition("; escaping=")[0]


class RequestMetrics:
    """Counts one answer to a prompt of `prompt` tokens, asked for at `entered`.

    `step` runs on the engine's thread.
    """

    def __init__(
        self, metrics: Metrics, params: SamplingParams, prompt: int, entered: float
    ) -> None:
        self._metrics = metrics
        self._params = params
        self._prompt = prompt
        self._entered = entered
        self._last_step = 0.0  # when it ended
        self._counted = 0  # tokens of the answer so far

    def step(self, record: StepRecord) -> None:
        """Count a step. This is an observer of the answer."""
        metric = self._metrics.metric
        now = time.perf_counter()
        emitted = len(record.emitted)
        metric("vllm:generation_tokens").inc(emitted)
        self._counted += emitted
        if emitted:
            begin = self._last_step or now - record.seconds
            gap = (now - begin) / emitted
            for _ in range(emitted):
                metric("vllm:inter_token_latency_seconds").observe(gap)
                metric("vllm:time_per_output_token_seconds").observe(gap)
        self._last_step = now
        metric("quickbeam:nodes_per_step").observe(len(record.tree))
        drafted = len(record.tree) - 1
        if not drafted:
            return
        accepted = len(record.path[1 : emitted + 1])
        metric("vllm:spec_decode_num_drafts").inc()
        metric("vllm:spec_decode_num_draft_tokens").inc(drafted)
        metric("vllm:spec_decode_num_accepted_tokens").inc(accepted)
        for depth in range(accepted):
            metric("vllm:spec_decode_num_accepted_tokens_per_pos", min(depth, MAX_DEPTH - 1)).inc()

    def over(self, completion: Completion, times: Times) -> None:
        """Count an answer, once it is over."""
        metric = self._metrics.metric
        now = time.perf_counter()
        statistics = completion.statistics
        reason = completion.finish_reason
        metric("vllm:request_success", VLLM_REASONS.get(reason, reason)).inc()
        metric("vllm:e2e_request_latency_seconds").observe(now - self._entered)
        metric("vllm:generation_tokens").inc(statistics.new_tokens - self._counted)
        metric("vllm:request_prompt_tokens").observe(self._prompt)
        metric("vllm:request_generation_tokens").observe(statistics.new_tokens)
        metric("vllm:request_params_max_tokens").observe(self._params.max_tokens)
        metric("vllm:num_preemptions").inc(statistics.preemptions)
        for source, tokens in statistics.sources.items():
            metric("quickbeam:drafted_tokens", source).inc(tokens.drafted)
            metric("quickbeam:accepted_tokens", source).inc(tokens.accepted)
        if times.began is None:
            return
        metric("vllm:request_queue_time_seconds").observe(times.began - self._entered)
        metric("vllm:prefix_cache_queries").inc(self._prompt)
        metric("vllm:prefix_cache_hits").inc(statistics.cached_tokens)
        if times.first is not None or reason == "length":  # the prompt was read
            metric("vllm:prompt_tokens").inc(self._prompt)
        if times.first is None:
            return
        metric("vllm:time_to_first_token_seconds").observe(times.first - self._entered)
        metric("vllm:request_prefill_time_seconds").observe(times.first - times.began)
        metric("vllm:request_decode_time_seconds").observe(now - times.first)
        if statistics.new_tokens > 1:
            mean = (now - times.first) / (statistics.new_tokens - 1)
            metric("vllm:request_time_per_output_token_seconds").observe(mean)
