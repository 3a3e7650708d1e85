"""Linear layers whose weights lie as the loop that reads them wants them: prepacked once, when the model is loaded."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from shared.cpu_ops import KernelsUnavailable, address, operation


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's own blocked layout, so that no call has to rearrange it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class PanelLinear(nn.Module):
    """The same by the loop of cpu_linear.cpp, whose weight lies in panels in the order in which it is read.

    Raises KernelsUnavailable for what the loop does not have: only bfloat16, and CPUs that multiply it.
    """

    INPUTS, OUTPUTS = 32, 16  # each size is a multiple

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.run = operation("linear", linear.weight.dtype)
        self.out_features, inputs = linear.weight.shape
        if inputs % self.INPUTS or self.out_features % self.OUTPUTS:
            limit = f"multiples of {self.INPUTS} inputs and {self.OUTPUTS} outputs"
            raise KernelsUnavailable(f"the compiled linear layer has {limit}, not {inputs} and {self.out_features}")
        panels = linear.weight.detach().view(-1, self.OUTPUTS, inputs // 2, 2).transpose(1, 2)
        self.weight, self.bias = panels.contiguous(), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features], rows one after another -> [T, out_features]."""
        y = x.new_empty(len(x), self.out_features)
        self.run(x.data_ptr(), self.weight.data_ptr(), address(self.bias), y.data_ptr(), *x.shape, self.out_features)
        return y


def packed(linear: nn.Linear) -> nn.Module:
    """The faster of the two that this layer can have."""
    try:
        return PanelLinear(linear)
    except KernelsUnavailable:
        return PackedLinear(linear)


def prepack_linears(module: nn.Module) -> None:
    """Swap every linear layer; each weight is freed once its packed form exists (a tied embedding stays)."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, packed(child))
        else:
            prepack_linears(child)
