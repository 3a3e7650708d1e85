"""The CPU runner: the same model with faster modules. Each speed-up is one swap, and one switch.

`prepack` lays the weights of linear layers out as the loop that multiplies wants to read them; `fuse` joins the
projections that share an input and runs the small operations between them in one pass each. Both take the
model over: the plain modules are gone from it, and so is their memory. With both, and attention in place, a step
in bfloat16 goes through all layers in one call.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shared.batch import AttentionBackend, ModelRunner, RaggedAttention
from shared.cpu_attention import CPUPagedAttention, paged_operation
from shared.cpu_layers import CompiledLayers, FusedLayer, FusedRMSNorm
from shared.cpu_linear import prepack_linears
from shared.cpu_ops import KernelsUnavailable, operation
from shared.kv_cache import KVCache
from shared.model import Transformer


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
        if fuse and prepack and not self.missing and self.attention_backend is CPUPagedAttention:
            compile_layers(model)


def why_not(operation_for: Callable, *arguments) -> str | None:
    """Why a compiled operation can't be had, or None."""
    try:
        operation_for(*arguments)
    except KernelsUnavailable as error:
        return str(error)
    return None


def no_prepacking(dtype: torch.dtype) -> str | None:
    """Why linear layers cannot be prepacked here, or None."""
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 on this CPU"
    return None if dtype in (torch.float32, torch.bfloat16) else f"oneDNN packs no {dtype}"


def fuse_layers(model: Transformer) -> None:
    """Swap every decoder layer and the final norm."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = FusedLayer(layer)
    model.norm = FusedRMSNorm(model.norm)


def compile_layers(model: Transformer) -> None:
    """Put one module in the place of all decoder layers, if all they do is compiled; else they stay."""
    try:
        model.layers = nn.ModuleList([CompiledLayers(model.layers)])
    except KernelsUnavailable:
        pass
