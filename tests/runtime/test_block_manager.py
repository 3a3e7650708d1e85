"""Who owns which slot: both plain allocators by example, and by a machine that tries to lose a block."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.allocator import RowAllocator
from shared.block_manager import BlockManager
from shared.errors import InvalidRequestError
from shared.scheduler import Scheduler
from tests.runtime.plain import make_request


def request(num_tokens: int = 10):
    return make_request("r", range(num_tokens))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 64])
def test_a_table_has_the_blocks_that_the_tokens_fill(size):
    manager, r = BlockManager(64, size), request()
    for num_tokens in range(1, 65):
        assert manager.allocate_slots(r, num_tokens)
        assert len(r.block_table) == -(-num_tokens // size) == manager.blocks_for(num_tokens)
        assert manager.num_free_blocks == 64 - len(r.block_table)
        manager.check([r])


def test_what_does_not_fit_changes_nothing():
    manager, r = BlockManager(3, 4), request()
    assert manager.allocate_slots(r, 5)
    table = list(r.block_table)
    assert not manager.allocate_slots(r, 13)
    assert r.block_table == table and manager.num_free_blocks == 1
    manager.check([r])
    assert manager.allocate_slots(r, 12) and manager.num_free_blocks == 0


def test_growing_keeps_the_blocks_and_asking_for_less_gives_nothing_back():
    manager, r = BlockManager(8, 4), request()
    manager.allocate_slots(r, 9)
    table = list(r.block_table)
    manager.allocate_slots(r, 3)
    assert r.block_table == table
    manager.allocate_slots(r, 13)
    assert r.block_table[:3] == table
    assert manager.num_new_blocks(r, 13) == manager.num_new_blocks(r, 2) == 0
    assert manager.num_new_blocks(r, 17) == 1


def test_no_hole_is_too_small():
    """Blocks given back anywhere serve the next request: nothing is lost between two others."""
    manager = BlockManager(6, 4)
    a, b, c, d = (request() for _ in range(4))
    assert manager.allocate_slots(a, 8) and manager.allocate_slots(b, 8) and manager.allocate_slots(c, 8)
    manager.free(a)
    manager.free(c)
    assert manager.allocate_slots(d, 16)
    assert not set(d.block_table) & set(b.block_table)
    manager.check([b, d])


def test_the_block_free_longest_is_taken_first_and_a_beginning_last():
    manager, a, b = BlockManager(4, 2), request(), request()
    manager.allocate_slots(a, 6)
    first = list(a.block_table)
    manager.free(a)
    assert a.block_table == []
    manager.allocate_slots(b, 8)
    assert b.block_table[1:] == first[::-1] and b.block_table[0] not in first


def test_plain_managers_find_nothing_computed():
    for manager in (BlockManager(8, 2), RowAllocator(4, 20)):
        r = request()
        assert manager.allocate_slots(r, 10)
        r.num_computed_tokens = 10
        manager.cache_blocks(r, 0)
        manager.free(r)
        assert manager.get_computed_blocks(request()) == []


def test_a_row_is_reserved_whole_and_once():
    rows, a, b, c = RowAllocator(2, 100), request(), request(), request()
    for num_tokens in (1, 50, 100):
        assert rows.allocate_slots(a, num_tokens)
        assert len(a.block_table) == 1 and rows.num_new_blocks(a, 100) == 0
    assert rows.allocate_slots(b, 1) and rows.num_free_blocks == 0
    assert a.block_table != b.block_table
    assert not rows.allocate_slots(c, 1) and c.block_table == []
    rows.free(a)
    rows.check([b])
    assert rows.allocate_slots(c, 1)
    rows.check([b, c])


def test_a_request_longer_than_a_row_is_refused_however_many_rows_are_free():
    scheduler = Scheduler(RowAllocator(4, 20))
    scheduler.check_fits(20)
    with pytest.raises(InvalidRequestError, match="within the cache, which has 4 blocks of 20 slots, got '21 tokens"):
        scheduler.check_fits(21)
    assert [RowAllocator(4, 20).blocks_for(n) for n in (0, 1, 20)] == [1, 1, 1]


@pytest.mark.parametrize("make", [lambda: BlockManager(4, 2), lambda: RowAllocator(4, 8)])
def test_check_notices_a_lost_and_a_stolen_block(make):
    manager, a, b = make(), request(), request()
    manager.allocate_slots(a, 2)
    manager.allocate_slots(b, 2)
    with pytest.raises(AssertionError, match="lost or owned twice"):
        manager.check([a])
    b.block_table[:] = a.block_table
    with pytest.raises(AssertionError, match="lost or owned twice"):
        manager.check([a, b])


class Owners(RuleBasedStateMachine):
    """Any order of growing and freeing; a dict says who must own what."""

    @initialize(num_blocks=st.integers(1, 12), size=st.integers(1, 5), rows=st.booleans())
    def start(self, num_blocks, size, rows):
        self.rows = rows
        self.manager = RowAllocator(num_blocks, 20) if rows else BlockManager(num_blocks, size)
        self.requests, self.owned = {}, {}

    @rule(name=st.integers(0, 5), num_tokens=st.integers(1, 20))
    def grow(self, name, num_tokens):
        r = self.requests.setdefault(name, request())
        free = self.manager.num_blocks - sum(map(len, self.owned.values()))
        missing = max(0, (1 if self.rows else -(-num_tokens // self.manager.block_size)) - len(r.block_table))
        assert self.manager.num_new_blocks(r, num_tokens) == missing
        before = list(r.block_table)
        assert self.manager.allocate_slots(r, num_tokens) == (missing <= free)
        assert r.block_table[: len(before)] == before
        assert len(r.block_table) == len(before) + (missing if missing <= free else 0)
        new = set(r.block_table[len(before) :])
        assert not new & {block for blocks in self.owned.values() for block in blocks}
        self.owned[name] = list(r.block_table)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.manager.free(self.requests.pop(name))
        del self.owned[name]

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "manager"):
            assert {name: r.block_table for name, r in self.requests.items()} == self.owned
            assert self.manager.num_free_blocks == self.manager.num_blocks - sum(map(len, self.owned.values()))
            self.manager.check(self.requests.values())


TestOwners = Owners.TestCase
