"""Ranks for tests of tensor parallelism: as threads of this process, or as processes that serve many engines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from shared import workers
from shared.group import DistributedGroup, TensorParallelRunner, run_batches
from shared.lab.chapters.ch11_ranks import together
from shared.parallel import connect, load_shard
from shared.workers import Ranks, Workers, plain_runner
from tests.runtime.tiny import VARIANTS, save_hf

__all__ = ["group_of", "rank_processes", "rank_threads", "save_model", "together"]
ROOT = Path(__file__).parents[2]


def save_model(folder: Path, family: str, **changes) -> Path:
    """A tiny random model of a shape of its own."""
    with mock.patch.dict(VARIANTS, own=(family, changes)):
        return save_hf("own", folder)


def group_of(rank: int, size: int, store: dist.Store) -> DistributedGroup:
    return DistributedGroup(store, rank, size, torch.device("cpu"), timeout=20.0)


@contextmanager
def rank_threads(folder: Path, size: int, make_runner=plain_runner, num_slots: int = 512) -> Iterator:
    """The runner of rank 0 of a real group whose other ranks are threads."""
    store = dist.HashStore()

    def build(rank: int):
        model, shard = load_shard(folder, rank, size)
        group = group_of(rank, size, store)
        connect(model, shard, group)
        return make_runner(model, group.smallest, num_slots), group

    def serve(rank: int) -> None:
        run_batches(*build(rank))

    others = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in others:
        thread.start()
    runner, group = build(0)
    ranks = Ranks(store, size, Workers())
    ranks.group = group
    yield TensorParallelRunner(runner, ranks, threads=1)
    ranks.close()
    for thread in others:
        thread.join(20.0)
        assert not thread.is_alive()


@contextmanager
def rank_processes(size: int, engines: int) -> Iterator[list[subprocess.Popen]]:
    """Ranks 1 to size - 1, set up as torchrun does it; each serves as many engines as the test will launch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    facts = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size),
             "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-c", f"from shared.workers import serve_worker as s; [s() for _ in range({engines})]"]
    environment = {**os.environ, **facts, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(1, size)]
    with mock.patch.dict(os.environ, {**facts, "RANK": "0"}), mock.patch.object(workers, "LAUNCHED", count()):
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
    del store
