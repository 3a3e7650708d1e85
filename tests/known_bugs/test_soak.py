"""A long mixed workload on a small cache: random lengths, options and arrivals, aborts in every state.

Each output equals that of the same request alone, computed without cache and batch; every block is accounted
for after every step; nobody starves; the loop ends. ZERO_TO_ENGINE_SOAK=20 runs twenty times as much, with
other seeds.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from shared.block_manager import BlockManager
from shared.engine import Engine
from shared.output import CompletionOutput, RequestOutput
from shared.prefix_cache import PrefixCachingBlockManager
from shared.request import Request, RequestStatus
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import oracle, plain_stop, random_prompt, tiny
from tests.runtime.tiny import EOS, ToyTokenizer, make_engine

ROUNDS = int(os.environ.get("ZERO_TO_ENGINE_SOAK", "1"))
REQUESTS = 75  # for each of eight engines and each round
LONGEST = 60  # prompt and output together
STATES = ["waiting", "prefilling", "decoding", "preempted"]
SHARED = [random_prompt(24, seed) for seed in range(90, 93)]  # beginnings that many prompts have in common


@dataclass
class Job:
    """One request: when it arrives, and in which state it is aborted, if at all."""

    name: str
    arrival: int
    prompt: list[int]
    params: SamplingParams
    abort_in: str | None
    patience: int  # steps in that state before the abort
    reports: list[RequestOutput] = field(default_factory=list)
    aborted: str | None = None


def make_jobs(draw: random.Random) -> list[Job]:
    arrival, jobs = 0, []
    for index in range(REQUESTS):
        arrival += draw.choice([0, 0, 0, 1, 2, 5])
        abort_in = draw.choice(STATES) if draw.random() < 0.35 else None
        prompt = make_prompt(draw)
        params = make_params(draw, LONGEST - len(prompt))
        jobs.append(Job(f"job {index}", arrival, prompt, params, abort_in, draw.choice([0, 0, 1, 3])))
    return jobs


def make_prompt(draw: random.Random) -> list[int]:
    own = [draw.randrange(3, 128) for _ in range(draw.choice([1, 2, 3, 4, 5, 8, 15]))]
    return draw.choice(SHARED)[: draw.choice([0, 0, 4, 7, 8, 16, 24])] + own


def make_params(draw: random.Random, room: int) -> SamplingParams:
    max_tokens = min(room, draw.choice([1, 2, 5, 9, 14, 20]))
    options = dict(
        n=draw.choice([1, 1, 1, 1, 1, 3]),
        seed=draw.randrange(2**40),
        temperature=draw.choice([0, 0, 0.7, 1.3]),
        top_k=draw.choice([0, 0, 1, 20]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.4]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.8]),
        presence_penalty=draw.choice([0.0, 0.5]),
        logit_bias=draw.choice([None, None, {EOS: 4.0}, {65: 3.0, 66: 3.0}]),
        stop=draw.choice([(), (), ("a",), ("AB", "zz", "Q"), ("1", "e"), ("BA",)]),
        stop_token_ids=draw.choice([(), (), (50, 51, 52)]),
        ignore_eos=draw.random() < 0.3,
        min_tokens=draw.choice([0, 0, 0, min(4, max_tokens)]),
        include_stop_str_in_output=draw.random() < 0.2,
        logprobs=draw.choice([None, None, 2]),
        prompt_logprobs=draw.choice([None, None, None, None, 1]),
        max_tokens=max_tokens,
    )
    return SamplingParams(**options)


# One request alone


def alone(job: Job, index: int) -> tuple[list[int], str, str]:
    """Token ids, text and reason of an answer, from the loop without cache, and plain string search."""
    params = job.params
    ids = oracle(tiny(), job.prompt, params, params.seed + index)
    for count in range(1, len(ids) + 1):
        answer = cut_at_stop(ids[:count], params)
        if answer is not None:
            return ids[:count], answer, "stop"
    ended = ids[-1] in ends_of(params) and len(ids) >= params.min_tokens
    return ids, text_of(ids, params), "stop" if ended else "length"


def ends_of(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})


def text_of(ids: list[int], params: SamplingParams) -> str:
    """The end token is text only on request."""
    ended = ids[-1] in ends_of(params) and len(ids) >= params.min_tokens
    return ToyTokenizer().decode(ids[:-1] if ended and not params.include_stop_str_in_output else ids)


def cut_at_stop(ids: list[int], params: SamplingParams) -> str | None:
    """The text if a stop string is complete after these ids; what min_tokens ruled out does not count."""
    if len(ids) < params.min_tokens:
        return None
    text = text_of(ids, params)
    ruled_out = len(ToyTokenizer().decode(ids[: max(0, params.min_tokens - 1)]))
    return plain_stop(text, params.stop, ruled_out, params.include_stop_str_in_output)


# Serving them all


def state_of(request: Request) -> str:
    if request.status is RequestStatus.RUNNING:
        decoding = request.num_computed_tokens == request.num_tokens - 1 and request.output_token_ids
        return "decoding" if decoding else "prefilling"
    return "preempted" if request.status is RequestStatus.PREEMPTED else "waiting"


class Soak:
    """Feeds an engine step by step, aborts, and checks what must hold between two steps."""

    def __init__(self, engine: Engine, jobs: list[Job]):
        self.engine, self.jobs = engine, {job.name: job for job in jobs}
        self.waited: Counter = Counter()  # steps that a job has spent in the state it is to be aborted in
        self.aborts: Counter = Counter()

    def run(self) -> None:
        to_come = sorted(self.jobs.values(), key=lambda job: job.arrival)
        limit, step = self.most_steps(), 0
        while to_come or self.engine.has_unfinished_requests():
            while to_come and to_come[0].arrival <= step:
                job = to_come.pop(0)
                self.engine.add_request(job.name, job.prompt, job.params)
            self.abort_some()
            self.record(self.engine.step())
            self.check()
            step += 1
            assert step <= limit, "somebody makes no progress"

    def most_steps(self) -> int:
        """All requests one after the other, and the wait for the last one."""
        budget = self.engine.scheduler.max_num_batched_tokens
        jobs = self.jobs.values()
        own = [job.params.n * (len(job.prompt) // budget + 1 + job.params.max_tokens) for job in jobs]
        return max(job.arrival for job in jobs) + sum(own)

    def abort_some(self) -> None:
        for name, group in list(self.engine.groups.items()):
            job = self.jobs[name]
            states = [state_of(answer.request) for answer in group.answers if not answer.request.finished]
            if job.abort_in not in states:
                continue
            self.waited[name] += 1
            if self.waited[name] > job.patience:
                job.aborted = job.abort_in
                self.aborts[job.abort_in] += 1
                self.record([self.engine.abort(name)])
                self.engine.scheduler.check()

    def record(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            reports = self.jobs[output.request_id].reports
            assert not (reports and reports[-1].finished), "an answer after the end"
            reports.append(output)

    def check(self) -> None:
        """Blocks, and fairness: who runs advances at every step, and nobody overtakes in the queue."""
        scheduler, step = self.engine.scheduler, self.engine.trace.steps[-1]
        scheduler.check()
        assert set(step.scheduled) >= set(step.running) and all(step.scheduled.values())
        fresh = [r.arrival_order for r in scheduler.waiting if r.status is RequestStatus.WAITING]
        assert all(r.arrival_order < min(fresh, default=r.arrival_order + 1) for r in scheduler.running)


def check_answer(job: Job, index: int, answer: CompletionOutput) -> None:
    ids, text, reason = alone(job, index)
    streamed = "".join(report.outputs[index].new_text for report in job.reports)
    assert streamed == answer.text
    if answer.finish_reason == "abort":
        assert job.aborted and answer.token_ids == ids[: len(answer.token_ids)] != ids
        assert answer.text == ToyTokenizer().decode(answer.token_ids)
    else:
        assert (answer.token_ids, answer.text, answer.finish_reason) == (ids, text, reason)
    if job.params.logprobs is not None:
        assert len(answer.logprobs) == len(answer.token_ids)
        assert all(token in row for token, row in zip(answer.token_ids, answer.logprobs))


ENGINES = [  # budget of a step, prompts may be cut, blocks, their size
    (7, True, 20, 4),
    (16, True, 24, 4),
    (64, False, 19, 4),
    (12, True, 70, 1),
]


@pytest.mark.parametrize("manager", [BlockManager, PrefixCachingBlockManager])
@pytest.mark.parametrize(("budget", "chunked", "num_blocks", "block_size"), ENGINES)
def test_b40_soak_equal_to_alone_and_every_block_accounted_for(
    manager, budget, chunked, num_blocks, block_size
):
    seen: Counter = Counter()
    for seed in range(ROUNDS):
        engine = make_engine(
            tiny(), allocator=manager(num_blocks, block_size), max_model_len=LONGEST + 1, max_num_seqs=6,
            max_num_batched_tokens=budget, chunked=chunked, poison=float("nan"),
        )  # fmt: skip
        soak = Soak(engine, make_jobs(random.Random(f"{seed} {budget} {manager.__name__}")))
        soak.run()
        for job in soak.jobs.values():
            assert job.reports[-1].finished
            for index, answer in enumerate(job.reports[-1].outputs):
                check_answer(job, index, answer)
        check_empty(engine)
        seen += soak.aborts
        seen["hits"] += sum(len(step.cache_hits) for step in engine.trace.steps)
        seen["preemptions"] += sum(len(step.preempted) for step in engine.trace.steps)

    impossible = set() if chunked else {"prefilling"}
    impossible |= {"hits"} if manager is BlockManager else set()
    assert {name for name, count in seen.items() if count} == {*STATES, "hits", "preemptions"} - impossible


def check_empty(engine: Engine) -> None:
    allocator = engine.scheduler.allocator
    assert allocator.num_free_blocks == allocator.num_blocks
    assert not (engine.groups or engine.outputs.answers or engine.scheduler.waiting or engine.scheduler.running)
    if isinstance(allocator, PrefixCachingBlockManager):
        allocator.reset_prefix_cache()
        engine.scheduler.check()
        assert not allocator.hash_of and not allocator.block_of and not sum(allocator.ref_counts)
