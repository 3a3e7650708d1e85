"""Decoder layers for CPUs: fused, and then all layers of a step in one call."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared.cpu_attention import CPUPagedAttention
from shared.cpu_linear import PanelLinear
from shared.cpu_ops import KernelsUnavailable, Shape, Step, Weights, address, operation
from shared.model import Attention, DecoderLayer, RMSNorm


class FusedRMSNorm(nn.Module):
    """RMSNorm in one pass, with the addition to the residual before it if there is one."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.run = operation("add_rms_norm", norm.weight.dtype)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Adds delta to x in place; both [T, hidden]."""
        out = torch.empty_like(x)
        self.run(x.data_ptr(), address(delta), self.weight.data_ptr(), out.data_ptr(), *x.shape, self.eps)
        return out


class FusedLayer(nn.Module):
    """A decoder layer with two wide projections instead of five, and four small operations of one pass each."""

    def __init__(self, layer: DecoderLayer):
        super().__init__()
        attn, mlp = layer.self_attn, layer.mlp
        self.layer, self.head_dim = attn.layer, attn.head_dim
        self.kv_heads = attn.k_proj.out_features // self.head_dim
        self.heads = attn.q_proj.out_features // self.head_dim
        self.qkv_proj, self.o_proj = joined(attn.q_proj, attn.k_proj, attn.v_proj), attn.o_proj
        self.gate_up_proj, self.down_proj = joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        self.q_norm, self.k_norm = attn.q_norm, attn.k_norm
        self.input_layernorm = FusedRMSNorm(layer.input_layernorm)
        self.post_attention_layernorm = FusedRMSNorm(layer.post_attention_layernorm)
        dtype = attn.o_proj.weight.dtype
        self.turn, self.activate = operation("rotary", dtype), operation("swiglu", dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """x [T, hidden] is the residual stream; it grows in place."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (-1, self.head_dim))
        self.rotate(qkv, cos, sin)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        mixed = self.o_proj(attention(self.layer, q, k, v).flatten(1))
        hidden = self.post_attention_layernorm(x, mixed)
        return x.add_(self.down_proj(self.swiglu(self.gate_up_proj(hidden))))

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn queries and keys of qkv [T, heads + 2 * kv_heads, head_dim] in place, normed before if Qwen3."""
        q_weight, k_weight = getattr(self.q_norm, "weight", None), getattr(self.k_norm, "weight", None)
        self.turn(
            qkv.data_ptr(), address(q_weight), address(k_weight), cos.data_ptr(), sin.data_ptr(),
            len(qkv), self.heads, self.kv_heads, self.head_dim, getattr(self.q_norm, "eps", 0.0),
        )

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * intermediate] -> silu(gate) * up [T, intermediate]."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.activate(gate_up.data_ptr(), out.data_ptr(), *out.shape)
        return out


def joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer that gives the outputs of several side by side."""
    wide = nn.Linear(linears[0].in_features, sum(x.out_features for x in linears), linears[0].bias is not None, "meta")
    wide.weight = nn.Parameter(torch.cat([x.weight for x in linears]), requires_grad=False)
    if linears[0].bias is not None:
        wide.bias = nn.Parameter(torch.cat([x.bias for x in linears]), requires_grad=False)
    return wide


class CompiledLayers(nn.Module):
    """All decoder layers of a model in the place of one: a step asks for them with a single call.

    Raises KernelsUnavailable if a projection has no compiled loop.
    """

    def __init__(self, layers: Sequence[FusedLayer]):
        super().__init__()
        first, norm = layers[0], layers[0].input_layernorm
        self.run = operation("decoder_layers", norm.weight.dtype)
        self.tensors = [weights_of(layer) for layer in layers]  # kept, for the call gets their addresses
        self.weights = (Weights * len(layers))(*(Weights(*map(address, own)) for own in self.tensors))
        q_size, kv_size = first.heads * first.head_dim, first.kv_heads * first.head_dim
        hidden, intermediate = first.down_proj.out_features, first.gate_up_proj.out_features // 2
        qk_eps = getattr(first.q_norm, "eps", 0.0)
        self.shape = Shape(hidden, intermediate, first.heads, first.kv_heads, first.head_dim, norm.eps, qk_eps)
        self.scratch_size = hidden + q_size + 2 * kv_size + q_size + intermediate  # what a token leaves in between

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: CPUPagedAttention) -> Tensor:
        """x [T, hidden] is the residual stream; it grows in place."""
        batch, cache = attention.batch, attention.cache
        tensors = cache.keys, cache.values, cos, sin, batch.slot_mapping, batch.block_tables
        starts = batch.query_start_loc, batch.seq_lens
        sizes = cache.keys[0].numel(), batch.block_tables.shape[1], batch.block_size, len(batch.query_lens), len(x)
        step = Step(*map(address, (*tensors, *starts)), *sizes)
        scratch = x.new_empty(len(x) * self.scratch_size)
        own, given = ctypes.byref(self.shape), ctypes.byref(step)
        self.run(self.weights, len(self.weights), own, given, x.data_ptr(), scratch.data_ptr())
        return x


def weights_of(layer: FusedLayer) -> list[Tensor | None]:
    """What Weights points to, field by field."""
    projections = layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj
    if not all(isinstance(projection, PanelLinear) for projection in projections):
        raise KernelsUnavailable("all layers in one call: a projection has no compiled loop")
    if len(layer.gate_up_proj.weight) % 2:
        raise KernelsUnavailable("all layers in one call: a panel would hold gates and ups")
    norms = layer.input_layernorm, layer.post_attention_layernorm, layer.q_norm, layer.k_norm
    return [
        *(getattr(norm, "weight", None) for norm in norms),
        *(part for projection in projections for part in (projection.weight, projection.bias)),
    ]
