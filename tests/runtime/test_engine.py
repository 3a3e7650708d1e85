"""The engine's door and its loop: what is refused and how, aborts, streams, n answers, priorities, the trace."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.block_manager import BlockManager
from shared.errors import EngineError, InvalidRequestError
from shared.prefix_cache import PrefixCachingBlockManager
from shared.sampling_params import SamplingParams
from shared.trace import Trace
from tests.runtime.tiny import EOS, VOCAB, ScriptedRunner, ToyTokenizer, drain, make_engine, run

SCRIPT = [ord(c) for c in "hello world"]
GREEDY = SamplingParams(temperature=0, max_tokens=5)


def scripted(script=SCRIPT, **options):
    return make_engine(runner=ScriptedRunner(script), **options)


def small(**options):
    """A cache of 8 blocks of 4 slots: two requests of 24 tokens do not fit together."""
    return scripted(num_blocks=8, **options)


def is_whole(engine) -> bool:
    """No request is left, no block is lost, and the next request is served."""
    assert not engine.has_unfinished_requests()
    assert not engine.groups and not engine.scheduler.waiting and not engine.scheduler.running
    engine.scheduler.check()
    assert engine.scheduler.allocator.num_free_blocks == engine.scheduler.allocator.num_blocks
    (ids,) = run(engine, ["ok"], GREEDY)
    return ids == SCRIPT[:5]


# Admission

REFUSED = {
    "empty text": (dict(prompt=""), "prompt", "empty"),
    "empty ids": (dict(prompt=[]), "prompt", "empty"),
    "no prompt": (dict(prompt=None), "prompt", None),
    "a number": (dict(prompt=5), "prompt", 5),
    "bytes": (dict(prompt=b"ab"), "prompt", b"ab"),
    "id too large": (dict(prompt=[5, VOCAB]), "prompt_token_ids", VOCAB),
    "negative id": (dict(prompt=[-1]), "prompt_token_ids", -1),
    "fractional id": (dict(prompt=[1.0]), "prompt_token_ids", 1.0),
    "text among ids": (dict(prompt=[5, "a"]), "prompt_token_ids", "a"),
    "a truth value": (dict(prompt=[True]), "prompt_token_ids", True),
    "nested ids": (dict(prompt=[[1, 2]]), "prompt_token_ids", [1, 2]),
    "prompt at the limit": (dict(prompt=[5] * 200), "prompt", "200 tokens"),
    "prompt over the limit": (dict(prompt=[5] * 5000), "prompt", "5000 tokens"),
    "options of another kind": (dict(sampling_params={"n": 1}), "sampling_params", {"n": 1}),
    "foreign stop id": (dict(sampling_params=SamplingParams(stop_token_ids=[VOCAB])), "stop_token_ids", VOCAB),
    "foreign bias": (dict(sampling_params=SamplingParams(logit_bias={VOCAB: 1})), "logit_bias", VOCAB),
    "no name": (dict(request_id=""), "request_id", ""),
    "a number as name": (dict(request_id=7), "request_id", 7),
    "a name that runs": (dict(request_id="busy"), "request_id", "busy"),
    "a fractional priority": (dict(priority=1.5), "priority", 1.5),
    "a salt that is no text": (dict(cache_salt=5), "cache_salt", 5),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_request_is_refused_at_the_door_and_changes_nothing(case):
    changes, field, value = REFUSED[case]
    engine = scripted()
    engine.add_request("busy", "abc", GREEDY)
    engine.step()
    before = (list(engine.groups), engine.scheduler.allocator.num_free_blocks, len(engine.scheduler.waiting))
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(**{"request_id": "bad", "prompt": "abc", "sampling_params": GREEDY, **changes})
    assert caught.value.field == field and (caught.value.value == value) and caught.value.limit
    assert (list(engine.groups), engine.scheduler.allocator.num_free_blocks, len(engine.scheduler.waiting)) == before
    assert drain(engine)["busy"].outputs[0].token_ids == SCRIPT[:5]
    assert is_whole(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_what_can_never_fit_is_refused_with_all_its_answers(n):
    engine = small()
    with pytest.raises(InvalidRequestError, match="8 blocks of 4 slots") as caught:
        engine.add_request("big", [5] * 20, SamplingParams(n=n, max_tokens=13))
    assert caught.value.field == "request" and is_whole(engine)
    engine.add_request("fits", [5] * 20, SamplingParams(n=n, max_tokens=12, temperature=0))
    assert drain(engine)["fits"].finished and is_whole(engine)


@pytest.mark.parametrize("length, room", [(62, 2), (63, 1)])
def test_a_prompt_near_the_limit_gets_what_is_left(length, room):
    engine = scripted(max_model_len=64)
    for max_tokens in (None, 100):
        engine.add_request("r", [5] * length, SamplingParams(temperature=0, max_tokens=max_tokens))
        (answer,) = drain(engine)["r"].outputs
        assert len(answer.token_ids) == room and answer.finish_reason == "length"


def test_the_last_id_of_the_vocabulary_is_a_token():
    engine = scripted()
    assert run(engine, [[0, VOCAB - 1]], GREEDY) == [SCRIPT[:5]]


def test_a_name_can_be_used_again_when_it_is_done():
    engine = scripted()
    for _ in range(2):
        engine.add_request("r", "ab", GREEDY)
        drain(engine)
    assert is_whole(engine)


def test_a_refusal_does_not_change_the_answers_of_unseeded_requests(family):
    def answers(refused: bool):
        engine = make_engine(family("llama").model, num_blocks=16)
        if refused:
            for bad in ([5] * 100, [5] * 199, []):
                with pytest.raises(InvalidRequestError):
                    engine.add_request("bad", bad, SamplingParams(max_tokens=100))
        return run(engine, ["abc", "abd"], SamplingParams(max_tokens=10))

    assert answers(False) == answers(True)


# Aborts


def states(engine):
    """A request in each state, by the name of the state: of two that do not fit together, one gets preempted."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.add_request("running", "abcdefgh", params)
    engine.add_request("preempted", "abcdefgh", params)
    engine.step()
    while not engine.scheduler.waiting:
        engine.step()
    engine.add_request("waiting", "xyz", params)
    statuses = {r.request_id: r.status.value for r in [*engine.scheduler.waiting, *engine.scheduler.running]}
    assert statuses == {name: name for name in ("running", "preempted", "waiting")}
    return params


