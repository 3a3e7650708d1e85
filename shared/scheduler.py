"""Who runs next, and how many tokens of it. Pure Python; it knows no phases.

Every request has `num_tokens` and `num_computed_tokens`. A step spends a budget of tokens on letting
requests catch up, running ones first. Prefill, decode, chunks, prefix hits and resumption after a
preemption are all this one subtraction (the view of vLLM's V1 scheduler).
"""
from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.allocator import Allocator, reserved_blocks
from shared.errors import InvalidRequestError
from shared.request import Request, RequestStatus

Policy = Callable[[Request], Any]


def fcfs(request: Request) -> Any:
    """First come, first served."""
    return ()


def shortest_first(request: Request) -> Any:
    """Fewest prompt tokens first: low mean waiting time, and long prompts may wait without end."""
    return request.num_prompt_tokens


def priority(request: Request) -> Any:
    """Lowest priority number first."""
    return request.priority


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "shortest_first": shortest_first}


@dataclass(frozen=True)
class ScheduledRequest:
    """`num_tokens` of a request run in this step, from position `start`."""

    request: Request
    start: int
    num_tokens: int
    total: int  # tokens the request had when this was decided

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> ScheduledRequest:
        return cls(request, request.num_computed_tokens, num_tokens, request.num_tokens)

    @property
    def samples(self) -> bool:
        """Whether this catches up, so that the last position scores a new token."""
        return self.start + self.num_tokens == self.total


