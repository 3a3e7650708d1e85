"""flash-attn's two functions as their documentation (version 2.8) describes them, in plain PyTorch.

They check what the library checks and what it leaves undefined: data types, page sizes, shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """q [total_q, heads, head_dim]; k and v are pages [blocks, page, kv_heads, head_dim], as a block_table is given."""
    check_pages(q, k, v, block_table)
    assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int) and causal and dropout_p == 0.0
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == torch.int32 and starts.shape == (len(block_table) + 1,) and starts[0] == 0
    query_lens, key_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert query_lens.sum() == len(q) and query_lens.max() == max_seqlen_q and key_lens.max() <= max_seqlen_k
    pieces = q.split(query_lens.tolist())
    return torch.cat([attend(*row, k, v, softmax_scale) for row in zip(pieces, key_lens.tolist(), block_table)])


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """q [batch, new, heads, head_dim]; a request without keys gives zeros."""
    check_pages(q[:, 0], k_cache, v_cache, block_table)
    assert k is None and v is None and cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (len(q),)
    assert q.ndim == 4 and causal
    rows = zip(q, cache_seqlens.tolist(), block_table)
    return torch.stack([attend(*row, k_cache, v_cache, softmax_scale) for row in rows])


def check_pages(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16) and k.dtype == v.dtype == q.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.ndim == 4 and k.shape == v.shape and q.shape[1] % k.shape[2] == 0 and q.shape[2] == k.shape[3]
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert block_table.dtype == torch.int32 and block_table.ndim == 2 and block_table.stride(-1) == 1


def attend(q: Tensor, seq_len: int, table: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """One request, aligned at the end: q [new, heads, head_dim] attends over seq_len cached tokens."""
    if seq_len == 0:
        return torch.zeros_like(q)
    pages = table[: -(-seq_len // k.shape[1])].long()
    keys, values = (x[pages].flatten(0, 1)[:seq_len].double() for x in (k, v))
    grouped = q.double().unflatten(1, (k.shape[2], -1))
    scores = torch.einsum("nkgd,tkd->kgnt", grouped, keys) * (scale or q.shape[-1] ** -0.5)
    hidden = torch.arange(seq_len) > torch.arange(seq_len - len(q), seq_len)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("kgnt,tkd->nkgd", weights, values).flatten(1, 2).to(q.dtype)
