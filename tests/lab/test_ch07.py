"""Chapter 07's simulator, driven without a kernel, and what its checks and measurements promise."""

from __future__ import annotations

import random

import pytest

from shared.allocator import RowAllocator
from shared.lab.chapters import ch07, ch07_measure, ch07_steps
from shared.lab.chapters.ch07_steps import (
    SlotAllocator,
    first_steps,
    gantt,
    idle_steps,
    last,
    make_request,
    row_grid,
    run_steps,
)
from shared.lab.evidence import evidence
from shared.scheduler import Scheduler
from tests.lab.stepping import assert_explains, assert_goes_back_and_resets, frames, plain

LENGTHS = {"A": 12, "B": 3, "C": 5, "D": 2, "E": 4, "F": 10, "G": 3, "H": 6}


def stepper(**inputs):
    made = ch07_steps.schedule_stepper(Scheduler, RowAllocator, SlotAllocator, run_steps)
    for name, value in inputs.items():
        made.fields[name].value = value
    return made


# The exact counts


def test_rows_that_get_free_are_given_to_the_next():
    arrivals = [(0, make_request(name, 5, length)) for name, length in LENGTHS.items()]
    records = last(run_steps(Scheduler(RowAllocator(4, 64), 4), arrivals)).steps
    grid = row_grid(records, 4)
    assert ["".join(cell or "." for cell in row) for row in grid] == [
        "AAAAAAAAAAAA.", "BBBFFFFFFFFFF", "CCCCCGGG.....", "DDEEEEHHHHHH."]
    assert idle_steps(records, 4) == sum(not cell for row in grid for cell in row) == 7
    assert "13 steps, 7 of 52 row-steps idle" in plain(gantt(grid, "The scheduler"))


def test_the_rows_of_the_chart_survive_a_preemption():
    arrivals = [(0, make_request("A", 8, 10)), (0, make_request("B", 6, 8)), (5, make_request("C", 2, 3))]
    records = last(run_steps(Scheduler(SlotAllocator(24), 2, 24), arrivals)).steps
    grid = row_grid(records, 2)
    assert [row.count("A") for row in grid] == [10, 0] and sum(row.count("B") for row in grid) == 8
    assert [record.preempted for record in records if record.preempted] == [["B"]]


@pytest.mark.parametrize("budget", [8, 16, 256])
def test_no_step_is_longer_than_the_budget_and_who_runs_advances(budget):
    arrivals = [(0, make_request("A", 3, 12)), (0, make_request("B", 4, 12)),
                (2, make_request("C", 40, 3)), (2, make_request("D", 3, 3))]
    records = last(run_steps(Scheduler(RowAllocator(4, 64), 4, budget), arrivals)).steps
    assert max(record.num_batched_tokens for record in records) == min(budget, 45)
    assert all({"A", "B"} <= record.new_tokens.keys() for record in records)


# The simulator


def test_each_decision_is_told_with_its_reason():
    told = frames(stepper())
    assert told[0].startswith("Nothing has been decided yet.")
    assert told[1].startswith("Engine step 0: 10 of 12 tokens, 2 of 3 rows busy. Idle row-steps so far: 1.")
    assert "C runs tokens 0 to 9 of 30" in told[2]
    assert "E waits: max_num_seqs=3 requests are running" in told[4]
    assert "C 1 30 4 0 1 0 6" in told[-1] and "E 3 2 2 0 7 4 8" in told[-1]


def test_a_small_cache_preempts_and_a_policy_reorders():
    assert any("preempted: the cache is full" in frame for frame in frames(stepper(slots="34")))
    short = frames(stepper(policy="shortest_first", max_num_seqs="1"))
    assert "E 3 2 2 0 10 7" in short[-1] and "C 1 30 4 0 20 19" in short[-1]
    urgent = frames(stepper(arrivals="A 0 4 3 5\nB 0 4 3 1", policy="priority", max_num_seqs="1"))
    assert "B runs tokens 0 to 3 of 4" in urgent[1]


def test_whole_prompts_wait_for_a_step_that_holds_them():
    told = frames(stepper(arrivals="A 0 4 3\nB 0 9 1", chunked=False))
    assert "B waits: the budget of 12 tokens is spent" in told[1] and "B runs tokens 0 to 8 of 9" in told[2]


def test_the_seed_draws_other_arrivals_and_nothing_else():
    made = stepper(source=ch07_steps.DRAWN)
    first = frames(made)
    made.seed.value = 1
    second = frames(made)
    assert first != second
    made.seed.value = 0
    assert frames(made) == first


def test_a_gap_without_requests_is_stepped_through():
    told = frames(stepper(arrivals="A 0 2 1\nB 4 2 1"))
    assert len(told) == 6 and "Nothing to decide here." in told[3]


@pytest.mark.parametrize("name, value, words", [
    ("arrivals", "A 0 4", "line 1: write a name"), ("arrivals", "A 0 4 2\nA 1 4 2", "two requests are called"),
    ("arrivals", "A 0 x 2", "is not a whole number"), ("max_num_seqs", "0", "max_num_seqs: 0 is not between"),
    ("budget", "2", "at least max_num_seqs=3"), ("slots", "20", "must be within the cache"),
    ("slots", "9", "A: request: must be within"),
])  # fmt: skip
def test_bad_input_is_explained(name, value, words):
    made = stepper(**{name: value})
    assert_explains(made, name, words, good={"budget": "12", "slots": "0", "max_num_seqs": "3"}.get(name, "A 0 4 2"))


def test_steps_go_back():
    assert_goes_back_and_resets(stepper())


# Exercises


def test_the_waits_of_the_exercise_are_those_of_the_scheduler():
    draw = random.Random(1)
    for _ in range(40):
        arrivals = sorted(draw.randint(0, 12) for _ in range(draw.randint(1, 9)))
        lengths, rows = [draw.randint(1, 9) for _ in arrivals], draw.randint(1, 4)
        requests = [(step, make_request(str(i), 1, length)) for i, (step, length) in enumerate(zip(arrivals, lengths))]
        first = first_steps(last(run_steps(Scheduler(RowAllocator(rows, 64), rows), requests)).steps)
        assert ch07.waits(arrivals, lengths, rows) == [first[r.request_id] - step for step, r in requests]


def test_the_policies_that_the_exercise_compares_differ():
    waited = {policy: [ch07.policy_waits(policy, case) for case in ch07.streams().values()]
              for policy in ("fcfs", "shortest_first", ch07.aged)}
    longest = [max(map(max, waits)) for waits in waited.values()]
    total = [sum(map(sum, waits)) for waits in waited.values()]
    assert longest[0] <= ch07.PATIENCE < longest[1] and longest[2] <= ch07.PATIENCE
    assert total[1] < total[2] < total[0]


def test_a_right_policy_is_scored_by_the_steps_waited():
    score = ch07.judge_policy(lambda request: request.num_prompt_tokens + 2 * request.arrival_order)
    assert score.what == "steps waited" and score.value > score.best == ch07.judge_policy(ch07.aged).value


# Measurements


def test_decisions_are_timed_with_count_and_spread():
    for result in ch07_measure.decision_times(n=3):
        assert result.n == 3 and 0 < result.low <= result.median <= result.high and result.unit == "µs"


def test_the_workload_has_many_short_and_a_few_long_answers():
    lengths = sorted(request.max_tokens for _, request in ch07_measure.workload())
    assert len(lengths) == 64 and lengths[32] < 50 < 150 < lengths[-1]


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("07_scheduling")
    assert record["command"] == "python -m shared.lab.chapters.ch07_measure" and len(record["results"]) == 3
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
