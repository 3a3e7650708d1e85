"""Small kernels in Triton that read and write each number once: norm, rotary positions, SwiGLU.

Plain PyTorch runs each of them as several kernels, and each writes its result to memory for the next one to
read. The modules below stand in for those of model.py, with the same weights: `fuse_for_cuda(model)`.
"""
from __future__ import annotations

from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from shared.model import Attention, DecoderLayer, RMSNorm, SelfAttention, SwiGLU, Transformer

Module = TypeVar("Module", bound=nn.Module)
Hidden = Tensor | tuple[Tensor, Tensor]  # [T, hidden], or two of these that are still to be added


@triton.jit
def rms_norm_kernel(x, added, weight, summed, out, size, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row: add the residual (if ADD, and keep the sum), then scale to unit root mean square."""
    row, dims = tl.program_id(0), tl.arange(0, WIDTH)
    real, places = dims < size, row * size + dims
    dtype = out.dtype.element_ty
    wide = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(added + places, mask=real, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)  # the sum that the next layer reads
        tl.store(summed + places, wide.to(dtype), mask=real)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scale = tl.load(weight + dims, mask=real, other=0.0).to(tl.float32)
    tl.store(out + places, (normed.to(dtype).to(tl.float32) * scale).to(dtype), mask=real)


@triton.jit
def rotate_heads(x, cos, sin, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Turn all heads of one token in place; x points to [num_heads, 2 * half], cos and sin are [HALF]."""
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    real, places = (heads < num_heads) & (dims < half), x + heads * 2 * half + dims
    first = tl.load(places, mask=real, other=0.0).to(tl.float32)
    second = tl.load(places + half, mask=real, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    tl.store(places, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=real)
    tl.store(places + half, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=real)


@triton.jit
def rotary_kernel(
    q, k, cos, sin, q_stride, k_stride, num_heads, kv_heads, half,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program a token: its queries and its keys turn by the same angles, where they lie."""
    token, dims = tl.program_id(0), tl.arange(0, HALF)
    c = tl.load(cos + token * 2 * half + dims, mask=dims < half, other=0.0)
    s = tl.load(sin + token * 2 * half + dims, mask=dims < half, other=0.0)
    rotate_heads(q + token * q_stride, c, s, num_heads, half, HEADS, HALF)
    rotate_heads(k + token * k_stride, c, s, kv_heads, half, KV_HEADS, HALF)


@triton.jit
def silu_and_mul_kernel(gate, up, out, size, WIDTH: tl.constexpr):
    """One program for WIDTH numbers: gate / (1 + exp(-gate)) * up."""
    places = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    real = places < size
    dtype = out.dtype.element_ty
    wide = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
    passed = (wide / (1 + tl.exp(-wide))).to(dtype).to(tl.float32)
    tl.store(out + places, (passed * tl.load(up + places, mask=real, other=0.0).to(tl.float32)).to(dtype), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x."""
    x, size = x.contiguous(), x.shape[-1]
    out, width = torch.empty_like(x), triton.next_power_of_2(size)
    rms_norm_kernel[(x.numel() // size,)](x, x, weight, x, out, size, eps, ADD=False, WIDTH=width)
    return out


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added, and that sum normalised: one kernel instead of two, and the sum is not read again."""
    x, added, size = x.contiguous(), added.contiguous(), x.shape[-1]
    summed, out, width = torch.empty_like(x), torch.empty_like(x), triton.next_power_of_2(size)
    rms_norm_kernel[(x.numel() // size,)](x, added, weight, summed, out, size, eps, ADD=True, WIDTH=width)
    return summed, out


def rotate_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn q [T, heads, head_dim] and k [T, kv_heads, head_dim] by cos and sin [T, 1, head_dim]."""
    (num_tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    powers = [triton.next_power_of_2(size) for size in (heads, kv_heads, head_dim // 2)]
    rotary_kernel[(num_tokens,)](
        q, k, cos, sin, q.stride(0), k.stride(0), heads, kv_heads, head_dim // 2,
        HEADS=powers[0], KV_HEADS=powers[1], HALF=powers[2],
    )  # fmt: skip


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, intermediate]."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    silu_and_mul_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), WIDTH=1024)
    return out


class FusedRMSNorm(RMSNorm):
    """RMSNorm in one kernel, which also adds a pair that is still to be added."""

    def forward(self, x: Hidden) -> Tensor:
        return self.add(x)[1]

    def add(self, x: Hidden) -> tuple[Tensor, Tensor]:
        """The sum (or x itself), and the sum normalised."""
        if isinstance(x, Tensor):
            return x, rms_norm(x, self.weight, self.eps)
        return add_rms_norm(*x, self.weight, self.eps)


class FusedSelfAttention(SelfAttention):
    """SelfAttention that turns queries and keys in place, in one kernel."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, heads, head_dim]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        rotate_in_place(q, k, cos, sin)
        return self.o_proj(attention(self.layer, q, k, v).flatten(1))  # [T, hidden]


class FusedSwiGLU(SwiGLU):
    """SwiGLU whose activation and product are one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_proj(x), self.up_proj(x)))


class FusedDecoderLayer(DecoderLayer):
    """A layer whose additions happen in the norm that reads their sum, be it the next layer's."""

    def forward(self, x: Hidden, cos: Tensor, sin: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        x, normed = self.input_layernorm.add(x)
        x, normed = self.post_attention_layernorm.add((x, self.self_attn(normed, cos, sin, attention)))
        return x, self.mlp(normed)


FUSED = {
    RMSNorm: FusedRMSNorm, SelfAttention: FusedSelfAttention, SwiGLU: FusedSwiGLU, DecoderLayer: FusedDecoderLayer,
}  # fmt: skip


def with_forward_of(module: nn.Module, kind: type[Module]) -> Module:
    """A module of another class with the same weights and parts."""
    twin = kind.__new__(kind)
    twin.__dict__ = dict(module.__dict__)
    return twin


def fuse_for_cuda(model: Transformer) -> Transformer:
    """Swap the model's norms, attention, feed-forward blocks and layers for fused ones; returns the model.

    The weights and their names stay, and so do submodules that tensor parallelism has put in.
    """
    for name, module in list(model.named_modules()):
        if type(module) in FUSED:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, with_forward_of(module, FUSED[type(module)]))
    return model
