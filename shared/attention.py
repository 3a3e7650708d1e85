"""Ways to attend over the paged cache, by their names, and the choice among them."""
from __future__ import annotations

import importlib.util
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.batch import AttentionBackend, ForwardBatch, RaggedAttention
from shared.errors import InvalidRequestError
from shared.kv_cache import KVCache

AUTO = {"cuda": ("triton", "torch_sdpa"), "cpu": ("cpu_paged", "torch_sdpa")}
BACKENDS = ("torch_sdpa", "cpu_paged", "triton", "flash_attn")


def select_backend(
    name: str | AttentionBackend, device: torch.device | str, dtype: torch.dtype, head_dim: int, block_size: int = 16
) -> AttentionBackend:
    """The back end of that name; "auto" is the fastest that can be had here. A class goes through unchanged.

    Raises InvalidRequestError that says why this device, data type or model can't have it.
    """
    if callable(name):
        return name
    if name not in ("auto", *BACKENDS):
        raise InvalidRequestError("attention_backend", name, f"auto, a class, or one of {sorted(BACKENDS)}")
    device = torch.device(device)
    wanted = AUTO.get(device.type, ("torch_sdpa",)) if name == "auto" else (name,)
    reasons = {choice: obstacle(choice, device, dtype, head_dim, block_size) for choice in wanted}
    for choice, reason in reasons.items():
        if reason is None:
            return load_backend(choice)
    raise InvalidRequestError("attention_backend", name, f"one that can be had here: {reasons[name]}")


def obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why this back end can't be had, in words; None if it can."""
    if name == "cpu_paged":
        return cpu_obstacle(device, dtype, head_dim)
    if name == "triton":
        return triton_obstacle(device, dtype, head_dim)
    if name == "flash_attn":
        return flash_attn_obstacle(device, dtype, head_dim, block_size)
    return None  # torch_sdpa runs everywhere


def load_backend(name: str) -> AttentionBackend:
    if name == "cpu_paged":
        from shared.cpu_attention import CPUPagedAttention

        return CPUPagedAttention
    return {"torch_sdpa": RaggedAttention, "triton": TritonAttention, "flash_attn": FlashAttention}[name]


def cpu_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    from shared.cpu_attention import HEAD_DIMS
    from shared.cpu_ops import KernelsUnavailable, operation

    if device.type != "cpu":
        return f"cpu_paged runs on cpu, not on {device}"
    if head_dim not in HEAD_DIMS:
        return f"cpu_paged takes a head_dim of {HEAD_DIMS}, not {head_dim}"
    try:
        operation("paged_attention", dtype)
    except KernelsUnavailable as error:
        return str(error)
    return None


def triton_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed (Linux: pip install -c constraints.txt -e ".[gpu]")'
    if not 16 <= head_dim <= 256:
        return f"the Triton kernels take a head_dim from 16 to 256, not {head_dim}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if dtype != torch.bfloat16 else "Triton's interpreter can't multiply matrices of bfloat16"
    return device_obstacle("triton", device)


def device_obstacle(name: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        also = ", or TRITON_INTERPRET=1 set before Python starts" if name == "triton" else ""
        return f"{name} needs a CUDA device{also}, and the device is {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"{name} needs compute capability 8.0, this GPU has {capability}"


def flash_attn_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return 'flash-attn is not installed (pip install --no-build-isolation -c constraints.txt -e ".[gpu]")'
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, not {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"flash-attn takes a head_dim up to 256 that 8 divides, not {head_dim}"
    if block_size % 256:
        return f"flash-attn reads pages of a multiple of 256 tokens: set block_size=256, it is {block_size}"
    return device_obstacle("flash_attn", device)


class TritonAttention:
    """Our own kernels: they read the pages where they lie. One kernel serves decoding requests, one the others."""

    can_be_captured = True  # no shape, and no number on the host, depends on how long the requests are

    def __init__(self, cache: KVCache, batch: ForwardBatch):
        from shared import kernels_attention

        self.cache, self.batch, self.kernels = cache, batch, kernels_attention
        kv_heads = cache.keys.shape[2]
        self.num_splits = kernels_attention.num_key_splits(len(batch.query_lens), kv_heads, batch.max_seq_len)
        self.decodes, self.longest_query = 1 in batch.query_lens, max(batch.query_lens)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, batch = self.cache.keys[layer], self.cache.values[layer], self.batch
        self.kernels.store_kv(k, v, keys, values, batch.slot_mapping)
        out = q.new_empty(q.shape)
        paged = (q, keys, values, batch.block_tables, batch.seq_lens, batch.query_start_loc, batch.block_size)
        if self.decodes:
            self.kernels.paged_decode(*paged, self.num_splits, out)
        if self.longest_query > 1:
            self.kernels.paged_prefill(*paged, self.longest_query, out)
        return out


class FlashAttention:
    """flash-attn 2 over the same cache, seen as pages [blocks, block_size, kv_heads, head_dim].

    Its calls are tested against a stand-in of the same signatures; it has not run on a GPU yet.
    """

    can_be_captured = True

    def __init__(self, cache: KVCache, batch: ForwardBatch):
        import flash_attn

        from shared.kernels_attention import store_kv

        self.cache, self.batch, self.flash_attn, self.store_kv = cache, batch, flash_attn, store_kv
        self.block_tables, self.seq_lens = batch.block_tables.int(), batch.seq_lens.int()  # it wants int32
        self.query_start_loc = batch.query_start_loc.int()
        self.key_start_loc = F.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self.store_kv(k, v, keys, values, self.batch.slot_mapping)
        pages = [x.unflatten(0, (-1, self.batch.block_size)) for x in (keys, values)]
        return self._decode(q, *pages) if max(self.batch.query_lens) == 1 else self._mixed(q, *pages)

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = self.flash_attn.flash_attn_with_kvcache(
            q.unsqueeze(1), keys, values, cache_seqlens=self.seq_lens, block_table=self.block_tables, causal=True
        )
        return out.squeeze(1)

    def _mixed(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.flash_attn.flash_attn_varlen_func(
            q, keys, values, self.query_start_loc, self.key_start_loc, max(self.batch.query_lens),
            self.batch.max_seq_len, causal=True, block_table=self.block_tables,
        )  # fmt: skip
