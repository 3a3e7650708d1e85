"""What this machine allows on the workload: linear layers, prefill and reading the cache, each measured alone.

Once with oneDNN's prepacked linear layers, the bound that any engine over that library has, and once with the
linear layers that the engine uses here.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from shared.cpu_layers import joined
from shared.cpu_linear import PackedLinear, packed
from shared.kv_cache import kv_bytes_per_token
from shared.model import Transformer
from shared.runner import no_prepacking
from shared.weights import load_model

DECODE_ROWS = (1, 2, 4, 8, 16, 32)
PREFILL_ROWS = 1024


def median_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


class Linears:
    """The linear layers of a model alone, joined and prepacked by `pack`, on random inputs."""

    def __init__(self, model: Transformer, pack: Callable[[nn.Linear], nn.Module]):
        plain = []
        for layer in model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            plain += [joined(attn.q_proj, attn.k_proj, attn.v_proj), attn.o_proj]
            plain += [joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj]
        dtype = model.embed_tokens.weight.dtype
        pack = pack if no_prepacking(dtype) is None else (lambda linear: linear)
        self.body = [(linear.in_features, pack(linear)) for linear in plain]
        self.head = (model.lm_head.in_features, pack(model.lm_head))
        self.dtype = dtype

    @torch.inference_mode()
    def seconds(self, rows: int, with_head: bool) -> float:
        layers = [*self.body, self.head] if with_head else self.body
        inputs = {size: torch.randn(rows, size).to(self.dtype) for size, _ in layers}
        return median_seconds(lambda: [linear(inputs[size]) for size, linear in layers])


def memory_bandwidth(num_bytes: int = 512 * 2**20) -> float:
    """Bytes read a second, by a sum over more memory than a core's caches hold."""
    numbers = torch.ones(num_bytes // 4)
    return num_bytes / median_seconds(numbers.sum)


class Bound:
    """Tokens a second if nothing but linear layers and one reading of the cache took time."""

    def __init__(self, name: str, dtype: str):
        model = load_model(name, getattr(torch, dtype))
        self.token_bytes = kv_bytes_per_token(model.config, model.embed_tokens.weight.dtype)
        self.onednn, self.own = Linears(model, PackedLinear), Linears(model, packed)

    def measure(self, requests: list[dict]) -> dict:
        """The numbers of this moment, with oneDNN's linear layers; below `own`, with the engine's."""
        bandwidth = memory_bandwidth()
        measured = self.bounds(requests, self.onednn, bandwidth)
        measured["own"] = self.bounds(requests, self.own, bandwidth)
        measured["memory_gigabytes_per_second"] = round(bandwidth / 1e9, 1)
        return measured

    def bounds(self, requests: list[dict], linears: Linears, bandwidth: float) -> dict:
        """Rows of a step are those requests that still run in it."""
        most = len(requests)
        decode = {rows: linears.seconds(rows, True) for rows in {min(rows, most) for rows in DECODE_ROWS} | {most}}
        decode = dict(sorted(decode.items()))
        prefill = linears.seconds(PREFILL_ROWS, False) / PREFILL_ROWS  # a token
        linear_seconds = read_bytes = 0.0
        for step in range(1, max(r["max_tokens"] for r in requests)):  # the first token comes with the prefill
            running = [r for r in requests if r["max_tokens"] > step]
            linear_seconds += interpolated(decode, len(running))
            read_bytes += sum(len(r["prompt"]) + step for r in running) * self.token_bytes
        seconds = sum(len(r["prompt"]) for r in requests) * prefill + linear_seconds + read_bytes / bandwidth
        return {
            "workload": round(sum(r["max_tokens"] for r in requests) / seconds, 1),
            "one request": round(1 / decode[1], 1),
            "linear_ms_by_rows": {rows: round(s * 1e3, 2) for rows, s in decode.items()},
            "prefill_tokens_per_second": round(1 / prefill),
        }


def interpolated(table: dict[int, float], rows: int) -> float:
    """Seconds for a number of rows between two that were measured."""
    above = min(known for known in table if known >= min(rows, max(table)))
    below = max(known for known in table if known <= rows)
    if above == below:
        return table[above]
    return table[below] + (table[above] - table[below]) * (rows - below) / (above - below)
