"""What goes between the ranks of one engine: sums and parts of tensors, and rank 0's batches.

Everything goes through torch.distributed: gloo on CPU and for the batches, NCCL between GPUs. An engine has
groups of its own, so several live in one process. NCCL has not run with more than one GPU yet.
"""
from __future__ import annotations

import math
from dataclasses import fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shared.batch import ForwardBatch

IDLE = timedelta(days=365)  # how long a rank waits for work
FIELDS = fields(ForwardBatch)
RESTORE = {"Tensor": lambda part: part, "int": int, "tuple[int, ...]": lambda part: tuple(part.tolist())}


class DistributedGroup:
    """A Group over torch.distributed. `timeout` bounds every wait for another rank, in seconds."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float = 120.0):
        self.rank, self.size = rank, size
        wait = timedelta(seconds=timeout)
        self.messages = dist.ProcessGroupGloo(dist.PrefixStore("messages", store), rank, size, wait)
        self.tensors = self.messages
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            self.tensors = dist.ProcessGroupNCCL(dist.PrefixStore("tensors", store), rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.tensors.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.tensors.allgather([parts], [x]).wait()
        return parts

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that the ranks bring."""
        options, value = dist.AllreduceOptions(), torch.tensor([number])
        options.reduceOp = dist.ReduceOp.MIN
        self.messages.allreduce([value], options).wait()
        return int(value)

    def broadcast(self, message: Tensor, wait: timedelta | None = None) -> Tensor:
        """Rank 0's int64 message, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if wait is not None:
            options.timeout = wait
        self.messages.broadcast([message], options).wait()
        return message


def send_batch(group: DistributedGroup, batch: ForwardBatch | None) -> None:
    """Send a step's batch to the other ranks, or None to end them: the shapes first, then all numbers."""
    header = torch.zeros(1 + 3 * len(FIELDS), dtype=torch.long)  # is there a batch; dimensions and shape of each field
    if batch is None:
        group.broadcast(header)
        return
    parts = [torch.as_tensor(getattr(batch, field.name)).cpu() for field in FIELDS]
    shapes = [[part.ndim, *part.shape, *[0] * (2 - part.ndim)] for part in parts]
    group.broadcast(torch.tensor([1, *sum(shapes, [])]))
    group.broadcast(torch.cat([part.reshape(-1) for part in parts]))


def receive_batch(group: DistributedGroup) -> ForwardBatch | None:
    """Wait for rank 0's next batch; None means that there will be no more."""
    header = group.broadcast(torch.zeros(1 + 3 * len(FIELDS), dtype=torch.long), IDLE).tolist()
    if not header[0]:
        return None
    shapes = [header[i + 1 : i + 1 + header[i]] for i in range(1, len(header), 3)]
    sizes = [math.prod(shape) for shape in shapes]
    numbers = group.broadcast(torch.zeros(sum(sizes), dtype=torch.long)).split(sizes)
    return ForwardBatch(**{
        field.name: RESTORE[field.type](part.reshape(shape)) for field, part, shape in zip(FIELDS, numbers, shapes)
    })  # fmt: skip


def on_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    tensors = {field.name: getattr(batch, field.name).to(device) for field in FIELDS if field.type == "Tensor"}
    return replace(batch, **tensors)
