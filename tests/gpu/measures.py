"""What is measured on a GPU: each part of the stack alone and all together. Nothing is compared with a limit."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from shared.attention import obstacle
from shared.kv_cache import kv_bytes_per_token
from tests.gpu.setting import Setting, Stack, answer, build_engine, greedy, random_model, random_prompts

STACKS = [  # the base, each part alone (graphs need kernels that can be recorded), and all
    Stack("torch_sdpa"), Stack("torch_sdpa", fused=True), Stack("triton"), Stack("triton", graphs=True),
    Stack("triton", fused=True), Stack("triton", fused=True, graphs=True),
]  # fmt: skip


def result(what: str, samples: Sequence[float], unit: str, **more: Any) -> dict[str, Any]:
    median = statistics.median(samples)
    return dict(what=what, median=median, low=min(samples), high=max(samples), n=len(samples), unit=unit, **more)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bandwidth(setting: Setting) -> list[dict[str, Any]]:
    """GB/s that the device reads and writes while it copies a tensor larger than its caches."""
    size = 2**20 if setting.dry else 2**31
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    target, samples = torch.empty_like(source), []
    for _ in range(6):
        setting.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        setting.synchronize()
        samples.append(2 * size / (time.perf_counter() - started) / 1e9)
    return [result("copy bandwidth", samples[1:], "GB/s")]


def available(setting: Setting, dtype: torch.dtype) -> list[Stack]:
    """The stacks that can run here, flash-attn's among them if it is installed."""
    reason = obstacle("flash_attn", torch.device(setting.device), dtype, setting.config.head_dim, 256)
    return [*STACKS, *([] if reason else [Stack("flash_attn", True, True)])]


def one_request(setting: Setting) -> list[dict[str, Any]]:
    """One request that decodes: seconds a token, and the share of the copy bandwidth that its bytes make.

    The bytes of a token are all weights once (the tied embedding counts once, as the head) and the keys and values
    so far.
    """
    dtype = torch.float32 if setting.dry else torch.bfloat16
    speed = bandwidth(setting)[0]["median"] * 1e9
    model, results = random_model(setting, dtype), []
    prompt_len, max_tokens = (4, 4) if setting.dry else (128, 256)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    cache = kv_bytes_per_token(model.config, dtype) * (prompt_len + max_tokens // 2)
    for stack in available(setting, dtype):
        engine = build_engine(setting, model, stack, max_num_seqs=1, max_model_len=2 * (prompt_len + max_tokens),
                              max_num_batched_tokens=512)  # fmt: skip
        prompt = random_prompts([prompt_len], model.config.vocab_size)[0]
        answer(engine, [prompt], [4])  # kernels are compiled here
        engine.add_request("timed", prompt, greedy(max_tokens))
        engine.step()
        samples = []
        while engine.has_unfinished_requests():
            setting.synchronize()
            started = time.perf_counter()
            engine.step()
            samples.append(time.perf_counter() - started)
        share = (weights + cache) / statistics.median(samples) / speed
        times = [sample * 1000 for sample in samples]
        results.append(result(f"one request, {stack}", times, "ms a token", share_of_bandwidth=share))
        del engine
        release()
    return results


def draw_workload(count: int, vocab_size: int, dry: bool) -> tuple[list[list[int]], list[int]]:
    """Prompts and answers of 100 to 1024 tokens each, uniform, seed 0."""
    draw = random.Random(0)
    low, high = (3, 6) if dry else (100, 1024)
    prompts = [[draw.randrange(3, vocab_size) for _ in range(draw.randint(low, high))] for _ in range(count)]
    return prompts, [draw.randint(low, high) for _ in range(count)]


def serve_for(setting: Setting, engine: Any, prompts: Sequence, lengths: Sequence[int], limit: float) -> dict[str, Any]:
    """Run all requests, or as far as `limit` seconds go; output tokens and seconds, and whether it was all."""
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        engine.add_request(str(i), prompt, greedy(length))
    requests = list(engine.scheduler.waiting)
    setting.synchronize()
    started = time.perf_counter()
    while engine.has_unfinished_requests() and time.perf_counter() - started < limit:
        for output in engine.step():
            assert output.outputs[0].finish_reason != "error", output.outputs[0].error
    setting.synchronize()
    seconds = time.perf_counter() - started
    finished = not engine.has_unfinished_requests()
    tokens = sum(len(request.output_token_ids) for request in requests)
    assert not finished or tokens == sum(lengths), "an answer is not as long as it was asked to be"
    return dict(output_tokens=tokens, seconds=seconds, finished=finished)


def blocks_that_fit(setting: Setting, dtype: torch.dtype, block_size: int) -> int:
    """Blocks for 256 long requests, or what most of the free memory holds."""
    if setting.dry:
        return 64
    free = torch.cuda.mem_get_info()[0]
    most = 2**19 // block_size
    return min(most, int(0.75 * free) // (block_size * kv_bytes_per_token(setting.config, dtype)))


def workload(setting: Setting) -> list[dict[str, Any]]:
    """256 requests at once: all parts on. Then 64 of them on each stack, so that a slow one fits in the time."""
    dtype = torch.float32 if setting.dry else torch.bfloat16
    model, results = random_model(setting, dtype), []
    prompts, lengths = draw_workload(4 if setting.dry else 256, model.config.vocab_size, setting.dry)
    full, part = len(prompts), len(prompts) // 4 or 1
    runs = [(STACKS[-1], full, 60.0), *((stack, part, 25.0) for stack in available(setting, dtype))]
    for stack, count, limit in runs:
        sizes = dict(max_num_seqs=4) if setting.dry else dict(
            max_num_seqs=256, max_model_len=2048, max_num_batched_tokens=4096)  # fmt: skip
        num_blocks = blocks_that_fit(setting, dtype, 256 if stack.backend == "flash_attn" else 16)
        engine = build_engine(setting, model, stack, num_blocks=num_blocks, **sizes)
        answer(engine, prompts[:2], [2, 2])
        served = serve_for(setting, engine, prompts[:count], lengths[:count], limit)
        speed = served["output_tokens"] / served["seconds"]
        results.append(result(f"{count} requests, {stack}", [speed], "output tokens/s", **served))
        del engine
        release()
    return results


MEASURES = [bandwidth, one_request, workload]
