"""Chapter 08's times: static against continuous batching, and the gap that a long prompt makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shared.allocator import RowAllocator
from shared.batch import ModelRunner
from shared.engine import Engine
from shared.kv_cache import KVCache, cached_logits
from shared.lab.chapters.ch08_steps import StaticBatches
from shared.lab.machine import Measurement
from shared.model import Transformer
from shared.request import RequestLimits
from shared.sampling_params import SamplingParams
from shared.scheduler import Scheduler
from shared.tokenizer import Tokenizer
from shared.trace import Trace

MakeEngine = Callable[..., Engine]
LENGTHS = (12, 3, 5, 2, 4, 10, 3, 6)  # tokens of each answer
ROWS, PROMPT_TOKENS, LONG_PROMPT = 4, 6, 256
SIZES = (1, 4, 8, 64, 260)  # tokens in one run of the model


def run_times(model: Transformer, n: int = 2) -> dict[int, float]:
    """Seconds of one run of the model by its number of tokens: the median of n, after one to warm up."""
    times = {}
    for size in SIZES:
        samples = []
        for _ in range(n + 1):
            cache = KVCache(model.config, size, torch.float32)
            started = time.perf_counter()
            cached_logits(model, cache, [7] * size, 0)
            samples.append(time.perf_counter() - started)
        times[size] = Measurement.of("", samples[1:], "s").median
    return times


def expected(times: dict[int, float], num_tokens: int) -> float:
    """Seconds of a run of that many tokens, on the straight line between the two measured sizes beside it."""
    low = max(size for size in times if size <= num_tokens)
    high = min((size for size in times if size >= num_tokens), default=low)
    share = 0 if high == low else (num_tokens - low) / (high - low)
    return times[low] + share * (times[high] - times[low])


def serve(engine: Engine, lengths: Sequence[int] = LENGTHS) -> float:
    """Answer all, which come together; returns seconds."""
    for index, length in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.add_request(str(index), [7 + index] * PROMPT_TOKENS, params)
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started


def throughput(make_engine: MakeEngine, times: dict[int, float], n: int = 3) -> list[tuple[float, Measurement]]:
    """Tokens a second of static and of continuous batching: what arithmetic expects, and what was measured."""
    results = []
    for words, static in (("static", True), ("continuous", False)):
        rates = []
        for _ in range(n):
            engine = make_engine(rows=ROWS, row_slots=64, budget=64, static=static)
            rates.append(sum(LENGTHS) / serve(engine))
        predicted = sum(LENGTHS) / sum(expected(times, step.num_batched_tokens) for step in engine.trace.steps)
        results.append((predicted, Measurement.of(f"{words} batching", rates, "tokens/s")))
    return results


def gaps(make_engine: MakeEngine, times: dict[int, float], n: int = 3) -> list[tuple[float, Measurement]]:
    """Three requests decode when a prompt of 256 tokens comes: their longest gap, and its first token, in ms."""
    results = []
    for words, budget in (("whole", 512), ("in chunks", 64)):
        samples = [arrival(make_engine(rows=4, row_slots=320, budget=budget)) for _ in range(n)]
        sizes = samples[-1][2]  # tokens of each step until its first token
        spent = [expected(times, size) * 1e3 for size in sizes]
        longest, first = ([sample[i] * 1e3 for sample in samples] for i in (0, 1))
        results.append((max(spent), Measurement.of(f"prompt {words}: longest gap of those who run", longest, "ms")))
        results.append((sum(spent), Measurement.of(f"prompt {words}: its own first token", first, "ms")))
    return results


def arrival(engine: Engine) -> tuple[float, float, list[int]]:
    """Longest gap of the running ones, seconds to the long prompt's first token, and the sizes of those steps."""
    options = {"temperature": 0, "ignore_eos": True}
    for name in "ABC":
        engine.add_request(name, [7] * PROMPT_TOKENS, SamplingParams(max_tokens=40, **options))
    for _ in range(3):
        engine.step()
    engine.add_request("long", [9] * LONG_PROMPT, SamplingParams(max_tokens=2, **options))
    before, last, longest = len(engine.trace.steps), time.perf_counter(), 0.0
    started = last
    while "long" not in engine.trace.steps[-1].new_tokens:
        engine.step()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest, last - started, [step.num_batched_tokens for step in engine.trace.steps[before:]]


def engine_maker(model: Transformer, tokenizer: Tokenizer) -> MakeEngine:
    """Engines over rows, as the notebook builds them."""
    def make(rows: int, row_slots: int, budget: int, chunked: bool = True, static: bool = False) -> Engine:
        scheduler = (StaticBatches if static else Scheduler)(RowAllocator(rows, row_slots), rows, budget, chunked)
        runner = ModelRunner(model, KVCache(model.config, rows * row_slots, torch.float32))
        limits = RequestLimits(model.config.vocab_size, row_slots)
        return Engine(runner, scheduler, tokenizer, limits, trace=Trace())
    return make


def lines(results: Sequence[tuple[float, Measurement]]) -> list[str]:
    """Arithmetic and measurement side by side."""
    return [f"{each.what}: expected {predicted:.1f} {each.unit}, measured {each}" for predicted, each in results]


def save(n: int = 3) -> Path:
    """Measure and save: `python -m shared.lab.chapters.ch08_measure`."""
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    model = load_model("smollm2-135m")
    make, times = engine_maker(model, Tokenizer("smollm2-135m")), run_times(model, n)
    results = [*throughput(make, times, n), *gaps(make, times, n)]
    what = "static against continuous batching, and what a long prompt does to those who run, whole and in chunks"
    return save_evidence("08_continuous_batching", what, "python -m shared.lab.chapters.ch08_measure",
                         [result for _, result in results], expected=[predicted for predicted, _ in results],
                         run_seconds={str(size): seconds for size, seconds in times.items()})


if __name__ == "__main__":
    print(save().name)
