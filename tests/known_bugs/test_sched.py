"""Known faults of inference engines: admission, fairness, progress."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.allocator import RowAllocator
from shared.block_manager import BlockManager
from shared.errors import InvalidRequestError
from shared.llm import LLM, GenerationError
from shared.prefix_cache import PrefixCachingBlockManager
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import (
    ask,
    cached_engine,
    fixed,
    forced,
    free_blocks,
    greedy,
    oracle,
    random_prompt,
    saying,
    tiny,
)
from tests.runtime.tiny import drain, make_engine, run, save_hf, save_tokenizer

MANAGERS = [BlockManager, PrefixCachingBlockManager]


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize(("prompt", "max_tokens"), [(1002, 4), (784, 1), (700, 200), (1, 784)])
def test_b30_a_request_that_can_never_fit_is_refused_at_once(manager, prompt, max_tokens):
    engine = make_engine(runner=forced(50), allocator=manager(49, 16), max_model_len=2000)
    for i in range(10):
        engine.add_request(f"short {i}", random_prompt(20, i), greedy(5))
    drain(engine)
    with pytest.raises(InvalidRequestError, match="49 blocks of 16"):
        engine.add_request("oversized", random_prompt(prompt), greedy(max_tokens, ignore_eos=True))
    for i in range(3):
        engine.add_request(f"behind {i}", random_prompt(20, i), greedy(5))
    done = drain(engine)
    assert sorted(done) == [f"behind {i}" for i in range(3)] and free_blocks(engine) == 49
    assert all(output.outputs[0].finish_reason == "length" for output in done.values())


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize(("prompt", "max_tokens"), [(783, 1), (700, 84), (1, 783)])
def test_b30_a_request_that_just_fits_is_served(manager, prompt, max_tokens):
    engine = make_engine(runner=forced(50), allocator=manager(49, 16), max_model_len=2000)
    assert len(ask(engine, random_prompt(prompt), max_tokens=max_tokens).ids) == max_tokens


@pytest.mark.parametrize("budget", [16, 64, 199, 200])
def test_b31_a_long_prompt_is_cut_into_chunks(budget):
    engine = cached_engine(tiny(), num_blocks=64, max_model_len=250, max_num_batched_tokens=budget)
    asked = ask(engine, random_prompt(200), max_tokens=8)
    assert asked.ids == oracle(tiny(), random_prompt(200), greedy(8))
    chunks = [step.num_batched_tokens for step in engine.trace.steps if not step.new_tokens]
    assert len(chunks) + 1 == -(-200 // budget) and set(chunks) <= {budget}


@pytest.mark.parametrize("length", [65, 200])
def test_b31_without_chunks_a_prompt_above_the_budget_is_refused(length):
    engine = cached_engine(tiny(), max_model_len=250, max_num_batched_tokens=64, chunked=False)
    with pytest.raises(InvalidRequestError, match="64"):
        engine.add_request("long", random_prompt(length), greedy(8))
    assert ask(engine, random_prompt(56), max_tokens=8).ids == oracle(tiny(), random_prompt(56), greedy(8))


def test_b31_without_chunks_a_request_could_not_come_back_if_it_outgrew_the_budget():
    """After a preemption it would have to run all its tokens in one step."""
    engine = cached_engine(tiny(), num_blocks=40, max_model_len=250, max_num_batched_tokens=64, chunked=False)
    with pytest.raises(InvalidRequestError, match="64"):
        engine.add_request("grows", random_prompt(60), greedy(60))
    prompts, params = [random_prompt(4, i) for i in range(6)], greedy(55, ignore_eos=True)
    assert run(engine, prompts, params) == [oracle(tiny(), prompt, params) for prompt in prompts]
    assert any(step.preempted for step in engine.trace.steps)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("prompt_length", [1, 40, 63])
def test_b32_new_prompts_do_not_stop_a_running_request(prompt_length, chunked):
    """A running request gains a token at every step (k = 1)."""
    engine = make_engine(runner=forced(50), max_num_batched_tokens=64, num_blocks=200, chunked=chunked)
    engine.add_request("victim", [5], greedy(50, ignore_eos=True))
    engine.step()
    for i in range(49):
        engine.add_request(f"fresh {i}", random_prompt(prompt_length, i), greedy(1))
        outputs = {output.request_id: output for output in engine.step()}
        assert len(outputs["victim"].outputs[0].token_ids) == i + 2
        engine.scheduler.check()
    drain(engine)
    assert engine.trace.steps[-1].finished


def test_b32_long_prompts_do_not_stop_each_other():
    """Prompts of many chunks: the later ones get at least one token a step, and all finish."""
    engine = make_engine(runner=forced(50), max_num_batched_tokens=8, max_num_seqs=4, num_blocks=200)
    for i in range(4):
        engine.add_request(str(i), random_prompt(50, i), greedy(3))
    done = drain(engine)
    assert len(done) == 4
    for step in engine.trace.steps:
        assert all(step.scheduled[name] >= 1 for name in step.running)


@pytest.mark.parametrize("max_num_seqs", [1, 4, 12])
def test_b33_no_more_run_than_max_num_seqs(max_num_seqs):
    engine = make_engine(
        runner=forced(50), max_num_seqs=max_num_seqs, num_blocks=256, max_num_batched_tokens=64
    )
    for i in range(12):
        engine.add_request(str(i), random_prompt(5, i), greedy(50, ignore_eos=True))
    for _ in range(13):
        engine.step()
        engine.scheduler.check()
        assert len(engine.scheduler.running) <= max_num_seqs
        assert not any(request.block_table for request in engine.scheduler.waiting)
    counts = [len(request.output_token_ids) for request in engine.scheduler.running]
    assert len(counts) == max_num_seqs and max(counts) - min(counts) <= 1
    assert len(drain(engine)) == 12


@pytest.mark.parametrize("make", [make_engine, cached_engine])
@pytest.mark.parametrize("budget", [2, 3, 4, 8, 64])
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "num_blocks"), [(8, 20, 8), (8, 20, 12), (3, 40, 12), (20, 8, 8)]
)
def test_b34_requests_that_do_not_fit_together_both_finish(make, budget, prompt, max_tokens, num_blocks):
    prompts, params = [random_prompt(prompt, i) for i in range(2)], greedy(max_tokens, ignore_eos=True)

    def serve(chosen, names):
        engine = make(tiny(), num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=2)
        return run(engine, chosen, params), engine.trace.steps

    solo = [serve([one], "01") for one in prompts]
    answers, steps = serve(prompts, "01")
    assert answers == [solo[0][0][0], solo[1][0][0]]
    assert len(steps) <= sum(len(steps) for _, steps in solo) + 5
    assert_progress_between_preemptions(steps)


def assert_progress_between_preemptions(steps) -> None:
    """Who comes back gets a token before it can be thrown out again."""
    gained: dict[str, int] = {}
    for step in steps:
        for name in step.preempted:
            assert gained.get(name, 1), f"{name} was preempted again without a token"
            gained[name] = 0
        for name in step.new_tokens:
            gained[name] = gained.get(name, 0) + 1


@pytest.mark.parametrize("make", [make_engine, cached_engine])
@pytest.mark.parametrize("budget", [6, 16])
@pytest.mark.parametrize("count", [3, 5])
def test_b34_many_that_do_not_fit_together_all_finish(make, budget, count):
    prompts, params = [random_prompt(7 + i, i) for i in range(count)], greedy(30, ignore_eos=True)
    engine = make(tiny(), num_blocks=14, max_num_batched_tokens=budget, max_num_seqs=5)
    assert run(engine, prompts, params) == [oracle(tiny(), prompt, params) for prompt in prompts]
    assert_progress_between_preemptions(engine.trace.steps)
    solo_steps = sum(30 + len(prompt) // budget for prompt in prompts)
    assert len(engine.trace.steps) <= solo_steps + 5 and any(step.preempted for step in engine.trace.steps)


@fixed
@given(
    jobs=st.lists(st.tuples(st.integers(1, 40), st.integers(2, 60)), min_size=2, max_size=6),
    block_size=st.sampled_from([2, 4, 8]),
    budget=st.sampled_from([6, 8, 16]),
    spare=st.integers(0, 6),
)
@example(jobs=[(19, 28), (15, 30), (1, 28), (17, 17)], block_size=4, budget=16, spare=5)
@example(jobs=[(34, 3), (30, 51), (16, 43), (4, 59), (11, 9), (24, 32)], block_size=4, budget=8, spare=6)
def test_b34_whatever_does_not_fit_together_makes_progress(jobs, block_size, budget, spare):
    """When one of several ends, the next must not come back only to be thrown out before it has caught up."""
    num_blocks = max(-(-(prompt + output) // block_size) for prompt, output in jobs) + spare
    engine = make_engine(
        runner=forced(50), num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=budget,
        max_num_seqs=6,
    )  # fmt: skip
    for i, (prompt, output) in enumerate(jobs):
        engine.add_request(str(i), random_prompt(prompt, i), greedy(output, ignore_eos=True))
    assert len(drain(engine)) == len(jobs)
    assert_progress_between_preemptions(engine.trace.steps)
    assert len(engine.trace.steps) <= sum(output + prompt // budget for prompt, output in jobs) + 5
    preempted = Counter(name for step in engine.trace.steps for name in step.preempted)
    assert max(preempted.values(), default=0) <= 4


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = save_tokenizer(save_hf("llama", tmp_path_factory.mktemp("llm")))
    return LLM(str(folder), max_model_len=64, num_gpu_blocks_override=16, block_size=4)


BAD = ["", [], [5, 999], [5, -1], [5] * 64, None, 7, {"text": "a"}, {"prompt": "a", "prompt_token_ids": [5]}]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_b35_a_refused_prompt_leaves_nothing_behind(llm, bad, position):
    prompts: list = ["ok", "fine"]
    prompts.insert(position, bad)
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, greedy(4))
    assert free_blocks(llm.engine) == 16 and not llm.engine.has_unfinished_requests() and not llm._streams._inboxes
    outputs = llm.generate(["a", "b"], greedy(4))
    assert [output.prompt for output in outputs] == ["a", "b"]
    alone = [llm.generate(prompt, greedy(4))[0].outputs[0].text for prompt in "ab"]
    assert [output.outputs[0].text for output in outputs] == alone


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_b35_an_error_or_an_interrupt_on_the_way_leaves_nothing_behind(llm, error, at, monkeypatch):
    expected = [output.outputs[0].text for output in llm.generate(["a", "b"], greedy(6))]
    execute, calls = llm.engine.runner.execute, []

    def failing(*args):
        calls.append(args)
        if len(calls) == at:
            raise error
        return execute(*args)

    monkeypatch.setattr(llm.engine.runner, "execute", failing)
    with pytest.raises((GenerationError, KeyboardInterrupt)):
        llm.generate(["one", "two"], greedy(6))
    monkeypatch.undo()
    assert free_blocks(llm.engine) == 16 and not llm.engine.has_unfinished_requests() and not llm._streams._inboxes
    llm.engine.scheduler.check()
    assert [output.outputs[0].text for output in llm.generate(["a", "b"], greedy(6))] == expected


def test_b35_a_stream_that_is_closed_leaves_nothing_behind(llm):
    expected = llm.generate("a", greedy(6))[0].outputs[0].text
    stream = llm.stream(["one", "two"], greedy(20))
    next(stream)
    stream.close()
    assert free_blocks(llm.engine) == 16 and not llm.engine.has_unfinished_requests()
    assert llm.generate("a", greedy(6))[0].outputs[0].text == expected


def test_b36_stepping_before_the_first_request_does_nothing():
    """The loop in a thread comes with the server; this is the step that it will make."""
    engine = saying("a", "b")
    for _ in range(3):
        assert engine.step() == [] and engine.runner.rows_seen == []
    assert ask(engine).text == "ab"
    assert engine.step() == [] and ask(engine).text == "ab"


def test_b36_a_loop_in_a_thread_serves_a_request_that_comes_late():
    engine, work, outputs = saying("a", "b"), threading.Event(), []

    def loop():
        assert engine.step() == []
        work.wait(10)
        while engine.has_unfinished_requests():
            outputs.extend(engine.step())

    thread = threading.Thread(target=loop)
    thread.start()
    engine.add_request("late", [5], SamplingParams(temperature=0))
    work.set()
    thread.join(10)
    assert not thread.is_alive() and outputs[-1].outputs[0].text == "ab"


def test_a_row_for_each_request_counts_as_one_block():
    """The allocator of whole rows obeys the same rules."""
    engine = make_engine(runner=forced(50), allocator=RowAllocator(3, 40), max_model_len=40)
    for i in range(7):
        engine.add_request(str(i), random_prompt(10, i), greedy(30, ignore_eos=True))
    assert len(drain(engine)) == 7 and free_blocks(engine) == 3
    with pytest.raises(InvalidRequestError):
        engine.add_request("long", random_prompt(40), greedy(1))
