"""Chapter 10's times: the first token of a prompt, with its beginning cached or not, and the price of names.

    python -m shared.lab.chapters.ch10_measure     writes evidence/10_prefix_caching.json
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.lab.charts import chart, to_png
from shared.lab.machine import Measurement
from shared.sampling_params import SamplingParams

LENGTHS, NEW = (64, 192, 512), 16  # tokens of the beginning, and of what is new after it
NUM_BLOCKS, BLOCK_SIZE = 128, 16


@dataclass(frozen=True)
class FirstToken:
    """Time to first token of prompts with a beginning of `length` tokens, and the positions computed for it."""

    length: int
    cached: bool
    positions: int
    time: Measurement

    def __str__(self) -> str:
        return f"{self.time.what}, {self.positions} positions: {self.time}"


def first_token_times(make: Callable[[], Any], lengths: Sequence[int] = LENGTHS, n: int = 3) -> list[FirstToken]:
    """For each length: nothing cached, then the beginning cached. Length 0 is what is new alone, as a prompt."""
    engine, draw = make(), random.Random(0)
    ask(engine, drawn(draw, NEW))  # warms up
    results = [measured(engine, draw, 0, False, n)]
    for length in lengths:
        results += [measured(engine, draw, length, cached, n) for cached in (False, True)]
    return results


def expected(results: Sequence[FirstToken]) -> list[float]:
    """Milliseconds by the positions computed, on the line through the shortest and the longest uncached prompt.

    Through their fastest runs: whatever else the machine does can only add to a time.
    """
    cold = [each for each in results if not each.cached]
    short, long = (choose(cold, key=lambda each: each.positions) for choose in (min, max))
    slope = (long.time.low - short.time.low) / (long.positions - short.positions)
    return [short.time.low + slope * (each.positions - short.positions) for each in results]


def lines(results: Sequence[FirstToken]) -> list[str]:
    """Measured times beside what the positions predict."""
    return [f"measured: {each}, expected {milliseconds:.1f} ms"
            for each, milliseconds in zip(results, expected(results), strict=True)]


def measured(engine: Any, draw: random.Random, length: int, cached: bool, n: int) -> FirstToken:
    """n prompts of one beginning, each with a new end; without `cached` everything is forgotten in between."""
    beginning, times, positions = drawn(draw, length), [], set()
    if cached:
        ask(engine, beginning + drawn(draw, NEW))
    for _ in range(n):
        if not cached:
            engine.scheduler.allocator.reset_prefix_cache()
        output = ask(engine, beginning + drawn(draw, NEW))
        times.append(output.metrics[0].time_to_first_token() * 1e3)
        positions.add(length + NEW - output.num_cached_tokens)
    words = f"{length} + {NEW} tokens, {'the beginning cached' if cached else 'nothing cached'}"
    return FirstToken(length, cached, *positions, Measurement.of(words, times, "ms"))


def ask(engine: Any, prompt: list[int]) -> Any:
    """The output of a request for one token."""
    engine.add_request("measured", prompt, SamplingParams(temperature=0, max_tokens=1))
    while True:
        for output in engine.step():
            if output.finished:
                return output


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(100, 40_000) for _ in range(count)]


def name_times(name: Callable[[bytes, Sequence[int]], bytes], root: bytes, n: int = 50) -> Measurement:
    """Microseconds to name all blocks of a prompt of 512 tokens."""
    ids, times = drawn(random.Random(0), 512), []
    for _ in range(n):
        started, parent = time.perf_counter(), root
        for start in range(0, len(ids), BLOCK_SIZE):
            parent = name(parent, ids[start : start + BLOCK_SIZE])
        times.append((time.perf_counter() - started) * 1e6)
    return Measurement.of("naming the blocks of 512 tokens", times, "µs")


def first_token_chart(results: Sequence[FirstToken]) -> bytes:
    """Median time to first token against the length of the beginning, as png bytes."""
    figure, axes = chart(6.4, 3.0, title="Time to first token, 16 new tokens after a beginning")
    for words, cached in (("nothing cached", False), ("the beginning cached", True)):
        shown = [each for each in results if each.cached == cached and each.length]
        medians = [each.time.median for each in shown]
        spread = [[each.time.median - each.time.low for each in shown],
                  [each.time.high - each.time.median for each in shown]]
        axes.errorbar([each.length for each in shown], medians, spread, label=words, capsize=3)
    axes.set(xlabel="tokens of the beginning", ylabel="milliseconds", ylim=(0, None))
    axes.legend(frameon=False)
    return to_png(figure)


def save() -> Path:
    """Measure with the runtime's own parts, and save."""
    import torch

    from shared.batch import ModelRunner
    from shared.engine import Engine
    from shared.kv_cache import KVCache
    from shared.lab.evidence import save_evidence
    from shared.prefix_cache import PrefixCachingBlockManager, hash_block, hash_root
    from shared.request import RequestLimits
    from shared.scheduler import Scheduler
    from shared.tokenizer import Tokenizer
    from shared.weights import load_model

    model = load_model("smollm2-135m")

    def make() -> Engine:
        manager = PrefixCachingBlockManager(NUM_BLOCKS, BLOCK_SIZE)
        runner = ModelRunner(model, KVCache(model.config, NUM_BLOCKS * BLOCK_SIZE, torch.float32))
        limits = RequestLimits(model.config.vocab_size, 1024)
        return Engine(runner, Scheduler(manager, 8, 1024), Tokenizer("smollm2-135m"), limits)

    times = first_token_times(make, n=5)
    results = [each.time for each in times]
    what = "time to first token with and without a cached beginning, float32"
    command = "python -m shared.lab.chapters.ch10_measure"
    return save_evidence("10_prefix_caching", what, command, [*results, name_times(hash_block, hash_root(""))],
                         expected=expected(times), positions=[each.positions for each in times])


if __name__ == "__main__":
    print(save().name)
