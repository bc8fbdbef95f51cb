"""/metrics: counters, times and gauges for Prometheus, under vLLM's names where it has them."""

from __future__ import annotations

from time import perf_counter

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from onward.generation.cache.blocks import BlockManager
from onward.generation.engine.engine import Engine
from onward.generation.request import Request as Answer
from onward.serving.jobs import Job
from onward.serving.models import engines_of
from onward.serving.request_log import RequestRecord
from onward.serving.service import Service

router = APIRouter(tags=["server"])
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class ServerMetrics(Collector):
    """Counters, histograms and gauges in a registry of their own."""

    def __init__(self, service: Service) -> None:
        self.service, self.registry = service, CollectorRegistry()
        self.last_step: dict[int, float] = {}  # time of the last step that produced tokens, by engine
        count = lambda name, text, labels=(): Counter(name, text, labels, registry=self.registry)
        times = lambda name, text, buckets=SECONDS: Histogram(name, text, buckets=buckets, registry=self.registry)
        self.prompt_tokens = count("vllm:prompt_tokens", "Prompt tokens")
        self.new_tokens = count("vllm:generation_tokens", "Generated tokens")
        self.queries = count("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache")
        self.hits = count("vllm:prefix_cache_hits", "Prompt tokens found in the cache")
        self.drafted = count("vllm:spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted = count("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens")
        self.done = count("vllm:request_success", "Finished answers", ["finished_reason"])
        self.first = times("vllm:time_to_first_token_seconds", "Time from the request to its first token")
        self.between = times("vllm:inter_token_latency_seconds", "Time between two steps with new tokens", BETWEEN)
        self.total = times("vllm:e2e_request_latency_seconds", "Time from the request to the end of its answers")
        self.responses = count("onward:http_responses", "Responses to requests, by HTTP status", ["status"])
        self.registry.register(self)

    def collect(self) -> list[GaugeMetricFamily]:
        """Gauges with current values; called by the Prometheus client."""
        engines = engines_of(list(self.service.served.values()))
        running = sum(len(engine.scheduler.active) for engine in engines)
        used = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use", labels=["engine"])
        for number, engine in enumerate(engines):
            used.add_metric([str(number)], cache_use(engine))
        return [
            GaugeMetricFamily("vllm:num_requests_running", "Answers being generated", running),
            GaugeMetricFamily(
                "vllm:num_requests_waiting",
                "Answers and other work waiting to be done",
                max(0, self.service.accounts.pending - running),
            ),
            used,
            GaugeMetricFamily("onward:ready", "1 if the server answers requests", self.service.state == "ready"),
        ]

    def step(self, engine: Engine, new: list[tuple[Answer, int]]) -> None:
        # called in the engine's thread
        if not new:
            return
        now, before = perf_counter(), self.last_step.get(id(engine))
        if before is not None:
            self.between.observe(now - before)
        if engine.busy:
            self.last_step[id(engine)] = now
        else:
            self.last_step.pop(id(engine), None)
        self.new_tokens.inc(len(new))

    def request(self, record: RequestRecord) -> None:
        self.responses.labels(str(record.status or 499)).inc()

    def job(self, job: Job) -> None:
        now = perf_counter()
        self.total.observe(now - job.arrival)
        if job.first_token:
            self.first.observe(job.first_token - job.arrival)
        for answer in job.answers:
            size = len(answer.prompt)
            self.prompt_tokens.inc(size)
            self.queries.inc(size)
            self.hits.inc(answer.num_shared)
            self.drafted.inc(answer.num_drafted)
            self.accepted.inc(answer.num_accepted)
            self.done.labels(answer.finish_reason or "cancelled").inc()


def cache_use(engine: Engine) -> float:
    """The share of the blocks that rows hold."""
    manager = engine.scheduler.manager
    assert isinstance(manager, BlockManager), "the server's caches are paged"
    counts = [count for pool in manager.pools.values() for count in pool.ref_counts[1:]]
    return sum(count > 0 for count in counts) / len(counts)


@router.get("/metrics", response_class=Response)
async def metrics(http: Request) -> Response:
    """Return the metrics in the text format of Prometheus."""
    own: ServerMetrics = http.app.state.metrics
    return Response(generate_latest(own.registry), media_type=CONTENT_TYPE_LATEST)
