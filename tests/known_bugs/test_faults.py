"""One step fails: in the model, in the sampler, in the detokenizer. The engine goes on and loses nothing."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.batch import ModelRunner
from shared.errors import EngineError, InvalidRequestError
from shared.sampling import Sampler
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import (
    cached_engine,
    free_blocks,
    greedy,
    oracle,
    random_prompt,
    saying,
    tiny,
)
from tests.runtime.tiny import ToyDetokenizer, ToyTokenizer, make_engine

OPTIONS = greedy(12, ignore_eos=True, stop=["\x00\x00"])
PROMPTS = {str(i): random_prompt(7 + 4 * i, i) for i in range(5)}


class Fault:
    """Raises at the chosen calls, and counts them all."""

    def __init__(self, at: int, error: BaseException | None = None):
        self.at, self.error, self.calls = at, error or RuntimeError("planted"), 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


class FailingRunner(ModelRunner):
    """Fails before the model runs, or in the middle of its layers, when some keys are written already."""

    fault: Fault | None = None
    layer = 0

    def forward(self, batch):
        handle = self.model.layers[self.layer].mlp.register_forward_pre_hook(lambda *_: self.fault())
        try:
            return super().forward(batch)
        finally:
            handle.remove()


class FailingTokenizer(ToyTokenizer):
    """Its detokenizers fail at a certain token of all that are pushed, or in flush."""

    def __init__(self, push: Fault, flush: Fault):
        self.push, self.flush = push, flush

    def detokenizer(self, skip_special_tokens: bool = True):
        made = ToyDetokenizer(self, skip_special_tokens)
        push, flush = made.push, made.flush
        made.push = lambda token: (self.push(), push(token))[1]
        made.flush = lambda: (self.flush(), flush())[1]
        return made


def never() -> Fault:
    return Fault(0)


def failing_engine(make, place: str, fault: Fault, **parts):
    """An engine where one place fails; small, so that requests also wait, are cut and are preempted."""
    places = dict.fromkeys(["push", "flush"], never()) | {place: fault}
    sample = Sampler()

    def sampler(logits, states):
        if place == "sampler":
            fault()
        return sample(logits, states)

    engine = make(
        tiny(), num_blocks=16, max_num_seqs=3, max_num_batched_tokens=12, sampler=sampler,
        tokenizer=FailingTokenizer(places["push"], places["flush"]), **parts,
    )  # fmt: skip
    runner = FailingRunner(engine.runner.model, engine.runner.cache)
    runner.fault, runner.layer = (fault if place.startswith("model") else never()), int(place == "model 1")
    engine.runner = runner
    return engine


def serve(engine) -> dict:
    """Serve all prompts; every report is one of a request that is known, and each ends once."""
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, OPTIONS)
    done: dict = {}
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            assert output.request_id not in done
            if output.finished:
                done[output.request_id] = output
        engine.scheduler.check()
    assert done.keys() == PROMPTS.keys()
    return done


PLACES = ["model 0", "model 1", "sampler", "push", "flush"]
EXPECTED: dict[str, list[int]] = {}


def expected(name: str) -> list[int]:
    if name not in EXPECTED:
        EXPECTED[name] = oracle(tiny(), PROMPTS[name], greedy(12, ignore_eos=True))
    return EXPECTED[name]


@pytest.mark.parametrize("make", [make_engine, cached_engine])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [1, 2, 3, 5, 9, 17])
def test_one_failing_call_ends_its_requests_and_no_other(make, place, at):
    fault = Fault(at)
    engine = failing_engine(make, place, fault)
    done = serve(engine)
    failed = {name for name, output in done.items() if output.outputs[0].finish_reason == "error"}
    if fault.calls >= at:
        assert failed and (len(failed) == 1 or place not in ("push", "flush"))
    for name, output in done.items():
        answer = output.outputs[0]
        if name in failed:
            assert answer.error == "RuntimeError: planted"
            assert answer.token_ids == expected(name)[: len(answer.token_ids)]
        else:
            assert answer.error is None and answer.token_ids == expected(name)
    assert free_blocks(engine) == 16 and not engine.scheduler.running and not engine.scheduler.waiting
    again = serve(engine)  # usable, and whatever the prefix cache kept is right
    assert all(again[name].outputs[0].token_ids == expected(name) for name in PROMPTS)
    assert free_blocks(engine) == 16


class Faults(Fault):
    """Raises at several calls."""

    def __init__(self, planned: set[int]):
        super().__init__(0)
        self.planned = planned

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self.planned:
            raise self.error


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["model", "sampler", "push", "flush"]), st.sets(st.integers(1, 40), max_size=3)),
    st.sampled_from([1, 2, 4, 40]), st.sampled_from([1, 2, 5]), st.sampled_from([0, 7, 60]),
    st.sampled_from(["fcfs", "priority", "shortest_first"]), st.booleans(), st.lists(st.integers(-2, 2), min_size=5),
)
def test_whatever_fails_and_whenever_nothing_is_lost_and_nobody_else_suffers(
    planned, block_size, max_num_seqs, more_tokens, policy, cached, priorities
):
    """Pools of one request's size and of one block, budgets of one token, priorities that preempt."""
    faults = {place: Faults(planned.get(place, set())) for place in ("model", "sampler", "push", "flush")}
    sample, num_blocks = Sampler(), -(-40 // block_size)
    engine = (cached_engine if cached else make_engine)(
        tiny(), num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, policy=policy,
        max_num_batched_tokens=max_num_seqs + more_tokens,
        tokenizer=FailingTokenizer(faults["push"], faults["flush"]),
        sampler=lambda logits, states: (faults["sampler"](), sample(logits, states))[1],
    )  # fmt: skip
    engine.runner = FailingRunner(engine.runner.model, engine.runner.cache)
    engine.runner.fault, engine.runner.layer = faults["model"], 1
    done = {}
    for (name, prompt), priority in zip(PROMPTS.items(), priorities):
        engine.add_request(name, prompt, OPTIONS, priority)
        done |= {output.request_id: output for output in engine.step() if output.finished}
    for _ in range(1000):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    assert done.keys() == PROMPTS.keys() and free_blocks(engine) == num_blocks and not engine.outputs.answers
    for name, output in done.items():
        (answer,) = output.outputs
        assert answer.token_ids == expected(name)[: len(answer.token_ids)]
        assert answer.error == "RuntimeError: planted" or answer.token_ids == expected(name)
    if not any(planned.values()):
        assert all(output.outputs[0].finish_reason == "length" for output in done.values())


@pytest.mark.parametrize("make", [make_engine, cached_engine])
def test_every_failing_step_ends_the_requests_that_ran_in_it(make):
    """The model fails at every third call: each request ends, none waits for ever."""
    engine = failing_engine(make, "sampler", never())
    execute, calls = engine.runner.execute, []

    def flaky(scheduled, block_size):
        calls.append([item.request.request_id for item in scheduled])
        if len(calls) % 3 == 0:
            raise MemoryError("no memory")
        return execute(scheduled, block_size)

    engine.runner.execute = flaky
    done = serve(engine)
    failed = {name for name, output in done.items() if output.outputs[0].finish_reason == "error"}
    assert failed == {name for names in calls[2::3] for name in names}
    engine.runner.execute = execute
    assert all(output.outputs[0].token_ids == expected(name) for name, output in serve(engine).items())


@pytest.mark.parametrize("place", ["model 0", "model 1", "sampler"])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_an_interrupt_passes_through_and_the_engine_can_be_emptied(place, at):
    """KeyboardInterrupt is the reader's: it is not turned into an answer, and nothing is lost."""
    engine = failing_engine(cached_engine, place, Fault(at, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        serve(engine)
    engine.scheduler.check()
    for name in list(engine.groups):
        assert engine.abort(name).finished
    assert free_blocks(engine) == 16 and not engine.has_unfinished_requests()
    assert all(output.outputs[0].token_ids == expected(name) for name, output in serve(engine).items())


@pytest.mark.parametrize("place", ["model 0", "model 1", "sampler"])
@pytest.mark.parametrize("at", [1, 2, 3, 6, 10])
def test_after_an_interrupt_the_engine_can_also_go_on(place, at):
    engine = failing_engine(cached_engine, place, Fault(at, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        serve(engine)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    assert all(output.outputs[0].token_ids == expected(name) for name, output in done.items())


# Aborts within a step: by what the engine calls


class Hook:
    """Called from within a step; at one of the calls it aborts requests, twice each."""

    def __init__(self, at: int, victims: list[str]):
        self.at, self.victims, self.calls, self.engine = at, victims, 0, None

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            for name in self.victims * 2:
                self.engine.abort(name)


def before(function, hook):
    return lambda *arguments: (hook(), function(*arguments))[1]


def hooked_engine(place: str, hook: Hook):
    push = Fault(0)
    engine = cached_engine(tiny(), num_blocks=40, max_num_seqs=4, tokenizer=FailingTokenizer(push, never()))
    hook.engine = engine
    if place == "trace":
        engine.trace.record = before(engine.trace.record, hook)
    elif place == "runner":
        execute = engine.runner.execute
        engine.runner.execute = lambda *arguments: (execute(*arguments), hook())[0]
    elif place == "sampler":
        engine.sampler = before(engine.sampler, hook)
    else:
        engine.tokenizer.push = hook
    return engine


@pytest.mark.parametrize("place", ["runner", "sampler", "push", "trace"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("victims", [["0"], ["2"], ["4"], sorted(PROMPTS)], ids=str)
@pytest.mark.parametrize("at", [1, 2, 4, 9])
def test_an_abort_within_a_step_ends_whom_it_names_and_no_other(place, n, victims, at):
    hook = Hook(at, victims)
    engine = hooked_engine(place, hook)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, greedy(12, ignore_eos=True, n=n))
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    assert done.keys() | set(victims) == PROMPTS.keys()
    for name, output in done.items():
        assert all(answer.token_ids == expected(name) for answer in output.outputs)
    assert free_blocks(engine) == 40 and not engine.scheduler.running and not engine.scheduler.waiting
    assert not engine.outputs.answers


def test_a_request_whose_last_report_was_lost_can_still_be_dropped():
    """An interrupt between the last token and its report leaves a request that has ended, and is known."""
    engine = cached_engine(tiny())
    engine.add_request("r", random_prompt(5), greedy(1, ignore_eos=True))
    report = engine.outputs.report
    engine.outputs.report = before(report, Fault(1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.outputs.report = report
    assert engine.abort("r").outputs[0].finish_reason == "length" and not engine.has_unfinished_requests()


def test_a_policy_that_fails_refuses_the_request_and_leaves_no_part_of_it():
    engine = cached_engine(tiny())
    fault = Fault(3)
    engine.scheduler.policy = lambda request: fault()
    with pytest.raises(RuntimeError, match="planted"):
        engine.add_request("r", random_prompt(5), SamplingParams(n=5))
    assert not engine.has_unfinished_requests() and not engine.scheduler.waiting and not engine.outputs.answers


def test_a_sampler_that_forgets_a_row_is_an_error_not_a_wait_without_end():
    engine = cached_engine(tiny(), sampler=lambda logits, states: Sampler()(logits, states)[:-1])
    for name in "ab":
        engine.add_request(name, random_prompt(5), greedy(3))
    done = serve_all(engine)
    assert all(output.outputs[0].finish_reason == "error" for output in done.values()) and len(done) == 2


def serve_all(engine) -> dict:
    done = {}
    for _ in range(1000):
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert not engine.has_unfinished_requests()
    return done


def test_a_runner_that_can_compute_nothing_any_more_ends_all_at_once():
    engine = cached_engine(tiny(), max_num_seqs=2)
    execute, steps = engine.runner.execute, []

    def break_down(scheduled, block_size):
        steps.append(len(scheduled))
        if len(steps) < 3:
            return execute(scheduled, block_size)
        engine.runner.failure = "rank 1 has ended"
        raise EngineError(engine.runner.failure)

    engine.runner.execute = break_down
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, greedy(12, ignore_eos=True))
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    assert len(steps) == 3 and done.keys() == PROMPTS.keys()
    assert all("rank 1 has ended" in answer.error for answer in done.values())
    assert [answer.token_ids for answer in done.values() if answer.token_ids]  # what they had, they keep
    assert free_blocks(engine) == engine.scheduler.allocator.num_blocks


def test_what_a_caller_does_to_an_output_changes_neither_the_engine_nor_other_outputs():
    engine = cached_engine(tiny())
    params = greedy(12, ignore_eos=True, repetition_penalty=1.3, logprobs=1, prompt_logprobs=1)
    alone = oracle(tiny(), PROMPTS["0"], params)
    engine.add_request("0", PROMPTS["0"], params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        answer = outputs[-1].outputs[0]
        for part in (outputs[-1].prompt_token_ids, answer.token_ids, answer.logprobs, outputs[-1].prompt_logprobs):
            part += [9] * 3
        outputs[-1].metrics[0].first_token = None
    assert outputs[-1].outputs[0].token_ids[:-3] == alone


def test_an_output_stays_what_it_was_when_it_came():
    now = [0.0]
    engine = cached_engine(tiny(), clock=lambda: now[0])
    engine.add_request("r", random_prompt(4), greedy(5, ignore_eos=True, logprobs=0))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        now[0] += 1.0
    assert [output.metrics[0].last_token for output in outputs] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1, 2, 3, 4, 5]
    first, tokens = outputs[0], outputs[-1].outputs[0].token_ids
    assert f"token_ids={tokens[:1]}, " in repr(first) and pickle.loads(pickle.dumps(first)) == first


def test_scores_that_are_no_numbers_are_an_error_not_an_answer():
    engine = make_engine(tiny(), poison=None)
    weight = tiny().lm_head.weight
    engine.add_request("r", random_prompt(5), greedy())
    kept = weight[7].clone()
    try:
        weight[7] = float("nan")
        answer = engine.step()[0].outputs[0]
    finally:
        weight[7] = kept
    assert answer.finish_reason == "error" and "NaN" in answer.error and free_blocks(engine) == 64


def test_n_answers_of_which_one_fails():
    push = Fault(2)
    engine = failing_engine(cached_engine, "push", push)
    engine.add_request("a", random_prompt(6), SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))
    done = None
    while engine.has_unfinished_requests():
        done = engine.step()[-1]
        engine.scheduler.check()
    assert [answer.finish_reason for answer in done.outputs] == ["length", "error", "length"]
    assert free_blocks(engine) == 16


def test_a_failing_encoder_or_detokenizer_changes_nothing_at_the_door():
    engine = saying("a", "b")
    with pytest.raises(ValueError):
        engine.add_request("r", "not in the vocabulary é")
    engine.tokenizer.detokenizer = None
    with pytest.raises(TypeError):
        engine.add_request("r", [5])
    assert not engine.has_unfinished_requests() and not engine.scheduler.waiting and engine.step() == []


def test_a_request_that_is_refused_can_be_sent_again_under_its_name():
    engine = saying("a", "b")
    with pytest.raises(InvalidRequestError):
        engine.add_request("r", [10**6])
    engine.add_request("r", [5])
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request("r", [5])
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("r", [5])


def test_a_step_that_cannot_run_anybody_says_so_instead_of_spinning():
    engine = saying("a", "b")
    engine.add_request("r", [5])
    engine.scheduler.max_num_seqs = 0  # nobody may run any more
    with pytest.raises(EngineError, match="max_num_seqs=0"):
        engine.step()
    assert engine.abort("r").finished and engine.step() == []


def test_a_clock_may_start_at_zero():
    now = [0.0]
    engine = make_engine(tiny(), clock=lambda: now[0])
    engine.add_request("r", random_prompt(4), greedy(3, ignore_eos=True))
    while engine.has_unfinished_requests():
        output = engine.step()[-1]
        now[0] += 1.0
    assert output.metrics[0].first_scheduled == output.metrics[0].first_token == 0.0
    assert output.metrics[0].last_token == 2.0