@pytest.mark.parametrize("manager", [BlockManager, PrefixCachingBlockManager])
@pytest.mark.parametrize("name", ["running", "preempted", "waiting"])
def test_abort_in_each_state(name, manager):
    script = (SCRIPT * 3)[:16]
    engine = make_engine(runner=ScriptedRunner(script), allocator=manager(8, 4))
    states(engine)
    held = {r.request_id: len(r.block_table) for r in engine.scheduler.running}
    free = engine.scheduler.allocator.num_free_blocks
    output = engine.abort(name)
    (answer,) = output.outputs
    assert output.finished and answer.finish_reason == "abort" and output.request_id == name
    assert answer.token_ids == script[: len(answer.token_ids)] and bool(answer.token_ids) == (name != "waiting")
    assert answer.text == ToyTokenizer().decode(answer.token_ids)
    assert engine.scheduler.allocator.num_free_blocks >= free + (name == "running") * min(held.get(name, 0), 1)
    engine.scheduler.check()
    others = drain(engine)
    assert sorted(others) == sorted({"running", "preempted", "waiting"} - {name})
    assert all(o.outputs[0].token_ids == script for o in others.values())
    assert engine.scheduler.allocator.num_free_blocks == 8 and engine.abort(name) is None


def test_abort_in_the_middle_of_a_prompt():
    engine = scripted(max_num_batched_tokens=8, num_blocks=32)
    engine.add_request("r", [5] * 50, GREEDY)
    engine.step()
    assert engine.abort("r").outputs[0].token_ids == [] and is_whole(engine)


