"""The prefix cache: what may be found, what must not, and in which order it is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.prefix_cache import PrefixCachingBlockManager, hash_block, hash_root
from tests.runtime.plain import make_request


def compute(manager, prompt, num_tokens=None, salt="", **params):
    """Admit a request and compute its first tokens, as a scheduler and a runner would."""
    request = make_request("r", prompt, salt=salt, **params)
    found = manager.get_computed_blocks(request)
    start = len(found) * manager.block_size
    request.num_cached_tokens = start
    assert manager.allocate_slots(request, num_tokens or len(prompt), found)
    request.num_computed_tokens = num_tokens or len(prompt)
    manager.cache_blocks(request, start)
    return request


def num_found(manager, prompt, salt="", **params) -> int:
    return len(manager.get_computed_blocks(make_request("q", prompt, salt=salt, **params)))


@pytest.fixture
def manager():
    return PrefixCachingBlockManager(16, 4)


def test_a_computed_beginning_is_found_in_the_same_blocks(manager):
    first = compute(manager, range(10))
    again = make_request("q", [*range(9), 99])
    assert manager.get_computed_blocks(again) == first.block_table[:2]
    assert num_found(manager, range(8)) == 1  # the last token is left to compute
    assert num_found(manager, range(9)) == 2
    assert num_found(manager, [*range(4), 99, *range(5, 10)]) == 1
    assert num_found(manager, [99, *range(1, 10)]) == 0


@pytest.mark.parametrize("length", range(1, 13))
def test_the_last_token_is_always_left_to_compute(length):
    manager = PrefixCachingBlockManager(16, 4)
    compute(manager, range(20))
    assert num_found(manager, range(length)) == (length - 1) // 4


def test_only_full_computed_blocks_are_published(manager):
    chunked = compute(manager, range(12), num_tokens=6)
    assert num_found(manager, range(12)) == 1
    manager.allocate_slots(chunked, 12)
    assert num_found(manager, range(12)) == 1  # allocated, not yet computed
    chunked.num_computed_tokens = 12
    manager.cache_blocks(chunked, 6)
    assert num_found(manager, range(13)) == 3


def test_the_same_block_after_another_prefix_is_another_block(manager):
    x, y, w = [1] * 4, [2] * 4, [3] * 4
    compute(manager, x + y + [9])
    assert num_found(manager, w + y + [9]) == 0
    assert num_found(manager, y + [9]) == 0
    assert num_found(manager, x + y + [9]) == 2
    compute(manager, w + y + [9])
    assert manager.get_computed_blocks(make_request("q", w + y + [9])) != manager.get_computed_blocks(
        make_request("q", x + y + [9])
    )


def test_salts_separate_tenants(manager):
    compute(manager, range(9), salt="a")
    assert num_found(manager, range(9), salt="a") == 2
    assert num_found(manager, range(9), salt="b") == num_found(manager, range(9)) == 0


def test_prompt_logprobs_need_every_position(manager):
    compute(manager, range(9))
    assert num_found(manager, range(9), prompt_logprobs=0) == 0
    assert num_found(manager, range(9), logprobs=5) == 2


def test_answers_are_found_by_the_next_turn(manager):
    request = compute(manager, range(6))
    for token in range(50, 57):  # seven tokens; the last one is never computed
        request.append(token)
        if token < 56:
            manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
            manager.cache_blocks(request, request.num_tokens - 1)
    manager.free(request)
    turn = [*range(6), *range(50, 57), 7, 7, 7]
    assert num_found(manager, turn) == (6 + 7 - 1) // 4


def test_a_freed_block_is_found_and_leaves_the_free_list(manager):
    first = compute(manager, range(9))
    table = list(first.block_table)
    manager.free(first)
    assert manager.num_free_blocks == 16
    second = compute(manager, [*range(8), 99])
    assert second.block_table[:2] == table[:2] and second.num_cached_tokens == 8
    assert manager.num_free_blocks == 13
    manager.check([second])


def test_shared_blocks_are_counted(manager):
    a, b = compute(manager, range(9)), compute(manager, range(9))
    assert a.block_table[:2] == b.block_table[:2] and a.block_table[2] != b.block_table[2]
    assert manager.num_free_blocks == 16 - 4
    manager.free(a)
    assert manager.num_free_blocks == 16 - 3
    manager.check([b])
    manager.free(b)
    assert manager.num_free_blocks == 16
    manager.check([])


def test_a_block_that_is_revived_is_not_also_counted_as_free():
    """All free blocks belong to the prefix: nothing is left for the rest, so it does not fit."""
    manager = PrefixCachingBlockManager(4, 4)
    manager.free(compute(manager, range(9)))
    other = compute(manager, [77])
    request = make_request("q", [*range(8), *range(90, 97)])
    found = manager.get_computed_blocks(request)
    assert len(found) == 2 and manager.num_new_blocks(request, 15, found) == 4 > manager.num_free_blocks == 3
    assert not manager.allocate_slots(request, 15, found)
    assert request.block_table == [] and manager.num_free_blocks == 3
    manager.check([other])
    assert manager.allocate_slots(request, 12, found)
    manager.check([other, request])


def test_the_least_recently_used_is_forgotten_first_and_the_end_before_the_beginning():
    manager = PrefixCachingBlockManager(6, 2)
    prompts = [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]
    for prompt in prompts:
        manager.free(compute(manager, prompt[:4]))
    manager.free(compute(manager, prompts[0]))  # uses its two blocks again, and overwrites one for the fifth token
    left = [[num_found(manager, prompt) for prompt in prompts]]
    for token in range(70, 76):
        compute(manager, [token])
        left.append([num_found(manager, prompt) for prompt in prompts])
    assert left == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_what_is_overwritten_is_not_found():
    manager = PrefixCachingBlockManager(4, 4)
    manager.free(compute(manager, range(12)))
    manager.free(compute(manager, range(100, 116)))
    assert num_found(manager, range(12)) == 0 and sorted(manager.evicted) == sorted(set(manager.evicted))
    assert num_found(manager, range(100, 117)) == 4


def test_two_requests_that_compute_the_same_keep_both_copies_and_one_name(manager):
    a, b = make_request("a", range(9)), make_request("b", range(9))
    for request in (a, b):
        assert manager.get_computed_blocks(request) == []
        manager.allocate_slots(request, 9)
    for request in (a, b):
        request.num_computed_tokens = 9
        manager.cache_blocks(request, 0)
    assert not set(a.block_table) & set(b.block_table)
    manager.free(a)
    manager.free(b)
    manager.check([])
    assert num_found(manager, range(9)) == 2


def test_reset_forgets_everything_but_takes_nothing_away(manager):
    request = compute(manager, range(9))
    manager.reset_prefix_cache()
    assert num_found(manager, range(9)) == 0
    manager.check([request])
    manager.free(request)
    assert manager.num_free_blocks == 16


def test_hits_are_counted_in_tokens(manager):
    compute(manager, range(10))
    compute(manager, range(10))
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (20, 8)


def test_hashes_depend_on_everything_before(manager):
    root = hash_root("")
    a, b = hash_block(root, [1, 2]), hash_block(root, [2, 1])
    assert len({root, a, b, hash_block(a, [1, 2]), hash_block(b, [1, 2]), hash_root("x")}) == 6
    assert hash_block(root, [1, 2]) == a and len(a) == 16
    assert hash_block(root, [256, 70000]) != hash_block(root, [256 + 1, 70000])


class Contents(RuleBasedStateMachine):
    """Any order of admitting, computing, answering and freeing, against a dict from beginning to block.

    `held` says what each block really holds. `named` is the model of the cache: the block that was the first
    to hold a beginning, until it is overwritten. A hit must be exactly the longest run of the model.
    """

    @initialize(num_blocks=st.integers(2, 10), size=st.integers(1, 3))
    def start(self, num_blocks, size):
        self.manager = PrefixCachingBlockManager(num_blocks, size)
        self.requests, self.held, self.named = [], {}, {}

    def beginning(self, request, num_blocks):
        return request.cache_salt, tuple(request.all_token_ids[: num_blocks * self.manager.block_size])

    def expected_hit(self, request):
        found = []
        for i in range(1, (request.num_tokens - 1) // self.manager.block_size + 1):
            if self.beginning(request, i) not in self.named:
                break
            found.append(self.named[self.beginning(request, i)])
        return found

    def overwrite(self, blocks):
        for block in blocks:
            self.held.pop(block, None)
            self.named = {key: value for key, value in self.named.items() if value != block}

    def compute(self, request, num_tokens):
        start, size = request.num_computed_tokens, self.manager.block_size
        request.num_computed_tokens = num_tokens
        for i in range(start // size, num_tokens // size):
            block, key = request.block_table[i], self.beginning(request, i + 1)
            assert self.held.setdefault(block, key) == key
            if block not in self.named.values():
                self.named.setdefault(key, block)
        self.manager.cache_blocks(request, start)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from(["", "s"]),
          part=st.integers(1, 9))  # fmt: skip
    def admit(self, prompt, salt, part):
        request = make_request("r", prompt, salt=salt)
        found = self.manager.get_computed_blocks(request)
        assert found == self.expected_hit(request)
        for i, block in enumerate(found):
            assert self.held[block] == self.beginning(request, i + 1), "a hit on another content"
        start = len(found) * self.manager.block_size
        num_tokens = min(start + part, request.num_tokens)
        free, needed = self.manager.num_free_blocks, self.manager.num_new_blocks(request, num_tokens, found)
        if not self.manager.allocate_slots(request, num_tokens, found):
            assert needed > free and self.manager.num_free_blocks == free and not request.block_table
            return
        assert self.manager.num_free_blocks == free - needed
        self.overwrite(request.block_table[len(found) :])
        request.num_computed_tokens = start
        self.requests.append(request)
        self.compute(request, num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), part=st.integers(1, 4), token=st.integers(0, 1))
    def advance(self, data, part, token):
        request = data.draw(st.sampled_from(self.requests))
        if request.num_computed_tokens == request.num_tokens:
            request.append(token)
        num_tokens = min(request.num_computed_tokens + part, request.num_tokens)
        before = len(request.block_table)
        if self.manager.allocate_slots(request, num_tokens):
            self.overwrite(request.block_table[before:])
            self.compute(request, num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.manager.free(request)

    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()
        self.named = {}

    @invariant()
    def blocks_and_users_agree(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check(self.requests)
        used = {block for request in self.requests for block in request.block_table}
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(used)
        for request in self.requests:
            for i in range(request.num_computed_tokens // self.manager.block_size):
                assert self.held[request.block_table[i]] == self.beginning(request, i + 1)


TestContents = Contents.TestCase
