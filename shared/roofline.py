"""The least time a machine can need for what an engine did: bytes at memory speed, operations at full arithmetic."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.kv_cache import kv_bytes_per_token
from shared.model import ModelConfig
from shared.trace import StepRecord


@dataclass(frozen=True)
class Roofline:
    """What a machine can do at best, measured on it."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, cost: Cost) -> float:
        """A step can't be faster than the slower of its two needs (Williams and others, 2009)."""
        return max(cost.num_bytes / self.bytes_per_second, cost.flops / self.flops_per_second)


@dataclass(frozen=True)
class Cost:
    """What a step must read and compute."""

    num_bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.num_bytes


def linear_parameters(config: ModelConfig) -> int:
    """Weights that each token is multiplied with: those of the layers. Embedding and head are counted apart."""
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)
    return config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def step_cost(config: ModelConfig, dtype: torch.dtype, pieces: Sequence[tuple[int, int]], num_rows: int) -> Cost:
    """A step over pieces of requests: (new tokens, tokens in the cache after them) each; num_rows get scores.

    Every weight is read once, the keys and values of each request once. Norms and activations count nothing.
    """
    layers, head = linear_parameters(config), config.vocab_size * config.hidden_size
    num_tokens = sum(new for new, _ in pieces)
    pairs = sum(new * total - new * (new - 1) // 2 for new, total in pieces)  # query-key pairs, causal
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim  # scores, then the sum
    weight_bytes = (layers + (head if num_rows else 0)) * dtype.itemsize
    cache_bytes = sum(total for _, total in pieces) * kv_bytes_per_token(config, dtype)
    return Cost(weight_bytes + cache_bytes, 2 * layers * num_tokens + 2 * head * num_rows + per_pair * pairs)


def trace_costs(config: ModelConfig, dtype: torch.dtype, steps: Sequence[StepRecord]) -> list[Cost]:
    """The cost of each step that a Trace recorded."""
    costs, computed = [], {}
    for step in steps:
        for name in step.preempted:
            computed.pop(name, None)
        starts = {name: computed.get(name, step.cache_hits.get(name, 0)) for name in step.scheduled}
        pieces = [(new, starts[name] + new) for name, new in step.scheduled.items()]
        costs.append(step_cost(config, dtype, pieces, len(step.new_tokens)))
        computed = dict(step.computed)
    return costs


def least_seconds(config: ModelConfig, dtype: torch.dtype, steps: Sequence[StepRecord], roofline: Roofline) -> float:
    """The bound for all these steps, one after another."""
    return sum(roofline.seconds(cost) for cost in trace_costs(config, dtype, steps) if cost.flops)
