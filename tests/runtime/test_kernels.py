"""The Triton kernels: each against float64 in Triton's interpreter, on random shapes; and compiled without a GPU.

The interpreter multiplies no matrices of bfloat16, so that type is left to the compiler, and to tests/gpu.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.model import RMSNorm, RotaryEmbedding, rotate
from tests.runtime.paged import NAN, Paged, Shape, assert_close, draw_shape

pytest.importorskip("triton")

from shared import kernels, kernels_attention  # noqa: E402

ROOT = Path(__file__).parents[2]
HALVES = (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """So that a number which nobody wrote cannot pass for a zero."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan() and torch.zeros(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def paged_arguments(paged: Paged, **batch_options):
    batch = paged.batch(**batch_options)
    cache = paged.cache.keys[0], paged.cache.values[0]
    return (paged.q, *cache, batch.block_tables, batch.seq_lens, batch.query_start_loc, batch.block_size)


# Decode: one new token


def decode(paged: Paged, num_splits: int, **batch_options) -> torch.Tensor:
    out = torch.full_like(paged.q, NAN)
    kernels_attention.paged_decode(*paged_arguments(paged, **batch_options), num_splits, out)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_decode_equals_float64(seed):
    draw = random.Random(seed)
    paged = Paged(draw_shape(draw, decoding=3, prompts=0), seed)
    paged.write_all()
    assert_close(decode(paged, draw.choice([1, 2, 3, 8])), paged.expected(), paged.shape.dtype)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 7, 16])
def test_the_number_of_splits_does_not_matter(num_splits):
    """Spans of whole tiles, spans that no key falls to, and a request shorter than a tile."""
    paged = Paged(Shape([(257, 1), (1, 1), (64, 1)], group=3, kv_heads=1, head_dim=64), 5)
    paged.write_all()
    assert_close(decode(paged, num_splits), paged.expected(), torch.float32)


def test_a_table_may_be_wider_than_the_request_needs():
    """A graph's tables have the width of the longest request; what is behind the end is never looked up."""
    paged = Paged(Shape([(20, 1), (33, 1)]), 6)
    paged.write_all()
    assert_close(decode(paged, 4, table_width=64), paged.expected(), torch.float32)


def test_decode_leaves_prompts_alone_and_prefill_leaves_decodes_alone():
    paged = Paged(Shape([(20, 1), (33, 5), (9, 9), (40, 1)]), 7)
    paged.write_all()
    single = torch.tensor([True] + [False] * 14 + [True])
    decoded = decode(paged, 2)
    assert decoded[~single].isnan().all()
    prefilled = prefill(paged)
    assert prefilled[single].isnan().all()
    assert_close(torch.where(single[:, None, None], decoded, prefilled), paged.expected(), torch.float32)


def test_a_row_without_keys_gives_zeros():
    """A padding row of a graph: no tokens, and tables and slots that nobody set."""
    paged = Paged(Shape([(20, 1), (33, 1), (7, 1)]), 8)
    paged.write_all()
    *arguments, block_size = paged_arguments(paged)
    arguments[4] = torch.tensor([20, 0, 7])
    out = torch.full_like(paged.q, NAN)
    kernels_attention.paged_decode(*arguments, block_size, 3, out)
    assert (out[1] == 0).all()
    assert_close(out[[0, 2]], paged.expected()[[0, 2]], torch.float32)


def test_large_scores_do_not_overflow():
    paged = Paged(Shape([(150, 1), (40, 40)], head_dim=64), 9)
    paged.q *= 300
    paged.write_all()
    out = prefill(paged)
    kernels_attention.paged_decode(*paged_arguments(paged), 2, out)
    assert_close(out, paged.expected(), torch.float16)  # the scores are near 3000, the softmax nearly one-hot


@pytest.mark.parametrize("rows, kv_heads, longest", [(1, 8, 131072), (1, 3, 40), (256, 8, 4096), (3, 2, 129)])
def test_splits_fill_the_gpu_and_are_not_too_small(rows, kv_heads, longest):
    splits = kernels_attention.num_key_splits(rows, kv_heads, longest)
    assert 1 <= splits <= 64
    assert splits == 1 or longest / splits > 64
    assert splits == 1 or rows * kv_heads * (splits - 1) < 256


# Prefill: several new tokens, at the end of the request


def prefill(paged: Paged) -> torch.Tensor:
    out = torch.full_like(paged.q, NAN)
    longest = max(new for _, new in paged.shape.lengths)
    kernels_attention.paged_prefill(*paged_arguments(paged), longest, out)
    return out


@pytest.mark.parametrize("seed", range(100, 110))
def test_prefill_equals_float64(seed):
    paged = Paged(draw_shape(random.Random(seed), decoding=0, prompts=2), seed)
    paged.write_all()
    assert_close(prefill(paged), paged.expected(), paged.shape.dtype)


@pytest.mark.parametrize("chunk", [2, 31, 32, 33, 64, 65])
def test_chunks_at_the_edges_of_a_tile(chunk):
    paged = Paged(Shape([(chunk, chunk), (100, chunk), (chunk + 1, chunk)], group=1, kv_heads=1), chunk)
    paged.write_all()
    assert_close(prefill(paged), paged.expected(), torch.float32)


# Store


