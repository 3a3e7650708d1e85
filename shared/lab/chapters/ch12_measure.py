"""Chapter 12's counts and times: what a decode step does, and what each switch of the CPU stack brings.

`python -m shared.lab.chapters.ch12_measure` saves the times of all eight settings as evidence.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.batch import ForwardBatch, ModelRunner, RaggedAttention
from shared.kv_cache import KVCache
from shared.lab import Explorer, Switch
from shared.lab.machine import Measurement, timed
from shared.lab.markup import Html, bar, join, note, table
from shared.model import Transformer

SWITCHES = ("attention", "fuse", "prepack")
WORDS = {"attention": "attention in place", "fuse": "fused operations", "prepack": "prepacked weights"}
Setting = frozenset[str]  # the switches that are on
SETTINGS = [frozenset(on) for count in range(4) for on in itertools.combinations(SWITCHES, count)]


class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch that run inside of it, views left out, and the bytes that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes_written: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            name = func._schema.name.split("::")[1]
            self.counts[name] += 1
            self.bytes_written[name] += out.nbytes if isinstance(out, torch.Tensor) else 0
        return out


def stack_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies it, else float32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def decode_batch(rows: int, context: int, block_size: int = 16) -> ForwardBatch:
    """A step in which `rows` requests decode, each with `context` tokens in the cache, this one included."""
    width = -(-context // block_size)
    tables = torch.arange(rows * width).view(rows, width)  # [rows, width]
    last = context - 1
    slots = tables[:, last // block_size] * block_size + last % block_size
    return ForwardBatch(
        torch.arange(3, 3 + rows), torch.full((rows,), last), slots, torch.arange(rows), tables,
        torch.full((rows,), context), torch.arange(rows + 1), (1,) * rows, context, block_size,
    )


def filled_cache(model: Transformer, batch: ForwardBatch) -> KVCache:
    """A cache with room for the batch, full of small random numbers."""
    cache = KVCache(model.config, batch.block_tables.numel() * batch.block_size, model.embed_tokens.weight.dtype)
    generator = torch.Generator().manual_seed(0)
    for kept in (cache.keys, cache.values):
        kept.normal_(generator=generator)
    return cache


def runner_of(setting: Setting, model: Transformer, cache: KVCache) -> ModelRunner:
    """The plain runner, or chapter 12's with these parts switched on."""
    from shared.cpu_attention import CPUPagedAttention
    from shared.runner import CPURunner

    backend = CPUPagedAttention if "attention" in setting else RaggedAttention
    if not setting - {"attention"}:
        return ModelRunner(model, cache, backend)
    return CPURunner(model, cache, backend, fuse="fuse" in setting, prepack="prepack" in setting)


def stack_times(
    load: Callable[[], Transformer], rows: int = 8, context: int = 200, n: int = 7,
    settings: Iterable[Setting] = SETTINGS,
) -> dict[Setting, Measurement]:
    """Milliseconds of one decode step for each setting, one model at a time in memory."""
    batch, times = decode_batch(rows, context), {}
    for setting in settings:
        model = load()
        runner = runner_of(setting, model, filled_cache(model, batch))
        with torch.inference_mode():
            times[setting] = timed(named(setting), partial(runner.forward, batch), n)
    return times


def named(setting: Setting) -> str:
    return " + ".join(WORDS[switch] for switch in SWITCHES if switch in setting) or "plain"


def speedup(times: Mapping[Setting, Measurement], setting: Setting) -> float:
    return times[frozenset()].median / times[setting].median


def product_of_parts(times: Mapping[Setting, Measurement], setting: Setting) -> float:
    """What the setting would bring if the speed-ups of its switches alone multiplied."""
    product = 1.0
    for switch in setting:
        product *= speedup(times, frozenset([switch]))
    return product


def sum_of_savings(times: Mapping[Setting, Measurement], setting: Setting) -> float:
    """The milliseconds of a step that saves what each switch of the setting saves alone; 0 if that is all of it."""
    plain = times[frozenset()].median
    return max(0.0, plain - sum(plain - times[frozenset([switch])].median for switch in setting))


def switchboard(times: Mapping[Setting, Measurement]) -> Explorer:
    """Turn each part on and off: the measured step beside two guesses, speed-ups multiplied and savings added up."""
    slowest, plain = max(each.median for each in times.values()), times[frozenset()].median

    def render(inputs: dict[str, Any]) -> Html:
        chosen = frozenset(switch for switch in SWITCHES if inputs[switch])
        rows = [[named(s), str(t), bar(t.median / slowest), f"{speedup(times, s):.2f}"] for s, t in times.items()]
        lit = [list(times).index(chosen)]
        words = f"{named(chosen)}: {speedup(times, chosen):.2f} times as fast as plain"
        if len(chosen) > 1:
            product, left = product_of_parts(times, chosen), sum_of_savings(times, chosen)
            words += f". The single speed-ups multiply to {product:.2f}, a step of {plain / product:.1f} ms; the times"
            words += f" saved alone add up to a step of {left:.1f} ms" if left else " saved alone add up to all of it"
            words += f"; measured: {times[chosen].median:.1f} ms"
        return join([table(["switched on", "a decode step", "", "times as fast"], rows, lit=lit), note(f"{words}.")])

    fields = [Switch(switch, WORDS[switch], True) for switch in SWITCHES]
    return Explorer(render, fields, title="The stack, measured a moment ago")


def save() -> Path:
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    results: list[Measurement] = []
    saved = [setting for setting in SETTINGS if len(setting) != 2]
    for rows in (1, 32):
        times = stack_times(lambda: load_model("smollm2-135m", torch.bfloat16), rows, n=25, settings=saved)
        results += [replace(each, what=f"{rows} rows, {each.what}") for each in times.values()]
    what = "one decode step in bfloat16, 200 tokens of context each: plain, each switch alone, all together"
    return save_evidence("12_optimization_stack", what, "python -m shared.lab.chapters.ch12_measure", results)


if __name__ == "__main__":
    print(save().name)
