"""What a server says about itself: gauges, counters and histograms in Prometheus' format; names follow vLLM's."""
from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.engine import Engine
from shared.output import RequestOutput

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds


class EngineState:
    """Read from the engine when somebody asks: lengths and counts, which any thread may read."""

    def __init__(self, engine: Engine):
        self.scheduler = engine.scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler, cache = self.scheduler, self.scheduler.allocator
        queried, hit = getattr(cache, "num_queried_tokens", 0), getattr(cache, "num_hit_tokens", 0)
        yield GaugeMetricFamily("zte:num_requests_running", "Answers that run", len(scheduler.running))
        yield GaugeMetricFamily("zte:num_requests_waiting", "Answers that wait", len(scheduler.waiting))
        yield GaugeMetricFamily("zte:num_free_blocks", "Blocks that nobody holds", cache.num_free_blocks)
        yield GaugeMetricFamily("zte:num_blocks", "Blocks of the cache", cache.num_blocks)
        yield CounterMetricFamily("zte:prefix_cache_queries", "Prompt tokens looked up", queried)
        yield CounterMetricFamily("zte:prefix_cache_hits", "Prompt tokens found", hit)


class EngineMetrics:
    """The metrics of one engine, in a registry of their own; `observe` sees every output, once a step."""

    def __init__(self, engine: Engine):
        self.registry = registry = CollectorRegistry()
        registry.register(EngineState(engine))
        self.prompt_tokens = Counter("zte:prompt_tokens", "Of answers begun", registry=registry)
        self.generation_tokens = Counter("zte:generation_tokens", "Tokens generated", registry=registry)
        self.ended = Counter("zte:request_success", "Answers ended", ["finished_reason"], registry=registry)
        self.first, self.later = (
            Histogram(f"zte:{name}_seconds", about, buckets=BUCKETS, registry=registry) for name, about in (
                ("time_to_first_token", "From arrival to the first token"),
                ("inter_token_latency", "From one token of an answer to the next")))  # fmt: skip
        self._seen: dict[str, list[tuple]] = {}  # of each answer: tokens, time of the last, whether it has ended

    def observe(self, output: RequestOutput) -> None:
        seen = self._seen.setdefault(output.request_id, [(0, None, False)] * len(output.outputs))
        for answer, times in zip(output.outputs, output.metrics):
            count, last_token, ended = seen[answer.index]
            if answer.num_tokens > count:
                self.generation_tokens.inc(answer.num_tokens - count)
                if last_token is None:
                    self.prompt_tokens.inc(len(output.prompt_token_ids))
                    self.first.observe(times.first_token - times.arrival)
                else:
                    self.later.observe(times.last_token - last_token)
            if answer.finish_reason and not ended:
                self.ended.labels(answer.finish_reason).inc()
            seen[answer.index] = answer.num_tokens, times.last_token, answer.finish_reason is not None
        if output.finished:
            del self._seen[output.request_id]

    def exposition(self) -> bytes:
        """What /metrics answers."""
        return generate_latest(self.registry)
