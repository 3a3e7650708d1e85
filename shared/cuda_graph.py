"""Decode steps recorded once as CUDA graphs, and replayed with one call instead of hundreds of launches.

A graph keeps addresses and numbers as they were when it was recorded. So its inputs live in buffers that stay,
and nothing that it was told may depend on how long the requests are. There is a graph for a few sizes of batch;
a smaller batch is filled up with rows that attend over nothing and write nowhere.
The way of PyTorch's CUDA graphs and of vLLM's. It has not run on a GPU yet: the tests replay recordings on a CPU.
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.batch import AttentionBackend, ForwardBatch, ModelRunner
from shared.errors import InvalidRequestError
from shared.kv_cache import KVCache
from shared.model import Transformer
from shared.scheduler import ScheduledRequest

MAX_CAPTURED_ROWS = 256


class CUDAGraph:
    """torch.cuda.CUDAGraph: records the work of a function and does it again; `pool` is memory others may share."""

    def __init__(self):
        self.graph = torch.cuda.CUDAGraph()
        self.replay, self.pool = self.graph.replay, self.graph.pool

    def record(self, work: Callable[[], Tensor], pool: Any) -> Tensor:
        """The result, at the address where each replay leaves it; one run before compiles kernels and fills caches."""
        work()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=pool):
            return work()


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Sizes of batch to record: 1, 2, 4, 8, 16, then each 16 more, up to the most that run at once."""
    most = min(max_num_seqs, MAX_CAPTURED_ROWS)
    return [size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most] + [most]


class DecodeBuffers:
    """The inputs of every graph, at addresses that stay. Row i of each is request i of the batch.

    The block tables are as wide as the longest request needs. A padding row has no tokens to attend over, so
    its old table is never read, and its slot lies behind the cache, where nothing is written.
    """

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, num_slots: int, device: torch.device):
        self.max_model_len, self.block_size = max_model_len, block_size
        padding = [0, 0, num_slots, 0]  # input id, position, slot, tokens in all
        self.padding = torch.tensor(padding, device=device)[:, None]  # [4, 1]
        self.numbers = self.padding.repeat(1, max_rows)  # [4, max_rows]
        width = -(-max_model_len // block_size)
        self.block_tables = torch.zeros((max_rows, width), dtype=torch.long, device=device)
        self.query_start_loc = torch.arange(max_rows + 1, device=device)  # one new token each

    def view(self, size: int) -> ForwardBatch:
        """The first rows as a batch. Its longest request is as long as any may become."""
        input_ids, positions, slot_mapping, seq_lens = self.numbers[:, :size]
        return ForwardBatch(
            input_ids, positions, slot_mapping, self.query_start_loc[:size], self.block_tables[:size], seq_lens,
            self.query_start_loc[: size + 1], (1,) * size, self.max_model_len, self.block_size,
        )

    def load(self, batch: ForwardBatch, size: int) -> None:
        """Copy a batch of one token a request, from any device, and make padding of the rows up to `size`."""
        num_rows, width = batch.block_tables.shape
        rows = torch.stack([batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens])
        self.numbers[:, :num_rows].copy_(rows)
        self.numbers[:, num_rows:size] = self.padding
        self.block_tables[:num_rows, :width].copy_(batch.block_tables)


class CUDAGraphRunner(ModelRunner):
    """A runner that replays steps in which every request decodes; other steps run as before."""

    def __init__(
        self, model: Transformer, cache: KVCache, attention_backend: AttentionBackend,
        max_num_seqs: int, max_model_len: int, block_size: int, new_graph: Callable[[], CUDAGraph] = CUDAGraph,
    ):  # fmt: skip
        if not getattr(attention_backend, "can_be_captured", False):
            limit = "triton or flash_attn for CUDA graphs (or set enforce_eager=True)"
            raise InvalidRequestError("attention_backend", getattr(attention_backend, "__name__", None), limit)
        super().__init__(model, cache, attention_backend)
        self.sizes = capture_sizes(max_num_seqs)
        device = cache.keys.device
        self.buffers = DecodeBuffers(self.sizes[-1], max_model_len, block_size, cache.num_slots, device)
        self.graphs: dict[int, tuple[CUDAGraph, Tensor]] = {}  # by size: the graph, and the hidden states it leaves
        self._capture(new_graph)

    @torch.inference_mode()
    def _capture(self, new_graph: Callable[[], CUDAGraph]) -> None:
        """Record each size over padding rows, the largest first: the others fit into its memory."""
        pool = None
        for size in reversed(self.sizes):
            graph = new_graph()
            hidden = graph.record(partial(self._hidden, self.buffers.view(size)), pool)
            self.graphs[size] = graph, hidden
            pool = graph.pool() if pool is None else pool

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        return self.model(batch.input_ids, batch.positions, self.attention_backend(self.cache, batch))

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest], block_size: int) -> Tensor:
        """As ModelRunner's; a batch for a graph is built on the host and copied to the buffers at once."""
        query_lens = [item.num_tokens for item in scheduled]
        longest = max(item.start + item.num_tokens for item in scheduled)
        device = self.cache.keys.device if self.size_for(query_lens, longest) is None else "cpu"
        return self.forward(ForwardBatch.build(scheduled, block_size, device))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        size = self.size_for(batch.query_lens, batch.max_seq_len)
        if size is None:
            return super().forward(batch)
        self.buffers.load(batch, size)
        graph, hidden = self.graphs[size]
        graph.replay()
        all_score = len(batch.logits_indices) == len(batch.query_lens)  # nobody is in the middle of a prompt
        rows = slice(len(batch.query_lens)) if all_score else batch.logits_indices.to(hidden.device)
        return self.model.logits(hidden[rows])

    def size_for(self, query_lens: Sequence[int], longest: int) -> int | None:
        """The smallest recorded size that holds the batch; None if it has to run without a graph."""
        if any(length != 1 for length in query_lens) or longest > self.buffers.max_model_len:
            return None
        index = bisect_left(self.sizes, len(query_lens))
        return self.sizes[index] if index < len(self.sizes) else None
