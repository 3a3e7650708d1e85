"""Known faults of inference engines: padding and captured sizes, as far as they show without a GPU."""

from __future__ import annotations

import pytest
import torch

from shared.batch import ForwardBatch, slots_of
from shared.block_manager import BlockManager
from shared.kv_cache import KVCache
from tests.known_bugs.helpers import ask, cached_engine, greedy, random_prompt, tiny
from tests.runtime.tiny import drain, make_engine


@pytest.mark.parametrize("bad", [-1, 32])
@pytest.mark.parametrize("position", [0, 1])
def test_b56_a_slot_that_is_none_writes_nowhere(bad, position):
    """-1 must not mean the last slot, as it does in plain indexing."""
    cache = KVCache(tiny().config, 32, torch.float32)
    slots = [3, bad] if position else [bad, 3]
    new = torch.ones(2, 2, 16)
    with pytest.raises(IndexError):
        cache.write(0, torch.tensor(slots), new, new)
    for kept in (cache.keys, cache.values):
        assert not kept[:, [i for i in range(32) if i != 3]].any()
    shown = torch.zeros(2, 16)
    shown[torch.tensor(-1) // 16, torch.tensor(-1) % 16] = 1  # the fault, shown
    assert shown[-1, -1] == 1


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_b56_every_token_goes_to_a_slot_of_its_own_request(block_size, monkeypatch):
    batches = []
    build = ForwardBatch.build.__func__

    def recording(cls, scheduled, *args):
        batch = build(cls, scheduled, *args)
        for i, item in enumerate(scheduled):
            start, end = batch.query_start_loc[i : i + 2].tolist()
            assert {slot // block_size for slot in batch.slot_mapping[start:end].tolist()} <= set(
                item.request.block_table
            )
        batches.append(batch)
        return batch

    monkeypatch.setattr(ForwardBatch, "build", classmethod(recording))
    engine = make_engine(tiny(), allocator=BlockManager(80 // block_size, block_size), max_num_seqs=4)
    for i in range(6):
        engine.add_request(str(i), random_prompt(5 + 3 * i, i), greedy(20, ignore_eos=True))
    drain(engine)
    for batch in batches:
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots) and 0 <= min(slots) and max(slots) < 80


def test_b56_slots_follow_the_block_table():
    assert slots_of([7, 2], range(2, 6), 4) == [30, 31, 8, 9]


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("make", [make_engine, cached_engine])
def test_b59_a_request_ends_at_max_model_len(make, block_size):
    """The eager half: 64 tokens in all, whatever was asked for. Captured graphs come with their chapter."""
    engine = make(tiny(), num_blocks=128 // block_size, block_size=block_size, max_model_len=64)
    asked = ask(engine, random_prompt(10), max_tokens=200, ignore_eos=True)
    assert len(asked.ids) == 54 and asked.why == "length"
