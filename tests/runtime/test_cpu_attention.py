"""Attention over the cache in place: equal to the plain back end, on ragged batches, in both types."""
from __future__ import annotations

import subprocess
import sys
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from shared import cpu_ops
from shared.batch import ForwardBatch, RaggedAttention
from shared.cpu_attention import HEAD_DIMS, CPUPagedAttention
from shared.cpu_ops import KernelsUnavailable
from shared.kv_cache import KVCache

BATCHES = {  # (new tokens, tokens in all) of each request
    "one decode": [(1, 1)],
    "decodes": [(1, 1), (1, 63), (1, 64), (1, 65), (1, 200)],
    "prompts": [(1, 1), (5, 5), (16, 16), (17, 17), (130, 130)],
    "pieces of prompts": [(7, 90), (33, 64), (2, 66)],
    "mixed": [(1, 77), (40, 40), (1, 3), (20, 100), (1, 129)],
}


def ragged_batch(requests, block_size: int) -> ForwardBatch:
    """Requests whose blocks lie anywhere in the cache, in no order."""
    counts = [-(-total // block_size) for _, total in requests]
    free = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    positions = [p for new, total in requests for p in range(total - new, total)]
    owners = [row for row, (new, _) in enumerate(requests) for _ in range(new)]
    slots = [tables[row][p // block_size] * block_size + p % block_size for row, p in zip(owners, positions)]
    lens = tuple(new for new, _ in requests)
    width = max(counts)
    return ForwardBatch(
        torch.zeros(len(slots), dtype=torch.long), torch.tensor(positions), torch.tensor(slots), torch.tensor([0]),
        torch.tensor([[*table, *[0] * (width - len(table))] for table in tables]),
        torch.tensor([total for _, total in requests]), torch.tensor(list(accumulate(lens, initial=0))),
        lens, max(total for _, total in requests), block_size,
    )


def filled_cache(batch: ForwardBatch, dtype: torch.dtype, kv_heads: int, head_dim: int) -> KVCache:
    """Two layers of random keys and values where requests have tokens, NaN in every other slot."""
    slots = (int(batch.block_tables.max()) + 1) * batch.block_size
    shape = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=kv_heads, head_dim=head_dim)
    cache = KVCache(shape, slots, dtype)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    for table, total in zip(batch.block_tables, batch.seq_lens.tolist()):
        offsets = torch.arange(total)
        own = table[offsets // batch.block_size] * batch.block_size + offsets % batch.block_size
        for stored in (cache.keys, cache.values):
            stored[:, own] = torch.randn(2, total, kv_heads, head_dim).to(dtype)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16, 1000])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_plain_back_end(name, block_size, dtype):
    compare(ragged_batch(BATCHES[name], block_size), dtype, heads=9, kv_heads=3, head_dim=64)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (8, 2), (14, 2)])
def test_equals_the_plain_back_end_for_other_heads(heads, kv_heads, head_dim):
    compare(ragged_batch(BATCHES["mixed"], 16), torch.float32, heads, kv_heads, head_dim)


def compare(batch: ForwardBatch, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    ours, plain = (filled_cache(batch, dtype, kv_heads, head_dim) for _ in range(2))
    plain.keys.copy_(ours.keys)
    plain.values.copy_(ours.values)
    qkv = torch.randn(len(batch.input_ids), heads + 2 * kv_heads, head_dim).to(dtype)
    parts = qkv.split((heads, kv_heads, kv_heads), dim=1)  # views into longer rows
    tolerance = dict(atol=2e-6, rtol=2e-5) if dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)
    for layer in (1, 0):
        got = CPUPagedAttention(ours, batch)(layer, *parts)
        torch.testing.assert_close(got, RaggedAttention(plain, batch)(layer, *parts), **tolerance)
    assert torch.equal(ours.keys.nan_to_num(9.0), plain.keys.nan_to_num(9.0))
    assert torch.equal(ours.values.nan_to_num(9.0), plain.values.nan_to_num(9.0))


def test_scores_far_apart_neither_overflow_nor_vanish():
    batch = ragged_batch([(1, 100)], 16)
    cache = filled_cache(batch, torch.float32, 1, 64)
    q, k, v = torch.full((1, 1, 64), 100.0), torch.full((1, 1, 64), 50.0), torch.randn(1, 1, 64)
    torch.testing.assert_close(CPUPagedAttention(cache, batch)(0, q, k, v), v)  # the last key outweighs all others


def test_what_it_cannot_read_is_refused():
    batch = ragged_batch([(1, 1)], 16)
    with pytest.raises(KernelsUnavailable, match="head_dim"):
        CPUPagedAttention(filled_cache(batch, torch.float32, 1, 24), batch)
    with pytest.raises(KernelsUnavailable, match="float16"):
        CPUPagedAttention(filled_cache(batch, torch.float16, 1, 64), batch)


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """As on a machine that has built nothing yet."""
    monkeypatch.setenv("ZERO_TO_ENGINE_HOME", str(tmp_path))
    cpu_ops.kernels.cache_clear()
    yield tmp_path / "kernels"
    cpu_ops.kernels.cache_clear()


def test_without_a_compiler_the_error_says_so(no_library, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelsUnavailable, match="compiler"):
        cpu_ops.kernels()


def test_a_compiler_that_fails_is_quoted(no_library, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KernelsUnavailable, match="could not build"):
        cpu_ops.kernels()
    assert not list(no_library.glob("*.so"))


def test_two_processes_may_build_at_once(no_library):
    command = [sys.executable, "-c", "from shared.cpu_ops import kernels; kernels()"]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert len(list(no_library.iterdir())) == 1  # one library, no scraps
