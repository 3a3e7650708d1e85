"""Known faults of inference engines: taking the cache away from a request and giving it back."""

from __future__ import annotations

import pytest

from shared.scheduler import fcfs
from tests.known_bugs.helpers import cached_engine, forced, greedy, oracle, random_prompt, tiny
from tests.runtime.tiny import drain, make_engine, run

LONG = greedy(24, ignore_eos=True)


def preemptions(steps) -> list[str]:
    return [name for step in steps for name in step.preempted]


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("make", [make_engine, cached_engine])
def test_b37_a_resumed_request_is_computed_from_its_beginning(make, budget):
    """The engine's half: having generated tokens is not the same as being in decode. Ranks come later."""
    engine = make(tiny(), num_blocks=12, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = [random_prompt(6, i) for i in range(4)]
    assert run(engine, prompts, LONG) == [oracle(tiny(), prompt, LONG) for prompt in prompts]
    assert preemptions(engine.trace.steps)
    known = {str(i): 6 for i in range(4)}  # tokens that each request has
    fed = dict.fromkeys(known, 0)  # tokens of it that are in the cache
    for step in engine.trace.steps:
        for name in step.preempted:
            fed[name] = 0
        for name, count in step.scheduled.items():
            fed[name] += step.cache_hits.get(name, 0) + count
            assert (fed[name] == known[name]) == (name in step.new_tokens)
            known[name] += name in step.new_tokens


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize("prompt_length", [7, 8, 9])
def test_b38_a_resumed_request_computes_what_the_cache_has_lost(block_size, prompt_length):
    engine = cached_engine(tiny(), num_blocks=48 // block_size, block_size=block_size)
    prompts = [random_prompt(prompt_length, i) for i in range(2)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, LONG)
    lengths, done, hits = {}, {}, []
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
        step = engine.trace.steps[-1]
        for name in step.admitted:
            if name in lengths:  # it comes back
                assert step.scheduled[name] == lengths[name] - step.cache_hits.get(name, 0)
                hits.append(step.cache_hits.get(name, 0))
        for request in engine.scheduler.waiting:
            lengths[request.request_id] = request.num_tokens
    assert lengths and any(hits)
    for i, prompt in enumerate(prompts):
        assert done[str(i)].outputs[0].token_ids == oracle(tiny(), prompt, LONG)


@pytest.mark.parametrize("make", [make_engine, cached_engine])
def test_b39_the_latest_gives_way_and_returns_before_newer_ones(make):
    engine = make(runner=forced(50), num_blocks=13)
    for i in (1, 2, 3):
        engine.add_request(f"R{i}", random_prompt(8, i), LONG)
        engine.step()
    while not engine.trace.steps[-1].preempted:
        engine.step()
    engine.add_request("R4", random_prompt(8, 4), LONG)
    done = drain(engine)
    steps = engine.trace.steps
    assert preemptions(steps)[0] == "R3"
    admitted = [name for step in steps for name in step.admitted]
    assert admitted[:3] == ["R1", "R2", "R3"] and "R3" in admitted[3 : admitted.index("R4")]
    assert list(done) == ["R1", "R2", "R3", "R4"]


@pytest.mark.parametrize("make", [make_engine, cached_engine])
@pytest.mark.parametrize("blocks", range(8, 22, 3))
def test_b39_requests_of_equal_length_end_in_the_order_of_arrival(make, blocks):
    engine = make(runner=forced(50), num_blocks=blocks, max_num_seqs=5)
    for i in range(5):
        engine.add_request(str(i), random_prompt(8, i), LONG)
        engine.step()
    assert list(drain(engine)) == [str(i) for i in range(5)]
    started = [name for step in engine.trace.steps for name in step.admitted]
    assert list(dict.fromkeys(started)) == [str(i) for i in range(5)]


def test_b39_under_a_policy_the_last_in_its_order_gives_way():
    """Which is preempted is vLLM's choice: the last of the queue's order, here the lowest priority."""
    engine = make_engine(runner=forced(50), num_blocks=13, policy="priority")
    for name, priority in (("low", 9), ("high", 1), ("middle", 5)):
        engine.add_request(name, random_prompt(8), LONG, priority=priority)
    assert list(drain(engine))[0] == "high"
    assert preemptions(engine.trace.steps)[0] == "low"


def test_b39_the_default_order_is_the_order_of_arrival():
    assert make_engine(runner=forced(50)).scheduler.policy is fcfs