def test_abort_of_what_is_not_there():
    engine = scripted()
    assert engine.abort("nobody") is None and is_whole(engine)


def test_abort_of_n_answers_ends_those_that_run():
    engine = make_engine(runner=ScriptedRunner(SCRIPT))
    engine.add_request("r", "ab", SamplingParams(n=3, temperature=0, max_tokens=8))
    engine.step()
    output = engine.abort("r")
    assert [a.finish_reason for a in output.outputs] == ["abort"] * 3 and is_whole(engine)


# Streams


@given(st.data())
@settings(max_examples=60)
def test_deltas_join_to_the_text_and_reasons_come_once(data):
    words = data.draw(st.lists(st.sampled_from("abc "), min_size=1, max_size=12))
    script = [ord(c) for c in words] + data.draw(st.sampled_from([[], [EOS]]))
    params = SamplingParams(
        temperature=0, max_tokens=data.draw(st.integers(1, 14)), n=data.draw(st.integers(1, 3)),
        stop=data.draw(st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2)),
        include_stop_str_in_output=data.draw(st.booleans()),
    )  # fmt: skip
    engine = scripted(script, trace=False, max_num_batched_tokens=data.draw(st.sampled_from([8, 64])))
    engine.add_request("r", [5] * 10, params)
    joined, reasons, final = [""] * params.n, [[] for _ in range(params.n)], None
    while engine.has_unfinished_requests():
        for output in engine.step():
            final = output
            for answer in output.outputs:
                joined[answer.index] += answer.new_text
                assert joined[answer.index] == answer.text
                reasons[answer.index] += [answer.finish_reason] if answer.finish_reason else []
    assert final.finished
    for answer in final.outputs:
        assert joined[answer.index] == answer.text and len(set(reasons[answer.index])) == 1
        tokens = answer.token_ids[:-1] if answer.token_ids[-1] == EOS else answer.token_ids
        if answer.stop_reason is None:
            assert answer.text == ToyTokenizer().decode(tokens)
        else:
            assert answer.stop_reason in params.stop and answer.finish_reason == "stop"
            whole = ToyTokenizer().decode(answer.token_ids)
            assert whole.startswith(answer.text)
            assert (answer.stop_reason in answer.text) == params.include_stop_str_in_output
    assert engine.scheduler.allocator.num_free_blocks == 64


def test_finish_reasons():
    cases = [
        ([97, EOS], {}, [97, EOS], "a", "stop", None), ([97] * 9, dict(max_tokens=3), [97] * 3, "aaa", "length", None),
        ([97, 98, EOS], dict(max_tokens=3), [97, 98, EOS], "ab", "stop", None),
        ([97, 98, 99], dict(stop=["bc"]), [97, 98, 99], "a", "stop", "bc"),
        ([97, 98, 99], dict(stop_token_ids=[98]), [97, 98], "a", "stop", 98),
        ([EOS] * 9, dict(ignore_eos=True, max_tokens=4), [EOS] * 4, "", "length", None),
        ([EOS] * 9, dict(ignore_eos=True, max_tokens=1, skip_special_tokens=False), [EOS], "<2>", "length", None),
    ]  # fmt: skip
    for script, params, ids, text, reason, stop_reason in cases:
        engine = scripted(script)
        engine.add_request("r", [5, 6, 7], SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}))
        (a,) = drain(engine)["r"].outputs
        assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (ids, text, reason, stop_reason)


def test_min_tokens_holds_back_ends_but_not_text():
    engine = scripted([EOS] * 9)
    engine.add_request("r", [5] * 10, SamplingParams(temperature=0, min_tokens=5, max_tokens=8))
    (a,) = drain(engine)["r"].outputs
    assert len(a.token_ids) == 6 and EOS not in a.token_ids[:5] and a.token_ids[5] == EOS


# n answers, seeds, priorities


