"""One step's work as flat tensors, and the runner that takes it through the model.

Requests of any length lie one after another without padding. Row i of every per-request field is the same
request, in the order in which the scheduler named them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kv_cache import KVCache
from shared.model import Attention, Transformer
from shared.scheduler import ScheduledRequest


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of B requests. Names are vLLM's."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T], each within its own request
    slot_mapping: Tensor  # [T], where the keys and values of each token go
    logits_indices: Tensor  # [rows], the tokens whose scores are wanted
    block_tables: Tensor  # [B, most blocks], rows padded with 0
    seq_lens: Tensor  # [B], tokens that each request attends over, the new ones included
    query_start_loc: Tensor  # [B + 1], request i owns tokens query_start_loc[i] to query_start_loc[i + 1]
    query_lens: tuple[int, ...]  # new tokens of each request, known without asking the device
    max_seq_len: int
    block_size: int

    @classmethod
    def build(
        cls, scheduled: Sequence[ScheduledRequest], block_size: int, device: torch.device | str = "cpu"
    ) -> ForwardBatch:
        """Lay the scheduled tokens flat; a request that samples wants the scores of its last token."""
        ids, positions, slots, rows = [], [], [], []
        for item in scheduled:
            span = range(item.start, item.start + item.num_tokens)
            ids += item.request.all_token_ids[span.start : span.stop]
            positions += span
            slots += slots_of(item.request.block_table, span, block_size)
            rows += range(len(ids) - num_wanted_rows(item), len(ids))
        query_lens = tuple(item.num_tokens for item in scheduled)
        seq_lens = [item.start + item.num_tokens for item in scheduled]

        def tensor(values: Sequence) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return cls(
            tensor(ids), tensor(positions), tensor(slots), tensor(rows),
            tensor(padded([item.request.block_table for item in scheduled])),
            tensor(seq_lens), tensor(list(accumulate(query_lens, initial=0))),
            query_lens, max(seq_lens), block_size,
        )


def slots_of(block_table: Sequence[int], positions: range, block_size: int) -> list[int]:
    """The cache slot of each position: block_table[i // block_size] * block_size + i % block_size."""
    return [block_table[i // block_size] * block_size + i % block_size for i in positions]


def num_wanted_rows(item: ScheduledRequest) -> int:
    """How many of a request's last new positions to score: one if it samples, all for prompt_logprobs."""
    return int(item.samples) if item.request.sampling_params.prompt_logprobs is None else item.num_tokens


def padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of one length, filled up with 0."""
    longest = max(map(len, rows))
    return [[*row, *[0] * (longest - len(row))] for row in rows]


def slot_rows(block_tables: Tensor, offsets: Tensor, block_size: int) -> Tensor:
    """slots_of for many requests at once: block_tables [D, blocks], offsets [D, n] -> slots [D, n]."""
    return block_tables.gather(1, offsets // block_size) * block_size + offsets % block_size


class RaggedAttention:
    """Attention for a batch over a cache of slots: the reference back end, for every device.

    All requests with one new token (decode) go through one call; each longer piece of a prompt through
    its own. Both copy the keys and values they need out of the cache first.
    """

    def __init__(self, cache: KVCache, batch: ForwardBatch):
        self.cache, self.batch = cache, batch
        starts = list(accumulate(batch.query_lens, initial=0))
        single = [i for i, n in enumerate(batch.query_lens) if n == 1]
        longer = [i for i, n in enumerate(batch.query_lens) if n > 1]
        self.pieces = [(starts[i], starts[i + 1], *self._prompt_view(i)) for i in longer]
        self.decode_tokens = torch.tensor([starts[i] for i in single], device=batch.input_ids.device)
        if single:
            self.decode_slots, self.decode_mask = self._decode_view(torch.tensor(single, device=batch.input_ids.device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.batch.slot_mapping, k, v)
        out = torch.empty_like(q)
        if len(self.decode_tokens):
            out[self.decode_tokens] = self._decode(layer, q[self.decode_tokens])
        for start, end, slots, mask in self.pieces:
            out[start:end] = self._prompt(layer, q[start:end], slots, mask)
        return out

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        """q [D, heads, head_dim]. The heads that share a key-value head stand in as its queries."""
        k, v = self.cache.read(layer, self.decode_slots)  # [D, longest, kv_heads, head_dim]
        grouped = q.unflatten(1, (k.shape[2], -1))  # [D, kv_heads, group, head_dim]
        out = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=self.decode_mask)
        return out.flatten(1, 2)

    def _prompt(self, layer: int, q: Tensor, slots: Tensor, mask: Tensor | None) -> Tensor:
        k, v = self.cache.read(layer, slots)  # [seq_len, kv_heads, head_dim]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def _decode_view(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of each row's tokens [D, longest], and which of them are real [D, 1, 1, longest].

        Padding reads the row's own first slot: whatever lies in a foreign slot, even NaN, stays out.
        """
        seq_lens = self.batch.seq_lens[rows, None]
        offsets = torch.arange(int(seq_lens.max()), device=rows.device)
        real = offsets < seq_lens
        slots = slot_rows(self.batch.block_tables[rows], torch.where(real, offsets, 0), self.batch.block_size)
        return slots, real[:, None, None]

    def _prompt_view(self, row: int) -> tuple[Tensor, Tensor | None]:
        """Slots of the request's tokens [seq_len], and who may look where [new, seq_len]; None is causal."""
        seq_len, num_new = int(self.batch.seq_lens[row]), self.batch.query_lens[row]
        offsets = torch.arange(seq_len, device=self.batch.input_ids.device)
        slots = slot_rows(self.batch.block_tables[row : row + 1], offsets[None], self.batch.block_size)[0]
        return slots, None if num_new == seq_len else offsets <= offsets[-num_new:, None]


class AttentionBackend(Protocol):
    def __call__(self, cache: KVCache, batch: ForwardBatch) -> Attention: ...


class ModelRunner:
    """The data plane: a model, its cache, and a way to attend over it."""

    def __init__(self, model: Transformer, cache: KVCache, attention_backend: AttentionBackend = RaggedAttention):
        self.model, self.cache, self.attention_backend = model, cache, attention_backend

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest], block_size: int) -> Tensor:
        """Run one step: keys and values go to the cache; returns the wanted scores [rows, vocab_size]."""
        return self.forward(ForwardBatch.build(scheduled, block_size, self.cache.keys.device))

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = self.model(batch.input_ids, batch.positions, self.attention_backend(self.cache, batch))
        return self.model.logits(hidden[batch.logits_indices])
