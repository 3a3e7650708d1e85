"""The engine in its thread: clients that read, wait, leave, come too many, or live through its end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from shared.async_engine import AsyncEngine, EngineDeadError, EngineStoppedError, QueueFullError
from shared.errors import InvalidRequestError
from shared.load import SampleRequest, engine_client
from shared.sampling_params import SamplingParams
from shared.serving import merge
from tests.known_bugs.helpers import greedy, oracle, random_prompt, tiny
from tests.server.served import scripted, toy_engine

FOREVER = greedy(150, ignore_eos=True)


@pytest.fixture
def run():
    """Run a coroutine on an AsyncEngine over the given engine, and end both."""

    def go(engine, work, **options):
        async_engine = AsyncEngine(engine, **options)
        try:
            return asyncio.run(asyncio.wait_for(work(async_engine), 20))
        finally:
            async_engine.shutdown(0)
            assert not async_engine._thread.is_alive() and not async_engine.mailboxes.open
            allocator = engine.scheduler.allocator
            assert allocator.num_free_blocks == allocator.num_blocks or async_engine.error is not None

    return go


async def last(collector):
    return [output async for output in collector][-1]


def test_many_clients_get_the_tokens_they_would_get_alone(run):
    prompts = [random_prompt(3 + i % 7, i) for i in range(30)]

    async def work(engine):
        collectors = await asyncio.gather(*(engine.add_request(str(i), p, greedy(9)) for i, p in enumerate(prompts)))
        return await asyncio.gather(*map(last, collectors))

    outputs = run(toy_engine(tiny()), work)
    assert [o.outputs[0].token_ids for o in outputs] == [oracle(tiny(), p, greedy(9)) for p in prompts]


def test_a_slow_reader_gets_all_text_and_holds_one_output(run):
    pieces = [f"<{i}>" for i in range(40)]

    async def work(engine):
        slow = await engine.add_request("slow", [5], greedy(60))
        fast = await last(await engine.add_request("fast", [5], greedy(60)))
        await asyncio.sleep(0.05)
        assert len(slow._mailbox) == 1
        return fast, [output async for output in slow]

    fast, outputs = run(scripted(*pieces), work)
    assert len(outputs) < 5 and outputs[-1].finished
    assert "".join(output.outputs[0].new_text for output in outputs) == "".join(pieces) == fast.outputs[0].text


def test_two_event_loops_share_one_engine(run):
    async def work(engine):
        async def ask(name):
            return (await last(await engine.add_request(name, [5], greedy(5)))).outputs[0].text

        there = asyncio.to_thread(lambda: asyncio.run(ask("there")))
        return await asyncio.gather(there, ask("here"))

    assert run(scripted("a", "b"), work) == ["ab", "ab"]


def test_outputs_of_several_requests_are_merged_as_they_come(run):
    async def work(engine):
        collectors = [await engine.add_request(str(i), [5], greedy(2 + i)) for i in range(3)]
        seen = [(i, output.finished) async for i, output in merge(collectors)]
        assert sorted(i for i, finished in seen if finished) == [0, 1, 2]

    run(scripted("a", "b", "c", "d", "e", seconds=0.002), work)


def test_a_refused_request_is_an_error_before_anything_is_read(run):
    async def work(engine):
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            await engine.add_request("bad", [99999])
        await engine.add_request("twice", [5], FOREVER)
        with pytest.raises(InvalidRequestError, match="request_id"):
            await engine.add_request("twice", [5])
        engine.abort("nobody")
        return await last(await engine.add_request("good", [5], greedy(3)))

    assert run(scripted("a"), work).outputs[0].text == "a"


def test_the_queue_has_an_end_and_room_again_later(run):
    async def work(engine):
        held = [await engine.add_request(str(i), [5], FOREVER) for i in range(2 + 3)]
        with pytest.raises(QueueFullError, match="5 answers are open"):
            await engine.add_request("one too many", [5])
        held[0].close()
        assert (await last(held[0])).outputs[0].finish_reason == "abort"
        await engine.add_request("room", [5], FOREVER)

    run(scripted(*"abcde" * 40, seconds=0.001, max_num_seqs=2), work, max_waiting=3)


def test_a_request_of_more_answers_than_the_queue_holds_is_served_alone(run):
    async def work(engine):
        return await last(await engine.add_request("many", [5], SamplingParams(n=20, temperature=0, max_tokens=3)))

    outputs = run(scripted("a", "b", "c", max_num_seqs=2), work, max_waiting=0).outputs
    assert [answer.text for answer in outputs] == ["abc"] * 20


def test_a_client_that_is_cancelled_while_it_waits_leaves_nothing(run):
    async def work(engine):
        blocker = await engine.add_request("blocker", [5], FOREVER)
        task = asyncio.ensure_future(engine.add_request("late", [5], FOREVER))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert list(engine.engine.groups) == ["blocker"]
        blocker.close()

    run(scripted(*"ab" * 90, seconds=0.01), work)


BAD_ARGUMENTS = [
    {"request_id": 5}, {"request_id": ["a"]}, {"request_id": ""}, {"prompt": 5}, {"prompt": None}, {"prompt": b"ab"},
    {"sampling_params": {"n": 1}}, {"sampling_params": 5}, {"priority": "high"}, {"cache_salt": None},
]  # fmt: skip


def test_every_wrong_argument_is_refused_by_name(run):
    async def work(engine):
        for change in BAD_ARGUMENTS:
            with pytest.raises(InvalidRequestError) as caught:
                await engine.add_request(**{"request_id": "r", "prompt": [5], **change})
            assert caught.value.field in change
        return await last(await engine.add_request("good", [5], greedy(3)))

    assert run(scripted("a"), work).outputs[0].text == "a"


def test_who_closes_late_does_not_end_the_next_request_of_that_name(run):
    async def work(engine):
        first = await engine.add_request("name", [5], greedy(2))
        while "name" in engine.mailboxes.open:
            await asyncio.sleep(0.001)
        second = await engine.add_request("name", [5], greedy(100, ignore_eos=True))
        first.close()  # it never read its answer
        return (await last(second)).outputs[0]

    assert run(scripted(*"ab" * 60, seconds=0.001), work).finish_reason == "length"


def test_what_the_engine_had_before_goes_on_beside_the_clients(run):
    engine = scripted("a", "b")
    engine.add_request("earlier", [5], greedy(5))

    async def work(async_engine):
        return await last(await async_engine.add_request("now", [5], greedy(5)))

    assert run(engine, work).outputs[0].text == "ab" and not engine.groups


def test_two_clients_of_a_benchmark_share_an_engine_and_leave_nothing(run):
    request = SampleRequest([5], 100)

    async def work(engine):
        one, two = engine_client(engine), engine_client(engine)

        async def count(client):
            return sum([tokens async for tokens in client(request)])

        assert await asyncio.gather(*map(count, (one, two, one, two))) == [100] * 4
        abandoned = one(request)
        assert await anext(abandoned) == 1
        await abandoned.aclose()
        while engine.mailboxes.open:
            await asyncio.sleep(0.001)

    run(scripted(*"ab" * 60, seconds=0.001), work)


@pytest.mark.parametrize("error", [RuntimeError("a rank has ended"), SystemExit(3)], ids=repr)
def test_a_runner_that_can_compute_nothing_any_more_ends_the_engine_and_every_request(error):
    engine = scripted(*"ab" * 60, seconds=0.005, max_num_seqs=2)
    execute, now, failed = engine.runner.execute, threading.Event(), []

    def break_down(scheduled, block_size):
        if not now.is_set():
            return execute(scheduled, block_size)
        failed.append(len(scheduled))
        engine.runner.failure = str(error)
        raise error

    engine.runner.execute = break_down

    async def work(async_engine):
        collectors = [await async_engine.add_request(str(i), [5], FOREVER) for i in range(5)]
        now.set()
        ends = await asyncio.gather(*map(last, collectors), return_exceptions=True)
        assert all(isinstance(end, EngineDeadError) or str(error) in end.outputs[0].error for end in ends)
        async_engine._thread.join()
        with pytest.raises(EngineDeadError):
            await async_engine.add_request("late", [5])

    asyncio.run(asyncio.wait_for(work(AsyncEngine(engine)), 20))
    assert failed == [2]  # and not a step for each two of them


def test_a_model_that_fails_ends_its_requests_and_no_others(run):
    engine = scripted("a", "b")
    broken = {"now": True}
    execute = engine.runner.execute

    def fail_once(scheduled, block_size):
        if broken.pop("now", False):
            raise RuntimeError("out of luck")
        return execute(scheduled, block_size)

    engine.runner.execute = fail_once

    async def work(async_engine):
        first = await last(await async_engine.add_request("first", [5], greedy(5)))
        return first.outputs[0], (await last(await async_engine.add_request("next", [5], greedy(5)))).outputs[0]

    failed, fine = run(engine, work)
    assert failed.finish_reason == "error" and "out of luck" in failed.error and fine.text == "ab"


def test_an_engine_whose_step_raises_tells_every_client_and_takes_no_more(run):
    engine = scripted("a", "b", seconds=0.01)
    go = threading.Event()
    step = engine.step

    def die_when_told():
        if go.is_set():
            raise AssertionError("a block is lost")
        return step()

    engine.step = die_when_told

    async def work(async_engine):
        collectors = [await async_engine.add_request(str(i), [5], FOREVER) for i in range(3)]
        go.set()
        waiting = asyncio.ensure_future(async_engine.add_request("in the inbox", [5], FOREVER))
        for collector in collectors:
            with pytest.raises(EngineDeadError, match="a block is lost"):
                await last(collector)
        with pytest.raises(EngineDeadError):
            await last(await waiting)
        with pytest.raises(EngineDeadError):
            await async_engine.add_request("late", [5])
        return async_engine

    async_engine = AsyncEngine(engine)
    asyncio.run(asyncio.wait_for(work(async_engine), 20))
    async_engine.shutdown()
    assert not async_engine._thread.is_alive()


def test_a_shutdown_lets_short_answers_finish_and_cuts_long_ones(run):
    engine = scripted(*"ab" * 90, seconds=0.01)

    async def work(async_engine):
        short = await async_engine.add_request("short", [5], greedy(5))
        long = await async_engine.add_request("long", [5], FOREVER)
        ending = asyncio.ensure_future(asyncio.to_thread(async_engine.shutdown, 0.3))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineStoppedError):
            await async_engine.add_request("late", [5])
        outputs = await asyncio.gather(last(short), last(long))
        await ending
        return [output.outputs[0].finish_reason for output in outputs]

    started = time.monotonic()
    assert run(engine, work) == ["length", "abort"]
    assert time.monotonic() - started < 3


def test_a_client_whose_event_loop_has_closed_is_forgotten(run):
    engine = scripted(*"ab" * 90, seconds=0.005)
    async_engine = AsyncEngine(engine)

    async def leave():
        await async_engine.add_request("gone", [5], FOREVER)

    asyncio.run(leave())
    end = time.monotonic() + 5
    while engine.groups and time.monotonic() < end:
        time.sleep(0.01)
    assert not engine.groups and not async_engine.mailboxes.open
    async_engine.shutdown()
