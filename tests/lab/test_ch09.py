"""Chapter 09's simulator, driven without a kernel, and what its counts, checks and measurements promise."""

from __future__ import annotations

import random
import re

import pytest
import torch

from shared.allocator import RowAllocator
from shared.batch import slots_of
from shared.block_manager import BlockManager
from shared.kv_cache import KVCache
from shared.lab.chapters import ch09, ch09_measure, ch09_pages
from shared.lab.chapters.ch07_steps import make_request, run_steps
from shared.lab.chapters.ch09_pages import ContiguousAllocator, Slots, count_slots
from shared.lab.evidence import evidence
from shared.scheduler import Scheduler
from tests.known_bugs.helpers import tiny
from tests.lab.stepping import assert_explains, assert_goes_back_and_resets, frames


def stepper(**inputs):
    made = ch09_pages.memory_stepper(Scheduler, ContiguousAllocator, BlockManager)
    for name, value in inputs.items():
        made.fields[name].value = value
    return made


# Neighbouring slots


def request(name: str, slots: int):
    return make_request(name, slots - 1, 1)


def test_a_hole_is_used_again_and_neighbours_that_get_free_become_one():
    regions = ContiguousAllocator(24)
    a, b, c, d, e = (request(name, 8) for name in "abcde")
    assert all(regions.allocate_slots(each, 1) for each in (a, b, c))
    regions.free(b)
    assert regions.allocate_slots(d, 1) and d.block_table == list(range(8, 16))
    regions.free(a)
    regions.free(d)
    assert [len(hole) for hole in regions.holes()] == [16] and regions.num_free_blocks == 16
    assert regions.allocate_slots(e, 1) and e.block_table == list(range(8))
    regions.check([c, e])


def test_the_first_hole_that_is_long_enough_is_taken():
    regions = ContiguousAllocator(30)
    held = [request(str(i), n) for i, n in enumerate((3, 5, 8, 5, 9))]
    assert all(regions.allocate_slots(each, 1) for each in held)
    regions.free(held[0])
    regions.free(held[2])
    small, large = request("small", 3), request("large", 4)
    assert regions.allocate_slots(large, 1) and large.block_table[0] == 8
    assert regions.allocate_slots(small, 1) and small.block_table[0] == 0


def test_a_request_is_refused_although_enough_is_free_and_nothing_changes():
    regions = ContiguousAllocator(24)
    a, b, c, e = request("a", 8), request("b", 8), request("c", 8), request("e", 9)
    assert all(regions.allocate_slots(each, 1) for each in (a, b, c))
    regions.free(a)
    regions.free(c)
    assert not regions.allocate_slots(e, 1) and e.block_table == []
    assert len(regions.free_rows) == 16 and regions.num_free_blocks == 8
    regions.check([b, e])


def run(allocator, seed: int = 0, seqs: int = 16):
    draw = random.Random(seed)
    coming = [(draw.randint(0, 9), make_request(str(i), draw.randint(1, 20), draw.randint(1, 20))) for i in range(20)]
    scheduler = Scheduler(allocator, seqs)
    for trace in run_steps(scheduler, sorted(coming, key=lambda pair: pair[0])):
        yield scheduler, trace


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", [lambda: RowAllocator(3, 40), lambda: ContiguousAllocator(120),
                                  lambda: BlockManager(30, 4), lambda: BlockManager(120, 1)])
def test_the_four_counts_add_up_and_only_neighbours_can_be_scattered(make, seed):
    scattered = 0
    for scheduler, _ in run(make(), seed):
        slots = count_slots(scheduler)
        assert slots.held + slots.empty + slots.scattered + slots.free == 120 and min(vars(slots).values()) >= 0
        scattered += slots.scattered
        if slots.scattered:
            allocator = scheduler.allocator
            first = scheduler.waiting[0].max_num_tokens
            assert max(map(len, allocator.holes())) < first <= len(allocator.free_rows)
    assert not scattered or isinstance(scheduler.allocator, ContiguousAllocator)


