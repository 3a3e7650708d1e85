"""Attention over a paged cache, in Triton: store, decode with split keys, prefill with a running softmax.

The cache of a layer is flat, [slots, kv_heads, head_dim]; token i of request b lies in slot
block_tables[b, i // block_size] * block_size + i % block_size. The running softmax is FlashAttention's (Dao et
al., 2022), the split of the keys FlashDecoding's (Dao et al., 2023), the block tables PagedAttention's (Kwon et
al., 2023). Each kernel is checked against float64 in Triton's interpreter and compiled for sm_80 and sm_90.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_kernel(k, v, keys, values, slot_mapping, num_slots, k_stride, v_stride, row_size, ROW: tl.constexpr):
    """One program a token: its key and value go to its slot; a slot outside of the cache is written nowhere."""
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    dims = tl.arange(0, ROW)  # over kv_heads * head_dim
    real = (dims < row_size) & (slot >= 0) & (slot < num_slots)
    tl.store(keys + slot * row_size + dims, tl.load(k + token * k_stride + dims, mask=real), mask=real)
    tl.store(values + slot * row_size + dims, tl.load(v + token * v_stride + dims, mask=real), mask=real)


@triton.jit
def tile_offsets(positions, known, table, block_size, slot_stride, head_offset, dims):
    """Where the keys (or values) of these positions of one request and one head lie: [TILE, DIM]."""
    blocks = tl.load(table + positions // block_size, mask=known, other=0)
    slots = blocks * block_size + positions % block_size
    return slots[:, None] * slot_stride + head_offset + dims[None, :]


@triton.jit
def softmax_step(scores, value, peak, total, mixed):
    """Take one more tile into a running softmax: scores [ROWS, TILE], value [TILE, DIM].

    `peak` [ROWS] is the largest score so far, `total` [ROWS] the sum of exp(score - peak), `mixed` [ROWS, DIM]
    the values weighted by the same. A larger peak shrinks what was summed before.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp(peak - new_peak)
    weights = tl.exp(scores - new_peak[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def decode_kernel(
    q, keys, values, partial_out, partial_lse, block_tables, seq_lens, query_start_loc,
    scale, q_stride, table_stride, slot_stride, block_size, num_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a request, key-value head and span of keys; its rows are the GROUP query heads of that head.

    Each program is right for its own keys alone: it leaves a softmax over them, and the logarithm of its sum.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(query_start_loc + request)
    if tl.load(query_start_loc + request + 1) - row != 1:
        return  # a piece of a prompt: the other kernel's
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    span = tl.cdiv(tl.cdiv(seq_len, num_splits), TILE) * TILE
    start, end = split * span, tl.minimum(split * span + span, seq_len)

    group, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    heads = kv_head * GROUP + group
    real = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    peak, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    table = block_tables + request * table_stride
    for first in range(start, end, TILE):
        positions = first + tl.arange(0, TILE)
        known = positions < end
        offsets = tile_offsets(positions, known, table, block_size, slot_stride, kv_head * HEAD_DIM, dims)
        wanted = known[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + offsets, mask=wanted, other=0.0)  # [TILE, DIM]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [ROWS, TILE]
        scores = tl.where(known[None, :], scores, float("-inf"))
        value = tl.load(values + offsets, mask=wanted, other=0.0)
        peak, total, mixed = softmax_step(scores, value, peak, total, mixed)

    places = (request * tl.num_programs(1) * GROUP + heads) * num_splits + split  # in [B, heads, splits]
    if start < end:
        tl.store(partial_out + places[:, None] * HEAD_DIM + dims[None, :], mixed / total[:, None], mask=real)
        tl.store(partial_lse + places, peak + tl.log(total), mask=group < GROUP)
    else:
        tl.store(partial_lse + places, peak, mask=group < GROUP)  # minus infinity: no keys fell to this span


@triton.jit
def combine_kernel(
    partial_out, partial_lse, out, query_start_loc, out_stride, num_splits,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program a request and query head: the spans' results, each weighted by its share of the whole sum.

    A request of no keys (a padding row) gives zeros.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_start_loc + request)
    if tl.load(query_start_loc + request + 1) - row != 1:
        return
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    places = (request * tl.num_programs(1) + head) * num_splits + splits
    lse = tl.load(partial_lse + places, mask=splits < num_splits, other=float("-inf"))
    used, peak = lse > float("-inf"), tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(peak > float("-inf"), peak, 0.0))
    wanted = used[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial_out + places[:, None] * HEAD_DIM + dims[None, :], mask=wanted, other=0.0)
    total = tl.sum(weights, 0)
    mixed = tl.sum(weights[:, None] * parts, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_stride + head * HEAD_DIM + dims, mixed, mask=dims < HEAD_DIM)


@triton.jit
def prefill_kernel(
    q, keys, values, out, block_tables, seq_lens, query_start_loc,
    scale, q_stride, out_stride, table_stride, slot_stride, block_size,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a request, query head and tile of ROWS new tokens, which stand at the end of the sequence."""
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_start_loc + request)
    num_new = (tl.load(query_start_loc + request + 1) - first_row).to(tl.int32)
    if (num_new == 1) | (tile * ROWS >= num_new):
        return  # a decoding request, or no tokens left for this tile
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    rows, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    own = seq_len - num_new + rows  # the position of each row
    end = tl.minimum(seq_len, seq_len - num_new + tile * ROWS + ROWS)  # no row looks further

    real = (rows < num_new)[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q + (first_row + rows)[:, None] * q_stride + head * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    peak, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    table, head_offset = block_tables + request * table_stride, head // GROUP * HEAD_DIM
    for first in range(0, end, TILE):
        positions = first + tl.arange(0, TILE)
        known = positions < end
        offsets = tile_offsets(positions, known, table, block_size, slot_stride, head_offset, dims)
        wanted = known[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + offsets, mask=wanted, other=0.0)  # [TILE, DIM]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [ROWS, TILE]
        scores = tl.where(positions[None, :] <= own[:, None], scores, float("-inf"))
        value = tl.load(values + offsets, mask=wanted, other=0.0)
        peak, total, mixed = softmax_step(scores, value, peak, total, mixed)
    places = (first_row + rows)[:, None] * out_stride + head * HEAD_DIM + dims[None, :]
    tl.store(out + places, mixed / total[:, None], mask=real)


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Copy k and v [T, kv_heads, head_dim] to slots [T] of one layer's cache [slots, kv_heads, head_dim]."""
    row_size = k[0].numel()
    grid, width = (len(slot_mapping),), triton.next_power_of_2(row_size)
    store_kernel[grid](k, v, keys, values, slot_mapping, len(keys), k.stride(0), v.stride(0), row_size, ROW=width)


def num_key_splits(num_requests: int, kv_heads: int, longest: int, programs: int = 256, least: int = 128) -> int:
    """Spans to cut the keys into: enough programs for the whole GPU (an H100 runs 132 blocks at once or more),
    and not so many that a span of the longest request has fewer than `least` keys."""
    wanted = -(-programs // (num_requests * kv_heads))
    return max(1, min(wanted, -(-longest // least), 64))


def tile_size(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile, few enough that a program's share fits in registers and in the shared memory of small GPUs."""
    return 64 if dtype.itemsize == 2 and head_dim <= 128 else 32


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    block_size: int, num_splits: int, out: Tensor,
) -> None:  # fmt: skip
    """Attend for every request that has one new token; fills its row of out [T, heads, head_dim]."""
    num_requests, (_, heads, head_dim), kv_heads = len(seq_lens), q.shape, keys.shape[1]
    partial_out = q.new_empty((num_requests, heads, num_splits, head_dim), dtype=torch.float32)
    partial_lse = q.new_empty((num_requests, heads, num_splits), dtype=torch.float32)
    group, width = heads // kv_heads, triton.next_power_of_2(head_dim)
    decode_kernel[num_requests, kv_heads, num_splits](
        q, keys, values, partial_out, partial_lse, block_tables, seq_lens, query_start_loc,
        head_dim**-0.5, q.stride(0), block_tables.stride(0), keys.stride(0), block_size, num_splits,
        GROUP=group, HEAD_DIM=head_dim, ROWS=max(16, triton.next_power_of_2(group)), DIM=width,
        TILE=tile_size(head_dim, q.dtype),
    )  # fmt: skip
    combine_kernel[num_requests, heads](
        partial_out, partial_lse, out, query_start_loc, out.stride(0), num_splits,
        HEAD_DIM=head_dim, DIM=width, SPLITS=triton.next_power_of_2(num_splits),
    )  # fmt: skip


def paged_prefill(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    block_size: int, longest_query: int, out: Tensor,
) -> None:  # fmt: skip
    """Attend for every request that has several new tokens; fills their rows of out [T, heads, head_dim]."""
    num_requests, (_, heads, head_dim), kv_heads = len(seq_lens), q.shape, keys.shape[1]
    tile = tile_size(head_dim, q.dtype)
    prefill_kernel[triton.cdiv(longest_query, tile), heads, num_requests](
        q, keys, values, out, block_tables, seq_lens, query_start_loc,
        head_dim**-0.5, q.stride(0), out.stride(0), block_tables.stride(0), keys.stride(0), block_size,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, ROWS=tile, DIM=triton.next_power_of_2(head_dim), TILE=tile,
    )  # fmt: skip
