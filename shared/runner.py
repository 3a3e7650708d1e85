"""The CPU runner: the same model with faster modules. Each speed-up is one swap, and one switch.

`prepack` lays the weights of linear layers out as the matrix library wants to read them; `fuse` joins the
projections that share an input and runs the small operations between them in one pass each. Both take
the model over: the plain modules are gone from it, and so is their memory.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shared.batch import AttentionBackend, ModelRunner, RaggedAttention
from shared.cpu_attention import CPUPagedAttention, paged_operation
from shared.cpu_ops import KernelsUnavailable, address, operation
from shared.kv_cache import KVCache
from shared.model import Attention, DecoderLayer, RMSNorm, Transformer


class CPURunner(ModelRunner):
    """ModelRunner whose model is rebuilt for this CPU. It owns the model from now on.

    attention_backend None is CPUPagedAttention. What this machine cannot have (no compiler, no oneDNN, a
    dtype without a kernel) stays plain, and `missing` says why.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, attention_backend: AttentionBackend | None = None,
        *, prepack: bool = True, fuse: bool = True,
    ):
        obstacles = {
            "attention": why_not(paged_operation, cache.keys) if attention_backend is None else None,
            "fuse": why_not(operation, "swiglu", cache.keys.dtype) if fuse else None,
            "prepack": no_prepacking(cache.keys.dtype) if prepack else None,
        }
        self.missing = {name: reason for name, reason in obstacles.items() if reason}
        default = RaggedAttention if "attention" in self.missing else CPUPagedAttention
        super().__init__(model, cache, attention_backend or default)
        if fuse and "fuse" not in self.missing:
            fuse_layers(model)
        if prepack and "prepack" not in self.missing:
            prepack_linears(model)


def why_not(operation_for: Callable, *arguments) -> str | None:
    """Why a compiled operation can't be had, or None."""
    try:
        operation_for(*arguments)
    except KernelsUnavailable as error:
        return str(error)
    return None


# Prepacked linear layers


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's own blocked layout, so that no call has to rearrange it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def no_prepacking(dtype: torch.dtype) -> str | None:
    """Why linear layers cannot be prepacked here, or None."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 on this CPU"
    return None if dtype in (torch.float32, torch.bfloat16) else f"oneDNN packs no {dtype}"


def prepack_linears(module: nn.Module) -> None:
    """Swap every linear layer; each weight is freed once its packed form exists (a tied embedding stays)."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            prepack_linears(child)


# Fused layers


def fuse_layers(model: Transformer) -> None:
    """Swap every decoder layer and the final norm."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = FusedLayer(layer)
    model.norm = FusedRMSNorm(model.norm)


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