def wasted(allocator) -> tuple[int, int, int]:
    """Steps, given and empty slot-steps, scattered slot-steps on the notebook's trace, while somebody waits."""
    draw = random.Random(0)
    coming = [(0, make_request(str(i), draw.randint(8, 64), 1 + min(149, int(draw.expovariate(1 / 40)))))
              for i in range(64)]
    scheduler, total, steps = Scheduler(allocator, 64), Slots(), 0
    for _ in run_steps(scheduler, coming):
        steps += 1
        total += count_slots(scheduler) if scheduler.waiting else Slots()
    return steps, total.empty, total.scattered


@pytest.mark.parametrize("make, want", [
    (lambda: RowAllocator(8, 256), (485, 497_538, 0)), (lambda: ContiguousAllocator(2048), (309, 122_283, 34_540)),
    (lambda: BlockManager(2048, 1), (207, 0, 0)), (lambda: BlockManager(128, 16), (243, 19_047, 0)),
    (lambda: BlockManager(64, 32), (275, 40_139, 0)), (lambda: BlockManager(32, 64), (290, 82_664, 0)),
    (lambda: BlockManager(8, 256), (485, 497_538, 0)),
])  # fmt: skip
def test_wasted_slots_of_each_policy_on_one_trace(make, want):
    assert wasted(make()) == want


def test_blocks_as_long_as_a_row_are_rows():
    steps = [[record.scheduled for record in trace.steps][-1] for _, trace in run(BlockManager(3, 40))]
    assert steps == [[record.scheduled for record in trace.steps][-1] for _, trace in run(RowAllocator(3, 40))]


# The simulator


def test_the_first_trace_reaches_every_hard_case():
    told = frames(stepper())
    assert "C waits: needs 15 blocks of 13 free" in told[1] and "C comes in." in told[1]
    assert "C comes in where B was." in told[3]  # a hole that fits is used again
    assert "D is refused: it asks for 13 neighbouring slots, 17 are free, and the longest hole has 9." in told[3]
    assert "C grows by block 7." in told[3] and "E grows by block 0." in told[6]
    assert "E loses its blocks; 9 tokens will be run again." in told[7]
    assert "E comes back where C was and runs its tokens again." in told[9]
    assert "All requests ended in engine step" in told[-1] and "are free." in told[-1]


def test_what_is_drawn_is_what_the_tables_say():
    made = stepper()
    first = frames(made)[1]
    assert "0 A A A A A (A) (A) (A) B B B B B B B B 16 B (B) (B) · · ·" in first
    assert "B 2 3 4 9 4 · 4 + 0 = 16" in first
    assert "14 slots hold a token, 5 are given out and empty, 13 are free." in first


def test_both_sides_run_the_same_work():
    made = stepper()
    made.end.click()
    totals = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in made.frames[-1].split("<tr>")[-2:]]
    assert int(totals[0][6]) == 0 and int(totals[1][6]) == 9  # tokens to run again
    assert int(totals[1][1]) < int(totals[0][1]) and totals[1][4] == "0" and int(totals[0][4]) > 0


def test_the_seed_draws_other_requests():
    made = stepper(source=ch09_pages.DRAWN)
    first = frames(made)
    made.seed.value = 5
    assert frames(made) != first
    made.seed.value = 0
    assert frames(made) == first


@pytest.mark.parametrize("seed", range(30))
def test_every_drawn_trace_runs_to_its_end(seed):
    made = stepper(source=ch09_pages.DRAWN)
    made.seed.value = seed
    assert frames(made)[-1].count("All requests ended") == 2 and made.fields.error.value == ""


@pytest.mark.parametrize("size", ["1", "2", "8", "16"])
def test_other_block_sizes_run_to_the_end(size):
    assert frames(stepper(block_size=size))[-1].count("All requests ended") == 2


