"""Known faults of inference engines: graphs of decode steps, replayed on a CPU. See shared/lab/graph_recorder.py.

The same cases run on a GPU in tests/gpu.
"""

from __future__ import annotations

import pytest

from shared.batch import ForwardBatch
from shared.block_manager import BlockManager
from shared.cuda_graph import DecodeBuffers
from shared.lab.graph_recorder import RecordedGraph
from shared.prefix_cache import PrefixCachingBlockManager
from tests.known_bugs.helpers import ask, greedy, oracle, random_prompt, tiny
from tests.runtime.test_cuda_graph import compared, graph_runner
from tests.runtime.tiny import drain, make_engine

pytest.importorskip("triton")


def engine_with_graphs(manager=BlockManager, num_blocks=48, block_size=4, max_num_seqs=8, max_model_len=64):
    allocator = manager(num_blocks, block_size)
    runner, graphs = compared(tiny(), allocator, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    engine = make_engine(
        tiny(), runner=runner, allocator=allocator, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )
    return engine, graphs


@pytest.mark.parametrize("manager", [BlockManager, PrefixCachingBlockManager])
def test_b57_eight_rows_then_five_padded_to_eight(manager):
    """Three of eight end, two prompts take their blocks, then five rows decode in the graph of eight.

    Every step compares scores with a runner without graphs, and every slot that is not written with what it was.
    """
    engine, graphs = engine_with_graphs(manager, num_blocks=26)
    lengths = [4, 4, 4, 9, 9, 9, 3, 3]
    prompts = [random_prompt(6, i) for i in range(8)]
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        engine.add_request(str(i), prompt, greedy(length, ignore_eos=True))
    done: dict = {}
    freed: set[int] = set()
    while len(done) < 5:
        held = {block for request in engine.scheduler.running for block in request.block_table}
        done |= {output.request_id: output for output in engine.step() if output.finished}
        freed |= held - {block for request in engine.scheduler.running for block in request.block_table}
    prompts += [random_prompt(9, 20), random_prompt(11, 21)]
    for i in (8, 9):
        engine.add_request(str(i), prompts[i], greedy(4, ignore_eos=True))
    done |= {output.request_id: output for output in engine.step() if output.finished}
    done |= {output.request_id: output for output in engine.step() if output.finished}
    assert freed & {block for request in engine.scheduler.running for block in request.block_table}
    assert engine.runner.sizes_used[-1] == (5, 8)
    done |= drain(engine)
    for i, length in enumerate([*lengths, 4, 4]):
        assert done[str(i)].outputs[0].token_ids == oracle(tiny(), prompts[i], greedy(length, ignore_eos=True))
    assert graphs.replays >= 6


def test_b57_padding_rows_never_read_what_is_poisoned():
    """The padding's old tables and slots hold NaN, and the rows beside it are as they are alone."""
    runner, _ = graph_runner(tiny(), BlockManager(16, 4), max_num_seqs=4)
    runner.buffers.block_tables.fill_(10**6)
    engine = make_engine(tiny(), runner=runner, allocator=BlockManager(16, 4))
    for i in range(3):
        engine.add_request(str(i), random_prompt(4 + i, i), greedy(6, ignore_eos=True))
    done = drain(engine)
    for i in range(3):
        expected = oracle(tiny(), random_prompt(4 + i, i), greedy(6, ignore_eos=True))
        assert done[str(i)].outputs[0].token_ids == expected
    unused = runner.cache.keys[0].isnan().flatten(1).any(1)
    assert unused.sum() == 64 - sum(4 + i + 5 for i in range(3))  # nothing was written beside the tokens' slots


def test_b58_a_request_grows_to_ten_times_what_was_recorded():
    """Recorded over padding; then from 4 tokens to 44, across 11 widths of the block table."""
    engine, graphs = engine_with_graphs(max_num_seqs=2)
    engine.add_request("a", random_prompt(4), greedy(41, ignore_eos=True))
    engine.add_request("b", random_prompt(9, 1), greedy(10, ignore_eos=True))
    done = drain(engine)
    assert done["a"].outputs[0].token_ids == oracle(tiny(), random_prompt(4), greedy(41, ignore_eos=True))
    assert done["b"].outputs[0].token_ids == oracle(tiny(), random_prompt(9, 1), greedy(10, ignore_eos=True))
    assert graphs.replays == 40


def test_b58_a_tensor_that_is_made_anew_shows():
    """The fault, planted: tables that are copied before the recording, and so never change in it."""

    class Copied(DecodeBuffers):
        def view(self, size: int) -> ForwardBatch:
            batch = super().view(size)
            return ForwardBatch(**{**vars(batch), "block_tables": batch.block_tables.clone()})

    engine, _ = engine_with_graphs(max_num_seqs=1)
    runner = engine.runner.graphs
    runner.buffers.__class__ = Copied
    runner._capture(RecordedGraph)
    asked = []
    engine.add_request("a", random_prompt(9, 2), greedy(12, ignore_eos=True))
    while engine.has_unfinished_requests():
        asked += engine.step()
    assert asked[-1].outputs[0].finish_reason == "error" and "not close" in asked[-1].outputs[0].error


@pytest.mark.parametrize("block_size", [5, 16])
def test_b59_a_request_ends_at_the_captured_width(block_size):
    """64 tokens in all, whatever was asked for; the last steps use the table's last column."""
    engine, graphs = engine_with_graphs(num_blocks=2 * -(-64 // block_size), block_size=block_size, max_num_seqs=1)
    asked = ask(engine, random_prompt(50), max_tokens=200, ignore_eos=True)
    assert len(asked.ids) == 14 and asked.why == "length"
    assert asked.ids == oracle(tiny(), random_prompt(50), greedy(14, ignore_eos=True))
    assert graphs.replays == 13


def test_b59_a_step_beyond_the_captured_length_runs_without_a_graph():
    """Should a request ever be longer than promised, no table is cut: the step runs eagerly, and right."""
    runner, graphs = graph_runner(tiny(), BlockManager(32, 4), max_num_seqs=1, max_model_len=16)
    engine = make_engine(tiny(), runner=runner, allocator=BlockManager(32, 4), max_model_len=64)
    asked = ask(engine, random_prompt(10), max_tokens=12, ignore_eos=True)
    assert asked.ids == oracle(tiny(), random_prompt(10), greedy(12, ignore_eos=True))
    assert graphs.replays == 6
