"""A stand-in for torch.cuda.CUDAGraph on a CPU: it records what a function does, and does it again.

Like a real graph it keeps the operations, the tensors they read and write, and every plain number as they were
when it was recorded; no line of Python runs again. What a real graph refuses, it refuses: to ask for a value on
the host, or to bring one from there.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "item", "masked_select", "unique")


class RecordedGraph:
    """Has the methods of shared.cuda_graph.Graph."""

    def __init__(self):
        self.steps: list[Callable[[], None]] = []
        self.names: list[str] = []  # of the operations and kernels, in order

    def record(self, work: Callable[[], Tensor], pool: Any) -> Tensor:
        work()  # outside, as a real graph wants it
        with ExitStack() as stack:
            stack.enter_context(_Operations(self))
            stack.enter_context(_kernel_launches(self))
            return work()

    def replay(self) -> None:
        for step in self.steps:
            step()

    def pool(self) -> Any:
        return self

    def add(self, name: str, step: Callable[[], None]) -> None:
        self.names.append(name)
        self.steps.append(step)


class _Operations(TorchDispatchMode):
    """Records each operation of PyTorch."""

    def __init__(self, graph: RecordedGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        by_mask = name in ("index", "index_put_") and any(leaf.dtype == torch.bool for leaf in leaves[1:])
        if name in HOST or by_mask:
            raise RuntimeError(f"a graph cannot be recorded over {name}: it needs a value on the host")
        out = func(*args, **kwargs)
        inputs = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if func._schema.is_mutable:
            self.graph.add(name, lambda: func(*args, **kwargs))
        elif any(t.untyped_storage().data_ptr() not in inputs for t in results):  # not only a view
            self.graph.add(name, lambda: _refill(results, func(*args, **kwargs)))
        return out


def _refill(results: list[Tensor], again: Any) -> None:
    fresh = [t for t in tree_leaves(again) if isinstance(t, Tensor)]
    for kept, new in zip(results, fresh):
        kept.copy_(new)


def _kernel_launches(graph: RecordedGraph) -> Any:
    """Records each launch of an interpreted Triton kernel."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recording(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        graph.add(self.fn.__name__, lambda: launch(self, *args, **kwargs))
        with torch.utils._python_dispatch._disable_current_modes():  # the interpreter's own copies are no work
            launch(self, *args, **kwargs)

    return patch.object(GridExecutor, "__call__", recording)
