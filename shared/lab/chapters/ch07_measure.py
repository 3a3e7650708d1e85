"""Chapter 07's times: what one decision costs, beside one run of the model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shared.allocator import RowAllocator
from shared.kv_cache import KVCache, cached_logits
from shared.lab.chapters.ch07_steps import Arrivals, make_request
from shared.lab.machine import Measurement
from shared.model import Transformer
from shared.scheduler import Scheduler

ROWS = 32


def workload(count: int = 64, seed: int = 0) -> Arrivals:
    """Requests that all come at once; most answers are short and a few are long, as in practice."""
    draw = random.Random(seed)
    lengths = [min(200, 1 + int(draw.expovariate(1 / 40))) for _ in range(count)]
    return [(0, make_request(str(i), draw.randint(4, 40), length)) for i, length in enumerate(lengths)]


def decision_times(make: Callable[..., Scheduler] = Scheduler, n: int = 50) -> list[Measurement]:
    """Microseconds of `schedule` and `update` while 32 requests decode; nobody waits, or a thousand do."""
    results = []
    for waiting in (0, 1000):
        scheduler = make(RowAllocator(ROWS, 4096), ROWS, 2048)
        for i in range(ROWS + waiting):
            scheduler.add(make_request(str(i), 8, 4000))
        step(scheduler)
        times = [step(scheduler) * 1e6 for _ in range(n)]
        results.append(Measurement.of(f"one decision, {ROWS} requests run and {waiting} wait", times, "µs"))
    return results


def step(scheduler: Scheduler) -> float:
    """Seconds of one decision; the model is left out and each request gains a token."""
    started = time.perf_counter()
    output = scheduler.schedule()
    scheduler.update(output)
    seconds = time.perf_counter() - started
    for item in output.scheduled:
        item.request.append(7)
    return seconds


def model_times(model: Transformer, n: int = 9, context: int = 100) -> Measurement:
    """Milliseconds of one run of the model with one new token after `context` cached ones."""
    cache, times = KVCache(model.config, context + 1, torch.float32), []
    for _ in range(n + 1):  # the first warms up
        started = time.perf_counter()
        cached_logits(model, cache, [7], context)
        times.append((time.perf_counter() - started) * 1e3)
    return Measurement.of("one run of the model, one token", times[1:], "ms")


def save() -> Path:
    """Measure and save: `python -m shared.lab.chapters.ch07_measure`."""
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    results = [*decision_times(), model_times(load_model("smollm2-135m"))]
    what = "what one decision of the scheduler costs, beside one run of the model"
    return save_evidence("07_scheduling", what, "python -m shared.lab.chapters.ch07_measure", results)


if __name__ == "__main__":
    print(save().name)
