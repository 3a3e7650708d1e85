"""The ranks of one engine at work: what goes between them, and the runner that leads them.

Everything goes through torch.distributed: gloo on CPU and for the batches, NCCL between GPUs. An engine has
groups of its own, so several live in one process. NCCL has not run with more than one GPU yet.
"""
from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shared.batch import ForwardBatch
from shared.errors import EngineError
from shared.scheduler import ScheduledRequest

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


@torch.inference_mode()
def run_batches(runner: Any, group: DistributedGroup) -> None:
    while (batch := receive_batch(group)) is not None:
        runner.forward(on_device(batch, runner.cache.keys.device))


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with so many threads: the ranks of one machine share its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OtherRanks(Protocol):
    """Rank 0's hold on the processes of the other ranks."""

    group: DistributedGroup
    failure: str | None  # once set, nothing runs any more

    def check(self) -> None:
        """Raise EngineError if one of them has ended."""

    def explain(self, error: Exception) -> EngineError:
        """End them all; the error that says which of them failed first, and why."""

    def fail(self, reason: str) -> None: ...

    def close(self) -> None: ...


class TensorParallelRunner:
    """Rank 0's runner: sends each batch to the other ranks, then computes its own part along with them."""

    def __init__(self, runner: Any, ranks: OtherRanks, threads: int):
        self.runner, self.ranks, self.threads = runner, ranks, threads
        self.model, self.cache = runner.model, runner.cache
        self.shutdown = weakref.finalize(self, ranks.close)  # also when nobody holds it any more, and at exit

    failure = property(lambda self: self.ranks.failure)

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest], block_size: int) -> Tensor:
        """Run one step on all ranks: the wanted scores [rows, vocab_size]. Raises EngineError for good if one fails."""
        return self.forward(ForwardBatch.build(scheduled, block_size))

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.ranks.check()
        device = self.cache.keys.device
        try:
            send_batch(self.ranks.group, batch)
            with torch_threads(self.threads):
                logits = self.runner.forward(on_device(batch, device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            raise self.ranks.explain(error) from error
        except BaseException:  # the others wait in the middle of a step: it can't be taken up again
            self.ranks.fail("rank 0 was interrupted in the middle of a step")
            raise
        return logits
