"""CUDA graphs of decode steps, replayed on a CPU: a stand-in records every operation and kernel with its numbers.

What the stand-in keeps is what a real graph keeps: addresses and plain numbers of the time of the recording. So a
number that ought to change, or a tensor that is made anew, gives wrong tokens here too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from shared.attention import TritonAttention
from shared.batch import ForwardBatch, ModelRunner, RaggedAttention
from shared.block_manager import BlockManager
from shared.cuda_graph import MAX_CAPTURED_ROWS, CUDAGraphRunner, DecodeBuffers, capture_sizes
from shared.errors import InvalidRequestError
from shared.kv_cache import KVCache
from shared.lab.graph_recorder import RecordedGraph
from shared.sampling_params import SamplingParams
from tests.runtime.test_ladder import PROMPTS, serve
from tests.runtime.tiny import make_engine

pytest.importorskip("triton")

NAN = float("nan")


class Graphs(list):
    """Makes graphs and counts what they do."""

    def __call__(self) -> RecordedGraph:
        self.append(CountedGraph())
        return self[-1]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self)


class CountedGraph(RecordedGraph):
    replays = 0
    shared_pool = None

    def record(self, work, pool):
        self.shared_pool = pool
        return super().record(work, pool)

    def replay(self) -> None:
        self.replays += 1
        super().replay()


def graph_runner(model, allocator, max_num_seqs=8, max_model_len=64, backend=TritonAttention, graphs=None):
    cache = KVCache(model.config, allocator.num_blocks * allocator.block_size, torch.float32)
    cache.keys.fill_(NAN)
    cache.values.fill_(NAN)
    graphs = Graphs() if graphs is None else graphs
    runner = CUDAGraphRunner(model, cache, backend, max_num_seqs, max_model_len, allocator.block_size, graphs)
    return runner, graphs


# Sizes


@pytest.mark.parametrize(
    "most, sizes",
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (16, [1, 2, 4, 8, 16]),
     (40, [1, 2, 4, 8, 16, 32, 40])],
)  # fmt: skip
def test_sizes(most, sizes):
    assert capture_sizes(most) == sizes


@pytest.mark.parametrize("most", [1, 5, 31, 32, 33, 255, 256, 257, 5000])
def test_every_number_of_rows_finds_a_size(most):
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, MAX_CAPTURED_ROWS)
    assert all(later - earlier <= 16 for earlier, later in zip(sizes, sizes[1:]))


def test_the_largest_graph_is_recorded_first_and_the_others_use_its_memory(family):
    runner, graphs = graph_runner(family("llama").model, BlockManager(16, 4), max_num_seqs=4)
    assert list(runner.graphs) == [4, 2, 1]
    assert graphs[0].shared_pool is None
    assert all(graph.shared_pool is graphs[0] for graph in graphs[1:])
    assert [runner.graphs[size][1].shape[0] for size in (4, 2, 1)] == [4, 2, 1]


def test_recording_writes_nothing_to_the_cache(family):
    runner, _ = graph_runner(family("llama").model, BlockManager(16, 4), max_num_seqs=4)
    assert runner.cache.keys.isnan().all() and runner.cache.values.isnan().all()


def test_a_back_end_that_cannot_be_captured_is_refused(family):
    with pytest.raises(InvalidRequestError, match=r"triton or flash_attn.*enforce_eager.*RaggedAttention"):
        graph_runner(family("llama").model, BlockManager(16, 4), backend=RaggedAttention)


def test_the_stand_in_refuses_what_a_graph_refuses():
    for work in (
        lambda: torch.zeros(int(torch.ones(1).sum())),
        lambda: torch.tensor([1.0, 2.0]) + 1,
        lambda: torch.arange(4)[torch.arange(4) > 2],
    ):
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            RecordedGraph().record(work, None)


def test_the_stand_in_bakes_in_numbers_and_addresses():
    """The fault it is there to show: a number of the time of the recording, and a tensor that was replaced."""
    state = dict(number=2.0, tensor=torch.ones(3))
    graph = RecordedGraph()
    out = graph.record(lambda: state["tensor"] * state["number"], None)
    state["tensor"].fill_(5.0)
    graph.replay()
    assert out.tolist() == [10.0] * 3  # the same tensor, with new content
    state.update(number=3.0, tensor=torch.zeros(3))
    graph.replay()
    assert out.tolist() == [10.0] * 3


# Buffers


def test_buffers_pad_with_rows_that_read_and_write_nothing():
    buffers = DecodeBuffers(8, 64, 16, 320, torch.device("cpu"))

    def load(count: int, size: int) -> ForwardBatch:
        numbers = torch.arange(1, count + 1)
        tables = torch.arange(count * 2).reshape(count, 2) + 1
        starts = torch.arange(count + 1)
        batch = ForwardBatch(numbers, numbers * 2, numbers * 3, starts[:-1], tables, numbers * 2 + 1, starts,
                             (1,) * count, 17, 16)  # fmt: skip
        buffers.load(batch, size)
        return buffers.view(size)

    full = load(8, 8)
    assert full.input_ids.tolist() == list(range(1, 9))
    assert full.block_tables[:, :2].flatten().tolist() == list(range(1, 17))
    addresses = [full.input_ids.data_ptr(), full.block_tables.data_ptr(), full.seq_lens.data_ptr()]
    partly = load(5, 8)
    assert partly.slot_mapping.tolist() == [3, 6, 9, 12, 15, 320, 320, 320]
    assert partly.seq_lens.tolist() == [3, 5, 7, 9, 11, 0, 0, 0]
    assert partly.input_ids.tolist() == [1, 2, 3, 4, 5, 0, 0, 0] and partly.positions.tolist()[5:] == [0, 0, 0]
    assert [partly.input_ids.data_ptr(), partly.block_tables.data_ptr(), partly.seq_lens.data_ptr()] == addresses
    assert partly.block_tables.shape == (8, 4) and partly.max_seq_len == 64 and partly.query_lens == (1,) * 8
    assert partly.query_start_loc.tolist() == list(range(9))


# Steps: equal to a runner without graphs


class Compared(ModelRunner):
    """Runs every step twice, with graphs and without, each on a cache of its own; both must give the same."""

    def __init__(self, graphs: CUDAGraphRunner, eager: ModelRunner):
        super().__init__(graphs.model, graphs.cache)
        self.graphs, self.eager, self.sizes_used = graphs, eager, []

    def execute(self, scheduled, block_size):
        untouched = self._foreign(scheduled, block_size)
        before = [cache[:, untouched].clone() for cache in (self.cache.keys, self.cache.values)]
        logits = self.graphs.execute(scheduled, block_size)
        after = [cache[:, untouched] for cache in (self.cache.keys, self.cache.values)]
        assert all(torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5)) for x, y in zip(before, after))
        torch.testing.assert_close(logits, self.eager.execute(scheduled, block_size), rtol=1e-4, atol=1e-4)
        query_lens = [item.num_tokens for item in scheduled]
        self.sizes_used.append((len(scheduled), self.graphs.size_for(query_lens, 1)))
        return logits

    def _foreign(self, scheduled, block_size) -> list[int]:
        """Every slot but those that this step is to write."""
        own = ForwardBatch.build(scheduled, block_size).slot_mapping.tolist()
        return sorted(set(range(self.cache.num_slots)) - set(own))


def compared(model, allocator, **options) -> tuple[Compared, Graphs]:
    runner, graphs = graph_runner(model, allocator, **options)
    cache = KVCache(model.config, runner.cache.num_slots, torch.float32)
    return Compared(runner, ModelRunner(model, cache)), graphs


LENGTHS = [3, 6, 6, 5, 2]  # the prompts end at different times
SOME = [SamplingParams(temperature=0, max_tokens=length) for length in LENGTHS]


def test_the_ladder_with_graphs(family):
    """Sizes 8, 4, 2 with padding and without; the prompts themselves run without a graph."""
    model, allocator = family("qwen3").model, BlockManager(80, 4)
    expected = serve(make_engine(model, num_blocks=80), PROMPTS[:5], SOME)
    runner, graphs = compared(model, allocator)
    assert serve(make_engine(model, runner=runner, allocator=allocator), PROMPTS[:5], SOME) == expected
    decodes = [size for _, size in runner.sizes_used if size]
    assert graphs.replays == len(decodes) >= 4 and len(set(decodes)) > 1
    assert (5, None) in runner.sizes_used


def test_a_fused_model_with_graphs(family):
    from shared.kernels import fuse_for_cuda

    model = family("llama-biases").model
    expected = serve(make_engine(model), PROMPTS[:2], SOME[:2])
    fused = fuse_for_cuda(copy.deepcopy(model))
    runner, graphs = graph_runner(fused, BlockManager(64, 4), max_num_seqs=2)
    assert serve(make_engine(fused, runner=runner, max_num_seqs=2), PROMPTS[:2], SOME[:2]) == expected
    assert graphs.replays >= 4 and "rotary_kernel" in graphs[0].names and "decode_kernel" in graphs[0].names


def ramp(lengths: Sequence[int]) -> list[list[int]]:
    return [[3 + (i * 7 + j * 5) % 120 for j in range(length)] for i, length in enumerate(lengths)]


def test_a_chunk_of_one_token_gives_no_scores(family):
    """A step of single tokens may hold one in the middle of a prompt: its row is computed, and not scored."""
    model, allocator = family("llama").model, BlockManager(40, 4)
    runner, graphs = compared(model, allocator, max_num_seqs=2)
    engine = make_engine(model, runner=runner, allocator=allocator, max_num_seqs=2, max_num_batched_tokens=2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = serve(engine, ramp([1, 5]), [params] * 2)
    alone = [serve(make_engine(model), [prompt], [params])[0] for prompt in ramp([1, 5])]
    assert answers == alone and graphs.replays > 4


def test_larger_batches_and_longer_requests_than_recorded_run_without_a_graph(family):
    runner, _ = graph_runner(family("llama").model, BlockManager(16, 4), max_num_seqs=4, max_model_len=32)
    assert runner.size_for((1, 1, 1), 32) == 4
    assert runner.size_for((1,) * 5, 10) is None
    assert runner.size_for((1, 1), 33) is None
    assert runner.size_for((1, 2), 10) is None
