"""The scheduler on simulated execution: by example, then against any order of arrivals, aborts and stops."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shared.allocator import RowAllocator
from shared.block_manager import BlockManager
from shared.errors import InvalidRequestError
from shared.prefix_cache import PrefixCachingBlockManager
from shared.request import RequestStatus
from shared.scheduler import Scheduler
from tests.runtime.plain import Simulation, answer_alone, make_request, next_token


def simulation(num_blocks=64, size=4, manager=BlockManager, **options) -> Simulation:
    return Simulation(Scheduler(manager(num_blocks, size), **options))


def add(sim, *requests):
    for request in requests:
        sim.scheduler.add(request)


def plan(output) -> dict[str, int]:
    return {item.request.request_id: item.num_tokens for item in output.scheduled}


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def busy(name, length=4, max_tokens=12, **options):
    """A request that no end token stops."""
    return make_request(name, range(1, length + 1), max_tokens, ignore_eos=True, **options)


# One step


def test_prompts_then_one_token_each():
    sim = simulation()
    add(sim, busy("a", 5), busy("b", 9))
    assert plan(sim.step()) == {"a": 5, "b": 9}
    assert plan(sim.step()) == {"a": 1, "b": 1}


def test_running_requests_come_first_and_a_prompt_takes_what_is_left():
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=8)
    add(sim, busy("a", 3))
    sim.step()
    add(sim, busy("b", 20), busy("c", 2))
    assert [plan(sim.step()) for _ in range(3)] == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6, "c": 1}]
    assert plan(sim.step()) == {"a": 1, "b": 1, "c": 1}


def test_a_token_is_kept_for_each_running_request():
    sim = simulation(max_num_seqs=3, max_num_batched_tokens=6)
    add(sim, busy("a", 1), busy("b", 1))
    sim.step()
    add(sim, busy("long", 30, priority=-1))
    sim.scheduler.policy = lambda request: request.priority  # the long prompt now ranks first
    assert plan(sim.step()) == {"a": 1, "b": 1, "long": 4}
    assert plan(sim.step()) == {"long": 4, "a": 1, "b": 1}


def test_only_the_last_chunk_samples():
    sim = simulation(max_num_seqs=1, max_num_batched_tokens=4)
    request = busy("a", 10)
    add(sim, request)
    samples = [[item.samples for item in sim.step().scheduled] for _ in range(4)]
    assert samples == [[False], [False], [True], [True]]
    assert len(request.output_token_ids) == 2


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it():
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=8, enable_chunked_prefill=False)
    add(sim, busy("a", 5, 3), busy("b", 7, 1), busy("c", 7, 1))
    first = sim.step()
    assert plan(first) == {"a": 5} and "budget of 8" in first.obstacle
    assert [plan(sim.step()) for _ in range(2)] == [{"a": 1, "b": 7}, {"a": 1, "c": 7}]
    with pytest.raises(InvalidRequestError, match="max_num_batched_tokens=8"):
        add(sim, busy("d", 8, 1))  # after a preemption its nine tokens would never fit in a step


def test_no_more_than_max_num_seqs():
    sim = simulation(max_num_seqs=2)
    add(sim, *(busy(name) for name in "abcd"))
    output = sim.step()
    assert names(output.admitted) == ["a", "b"] and "max_num_seqs=2" in output.obstacle
    sim.drain(100)
    assert names(sim.finished) == ["a", "b", "c", "d"]


def test_nobody_overtakes_the_first_in_the_queue():
    """A short request would fit beside the running one, but the long one before it would wait for ever."""
    sim = simulation(num_blocks=8, size=4)
    add(sim, busy("a", 16, 8), busy("long", 24, 4), busy("short", 1, 2))
    output = sim.step()
    assert names(output.admitted) == ["a"] and "needs 6 blocks of 4 free" in output.obstacle
    sim.drain(60)
    assert names(sim.finished).index("a") == 0


# Preemption


def preempting(**options):
    """Two requests that each fit alone but not together: 8 blocks of 4 slots, 2 x 24 tokens."""
    sim = simulation(num_blocks=8, size=4, **options)
    add(sim, busy("a", 8, 16), busy("b", 8, 16))
    while not (output := sim.step()).preempted:
        pass
    return sim, output


def test_the_last_in_the_order_gives_way_and_keeps_its_tokens():
    sim, output = preempting()
    (victim,) = output.preempted
    assert victim.request_id == "b" and victim.status is RequestStatus.PREEMPTED
    assert victim.num_computed_tokens == 0 and not victim.block_table and victim.num_preemptions == 1
    assert len(victim.output_token_ids) > 4
    assert output.obstacle == "no admission in a step that preempts" and plan(output) == {"a": 1}


def test_the_preempted_one_resumes_before_newer_ones_and_catches_up_at_once():
    sim, output = preempting()
    (victim,) = output.preempted
    add(sim, busy("new", 2, 2))
    while victim.status is RequestStatus.PREEMPTED:
        output = sim.step()
    assert names(output.admitted)[0] == "b" and plan(output)["b"] == victim.num_tokens - 1
    sim.drain(100)
    assert names(sim.finished)[0] == "a"


def test_what_was_preempted_gives_the_same_answer():
    sim, _ = preempting()
    sim.drain(100)
    alone = simulation()
    add(alone, busy("b", 8, 16))
    (expected,) = alone.drain(100)
    assert [request.output_token_ids for request in sim.finished] == [expected.output_token_ids] * 2


def test_the_lowest_priority_gives_way():
    sim = simulation(num_blocks=8, size=4, policy="priority")
    add(sim, busy("low", 8, 16, priority=5), busy("high", 8, 16, priority=1))
    while not (output := sim.step()).preempted:
        pass
    assert names(output.preempted) == ["low"]


def test_two_that_do_not_fit_together_do_not_throw_each_other_out_for_ever():
    for chunk in (2, 3, 8, 64):
        sim = simulation(num_blocks=10, size=2, max_num_seqs=2, max_num_batched_tokens=chunk)
        add(sim, busy("a", 4, 16), busy("b", 4, 16))
        sim.drain(150)
        assert sum(request.num_preemptions for request in sim.finished) <= 6


def test_who_gave_way_comes_back_when_the_others_have_room_to_grow():
    """Its tokens would fit earlier, and be thrown out again a few steps later."""
    sim = simulation(num_blocks=20, size=1)
    add(sim, *(busy(name, 4, 16) for name in "abc"))
    sim.drain(60)
    assert [request.num_preemptions for request in sim.finished] == [0, 1, 1]


def test_rows_are_never_preempted():
    sim = simulation(num_blocks=2, size=40, manager=RowAllocator)
    add(sim, *(busy(name, 8, 30) for name in "abcd"))
    sim.drain(200)
    assert all(request.num_preemptions == 0 for request in sim.finished) and len(sim.finished) == 4


def test_a_hit_shortens_the_work_of_admission_and_of_resumption():
    sim = simulation(num_blocks=16, size=4, manager=PrefixCachingBlockManager)
    add(sim, busy("a", 10, 2))
    sim.drain(5)
    add(sim, busy("b", 10, 2))
    output = sim.step()
    assert plan(output) == {"b": 2} and output.admitted[0].num_cached_tokens == 8
    sim.drain(5)
    again, output = preempting(manager=PrefixCachingBlockManager)
    (victim,) = output.preempted
    while victim.status is RequestStatus.PREEMPTED:
        output = again.step()
    (item,) = [item for item in output.scheduled if item.request is victim]
    assert item.start % 4 == 0 and item.num_tokens == item.total - item.start
    assert victim.num_cached_tokens == 0  # what its first admission found


def test_equal_prompts_in_one_step_do_not_share_what_is_not_computed():
    """The simulation fails if a token attends over a slot that was not written."""
    sim = simulation(size=4, manager=PrefixCachingBlockManager, max_num_batched_tokens=8, max_num_seqs=4)
    add(sim, *(busy(name, 13, 4) for name in "abc"))
    sim.drain(40)
    assert [request.num_cached_tokens for request in sim.finished] == [0, 8, 12]  # "b" came in mid-prefill


# Order, ends, and refusals


def test_policies_order_the_queue_with_ties_by_arrival():
    arrivals = [("a", 9, 2), ("b", 3, 0), ("c", 9, 0), ("d", 1, 2)]
    orders = {"fcfs": "abcd", "shortest_first": "dbac", "priority": "bcad"}
    for policy, order in orders.items():
        sim = simulation(max_num_seqs=1, policy=policy)
        add(sim, *(busy(name, length, 2, priority=number) for name, length, number in arrivals))
        sim.drain(20)
        assert "".join(names(sim.finished)) == order
    sim = simulation(max_num_seqs=1, policy=lambda request: -request.num_prompt_tokens)
    add(sim, *(busy(name, length, 2) for name, length, _ in arrivals))
    sim.drain(20)
    assert "".join(names(sim.finished)) == "acbd"


def test_a_request_can_end_in_every_state():
    sim, output = preempting()
    (preempted,), (running,) = output.preempted, sim.scheduler.running
    waiting = busy("w")
    add(sim, waiting)
    for request in (preempted, running, waiting):
        sim.scheduler.finish(request, "abort")
        sim.scheduler.check()
        assert request.finished and request.finish_reason == "abort" and not request.block_table
    assert sim.scheduler.allocator.num_free_blocks == 8
    assert not sim.step().scheduled


def test_what_can_never_fit_is_refused_at_once():
    sim = simulation(num_blocks=4, size=4)
    with pytest.raises(InvalidRequestError, match="4 blocks of 4 slots") as error:
        add(sim, busy("a", 5, 12))
    assert error.value.field == "request"
    add(sim, busy("b", 4, 12))
    assert len(sim.drain(20)[0].output_token_ids) == 12


def test_bad_options_name_themselves():
    with pytest.raises(InvalidRequestError, match="max_num_seqs=9") as error:
        simulation(max_num_seqs=9, max_num_batched_tokens=8)
    assert (error.value.field, error.value.value) == ("max_num_batched_tokens", 8)
    for policy in ("lifo", 5, None, ["fcfs"]):
        with pytest.raises(InvalidRequestError, match="fcfs.*priority.*shortest_first") as error:
            simulation(policy=policy)
        assert (error.value.field, error.value.value) == ("policy", policy)


def test_the_seed_of_fairness_a_stream_of_prompts_does_not_stop_a_running_request():
    sim = simulation(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64)
    victim = busy("victim", 4, 50)
    add(sim, victim)
    for i in range(50):
        add(sim, busy(f"p{i}", 40, 1))
        sim.step()
        assert len(victim.output_token_ids) == i + 1


# Any order of events


class AnyOrder(RuleBasedStateMachine):
    """Random arrivals, aborts and steps on random parts; every rule of the scheduler is checked at each step."""

    @initialize(
        manager=st.sampled_from([BlockManager, PrefixCachingBlockManager, RowAllocator]),
        num_blocks=st.integers(3, 14), size=st.integers(1, 4), max_num_seqs=st.integers(1, 4),
        spare=st.sampled_from([0, 1, 5, 40]), chunked=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "shortest_first"]),
    )  # fmt: skip
    def start(self, manager, num_blocks, size, max_num_seqs, spare, chunked, policy):
        self.longest = num_blocks * size
        if manager is RowAllocator:
            num_blocks, size = max_num_seqs, self.longest
        budget = max(max_num_seqs + spare, 0 if chunked else self.longest)
        self.scheduler = Scheduler(manager(num_blocks, size), max_num_seqs, budget, chunked, policy)
        self.sim, self.all, self.aborted, self.admissions = Simulation(self.scheduler), [], set(), []

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=16), max_tokens=st.integers(1, 16),
          priority=st.integers(0, 2), salt=st.sampled_from(["", "s"]))  # fmt: skip
    def arrive(self, prompt, max_tokens, priority, salt):
        request = make_request(str(len(self.all)), prompt, max_tokens, priority, salt)
        if len(prompt) + max_tokens > self.longest:
            if not isinstance(self.scheduler.allocator, RowAllocator):
                with pytest.raises(InvalidRequestError):
                    self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.all.append(request)

    @precondition(lambda self: self.scheduler.waiting or self.scheduler.running)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from([*self.scheduler.waiting, *self.scheduler.running]))
        self.scheduler.finish(request, "abort")
        self.aborted.add(request)
        self.scheduler.check()

    @rule()
    def step(self):
        scheduler = self.scheduler
        before, waited = list(scheduler.running), bool(scheduler.waiting)
        output = self.sim.step()
        ran = [item.request for item in output.scheduled]
        assert all(item.num_tokens >= 1 for item in output.scheduled) and len(set(ran)) == len(ran)
        assert output.num_batched_tokens <= scheduler.max_num_batched_tokens
        assert len(ran) <= scheduler.max_num_seqs
        assert set(ran) == set(before) - set(output.preempted) | set(output.admitted), "somebody did not advance"
        assert ran or not (before or waited), "nothing ran although somebody could"
        if not scheduler.enable_chunked_prefill:
            assert all(item.samples for item in output.scheduled)
        self.check_order(before, output)

    def check_order(self, before, output):
        rank, scheduler = self.scheduler._rank, self.scheduler
        stayed = [rank(request) for request in before if request not in output.preempted]
        assert all(rank(victim) > other for victim in output.preempted for other in stayed), "wrong victim"
        assert not (output.preempted and output.admitted)
        assert bool(output.obstacle) == bool(scheduler.waiting)
        for request in output.admitted:
            assert all(rank(request) < rank(other) for other in scheduler.waiting), "somebody was overtaken"
        first = [request for request in output.admitted if not request.num_preemptions]
        self.admissions += [request.arrival_order for request in first]
        if scheduler.policy is not None and scheduler.policy.__name__ == "fcfs":
            assert self.admissions == sorted(self.admissions)

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        tokens = sum(request.max_num_tokens for request in self.all)
        self.sim.drain(20 + 10 * tokens)  # everybody finishes
        assert self.scheduler.allocator.num_free_blocks == self.scheduler.allocator.num_blocks
        for request in self.all:
            assert request.finished and (request in self.aborted) == (request.finish_reason == "abort")
            if request not in self.aborted:
                expected = answer_alone(request.prompt_token_ids, request.max_tokens)
                assert request.output_token_ids == expected


TestAnyOrder = AnyOrder.TestCase


def test_the_stand_in_for_a_model_ends_some_answers_early():
    lengths = [len(answer_alone([1, 2] * n, 16)) for n in range(1, 20)]
    assert min(lengths) < 16 and max(lengths) == 16
    assert len({next_token(make_request("r", [n])) for n in range(20)}) > 5


@pytest.mark.parametrize("blocks, size, seqs, budget", [(9, 4, 3, 3), (9, 4, 4, 16), (12, 3, 8, 8), (36, 1, 5, 7)])
def test_many_requests_on_a_small_cache_end_in_a_bounded_number_of_steps(blocks, size, seqs, budget):
    for manager in (BlockManager, PrefixCachingBlockManager):
        sim = simulation(blocks, size, manager, max_num_seqs=seqs, max_num_batched_tokens=budget)
        requests = [busy(str(i), 1 + i * 7 % 20, 1 + i * 5 % 16) for i in range(40)]
        add(sim, *requests)
        sim.drain(5 * sum(math.ceil(r.num_prompt_tokens / budget) + r.max_tokens for r in requests))
        assert sum(r.num_preemptions for r in requests) > 0
        for request in requests:
            assert len(request.output_token_ids) == request.max_tokens


# Pure Python


def test_the_control_plane_needs_neither_torch_nor_numpy():
    code = """
        import sys, time
        started = time.perf_counter()
        from shared import allocator, block_manager, errors, output, prefix_cache, request, sampling_params
        from shared import scheduler, trace
        from tests.runtime.plain import Simulation, make_request
        for manager in (block_manager.BlockManager, prefix_cache.PrefixCachingBlockManager):
            sim = Simulation(scheduler.Scheduler(manager(12, 4), 4, 16))
            record = trace.Trace()
            for i in range(12):
                sim.scheduler.add(make_request(str(i), [1, 2, 3] * (i % 4 + 1), 12, ignore_eos=True))
            while sim.scheduler.running or sim.scheduler.waiting:
                record.record(sim.scheduler, sim.step(), {}, [], 0.0)
            assert len(sim.finished) == 12 and sum(len(step.preempted) for step in record.steps)
        heavy = {"torch", "numpy", "transformers", "tokenizers", "xxhash"} & set(sys.modules)
        assert not heavy, heavy
        assert time.perf_counter() - started < 1.0
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