def test_n_answers_are_those_of_n_seeds(family):
    model = family("llama").model
    engine = make_engine(model, num_blocks=256)
    engine.add_request("many", "abc", SamplingParams(n=4, seed=3, max_tokens=12, temperature=1.5, ignore_eos=True))
    many = drain(engine)["many"].outputs
    assert [answer.index for answer in many] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in many}) == 4
    single = [SamplingParams(seed=3 + i, max_tokens=12, temperature=1.5, ignore_eos=True) for i in range(4)]
    assert run(make_engine(model, num_blocks=256), ["abc"] * 4, single) == [a.token_ids for a in many]
    last = SamplingParams(n=2, seed=2**63 - 1, max_tokens=3)
    engine.add_request("edge", "abc", last)
    assert len(drain(engine)["edge"].outputs) == 2


def test_n_answers_of_different_lengths_all_end(family):
    engine = make_engine(family("qwen3").model, num_blocks=20)
    params = SamplingParams(n=5, seed=0, max_tokens=20, temperature=1.4, logit_bias={EOS: 2.5})
    engine.add_request("r", "abcdef", params)
    answers = drain(engine)["r"].outputs
    assert len({len(answer.token_ids) for answer in answers}) > 1
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}


def test_unseeded_requests_differ_and_follow_the_engine_seed(family):
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)

    def answers(seed):
        return run(make_engine(family("llama").model, seed=seed), ["abc"] * 3, params)

    assert answers(1) == answers(1) != answers(2)
    assert len({tuple(ids) for ids in answers(1)}) == 3


def test_a_seeded_answer_does_not_depend_on_company(family):
    model, seeded = family("llama").model, SamplingParams(seed=42, temperature=0.8, max_tokens=10)
    alone = run(make_engine(model), ["abc"], seeded)[0]
    for others in ([SamplingParams()], [SamplingParams(temperature=0), SamplingParams(seed=1, n=2, logprobs=3)]):
        for place in (0, len(others)):
            params = [*others[:place], seeded, *others[place:]]
            assert run(make_engine(model), ["abc"] * len(params), params)[place] == alone


def test_lower_priority_numbers_run_first():
    engine = scripted(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 3), ("b", -1), ("c", 0)):
        engine.add_request(name, "ab", GREEDY, priority=priority)
    assert list(drain(engine)) == ["b", "c", "a"]


# Faults on the way


class Broken:
    """Fails in the given steps, and follows the script in the others."""

    def __init__(self, steps):
        self.inner, self.steps, self.step = ScriptedRunner(SCRIPT), steps, 0

    def execute(self, scheduled, block_size):
        self.step += 1
        if self.step in self.steps:
            raise RuntimeError("device lost")
        return self.inner.execute(scheduled, block_size)


def test_a_failing_step_ends_its_requests_and_nothing_else():
    engine = make_engine(runner=Broken({2}), max_num_seqs=1)
    engine.add_request("a", "ab", GREEDY)
    engine.add_request("b", "ab", GREEDY)
    done = drain(engine)
    (a,), (b,) = done["a"].outputs, done["b"].outputs
    assert a.finish_reason == "error" and a.error == "RuntimeError: device lost" and a.token_ids == SCRIPT[:1]
    assert b.finish_reason == "length" and b.token_ids == SCRIPT[:5] and is_whole(engine)


class Refuses(BlockManager):
    """An allocator with a fault: it claims that a request needs more blocks than there are."""

    def num_new_blocks(self, request, num_tokens, computed=()):
        return self.num_blocks + 1


def test_a_step_that_cannot_run_anything_says_why_instead_of_waiting_for_ever():
    engine = scripted(allocator=Refuses(8, 4))
    engine.add_request("r", "ab", GREEDY)
    with pytest.raises(EngineError, match="needs 9 blocks of 8 free"):
        engine.step()
    engine.abort("r")
    assert not engine.has_unfinished_requests()


def test_without_chunks_what_no_step_can_hold_is_refused():
    engine = scripted(chunked=False, max_num_batched_tokens=16, max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match="max_num_batched_tokens=16"):
        engine.add_request("r", [5] * 12, GREEDY)
    engine.add_request("r", [5] * 11, GREEDY)
    assert drain(engine)["r"].outputs[0].token_ids == SCRIPT[:5] and is_whole(engine)