@pytest.mark.parametrize("seed", range(6))
def test_store_writes_its_slots_and_no_others(seed):
    draw = random.Random(seed)
    paged = Paged(draw_shape(draw, decoding=2, prompts=2), seed)
    before = paged.cache.keys.clone(), paged.cache.values.clone()
    slots = paged.batch().slot_mapping
    kernels_attention.store_kv(
        paged.new(paged.k), paged.new(paged.v), paged.cache.keys[0], paged.cache.values[0], slots
    )
    stored = paged.cache.keys.clone(), paged.cache.values.clone()
    paged.cache.keys.copy_(before[0])
    paged.cache.values.copy_(before[1])
    paged.write_all()
    assert torch.equal(stored[0].nan_to_num(7.5), paged.cache.keys.nan_to_num(7.5))
    assert torch.equal(stored[1].nan_to_num(7.5), paged.cache.values.nan_to_num(7.5))


@pytest.mark.parametrize("outside", [-1, -(10**9), 48, 10**9])
def test_store_writes_nothing_for_a_slot_outside_of_the_cache(outside):
    keys, values = torch.zeros(48, 2, 16), torch.zeros(48, 2, 16)
    new = torch.ones(3, 2, 16)
    kernels_attention.store_kv(new, new, keys, values, torch.tensor([outside, 3, outside]))
    for kept in (keys, values):
        assert kept[3].eq(1).all() and kept.sum() == 32


def test_store_and_attention_take_rows_out_of_a_wider_tensor():
    """What a projection for queries, keys and values at once leaves."""
    paged = Paged(Shape([(20, 1), (33, 1)]), 11)
    wide = torch.cat([paged.q, paged.new(paged.k), paged.new(paged.v)], dim=1)
    paged.q, k, v = wide.split([4, 2, 2], dim=1)
    kernels_attention.store_kv(k, v, paged.cache.keys[0], paged.cache.values[0], paged.batch().slot_mapping)
    out = torch.full((2, 4, 16), NAN)
    kernels_attention.paged_decode(*paged_arguments(paged), 2, out)
    assert_close(out, paged.expected(), torch.float32)


# Norm, rotary positions, SwiGLU: bit for bit what the modules of model.py round to, or nearly


@pytest.mark.parametrize("dtype", [*HALVES, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 4, 80), (2, 576)])
def test_rms_norm(shape, dtype):
    torch.manual_seed(0)
    x, added = torch.randn(2, *shape).mul(3).to(dtype)
    norm = RMSNorm(shape[-1], 1e-6).to(dtype)
    norm.weight.data.normal_()
    ulp = torch.finfo(dtype).eps * 8
    alone = kernels.rms_norm(x, norm.weight, norm.eps)
    torch.testing.assert_close(alone, norm(x), rtol=ulp, atol=ulp)
    summed, normed = kernels.add_rms_norm(x, added, norm.weight, norm.eps)
    if dtype is not torch.bfloat16:  # the interpreter cuts bfloat16 off where a GPU rounds
        assert torch.equal(summed, x + added)
    torch.testing.assert_close(summed, x + added, rtol=ulp, atol=0)
    torch.testing.assert_close(normed, norm(x + added), rtol=ulp, atol=ulp)


@pytest.mark.parametrize("dtype", [*HALVES, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 16), (9, 3, 64), (2, 1, 80)])
def test_rotary(heads, kv_heads, head_dim, dtype):
    torch.manual_seed(1)
    positions = torch.tensor([0, 5, 1857, 131071])
    cos, sin = RotaryEmbedding(Shape([(1, 1)], head_dim=head_dim).config())(positions)
    q, k = torch.randn(4, heads, head_dim).to(dtype), torch.randn(4, kv_heads, head_dim).to(dtype)
    expected = rotate(q, cos, sin), rotate(k, cos, sin)
    kernels.rotate_in_place(q, k, cos, sin)
    for turned, right in zip((q, k), expected):
        torch.testing.assert_close(turned, right, rtol=torch.finfo(dtype).eps * 4, atol=torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize("dtype", [*HALVES, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (3, 96), (2, 1536)])
def test_silu_and_mul(shape, dtype):
    torch.manual_seed(2)
    gate, up = (torch.randn(2, *shape) * 4).to(dtype)
    expected = torch.nn.functional.silu(gate) * up
    ulp = torch.finfo(dtype).eps * 4
    torch.testing.assert_close(kernels.silu_and_mul(gate, up), expected, rtol=ulp, atol=ulp)


# Compiled for GPUs that are not there


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Everything, in a process of its own: interpreted kernels cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "shared.lab.kernel_compiler"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_both_architectures(compiled):
    names = {name for module in (kernels, kernels_attention) for name in vars(module) if name.endswith("_kernel")}
    found = {(record["kernel"], record["dtype"], record["arch"]) for record in compiled}
    types = ("bfloat16", "float32")
    assert found == {(name, dtype, arch) for name in names for dtype in types for arch in ("sm_80", "sm_90")}
    assert all(record["ptx_lines"] > 50 and record["cubin_bytes"] > 1000 for record in compiled)


def test_compiled_kernels_fit_and_use_the_tensor_cores(compiled):
    """Shared memory of a small GPU (99 KiB a program); half types multiply on tensor cores; little is spilled."""
    for record in compiled:
        assert record["shared_bytes"] <= 99 * 1024, record
        dots = record["kernel"] in ("decode_kernel", "prefill_kernel") and record["dtype"] != "float32"
        assert bool(record["tensor_core_instructions"]) == dots, record
        assert record["spilled_bytes"] <= 512, record
