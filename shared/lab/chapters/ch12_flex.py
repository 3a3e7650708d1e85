"""Three ways for a decode step to attend over pages on a CPU, timed in turn: the reference, FlexAttention, our loop.

`python -m shared.lab.chapters.ch12_flex` saves the times as evidence. FlexAttention is compiled first, some 20 seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shared.batch import ForwardBatch, RaggedAttention
from shared.cpu_attention import CPUPagedAttention
from shared.kv_cache import KVCache
from shared.lab.chapters.ch12_measure import decode_batch
from shared.lab.machine import Measurement

PAGE = 128  # tokens; what FlexAttention's masks are made of
ROWS, CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 32, 250, 9, 3, 64


class FlexPagedAttention:
    """FlexAttention over the cache in place, for steps in which every request decodes.

    Each request is a row of the batch; its block table says which pages of the one cache it reads, and the mask
    which of their slots are its own tokens.
    """

    compiled = staticmethod(torch.compile(flex_attention, dynamic=False))

    def __init__(self, cache: KVCache, batch: ForwardBatch):
        self.cache, self.batch = cache, batch
        seq_lens, tables = batch.seq_lens, batch.block_tables
        position = torch.full((cache.num_slots,), torch.iinfo(torch.long).max)  # of the token in each slot
        pages = torch.arange(tables.shape[1] * PAGE).view(-1, PAGE)
        position.view(-1, PAGE)[tables.flatten()] = pages.repeat(len(tables), 1)
        counts = -(-seq_lens // PAGE)
        wide = torch.nn.functional.pad(tables, (0, cache.num_slots // PAGE - tables.shape[1]))
        self.mask = BlockMask.from_kv_blocks(
            counts.int()[:, None, None], wide.int()[:, None, None].contiguous(), BLOCK_SIZE=(PAGE, PAGE),
            mask_mod=lambda row, head, query, slot: position[slot] < seq_lens[row],
            seq_lengths=(1, cache.num_slots), compute_q_blocks=False,
        )  # fmt: skip

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, heads, head_dim], k and v [B, kv_heads, head_dim] -> [B, heads, head_dim]."""
        self.cache.write(layer, self.batch.slot_mapping, k, v)
        keys, values = (x[layer].transpose(0, 1)[None].expand(len(q), -1, -1, -1)
                        for x in (self.cache.keys, self.cache.values))  # fmt: skip
        return self.compiled(q.unsqueeze(2), keys, values, block_mask=self.mask, enable_gqa=True).squeeze(2)


WAYS = {"gathered SDPA": RaggedAttention, "FlexAttention": FlexPagedAttention, "compiled loop": CPUPagedAttention}


@torch.inference_mode()
def times(dtype: torch.dtype, n: int = 25) -> list[Measurement]:
    """Milliseconds of one layer's attention for each way, in turn; raises AssertionError if their results differ."""
    torch.manual_seed(0)
    batch = decode_batch(ROWS, CONTEXT, PAGE)
    shape = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM)
    cache = KVCache(shape, batch.block_tables.numel() * PAGE, dtype)
    cache.keys.normal_()
    cache.values.normal_()
    qkv = torch.randn(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    ways = {name: way(cache, batch) for name, way in WAYS.items()}
    results = [way(0, *qkv) for way in ways.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=3e-2, rtol=3e-2)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(n):
        for name, way in ways.items():
            samples[name].append(milliseconds(lambda: way(0, *qkv)))  # noqa: B023
    kind = str(dtype).removeprefix("torch.")
    return [Measurement.of(f"{kind}, {name}", values, "ms") for name, values in samples.items()]


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def save() -> Path:
    from shared.lab.evidence import save_evidence

    what = f"one layer's attention, {ROWS} requests decode with {CONTEXT} tokens each, pages of {PAGE} tokens"
    results = [each for dtype in (torch.float32, torch.bfloat16) for each in times(dtype)]
    return save_evidence("12_cpu_attention", what, "python -m shared.lab.chapters.ch12_flex", results)


if __name__ == "__main__":
    print(save().name)
