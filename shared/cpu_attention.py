"""Attention over the cache in place, for CPUs: no copy of keys and values, one call for the whole ragged batch."""
from __future__ import annotations

import torch
from torch import Tensor

from shared.batch import ForwardBatch
from shared.cpu_ops import KernelsUnavailable, operation
from shared.kv_cache import KVCache

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)  # those compiled in cpu_attention.cpp


class CPUPagedAttention:
    """Writes the new keys and values to their slots, then each query walks its request's block table.

    Decodes and pieces of prompts go through the same compiled loop, with a running softmax. Raises
    KernelsUnavailable for a cache that is not on the CPU in float32 or bfloat16, or without a compiler.
    """

    def __init__(self, cache: KVCache, batch: ForwardBatch):
        keys = cache.keys
        self.attend = paged_operation(keys)
        self.cache, self.batch = cache, batch
        layers, _, self.kv_heads, self.head_dim = keys.shape
        self.layer_bytes = keys[0].numel() * keys.element_size()
        self.block_size, self.requests = batch.block_size, len(batch.query_lens)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        batch, offset = self.batch, layer * self.layer_bytes
        self.attend(
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), out.data_ptr(),
            self.cache.keys.data_ptr() + offset, self.cache.values.data_ptr() + offset,
            batch.slot_mapping.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.shape[1],
            batch.block_size, batch.query_start_loc.data_ptr(), batch.seq_lens.data_ptr(),
            self.requests, q.shape[1], self.kv_heads, self.head_dim, self.head_dim**-0.5,
        )
        return out


def paged_operation(keys: Tensor):
    """The compiled function for a cache like this; raises KernelsUnavailable."""
    head_dim = keys.shape[-1]
    if keys.device.type != "cpu" or head_dim not in HEAD_DIMS:
        limit = f"caches on the CPU with a head_dim of {HEAD_DIMS}"
        raise KernelsUnavailable(f"cpu_paged attention reads {limit}, not {head_dim} on {keys.device}")
    return operation("paged_attention", keys.dtype)


def packed_heads(x: Tensor) -> Tensor:
    """x [T, heads, head_dim] with each token's heads side by side; the tokens may be parts of longer rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
