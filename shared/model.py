"""The model, written once: a decoder-only transformer of the Llama, Qwen2.5 or Qwen3 family.

It takes the tokens of any number of requests laid flat, one after another, and an attention object that
knows which token may look at which. Caches, pages and kernels live behind that object, so this file
never changes: `hidden = model(input_ids, positions, attention)`, `logits = model.logits(hidden[rows])`.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import ModelLoadError

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, read from a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False  # Qwen2.5
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelConfig:
        """Read config.json; raises ModelLoadError for a family or a feature that we do not have."""
        family, heads = model_family(config), config["num_attention_heads"]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=rope_scaling(rope),
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else attention_bias,
            o_bias=attention_bias, mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
        )


def model_family(config: dict[str, Any]) -> str:
    """llama, qwen2 or qwen3; anything else is an error rather than a guess."""
    for name in config.get("architectures") or [""]:
        if name in ARCHITECTURES:
            if config.get("use_sliding_window"):
                raise ModelLoadError("use_sliding_window: true is not supported, only full attention")
            if config.get("hidden_act", "silu") != "silu":
                raise ModelLoadError(f"hidden_act: {config['hidden_act']!r} is not supported, only 'silu'")
            return ARCHITECTURES[name]
    raise ModelLoadError(f"architectures: {config.get('architectures')} is none of {sorted(ARCHITECTURES)}")


def rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters of llama3 rope scaling, or None for plain rotary positions."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelLoadError(f"rope_scaling: type {kind!r} is not supported, only 'default' and 'llama3'")
    wanted = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if any(name not in rope for name in wanted):
        raise ModelLoadError(f"rope_scaling: type 'llama3' needs {', '.join(wanted)}, got {sorted(rope)}")
    return dict(rope)


class Attention(Protocol):
    """What a layer calls: mixes the tokens of each request, and keeps keys and values if it has a cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""


class CausalAttention:
    """One request, all its tokens at once: each token looks at itself and backwards."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, T, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)  # [T, heads, head_dim]


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()  # the mean of squares needs more digits than bfloat16 has
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Turn pairs of dimensions by an angle that grows with the position (Su et al., 2021)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        inv_freq = 1.0 / config.rope_theta**dims  # [head_dim / 2]
        if config.rope_scaling:
            inv_freq = scale_llama3(inv_freq, config.rope_scaling)
        self.inv_freq = inv_freq  # a plain attribute: model.to(bfloat16) must not round it

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and sin, each [T, 1, head_dim] in float32."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[:, None].float() * self.inv_freq  # [T, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos(), angles.sin()


def scale_llama3(inv_freq: Tensor, rope: dict[str, Any]) -> Tensor:
    """Slow down the long wavelengths so that positions past the trained length stay in range (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # in the trained context
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: leave alone, 0: divide by the factor
    return keep * inv_freq + (1 - keep) * inv_freq / rope["factor"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to x [T, heads, head_dim]; dimension i is paired with i + head_dim / 2."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class SelfAttention(nn.Module):
    """Project to queries, keys and values, turn the first two by position, attend, project back."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, heads, head_dim]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        mixed = attention(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(mixed.flatten(1))  # [T, hidden]


class SwiGLU(nn.Module):
    """The feed-forward block: one projection decides how much of another passes (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention mixes tokens, the feed-forward block works on each alone; both add to the residual."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Embedding, layers, final norm, head. Parameter names are Hugging Face's without `model.`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids [T], positions [T] -> hidden [T, hidden_size]."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] -> scores of each token, [rows, vocab_size]."""
        return self.lm_head(hidden)