@pytest.mark.parametrize("name, value, words", [
    ("arrivals", "A 0 4", "line 1: write a name"), ("arrivals", "A 0 4 2\nA 1 4 2", "two requests are called"),
    ("slots", "30", "not a whole number of blocks"), ("slots", "8", "B would be refused: request: must be within"),
    ("block_size", "0", "is not between 1 and 32"), ("max_num_seqs", "x", "is not a whole number"),
])  # fmt: skip
def test_bad_input_is_explained(name, value, words):
    made = stepper(**{name: value})
    good = {"slots": "32", "block_size": "4", "max_num_seqs": "6"}.get(name, "A 0 4 2")
    assert_explains(made, name, words, good)


def test_steps_go_back():
    assert_goes_back_and_resets(stepper(), steps=2)


def test_a_gap_without_requests_is_stepped_through():
    assert "Engine step 3." in frames(stepper(arrivals="A 0 2 1\nB 5 2 1"))[4]


# Exercises


def test_a_block_goes_exactly_when_nobody_looks_at_it():
    for window, size in ((8, 4), (5, 16), (3, 1)):
        for tokens in range(1, 60):
            looked_at = {position // size for position in range(max(0, tokens - window), tokens)}
            assert max(0, tokens - window) // size == min(looked_at)


def test_right_answers_are_scored():
    best = ch09.judge_victims(ch09.cheapest)
    assert best.value == best.best

    def fewest_tokens(tokens, needed, block_size):
        """Right but dearer: whoever frees the most blocks for a token first."""
        chosen = []
        for i in sorted(range(1, len(tokens)), key=lambda i: tokens[i] / -(-tokens[i] // block_size)):
            if sum(ch09.blocks_of(tokens[j], block_size) for j in chosen) < needed:
                chosen.append(i)
        return chosen

    dearer = ch09.judge_victims(fewest_tokens)
    assert dearer.what == "tokens run again" and dearer.value > dearer.best == best.value
    lazy = ch09.judge_window(lambda n, w, b: max(0, max(0, n - w) // b - 1))
    assert lazy.what == "blocks held" and lazy.value > lazy.best


def test_the_engines_rule_is_the_one_to_beat():
    for tokens, needed, size in ch09.full_pools():
        manager = BlockManager(sum(ch09.blocks_of(n, size) for n in tokens), size)
        requests = [make_request(str(i), n, 1) for i, n in enumerate(tokens)]
        for each in requests:
            manager.allocate_slots(each, each.num_tokens)
        victims = ch09.last_first(tokens, needed, size)
        for i in victims:
            manager.free(requests[i])
        assert manager.num_free_blocks >= needed and victims == list(range(len(tokens) - 1, 0, -1))[: len(victims)]


# Measurements


def test_both_reads_copy_the_same_keys_and_values():
    cache = KVCache(tiny().config, 64, torch.float32)
    cache.keys.normal_(generator=torch.Generator().manual_seed(0))
    for size, order in ch09_measure.tables(64, (1, 4, 16)):
        k, _ = cache.read(0, torch.tensor(slots_of(order, range(64), size)))
        assert torch.equal(ch09_measure._read_blocks(cache, order, size)[0].view_as(k), k)
    results = ch09_measure.gather_times(cache, (1, 16), n=2)
    assert len(results) == 5 and all(0 < result.low <= result.median <= result.high for result in results)


def test_the_prediction_counts_prompts_and_answers_apart():
    record = next(trace for _, trace in run(BlockManager(30, 4))).steps[0]
    cost = ch09_measure.StepCost(1.0, 0.1, 0.01)
    decoding = sum(tokens == 1 for tokens in record.scheduled.values())
    assert cost.of(record) == pytest.approx(1 + 0.1 * decoding + 0.01 * (record.num_batched_tokens - decoding))


def test_slots_add_up():
    assert Slots(1, 2, 3, 4) + Slots(1, 1, 1, 1) == Slots(2, 3, 4, 5)


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("09_paged_kv_cache")
    assert record["command"] == "python -m shared.lab.chapters.ch09_measure" and len(record["results"]) == 11
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
    assert record["counts"]["blocks"]["steps"] < record["counts"]["rows"]["steps"]
