"""Chapter 14's ladder: one workload through every stage of the course, on the same memory, and what each one cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.allocator import Allocator, RowAllocator
from shared.batch import ModelRunner
from shared.block_manager import BlockManager
from shared.decode import generate_naive, greedy
from shared.engine import Engine, Runner
from shared.kv_cache import KVCache, generate_cached
from shared.lab.chapters.ch08_steps import StaticBatches
from shared.load import SampleRequest, random_requests
from shared.model import Transformer
from shared.prefix_cache import PrefixCachingBlockManager
from shared.request import RequestLimits
from shared.roofline import Cost, step_cost, trace_costs
from shared.runner import CPURunner
from shared.scheduler import Scheduler
from shared.tokenizer import Tokenizer
from shared.trace import Trace

BLOCK_SIZE, MAX_NUM_SEQS, WHOLE = 16, 16, 4096


@dataclass(frozen=True)
class Work:
    """Requests that come all at once and begin alike, the slots of the cache, and the budget of a chunk."""

    requests: list[SampleRequest]
    slots: int
    chunk: int

    @property
    def longest(self) -> int:
        return max(len(each.prompt_token_ids) + each.max_tokens for each in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(each.max_tokens for each in self.requests)


def work(count: int, prefix: int, own: int, output: int, slots: int, chunk: int, seed: int = 0) -> Work:
    """`count` prompts: the same `prefix` tokens, then about `own` more. Most answers are short, a few are long."""
    (shared,) = random_requests(1, prefix, 1, seed=seed + 1000)
    draw, requests = random.Random(seed), []
    for each in random_requests(count, own, 1, 0.75, seed):
        max_tokens = min(4 * output, 2 + int(draw.expovariate(1 / output)))
        requests.append(SampleRequest(shared.prompt_token_ids + each.prompt_token_ids, max_tokens))
    return Work(requests, slots, chunk)


SMALL = {"count": 6, "prefix": 32, "own": 8, "output": 6, "slots": 176, "chunk": 32, "seed": 1}
LARGE = {"count": 8, "prefix": 48, "own": 12, "output": 10, "slots": 336, "chunk": 48, "seed": 4}


@dataclass
class Run:
    """What a stage did with the work: tokens, when each came (seconds from the start), the cost of each step."""

    tokens: list[list[int]]
    times: list[list[float]]
    costs: list[Cost] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # positions in each run of the model
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def first_token(self) -> float:
        """Mean milliseconds from the start, when all requests came, to the first token of each."""
        return 1e3 * sum(times[0] for times in self.times) / len(self.times)

    @property
    def longest_gap(self) -> float:
        """The longest time between two tokens of one answer, in milliseconds."""
        gaps = (later - earlier for times in self.times for earlier, later in zip(times, times[1:]))
        return 1e3 * max(gaps)


def loop_run(generate: Callable, model: Transformer, requests: Sequence[SampleRequest]) -> Run:
    """One request after another, by the loop of chapter 03 or 04."""
    run, started = Run([], []), time.perf_counter()
    traces = []
    for request in requests:
        times: list[float] = []

        def choose(logits: Tensor, times: list[float] = times) -> int:
            token = greedy(logits)
            times.append(time.perf_counter() - started)
            return token

        traces.append(generate(model, request.prompt_token_ids, request.max_tokens, choose=choose))
        run.times.append(times)
    run.seconds = time.perf_counter() - started
    run.tokens = [trace.new_ids for trace in traces]
    for trace in traces:
        run.sizes += trace.positions_per_step
        steps = ((new, trace.prompt_len + i) for i, new in enumerate(trace.positions_per_step))
        run.costs += [step_cost(model.config, torch.float32, [piece], 1) for piece in steps]
    return run


def engine_run(runner: Runner, scheduler: Scheduler, tokenizer: Tokenizer, config, work: Work) -> Run:
    """All requests at once, by an engine of these parts."""
    trace = Trace()
    engine = Engine(runner, scheduler, tokenizer, RequestLimits(config.vocab_size, work.longest), trace=trace)
    run = Run([[] for _ in work.requests], [[] for _ in work.requests])
    started = time.perf_counter()
    for name, request in enumerate(work.requests):
        engine.add_request(str(name), request.prompt_token_ids, request.sampling_params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            name = int(output.request_id)
            run.tokens[name] = output.outputs[0].token_ids
            run.times[name].append(time.perf_counter() - started)
    run.seconds = time.perf_counter() - started
    run.sizes = [step.num_batched_tokens for step in trace.steps]
    run.costs = trace_costs(config, torch.float32, trace.steps)
    return run


def stages(model: Transformer, fast_model: Transformer, tokenizer: Tokenizer, work: Work) -> dict[str, Callable]:
    """Each stage as a function that does the work. `fast_model` is rebuilt by the CPU runner and no longer plain."""
    slots, config = work.slots, model.config
    plain, fast = ModelRunner(model, cache := KVCache(config, slots, torch.float32)), CPURunner(fast_model, cache)

    def engine(runner: Runner, kind: type[Scheduler], make: Callable[[], Allocator], chunk: int | None) -> Callable:
        def run() -> Run:
            scheduler = kind(make(), MAX_NUM_SEQS, chunk or WHOLE, enable_chunked_prefill=chunk is not None)
            return engine_run(runner, scheduler, tokenizer, config, work)
        return run

    def rows() -> Allocator:
        return RowAllocator(slots // work.longest, work.longest)

    def blocks() -> Allocator:
        return BlockManager(slots // BLOCK_SIZE, BLOCK_SIZE)

    def cached_blocks() -> Allocator:
        return PrefixCachingBlockManager(slots // BLOCK_SIZE, BLOCK_SIZE)

    return {
        "naive": lambda: loop_run(generate_naive, model, work.requests),
        "cached": lambda: loop_run(generate_cached, model, work.requests),
        "static batches": engine(plain, StaticBatches, rows, None),
        "continuous": engine(plain, Scheduler, rows, None),
        "chunked": engine(plain, Scheduler, rows, work.chunk),
        "paged": engine(plain, Scheduler, blocks, work.chunk),
        "prefix-cached": engine(plain, Scheduler, cached_blocks, work.chunk),
        "optimised": engine(fast, Scheduler, cached_blocks, work.chunk),
    }


CHAPTERS = {"naive": "03", "cached": "04", "static batches": "07", "continuous": "08", "chunked": "08",
            "paged": "09", "prefix-cached": "10", "optimised": "12"}


def transformers_stage(folder, requests: Sequence[SampleRequest]) -> Callable[[], Run]:
    """transformers' `generate`: one left-padded batch until the longest is done; only what was asked for counts."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    longest, most = max(len(r.prompt_token_ids) for r in requests), max(r.max_tokens for r in requests)
    pads = [longest - len(r.prompt_token_ids) for r in requests]
    ids = torch.tensor([[0] * pad + r.prompt_token_ids for pad, r in zip(pads, requests)])  # [requests, longest]
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])

    @torch.inference_mode()
    def run() -> Run:
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False,
                             pad_token_id=0)
        seconds = time.perf_counter() - started
        tokens = [row[longest : longest + r.max_tokens] for row, r in zip(out.tolist(), requests)]
        return Run(tokens, [], sizes=[ids.numel(), *[len(requests)] * (most - 1)], seconds=seconds)

    return run


def rounds(made: Mapping[str, Callable[[], Run]], n: int, before: Iterable[str] = ()) -> dict[str, list[Run]]:
    """n runs of each stage, in turn, so that a slow minute of the machine hits all; `before` are run once, to warm."""
    for name in before:
        made[name]()
    results: dict[str, list[Run]] = {name: [] for name in made}
    for _ in range(n):
        for name, run in made.items():
            results[name].append(run())
    return results
