"""Chapter 11's times: decode steps on one, two and three processes of this machine; and a model of real links."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.batch import ForwardBatch, ModelRunner
from shared.kv_cache import KVCache
from shared.lab.machine import Measurement
from shared.model import ModelConfig

CONTEXT = 100


def decode_batch(rows: int = 1, context: int = CONTEXT, block_size: int = 128) -> ForwardBatch:
    """`rows` requests with one new token each, after `context` others; each in a block of its own."""
    def numbers(values: Sequence) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long)

    slots = [row * block_size + context for row in range(rows)]
    return ForwardBatch(
        numbers([7] * rows), numbers([context] * rows), numbers(slots), numbers(range(rows)),
        numbers([[row] for row in range(rows)]), numbers([context + 1] * rows), numbers(range(rows + 1)),
        (1,) * rows, context + 1, block_size,
    )  # fmt: skip


def step_times(what: str, forward: Callable[[ForwardBatch], torch.Tensor], rows: int = 1, n: int = 15) -> Measurement:
    """Milliseconds of a decode step, after two to warm up."""
    batch, times = decode_batch(rows), []
    with torch.inference_mode():
        for _ in range(n + 2):
            started = time.perf_counter()
            forward(batch)
            times.append((time.perf_counter() - started) * 1e3)
    return Measurement.of(what, times[2:], "ms")


# What links would allow: a model


@dataclass(frozen=True)
class Link:
    """How ranks are connected: bytes a second in one direction, and seconds before the first byte arrives."""

    name: str
    bandwidth: float
    latency: float


MEMORY_BANDWIDTH = 3.35e12  # bytes a second of one H100, NVIDIA's data sheet
LINKS = (  # round numbers; put in yours
    Link("NVLink, 450 GB/s", 450e9, 10e-6),
    Link("PCIe 5, 60 GB/s", 60e9, 20e-6),
    Link("Ethernet, 12 GB/s", 12e9, 50e-6),
)


def modelled_step(parameters: int, config: ModelConfig, ranks: int, link: Link, tokens: int = 1, itemsize: int = 2):
    """Seconds of a decode step: the weights of a rank read once, then the collectives, one after another.

    A ring moves 2 (N - 1) / N of a sum's bytes over each link. Work and traffic do not overlap.
    """
    read = parameters * itemsize / ranks / MEMORY_BANDWIDTH
    if ranks == 1:
        return read
    sums = 2 * config.num_hidden_layers + 1
    moved = 2 * (ranks - 1) / ranks * tokens * config.hidden_size * itemsize
    gathered = (ranks - 1) / ranks * tokens * config.vocab_size * itemsize
    return read + sums * (link.latency + moved / link.bandwidth) + link.latency + gathered / link.bandwidth


def save() -> Path:
    """Measure and save: `python -m shared.lab.chapters.ch11_measure`."""
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model
    from shared.workers import launch

    model = load_model("smollm2-135m")
    plain = ModelRunner(model, KVCache(model.config, 8 * 128, torch.float32))
    results = []
    for rows in (1, 8):
        results.append(step_times(f"1 process, {rows} requests decode", plain.forward, rows))
    for size in (2, 3):
        runner = launch("smollm2-135m", size, num_slots=8 * 128)
        for rows in (1, 8):
            results.append(step_times(f"{size} processes, {rows} requests decode", runner.forward, rows))
        runner.shutdown()
    what = "a decode step of smollm2-135m in float32 on one process and cut over two and three of one machine"
    return save_evidence("11_tensor_parallelism", what, "python -m shared.lab.chapters.ch11_measure", results)


if __name__ == "__main__":
    print(save().name)