def test_an_idle_step_does_nothing():
    engine = scripted()
    assert engine.step() == [] and is_whole(engine)


# Times


def test_times_follow_the_clock_even_from_zero():
    ticks = count()
    engine = scripted(clock=lambda: float(next(ticks) // 3))  # several readings fall on second zero
    engine.add_request("r", "ab", SamplingParams(temperature=0, max_tokens=6))
    seen = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            (times,) = output.metrics
            seen.append((times.first_scheduled, times.first_token))
    assert seen[0][0] == 0.0 and len(set(seen)) == 1
    assert times.arrival <= times.first_scheduled <= times.first_token < times.last_token <= times.finished
    assert times.time_to_first_token() == times.first_token - times.arrival
    assert times.time_per_output_token(6) == (times.last_token - times.first_token) / 5
    assert times.time_per_output_token(1) is None


# The trace


@pytest.mark.parametrize("manager", [BlockManager, PrefixCachingBlockManager])
@pytest.mark.parametrize("budget", [8, 64])
def test_the_trace_tells_a_consistent_story(manager, budget, family):
    engine = make_engine(family("llama").model, allocator=manager(16, 4), max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    computed, tokens, finished = {}, {}, {}
    for i in range(8):
        engine.add_request(str(i), "a shared beginning"[: 3 + 2 * i], params)
    outputs = drain(engine)
    for number, step in enumerate(engine.trace.steps):
        assert step.step == number and step.block_size == 4 and step.num_blocks == 16 and step.seconds >= 0
        assert step.num_batched_tokens == sum(step.scheduled.values()) <= budget
        assert not set(step.waiting) & set(step.running) and not set(step.preempted) & set(step.scheduled)
        held = {block for table in step.block_tables.values() for block in table}
        assert step.num_free_blocks == 16 - len(held) and set(step.block_tables) == set(step.running)
        for name in step.preempted:
            computed[name] = 0
        for name in step.admitted:
            computed[name] = step.cache_hits.get(name, 0)
        for name, num in step.scheduled.items():
            computed[name] += num
        for name, num in step.computed.items():
            assert num == computed[name] and len(step.block_tables[name]) == -(-num // 4)
        for name, token in step.new_tokens.items():
            assert name in step.scheduled
            tokens.setdefault(name, []).append(token)
        finished |= step.finished
        assert set(step.reasons) >= {*step.waiting, *step.scheduled, *step.preempted}
        assert all(step.reasons.values())
        if manager is BlockManager:
            assert not step.evicted and not step.cache_hits
    assert tokens == {name: output.outputs[0].token_ids for name, output in outputs.items()}
    assert finished == {name: output.outputs[0].finish_reason for name, output in outputs.items()}
    assert any(step.preempted for step in engine.trace.steps)
    hits = sum(sum(step.cache_hits.values()) for step in engine.trace.steps)
    assert (hits > 0) == (manager is PrefixCachingBlockManager) and all(
        output.num_cached_tokens % 4 == 0 for output in outputs.values()
    )


def test_a_trace_does_not_change_what_the_engine_does(family):
    model = family("llama").model
    answers = [run(make_engine(model, num_blocks=12, trace=trace), ["abcdef"] * 4, GREEDY) for trace in (True, False)]
    assert answers[0] == answers[1] and Trace().steps == []


def test_engines_in_one_process_do_not_share_anything(family):
    one, other = (make_engine(family("llama").model, seed=seed) for seed in (0, 0))
    one.add_request("r", "abc", GREEDY)
    other.add_request("r", "xyz", GREEDY)
    while one.has_unfinished_requests() or other.has_unfinished_requests():
        one.step()
        other.step()
    assert len(one.trace.steps) == len(other.trace.steps)
    again = make_engine(family("llama").model)
    assert run(again, ["xyz"], GREEDY)[0] == [step.new_tokens["r"] for step in other.trace.steps if step.new_tokens]
