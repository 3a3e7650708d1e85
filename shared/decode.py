"""The loop that makes text, in its plainest form: run everything, keep one token, run everything again."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.model import CausalAttention, Transformer

Choose = Callable[[Tensor], int]


def greedy(logits: Tensor) -> int:
    """The most likely token; the lowest id wins a tie. logits [vocab_size]."""
    return int(logits.argmax())


@dataclass
class DecodeTrace:
    """What a generation cost: how many token positions went through the model, step by step."""

    prompt_len: int
    new_ids: list[int] = field(default_factory=list)
    positions_per_step: list[int] = field(default_factory=list)

    @property
    def positions_processed(self) -> int:
        return sum(self.positions_per_step)

    @property
    def positions_recomputed(self) -> int:
        """Positions that the model had already seen in an earlier step (the last new token never goes in)."""
        once_each = self.prompt_len + len(self.new_ids) - 1 if self.new_ids else 0
        return self.positions_processed - once_each


@torch.inference_mode()
def next_token_logits(model: Transformer, ids: list[int]) -> Tensor:
    """Run all tokens through the model and score the next one: [vocab_size]."""
    device = model.embed_tokens.weight.device
    positions = torch.arange(len(ids), device=device)
    hidden = model(torch.tensor(ids, device=device), positions, CausalAttention())
    return model.logits(hidden[-1])


def decode_steps(model: Transformer, prompt_ids: list[int], choose: Choose = greedy) -> Iterator[tuple[Tensor, int]]:
    """Yield (logits, chosen token) without end; each step recomputes every position before it."""
    ids = list(prompt_ids)
    while True:
        logits = next_token_logits(model, ids)
        ids.append(choose(logits))
        yield logits, ids[-1]


def generate_naive(
    model: Transformer,
    prompt_ids: list[int],
    max_tokens: int = 16,
    eos_token_ids: tuple[int, ...] = (),
    choose: Choose = greedy,
) -> DecodeTrace:
    """Generate until an end token or max_tokens, counting every position that the model processes."""
    trace = DecodeTrace(len(prompt_ids))
    for _, (_, token) in zip(range(max_tokens), decode_steps(model, prompt_ids, choose)):
        trace.positions_per_step.append(len(prompt_ids) + len(trace.new_ids))
        trace.new_ids.append(token)
        if token in eos_token_ids:
            break
    return trace
