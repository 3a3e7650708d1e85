"""The processes of tensor parallelism: `launch` starts them on this machine, watches them and ends them.

Under torchrun, on one machine or several, it meets those that torchrun has started. Their program is

    if os.environ["RANK"] == "0":
        print(LLM(tensor_parallel_size=int(os.environ["WORLD_SIZE"])).generate("Hello"))
    else:
        serve_worker()
"""
from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shared.batch import ModelRunner
from shared.errors import EngineError, InvalidRequestError
from shared.group import IDLE, DistributedGroup, TensorParallelRunner, run_batches, send_batch, torch_threads
from shared.kv_cache import KVCache
from shared.model import Transformer
from shared.parallel import connect, load_shard
from shared.weights import resolve

PATIENCE = 5.0  # seconds that a process gets to end by itself
LAUNCHED = count()  # under torchrun all ranks count their engines, so that each has its own keys in the store


@dataclass(frozen=True)
class RankSpec:
    """What every rank must know to build its part. It travels as JSON."""

    model: str
    dtype: str
    device: str
    make_runner: Callable[..., Any]
    options: Mapping[str, Any]
    timeout: float

    def to_json(self) -> str:
        """Functions and classes travel by name: module and name in it."""
        return json.dumps(asdict(self), default=lambda value: {"module": value.__module__, "name": value.__qualname__})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankSpec:
        return cls(**json.loads(text, object_hook=found))


def found(value: dict[str, Any]) -> Any:
    """The function or class that RankSpec named; any other dict is left alone."""
    if value.keys() != {"module", "name"}:
        return value
    return getattr(importlib.import_module(value["module"]), value["name"])


def plain_runner(model: Transformer, agree: Callable[[int], int], num_slots: int) -> ModelRunner:
    """A rank's runner. `agree` gives the smallest of all ranks' numbers, here of the slots in their caches."""
    weight = model.embed_tokens.weight
    return ModelRunner(model, KVCache(model.config, agree(num_slots), weight.dtype, weight.device))


def build_rank(spec: RankSpec, store: dist.Store, rank: int, size: int, meet: Callable[[], None]):
    """Load a rank's part, meet the others, connect: the runner and its group."""
    device = rank_device(spec.device)
    model, shard = load_shard(spec.model, rank, size, getattr(torch, spec.dtype), device)
    meet()
    group = DistributedGroup(store, rank, size, device, spec.timeout)
    connect(model, shard, group)
    runner = spec.make_runner(model, group.smallest, **spec.options)
    group.smallest(rank)  # nobody goes on before all are ready
    return runner, group


def rank_device(name: str) -> torch.device:
    """Each rank of a machine has a GPU of its own; a CPU is shared."""
    if torch.device(name).type != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def serve_worker() -> None:
    """Be rank RANK of WORLD_SIZE until rank 0 shuts its engine down: what torchrun's other ranks call."""
    store, rank, size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"engine {next(LAUNCHED)}", store)
    store.wait(["spec"], IDLE)

    def meet() -> None:
        store.set(f"loaded {rank}", "")
        store.wait(["loaded 0"], IDLE)

    try:
        spec = RankSpec.from_json(store.get("spec"))
        runner, group = build_rank(spec, store, rank, size, meet)
        run_batches(runner, group)
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # rank 0, which keeps the store, may be gone
            store.set(f"error {rank}", f"{type(error).__name__}: {error}")
        raise


