"""Keys and values, kept: a flat array of slots. What changes in later chapters is who owns which slot."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.decode import Choose, DecodeTrace, greedy
from shared.model import ModelConfig, Transformer


class KVCache:
    """`keys` and `values`, each [layers, slots, kv_heads, head_dim]; a slot holds one token of one request."""

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.num_slots = num_slots

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] in slots [T]."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Fetch slots of any shape: [*slots.shape, kv_heads, head_dim] for keys and for values."""
        flat = slots.reshape(-1)
        k = self.keys[layer].index_select(0, flat).unflatten(0, slots.shape)
        return k, self.values[layer].index_select(0, flat).unflatten(0, slots.shape)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token keeps: keys and values, of every layer and every key-value head."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


class CachedAttention:
    """One request whose tokens lie in slots 0, 1, 2, ...: write the new ones, attend over all of them."""

    def __init__(self, cache: KVCache, num_computed: int, num_new: int):
        device = cache.keys.device
        self.cache, self.total = cache, num_computed + num_new
        self.slots = torch.arange(num_computed, self.total, device=device)  # of the new tokens
        self.mask = torch.arange(self.total, device=device) <= self.slots[:, None]  # [new, total]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        keys, values = self.cache.keys[layer, : self.total], self.cache.values[layer, : self.total]
        q, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)  # [T, heads, head_dim]


@torch.inference_mode()
def cached_logits(model: Transformer, cache: KVCache, new_ids: list[int], num_computed: int) -> Tensor:
    """Run only the new tokens, after num_computed cached ones, and score the next: [vocab_size]."""
    device = cache.keys.device
    positions = torch.arange(num_computed, num_computed + len(new_ids), device=device)
    attention = CachedAttention(cache, num_computed, len(new_ids))
    hidden = model(torch.tensor(new_ids, device=device), positions, attention)
    return model.logits(hidden[-1])


def generate_cached(
    model: Transformer,
    prompt_ids: list[int],
    max_tokens: int = 16,
    eos_token_ids: tuple[int, ...] = (),
    choose: Choose = greedy,
) -> DecodeTrace:
    """Prefill the prompt once, then decode with one token in; the same tokens as generate_naive."""
    weight = model.embed_tokens.weight
    cache = KVCache(model.config, len(prompt_ids) + max_tokens, weight.dtype, weight.device)
    trace, new_ids, num_computed = DecodeTrace(len(prompt_ids)), list(prompt_ids), 0
    for _ in range(max_tokens):
        logits = cached_logits(model, cache, new_ids, num_computed)
        trace.positions_per_step.append(len(new_ids))
        trace.new_ids.append(choose(logits))
        if trace.new_ids[-1] in eos_token_ids:
            break
        num_computed += len(new_ids)
        new_ids = trace.new_ids[-1:]
    return trace
