"""The server's metrics for Prometheus.

Most have the names that vLLM gives them, so that dashboards made for vLLM work here. A few are
quickbeam's own. Counting costs only a few additions per step. Values that take time to find out are
computed when `/metrics` is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from quickbeam.engine.engine import Engine
from quickbeam.engine.result import Completion
from quickbeam.engine.sequence import Times
from quickbeam.engine.trace import StepRecord
from quickbeam.params import SamplingParams
from quickbeam.serve.admission import Gate, TurnedAway

DEEPEST = 16  # depths below the root that are counted separately; deeper ones count as the last
REASONS = {"interrupted": "abort"}  # our finish reasons that have another name in vLLM
SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
A_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
A_REQUEST = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """The metrics of one server, in a registry. Each is labelled with `name`, the model's name."""

    def __init__(self, name: str, gate: Gate) -> None:
        self._name, self.registry = name, CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauge(
            "vllm:num_requests_waiting",
            "Requests that the engine has not taken up.",
            lambda: gate.waiting,
        )
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Tokens of prompts that were read."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries",
            "Tokens of prompts that were looked up in the prefix cache.",
        )
        self.prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Tokens of prompts that came from the prefix cache."
        )
        self.preemptions = self._counter(
            "vllm:num_preemptions", "Answers that were set back for lack of memory."
        )
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Draft trees.")
        self.drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens of draft trees.")
        self.accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Tokens of draft trees that were accepted."
        )
        position = self._family(
            Counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by depth in their tree.",
            "position",
        )
        self.accepted_at = [position.labels(name, depth) for depth in range(DEEPEST)]
        self._success = self._family(
            Counter, "vllm:request_success", "Answers by how they ended.", "finished_reason"
        )
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", SECONDS
        )
        self.between = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between tokens; those of a step share its time.",
            A_TOKEN,
        )
        self.between_before = self._histogram(
            "vllm:time_per_output_token_seconds",
            "As inter_token_latency_seconds, its later name.",
            A_TOKEN,
        )
        self.a_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a token, by request.",
            A_TOKEN,
        )
        self.e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its end.", A_REQUEST
        )
        self.queue = self._histogram(
            "vllm:request_queue_time_seconds", "Until the engine takes a request up.", A_REQUEST
        )
        self.prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "From there to its first token.", A_REQUEST
        )
        self.decode = self._histogram(
            "vllm:request_decode_time_seconds", "From there to its end.", A_REQUEST
        )
        self.prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS
        )
        self.answer_length = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer.", TOKENS
        )
        self.most_tokens = self._histogram(
            "vllm:request_params_max_tokens", "What max_tokens was.", TOKENS
        )
        self.nodes = self._histogram(
            "quickbeam:nodes_per_step", "Nodes of a draft tree, the root included.", NODES
        )
        self._refused = self._family(
            Counter,
            "quickbeam:refused_requests",
            "Requests turned away: busy (429), unavailable (503).",
            "reason",
        )
        self._drafted_by = self._family(
            Counter,
            "quickbeam:drafted_tokens",
            "Tokens of draft trees by who proposed them.",
            "source",
        )
        self._accepted_by = self._family(
            Counter, "quickbeam:accepted_tokens", "Accepted tokens by who proposed them.", "source"
        )

    def watch(self, engine: Engine, heartbeat: Callable[[], float]) -> None:
        """Add an engine's state to the metrics.

        `heartbeat` returns the seconds since the engine's thread last gave a sign of life.
        """
        self._gauge(
            "quickbeam:heartbeat_age_seconds",
            "Since the engine's thread last gave a sign of life.",
            heartbeat,
        )
        self._gauge(
            "vllm:num_requests_running",
            "Answers that are being read or made.",
            lambda: len(engine.scheduler.active),
        )
        self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the memory for keys and values that is in use (1 is all).",
            lambda: engine.used,
        )
        self._gauge(
            "quickbeam:budget_nodes",
            "Nodes of the last draft tree, over the answers under way.",
            lambda: engine.nodes,
        )

    def request(self, params: SamplingParams, prompt: int, entered: float) -> RequestMetrics:
        """Return the counters for one answer.

        `prompt` is the prompt's length in tokens. `entered` is when the answer was asked for
        (`time.perf_counter`).
        """
        return RequestMetrics(self, params, prompt, entered)

    def by_source(self, source: str) -> tuple[Counter, Counter]:
        """Return the counters of a source's drafted and accepted tokens."""
        return self._drafted_by.labels(self._name, source), self._accepted_by.labels(
            self._name, source
        )

    def ended(self, reason: str) -> None:
        """Count an answer that is over."""
        self._success.labels(self._name, REASONS.get(reason, reason)).inc()

    def refused(self, error: TurnedAway) -> None:
        """Count a request that was turned away."""
        self._refused.labels(self._name, type(error).__name__.lower()).inc()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return the text that Prometheus reads, and its content type.

        `accept` is the request's Accept header.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _family(self, kind: type[Any], name: str, text: str, *labels: str, **more: Any) -> Any:
        return kind(name, text, ["model_name", *labels], registry=self.registry, **more)

    def _counter(self, name: str, text: str) -> Counter:
        found: Counter = self._family(Counter, name, text).labels(self._name)
        return found

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        found: Histogram = self._family(Histogram, name, text, buckets=buckets).labels(self._name)
        return found

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        self._family(Gauge, name, text).labels(self._name).set_function(value)


