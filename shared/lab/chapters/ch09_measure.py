"""Chapter 09's measurements: the same cache memory as rows and as blocks, and what a block table costs a read."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shared.allocator import Allocator, RowAllocator
from shared.batch import ModelRunner, slots_of
from shared.engine import Engine
from shared.kv_cache import KVCache
from shared.lab.machine import Measurement, timed
from shared.model import Transformer
from shared.request import RequestLimits
from shared.sampling_params import SamplingParams
from shared.scheduler import Scheduler
from shared.tokenizer import Tokenizer
from shared.trace import StepRecord, Trace

SLOTS, MAX_MODEL_LEN, MAX_NUM_SEQS, BUDGET = 768, 256, 32, 512
Lengths = Sequence[tuple[int, int]]  # prompt and answer tokens of each request


def lengths(count: int = 12, seed: int = 0) -> Lengths:
    """Requests that all come at once, each far shorter than MAX_MODEL_LEN allows."""
    draw = random.Random(seed)
    return [(draw.randint(8, 40), draw.randint(3, 6)) for _ in range(count)]


def make_engine(model: Transformer, tokenizer: Tokenizer, allocator: Allocator) -> Engine:
    """An engine whose cache has exactly the slots of its allocator."""
    cache = KVCache(model.config, allocator.num_blocks * allocator.block_size, model.embed_tokens.weight.dtype)
    scheduler = Scheduler(allocator, MAX_NUM_SEQS, BUDGET)
    limits = RequestLimits(model.config.vocab_size, MAX_MODEL_LEN)
    return Engine(ModelRunner(model, cache), scheduler, tokenizer, limits, trace=Trace())


def serve(engine: Engine, work: Lengths) -> list[StepRecord]:
    """Run the workload to its end; the records say how long each step took."""
    for i, (prompt, answer) in enumerate(work):
        ids = [(7 * i + place) % 1000 + 10 for place in range(prompt)]
        engine.add_request(str(i), ids, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    return engine.trace.steps


@dataclass(frozen=True)
class Service:
    """One allocator's way through the workload, n times: exact counts, measured seconds, predicted seconds."""

    name: str
    num_steps: int
    most_at_once: int
    mean_at_once: float
    seconds: Measurement
    predicted: float


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: a fixed part, a part for each request that decodes, a part for each prompt token."""

    fixed: float
    per_request: float
    per_prompt_token: float

    def of(self, record: StepRecord) -> float:
        decoding = sum(tokens == 1 for tokens in record.scheduled.values())
        prompt_tokens = record.num_batched_tokens - decoding
        return self.fixed + self.per_request * decoding + self.per_prompt_token * prompt_tokens


def step_cost(model: Transformer, tokenizer: Tokenizer, n: int = 4) -> StepCost:
    """From steps in which 1 and 12 requests decode, and from the step that runs a prompt of 200 tokens."""
    few, many = (_steps(model, tokenizer, count, 20, n)[2:-1] for count in (1, 12))
    one, twelve = (statistics.median(record.seconds for record in records) for records in (few, many))
    prompt = statistics.median(_steps(model, tokenizer, 1, 200, 1)[0].seconds for _ in range(2))
    per_request = max(0.0, (twelve - one) / 11)
    fixed = one - per_request
    return StepCost(fixed, per_request, max(0.0, prompt - fixed) / 200)


def _steps(model: Transformer, tokenizer: Tokenizer, count: int, prompt: int, n: int) -> list[StepRecord]:
    engine = make_engine(model, tokenizer, RowAllocator(count, MAX_MODEL_LEN))
    return serve(engine, [(prompt, n + 3)] * count)


def throughput(model: Transformer, tokenizer: Tokenizer, blocks: Callable[[int, int], Allocator],
               rows: Callable[[int, int], Allocator] = RowAllocator, n: int = 3, block_size: int = 16) -> list[Service]:
    """Rows against blocks in the same memory, turn about; the prediction uses only the costs of bare steps."""
    cost = step_cost(model, tokenizer)
    made = {"rows": lambda: rows(SLOTS // MAX_MODEL_LEN, MAX_MODEL_LEN),
            "blocks": lambda: blocks(SLOTS // block_size, block_size)}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    records: dict[str, list[StepRecord]] = {}
    for _ in range(n):
        for name, allocator in made.items():
            started = time.perf_counter()
            records[name] = serve(make_engine(model, tokenizer, allocator()), lengths())
            seconds[name].append(time.perf_counter() - started)
    return [_service(name, records[name], seconds[name], cost) for name in made]


def _service(name: str, records: Sequence[StepRecord], seconds: Sequence[float], cost: StepCost) -> Service:
    at_once = [len(record.scheduled) for record in records]
    measured = Measurement.of(f"{name}: the whole workload", seconds, "s")
    return Service(name, len(records), max(at_once), statistics.mean(at_once), measured, sum(map(cost.of, records)))


# What the indirection costs


def tables(num_slots: int, block_sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """For each block size a table of all blocks in an order that has no pattern."""
    for size in block_sizes:
        order = list(range(num_slots // size))
        random.Random(size).shuffle(order)
        yield size, order


def gather_times(cache: KVCache, block_sizes: Sequence[int] = (1, 16, 64, 256), n: int = 7) -> list[Measurement]:
    """Milliseconds to copy the keys and values of all slots out of the cache, layer after layer."""
    layers = range(len(cache.keys))
    results = [timed("neighbours, one piece", lambda: [(cache.keys[i].clone(), cache.values[i].clone())
                                                       for i in layers], n)]
    for size, order in tables(cache.num_slots, block_sizes):
        slots = torch.tensor(slots_of(order, range(cache.num_slots), size))
        results.append(timed(f"blocks of {size}, slot by slot", partial(_read_slots, cache, slots), n))
        results.append(timed(f"blocks of {size}, block by block", partial(_read_blocks, cache, order, size), n))
    return results


def _read_slots(cache: KVCache, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As the engine's attention reads: one index a slot."""
    return [cache.read(layer, slots) for layer in range(len(cache.keys))]


def _read_blocks(cache: KVCache, order: Sequence[int], size: int) -> list[torch.Tensor]:
    """The same copy with one index a block: [blocks, size * kv_heads * head_dim] a layer."""
    wanted = torch.tensor(order)
    return [kept[layer].reshape(len(order), -1).index_select(0, wanted)
            for layer in range(len(cache.keys)) for kept in (cache.keys, cache.values)]


def save() -> Path:
    """Measure and save: `python -m shared.lab.chapters.ch09_measure`."""
    from shared.block_manager import BlockManager
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    model, tokenizer = load_model("smollm2-135m"), Tokenizer("smollm2-135m")
    services = throughput(model, tokenizer, BlockManager, n=5)
    cache = KVCache(model.config, 2048, torch.float32)
    counts = {service.name: {"steps": service.num_steps, "most at once": service.most_at_once,
                             "mean at once": round(service.mean_at_once, 2),
                             "predicted seconds": round(service.predicted, 2)} for service in services}
    what = f"{SLOTS} slots as rows of {MAX_MODEL_LEN} and as blocks of 16; copying 2048 slots out of the cache"
    results = [*(service.seconds for service in services), *gather_times(cache)]
    command = "python -m shared.lab.chapters.ch09_measure"
    return save_evidence("09_paged_kv_cache", what, command, results, counts=counts)


if __name__ == "__main__":
    print(save().name)
