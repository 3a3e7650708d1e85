"""What a server says about itself: gauges, counters and histograms in Prometheus' format; names follow vLLM's."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.engine import Engine
from shared.output import RequestOutput

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class EngineState:
    """Read from the engine when somebody asks; lengths and counters, which are safe to read from any thread."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        scheduler, allocator = self.engine.scheduler, self.engine.scheduler.allocator
        gauges = {
            "num_requests_running": ("Answers that advance at every step", len(scheduler.running)),
            "num_requests_waiting": ("Answers that wait for a place", len(scheduler.waiting)),
            "num_free_blocks": ("Blocks of the cache that nobody holds", allocator.num_free_blocks),
            "num_blocks": ("Blocks of the cache", allocator.num_blocks),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up", getattr(allocator, "num_queried_tokens", 0)),
            "prefix_cache_hits": ("Prompt tokens found", getattr(allocator, "num_hit_tokens", 0)),
        }
        yield from (GaugeMetricFamily(f"zte:{name}", *about) for name, about in gauges.items())
        yield from (CounterMetricFamily(f"zte:{name}", *about) for name, about in counters.items())


@dataclass(frozen=True)
class Seen:
    """What has been counted of an answer."""

    num_tokens: int = 0
    last_token: float | None = None
    ended: bool = False


class EngineMetrics:
    """The metrics of one engine, in a registry of their own. `observe` is for AsyncEngine's `on_output`."""

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        self.registry.register(EngineState(engine))
        self.prompt_tokens = Counter("zte:prompt_tokens", "Prompt tokens of answers begun", registry=self.registry)
        self.generation_tokens = Counter("zte:generation_tokens", "Tokens generated", registry=self.registry)
        self.finished = Counter("zte:request_success", "Answers ended", ["finished_reason"], registry=self.registry)
        self.first_token = Histogram("zte:time_to_first_token_seconds", "From arrival to the first token",
                                     buckets=FIRST_TOKEN_BUCKETS, registry=self.registry)  # fmt: skip
        self.next_token = Histogram("zte:inter_token_latency_seconds", "From one token of an answer to the next",
                                    buckets=TOKEN_BUCKETS, registry=self.registry)  # fmt: skip
        self._seen: dict[str, list[Seen]] = {}

    def observe(self, output: RequestOutput) -> None:
        """Count what is new in an output: called once a step for each request that changed."""
        seen = self._seen.setdefault(output.request_id, [Seen()] * len(output.outputs))
        for answer, times in zip(output.outputs, output.metrics):
            known = seen[answer.index]
            new = len(answer.token_ids) - known.num_tokens
            if new and known.last_token is None:
                self.prompt_tokens.inc(len(output.prompt_token_ids))
                self.first_token.observe(times.first_token - times.arrival)
            elif new:
                self.next_token.observe(times.last_token - known.last_token)
            self.generation_tokens.inc(new)
            if answer.finish_reason and not known.ended:
                self.finished.labels(answer.finish_reason).inc()
            seen[answer.index] = Seen(known.num_tokens + new, times.last_token, answer.finish_reason is not None)
        if output.finished:
            del self._seen[output.request_id]

    def exposition(self) -> bytes:
        """What /metrics answers."""
        return generate_latest(self.registry)
