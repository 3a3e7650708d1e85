"""One record of what an engine did, step by step, for widgets, figures, tests and benchmarks. Pure Python."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.request import Request
from shared.scheduler import Scheduler, SchedulerOutput


@dataclass(frozen=True)
class StepRecord:
    """One step: the decisions, and the state after it. Requests are named by their ids."""

    step: int
    scheduled: dict[str, int]  # tokens run of each request
    waiting: list[str]
    running: list[str]
    admitted: list[str]
    preempted: list[str]
    finished: dict[str, str]  # and why
    reasons: dict[str, str]
    block_tables: dict[str, list[int]]
    computed: dict[str, int]  # tokens of each running request that are in the cache
    cache_hits: dict[str, int]  # tokens found in the prefix cache by requests admitted in this step
    evicted: list[int]
    num_free_blocks: int
    num_blocks: int
    block_size: int
    new_tokens: dict[str, int]
    seconds: float

    @property
    def num_batched_tokens(self) -> int:
        return sum(self.scheduled.values())


@dataclass
class Trace:
    """Pass it to an engine: `Engine(..., trace=Trace())`."""

    steps: list[StepRecord] = field(default_factory=list)

    def record(
        self,
        scheduler: Scheduler,
        output: SchedulerOutput,
        new_tokens: Mapping[str, int],
        touched: Sequence[Request],
        seconds: float,
    ) -> None:
        """Add what one step did; called after the scheduler was updated."""
        allocator, running = scheduler.allocator, scheduler.running
        starts = {item.request.request_id: item.start for item in output.scheduled}
        self.steps.append(StepRecord(
            step=len(self.steps),
            scheduled={item.request.request_id: item.num_tokens for item in output.scheduled},
            waiting=[request.request_id for request in scheduler.waiting],
            running=[request.request_id for request in running],
            admitted=[request.request_id for request in output.admitted],
            preempted=[request.request_id for request in output.preempted],
            finished={request.request_id: request.finish_reason for request in touched if request.finished},
            reasons=explain(scheduler, output),
            block_tables={request.request_id: list(request.block_table) for request in running},
            computed={request.request_id: request.num_computed_tokens for request in running},
            cache_hits={r.request_id: starts[r.request_id] for r in output.admitted if starts[r.request_id]},
            evicted=list(allocator.evicted),
            num_free_blocks=allocator.num_free_blocks,
            num_blocks=allocator.num_blocks,
            block_size=allocator.block_size,
            new_tokens=dict(new_tokens),
            seconds=seconds,
        ))


def explain(scheduler: Scheduler, output: SchedulerOutput) -> dict[str, str]:
    """Why each request ran, waits or lost its place in this step, in words."""
    reasons = {}
    for position, request in enumerate(scheduler.waiting):
        behind = f"behind {scheduler.waiting[0].request_id}: " if position else ""
        reasons[request.request_id] = f"waits: {behind}{output.obstacle}"
    for item in output.scheduled:
        last, known = item.start + item.num_tokens - 1, item.total
        reasons[item.request.request_id] = f"runs tokens {item.start} to {last} of {known}"
    for request in output.preempted:
        reasons[request.request_id] = "preempted: the cache is full and it is the last in the order"
    return reasons
