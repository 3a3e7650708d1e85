"""Chapter 11's ranks in one kernel: threads with real groups between them, and the shapes of known models."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shared.model import ModelConfig, Transformer


def together(size: int, work: Callable[[int, dist.Store], Any]) -> list[Any]:
    """What `work(rank, store)` gives on each rank. The ranks are threads; a group made with the store is real."""
    store, results, errors = dist.HashStore(), [None] * size, []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():  # it holds for one thread
                results[rank] = work(rank, store)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def shape(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
          tied: bool = False) -> ModelConfig:
    """A Llama of this shape."""
    return ModelConfig(vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, 1e-5, 10000.0, None, 8192, tied)


SHAPES = {  # as the models' own config.json files say
    "SmolLM2-135M": shape(30, 576, 1536, 9, 3, 64, 49152, tied=True),
    "Qwen2.5-0.5B": shape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "Llama-3.1-8B": shape(32, 4096, 14336, 32, 8, 128, 128256),
    "Llama-3.1-70B": shape(80, 8192, 28672, 64, 8, 128, 128256),
}


@functools.cache
def num_parameters(config: ModelConfig) -> int:
    """Weights of a model, counted on one that takes no memory; tied ones once."""
    with torch.device("meta"):
        model = Transformer(config)
    return sum(parameter.numel() for parameter in model.parameters())
