"""Random ragged batches over a poisoned paged cache, and what attention over them is in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.batch import ForwardBatch, slots_of
from shared.kv_cache import KVCache
from shared.model import ModelConfig

NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """Heads, blocks, and how long each request is: (tokens in all, new tokens among them)."""

    lengths: Sequence[tuple[int, int]]
    group: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    layers: int = 1

    def config(self) -> ModelConfig:
        heads = self.group * self.kv_heads
        return ModelConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=self.layers, num_attention_heads=heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, rms_norm_eps=1e-6, rope_theta=10000.0,
            rope_scaling=None, max_position_embeddings=4096, tie_word_embeddings=True,
        )  # fmt: skip


def draw_shape(draw: random.Random, decoding: int, prompts: int) -> Shape:
    """Requests of any length, those at the edges of a block more often than others."""
    size = draw.choice([1, 3, 16, 64, 256])
    edges = [1, 2, size, size + 1, 2 * size - 1, 2 * size]

    def length() -> int:
        return min(300, draw.choice([*edges, draw.randint(1, 150)]))

    lengths = [(length(), 1) for _ in range(decoding)]
    for _ in range(prompts):
        total = max(2, length())
        lengths.append((total, draw.choice([total, draw.randint(2, total)])))
    draw.shuffle(lengths)
    return Shape(
        lengths, group=draw.choice([1, 2, 3, 4]), kv_heads=draw.choice([1, 2]), head_dim=draw.choice([16, 64, 80, 128]),
        block_size=size, dtype=draw.choice((torch.float32, torch.float16)),
    )  # fmt: skip


class Paged:
    """One batch: queries, keys and values of all tokens, and a cache that holds those of earlier steps.

    Blocks are handed out in random order. Every slot that holds no earlier token is NaN, the spare blocks are too.
    """

    def __init__(self, shape: Shape, seed: int, spare_blocks: int = 3):
        draw = torch.Generator().manual_seed(seed)
        self.shape = shape
        size, heads = shape.block_size, shape.group * shape.kv_heads
        counts = [-(-total // size) for total, _ in shape.lengths]
        blocks = torch.randperm(sum(counts) + spare_blocks, generator=draw).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=draw).to(shape.dtype).to(shape.device)

        self.k = [normal(total, shape.kv_heads, shape.head_dim) for total, _ in shape.lengths]
        self.v = [normal(total, shape.kv_heads, shape.head_dim) for total, _ in shape.lengths]
        self.q = normal(sum(new for _, new in shape.lengths), heads, shape.head_dim)
        self.cache = KVCache(shape.config(), (sum(counts) + spare_blocks) * size, shape.dtype, shape.device)
        self.cache.keys.fill_(NAN)
        self.cache.values.fill_(NAN)
        for i, (total, new) in enumerate(shape.lengths):
            self.write(i, range(total - new))

    def slots(self, request: int, positions: range) -> Tensor:
        found = slots_of(self.tables[request], positions, self.shape.block_size)
        return torch.tensor(found, dtype=torch.long, device=self.shape.device)

    def write(self, request: int, positions: range) -> None:
        """Put keys and values of these positions in the cache, without the kernel under test."""
        slots, span = self.slots(request, positions), slice(positions.start, positions.stop)
        self.cache.keys[0, slots], self.cache.values[0, slots] = self.k[request][span], self.v[request][span]

    def write_all(self) -> None:
        for i, (total, _) in enumerate(self.shape.lengths):
            self.write(i, range(total))

    def new(self, of: list[Tensor]) -> Tensor:
        """Keys or values of the new tokens, flat: [T, kv_heads, head_dim]."""
        return torch.cat([x[total - new :] for x, (total, new) in zip(of, self.shape.lengths)])

    def batch(self, table_width: int | None = None) -> ForwardBatch:
        device = self.shape.device
        totals, news = zip(*self.shape.lengths)
        width = table_width or max(map(len, self.tables))
        tables = torch.full((len(totals), width), 10**6, dtype=torch.long)  # whoever reads past the end is far off
        for row, table in zip(tables, self.tables):
            row[: len(table)] = torch.tensor(table)
        starts = torch.tensor([0, *news]).cumsum(0)
        positions = [torch.arange(total - new, total) for total, new in self.shape.lengths]
        slots = [self.slots(i, range(total - new, total)) for i, (total, new) in enumerate(self.shape.lengths)]
        return ForwardBatch(
            torch.zeros(sum(news), dtype=torch.long, device=device), torch.cat(positions).to(device), torch.cat(slots),
            starts[1:].to(device) - 1, tables.to(device), torch.tensor(totals, device=device), starts.to(device),
            news, max(totals), self.shape.block_size,
        )  # fmt: skip

    def expected(self) -> Tensor:
        """Attention of the new tokens, in float64: [T, heads, head_dim]."""
        out, start = [], 0
        for k, v, (total, new) in zip(self.k, self.v, self.shape.lengths):
            q = self.q[start : start + new].double().unflatten(1, (self.shape.kv_heads, -1))
            scores = torch.einsum("nkgd,tkd->kgnt", q, k.double()) * self.shape.head_dim**-0.5
            own = torch.arange(total - new, total, device=q.device)
            hidden = torch.arange(total, device=q.device) > own[:, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("kgnt,tkd->nkgd", weights, v.double()).flatten(1, 2))
            start += new
        return torch.cat(out)


def tolerance(dtype: torch.dtype) -> float:
    """What rounding may do to a weighted mean of unit normal numbers."""
    return {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert not out.isnan().any(), "a foreign slot was read, or a row left out"
    assert (out.double() - expected).abs().max().item() < tolerance(dtype)