@dataclass
class SchedulerOutput:
    """The decisions of one step."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    obstacle: str | None = None  # why the first waiting request was not admitted

    @property
    def num_batched_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


class Queues:
    """Two queues, both in the policy's order (ties: order of arrival): waiting, and running."""

    def __init__(
        self,
        allocator: Allocator,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        enable_chunked_prefill: bool = True,
        policy: str | Policy = "fcfs",
    ):
        if max_num_batched_tokens < max_num_seqs:
            limit = f"at least max_num_seqs={max_num_seqs}, so that each running request can advance"
            raise InvalidRequestError("max_num_batched_tokens", max_num_batched_tokens, limit)
        if not callable(policy) and policy not in list(POLICIES):
            raise InvalidRequestError("policy", policy, f"one of {sorted(POLICIES)}")
        self.allocator, self.policy = allocator, policy if callable(policy) else POLICIES[policy]
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request; raises InvalidRequestError if it could never run."""
        self.check_fits(request.max_num_tokens)
        request.arrival_order, self._arrivals = self._arrivals, self._arrivals + 1
        bisect.insort(self.waiting, request, key=self._rank)

    def check_fits(self, num_tokens: int) -> None:
        """Raise InvalidRequestError for a request that could outgrow the cache, or a step if it may not be cut.

        The tokens still to come count as well: after a preemption they are computed again like a prompt.
        """
        needed, allocator = self.allocator.blocks_for(num_tokens), self.allocator
        if needed > allocator.num_blocks:
            limit = f"within the cache, which has {allocator.num_blocks} blocks of {allocator.block_size} slots"
            raise InvalidRequestError("request", f"{num_tokens} tokens in {needed} blocks", limit)
        if not self.enable_chunked_prefill and num_tokens > self.max_num_batched_tokens:
            limit = f"at most max_num_batched_tokens={self.max_num_batched_tokens} tokens without chunked prefill"
            raise InvalidRequestError("request", f"{num_tokens} tokens", limit)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state (stop, length, abort or error) and free what it holds."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
                break
        self.allocator.free(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason

    def _rank(self, request: Request) -> tuple[Any, int]:
        return self.policy(request), request.arrival_order


class Admission(Queues):
    """Places: given at the front of the waiting queue, taken back at the end of the running one."""

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit from the front of the queue while sequences, budget and cache allow; nobody overtakes."""
        while self.waiting:
            request = self.waiting[0]
            computed = self.allocator.get_computed_blocks(request)
            request.num_computed_tokens = len(computed) * self.allocator.block_size
            num_tokens = self._chunk(request, budget)
            output.obstacle = self._obstacle(request, num_tokens, computed)
            if output.obstacle:
                request.num_computed_tokens = 0
                return
            self._admit(request, num_tokens, computed, output)
            budget -= num_tokens

    def _obstacle(self, request: Request, num_tokens: int, computed: Sequence[int]) -> str | None:
        if len(self.running) >= self.max_num_seqs:
            return f"max_num_seqs={self.max_num_seqs} requests are running"
        if not num_tokens:
            return f"the budget of {self.max_num_batched_tokens} tokens is spent"
        needed = self.allocator.num_new_blocks(request, request.num_tokens, computed)
        reserved = reserved_blocks(request, self.running, self.allocator, self.max_num_batched_tokens)
        if needed + reserved > self.allocator.num_free_blocks:
            free = self.allocator.num_free_blocks
            return f"needs {needed} blocks of {free} free, {reserved} of them spoken for"
        return None

    def _admit(self, request: Request, num_tokens: int, computed: list[int], output: SchedulerOutput) -> None:
        allocated = self.allocator.allocate_slots(request, request.num_computed_tokens + num_tokens, computed)
        assert allocated, "admission checked that the blocks are free"
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
        self.waiting.pop(0)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        output.admitted.append(request)
        output.scheduled.append(ScheduledRequest.of(request, num_tokens))

    def _preempt(self, victim: Request, output: SchedulerOutput) -> None:
        """Take back its slots. Its tokens stay: to come back, it computes them again."""
        self.running.remove(victim)
        self.allocator.free(victim)
        victim.status, victim.num_computed_tokens = RequestStatus.PREEMPTED, 0
        victim.num_preemptions += 1
        bisect.insort(self.waiting, victim, key=self._rank)
        output.preempted.append(victim)

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens to run now: all that are missing, or what the budget allows if prompts may be cut."""
        missing = request.num_tokens - request.num_computed_tokens
        return min(missing, budget) if self.enable_chunked_prefill or missing <= budget else 0


class Scheduler(Admission):
    """Decides step after step: `schedule`, run what it says, `update`, and `finish` whoever has ended."""

    def schedule(self) -> SchedulerOutput:
        """Decide one step. Running requests come first; nobody is admitted in a step that had to preempt."""
        self.allocator.evicted.clear()
        output = SchedulerOutput()
        budget = self._schedule_running(output)
        if output.preempted:
            output.obstacle = "no admission in a step that preempts"
        else:
            self._schedule_waiting(output, budget)
        return output

    def update(self, output: SchedulerOutput) -> None:
        """The step was computed: its tokens now have keys and values."""
        for item in output.scheduled:
            if not item.request.finished:  # it may have been aborted while the step ran
                item.request.num_computed_tokens += item.num_tokens
                self.allocator.cache_blocks(item.request, item.start)

    def check(self) -> None:
        """Assert the invariants between two steps."""
        assert len(self.running) <= self.max_num_seqs, "more requests run than max_num_seqs"
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        assert all(not request.block_table for request in self.waiting), "a waiting request holds blocks"
        assert self.waiting == sorted(self.waiting, key=self._rank), "the waiting queue is out of order"
        for request in self.running:
            assert request.num_computed_tokens <= request.num_tokens
            assert len(request.block_table) >= self.allocator.blocks_for(request.num_computed_tokens)
        self.allocator.check(self.running)

    def _schedule_running(self, output: SchedulerOutput) -> int:
        """Give each running request its tokens, preempting from the end of the order; returns the budget left."""
        self.running.sort(key=self._rank)
        budget, index = self.max_num_batched_tokens, 0
        while index < len(self.running):
            request = self.running[index]
            kept_back = len(self.running) - index - 1  # one token for each one after it, so that none starves
            num_tokens = self._chunk(request, budget - kept_back)
            if num_tokens and not self._make_room(request, num_tokens, output):
                break  # it was the last in the order, and gave way itself
            if num_tokens:
                output.scheduled.append(ScheduledRequest.of(request, num_tokens))
                budget -= num_tokens
            index += 1
        return budget

    def _make_room(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """Allocate, preempting the last in the order until it works; False if that was the request itself."""
        while not self.allocator.allocate_slots(request, request.num_computed_tokens + num_tokens):
            victim = self.running[-1]
            self._preempt(victim, output)
            if victim is request:
                return False
        return True