def serve_spawned() -> None:
    """The main program of a process that `launch` starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then ends this process
    serve_worker()
    os._exit(0)  # nothing is left to do, and taking torch apart takes a second


class Workers:
    """The processes of the other ranks on this machine; none under torchrun, which looks after them itself."""

    def __init__(self, size: int = 1, port: int = 0, threads: int = 1):
        self.logs = {rank: tempfile.TemporaryFile() for rank in range(1, size)}
        self.processes = {rank: self._start(rank, size, port, threads) for rank in self.logs}

    def _start(self, rank: int, size: int, port: int, threads: int) -> subprocess.Popen:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(rank),
               "LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": str(threads),
               "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}  # fmt: skip
        command = [sys.executable, "-c", "from shared.workers import serve_spawned; serve_spawned()"]
        return subprocess.Popen(command, env={"OMP_WAIT_POLICY": "passive", **os.environ, **own},
                                stdin=subprocess.DEVNULL, stdout=self.logs[rank], stderr=self.logs[rank])  # fmt: skip

    def ended(self) -> str | None:
        """Which process has ended, and its last words."""
        for rank, process in self.processes.items():
            if process.poll() is not None:
                self.logs[rank].seek(0)
                lines = self.logs[rank].read().decode(errors="replace").strip().splitlines()
                words = lines[-1:] if process.returncode > 0 else []  # one that was killed had no time for words
                return ": ".join([f"rank {rank} ended with code {process.returncode}", *words])
        return None

    def stop(self, patience: float) -> None:
        """Wait for the processes to end, then end them."""
        deadline = time.monotonic() + patience
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self.logs.values():
            log.close()
        self.processes.clear()


class Ranks:
    """Rank 0's hold on the others: watches them, says why they failed, ends them."""

    def __init__(self, store: dist.Store, size: int, workers: Workers):
        self.store, self.size, self.workers = store, size, workers
        self.group: DistributedGroup | None = None
        self.failure: str | None = None  # once set, nothing runs any more

    def meet(self) -> None:
        """Wait until every other rank has loaded its part; raises EngineError if one fails."""
        while not self.store.check([f"loaded {rank}" for rank in range(1, self.size)]):
            if reason := self._reason():
                self.fail(reason)
            self.check()
            time.sleep(0.01)
        self.store.set("loaded 0", "")

    def check(self) -> None:
        """Raise EngineError if the ranks can't compute any more."""
        if self.failure is None and self.workers.ended():
            self.fail(self._reason())
        if self.failure is not None:
            raise EngineError(f"tensor parallelism: {self.failure}")

    def _reason(self) -> str | None:
        """What another rank said before it ended, or that it has ended."""
        for rank in range(1, self.size):
            if self.store.check([f"error {rank}"]):
                return f"rank {rank}: {self.store.get(f'error {rank}').decode()}"
        return self.workers.ended()

    def explain(self, error: BaseException) -> EngineError:
        """Turn what rank 0 saw into what happened: another rank that failed, if there is one."""
        deadline, reason = time.monotonic() + 1.0, None
        while reason is None and isinstance(error, RuntimeError) and time.monotonic() < deadline:
            reason = self._reason()
            time.sleep(0.01)
        self.fail(reason or f"rank 0: {type(error).__name__}: {error}")
        return EngineError(f"tensor parallelism: {self.failure}")

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.workers.stop(patience=0.0)

    def close(self) -> None:
        if self.failure is not None:
            return
        self.failure = "it was shut down"
        if self.group is not None:
            with contextlib.suppress(RuntimeError):
                send_batch(self.group, None)
        self.workers.stop(PATIENCE if self.group is not None else 0.0)


def launch(
    model: str | Path, size: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu",
    make_runner: Callable[..., Any] = plain_runner, timeout: float = 120.0, **options: Any,
) -> TensorParallelRunner:
    """Cut a model over `size` ranks and start them: this process is rank 0.

    Every rank calls `make_runner(model, agree, **options)`; plain_runner wants `num_slots`. It and options that
    are functions or classes must be importable, the others JSON. Raises InvalidRequestError if the model can't be
    cut so, and EngineError if a rank fails.
    """
    check_launch(size, device, {"make_runner": make_runner, **options})
    spec = RankSpec(str(model), str(dtype).removeprefix("torch."), device, make_runner, options, timeout)
    threads = max(1, torch.get_num_threads() // size)
    if "WORLD_SIZE" in os.environ:  # torchrun started all ranks
        store, workers = next(rendezvous("env://"))[0], Workers()
        store = dist.PrefixStore(f"engine {next(LAUNCHED)}", store)
    else:
        spec = replace(spec, model=str(resolve(model).resolve()))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers, store = Workers(size, store.port, threads), dist.PrefixStore("engine 0", store)
    ranks = Ranks(store, size, workers)
    try:
        store.set("spec", spec.to_json())
        with torch_threads(threads):
            runner, ranks.group = build_rank(spec, store, 0, size, ranks.meet)
    except EngineError:
        ranks.close()
        raise
    except Exception as error:
        raise ranks.explain(error) from error
    return TensorParallelRunner(runner, ranks, threads)


def check_launch(size: int, device: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for what can't work on this machine."""
    if "WORLD_SIZE" in os.environ:
        if int(os.environ["RANK"]) > 0:
            raise EngineError(f"this process is rank {os.environ['RANK']}: it must call serve_worker()")
        if size != int(os.environ["WORLD_SIZE"]):
            limit = f"the number of processes that torchrun started, {os.environ['WORLD_SIZE']}"
            raise InvalidRequestError("tensor_parallel_size", size, limit)
    elif torch.device(device).type == "cuda" and size > torch.cuda.device_count():
        limit = f"at most the number of GPUs here, {torch.cuda.device_count()}"
        raise InvalidRequestError("tensor_parallel_size", size, limit)
    for name, value in options.items():
        if callable(value) and (value.__module__ == "__main__" or "<" in value.__qualname__):
            limit = "at the top of a module, where other processes can find it"
            raise InvalidRequestError(name, value.__qualname__, limit)