class RequestMetrics:
    """Counts one answer. `step` runs on the engine's thread, `over` on any thread."""

    def __init__(
        self, metrics: Metrics, params: SamplingParams, prompt: int, entered: float
    ) -> None:
        self._metrics, self._params, self._prompt, self._entered = metrics, params, prompt, entered
        self._last = 0.0  # when the last step ended
        self._counted = 0  # tokens of the answer so far

    def step(self, record: StepRecord) -> None:
        """Count a step. This is an observer of the answer."""
        metrics, now, emitted = self._metrics, time.perf_counter(), len(record.emitted)
        drafted, accepted = len(record.tree) - 1, record.path[1 : emitted + 1]
        metrics.generation_tokens.inc(emitted)
        self._counted += emitted
        if emitted:
            gap = (now - (self._last or now - record.seconds)) / emitted
            for _ in range(emitted):
                metrics.between.observe(gap)
                metrics.between_before.observe(gap)
        self._last = now
        metrics.nodes.observe(drafted + 1)
        if not drafted:
            return
        metrics.drafts.inc()
        metrics.drafted.inc(drafted)
        metrics.accepted.inc(len(accepted))
        for depth in range(len(accepted)):
            metrics.accepted_at[min(depth, DEEPEST - 1)].inc()

    def over(self, completion: Completion, times: Times) -> None:
        """Count the whole answer, once it is over."""
        metrics, now, statistics = self._metrics, time.perf_counter(), completion.statistics
        metrics.ended(completion.finish_reason)
        metrics.e2e.observe(now - self._entered)
        metrics.generation_tokens.inc(statistics.new_tokens - self._counted)
        metrics.prompt_length.observe(self._prompt)
        metrics.answer_length.observe(statistics.new_tokens)
        metrics.most_tokens.observe(self._params.max_tokens)
        metrics.preemptions.inc(statistics.set_back)
        for source, count in statistics.sources.items():
            drafted, accepted = metrics.by_source(source)
            drafted.inc(count.drafted)
            accepted.inc(count.accepted)
        if times.began is None:
            return
        metrics.queue.observe(times.began - self._entered)
        metrics.prefix_queries.inc(self._prompt)
        metrics.prefix_hits.inc(statistics.cached_tokens)
        if times.first is not None or completion.finish_reason == "length":  # the prompt was read
            metrics.prompt_tokens.inc(self._prompt)
        if times.first is None:
            return
        metrics.first_token.observe(times.first - self._entered)
        metrics.prefill.observe(times.first - times.began)
        metrics.decode.observe(now - times.first)
        if statistics.new_tokens > 1:
            metrics.a_token.observe((now - times.first) / (statistics.new_tokens - 1))
