"""Chapter 10's simulated execution: the real scheduler and a slot for every token, but no model.

Each slot remembers which beginning its keys and values belong to, so a token that attends over a foreign
slot is noticed here. A model would not notice: it would give another answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.lab.judging import Wrong
from shared.request import Request
from shared.sampling_params import SamplingParams
from shared.scheduler import ScheduledRequest, Scheduler

Beginning = tuple[str, tuple[int, ...]]  # salt, and all tokens up to a position


@dataclass(frozen=True)
class Call:
    """A caller's prompt, the step in which it comes, and the one in which the caller hangs up, if any."""

    name: str
    prompt: Sequence[int]
    step: int = 0
    answer: int = 4
    salt: str = ""
    hangs_up: int | None = None

    def request(self) -> Request:
        params = SamplingParams(max_tokens=self.answer, ignore_eos=True)
        return Request(self.name, list(self.prompt), params, self.answer, cache_salt=self.salt)


def serve(manager: Any, calls: Iterable[Call], budget: int = 64, max_num_seqs: int = 4) -> int:
    """Tokens computed for all calls. Raises Wrong if a token attends over what does not belong to it."""
    scheduler, slots, computed = Scheduler(manager, max_num_seqs, budget), Slots(manager.block_size), 0
    calls = sorted(calls, key=lambda call: call.step)
    requests = {call.name: call.request() for call in calls}
    coming, leaving, step = deque(calls), [call for call in calls if call.hangs_up is not None], 0
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0].step <= step:
            scheduler.add(requests[coming.popleft().name])
        for call in leaving:
            if call.hangs_up == step and not requests[call.name].finished:
                scheduler.finish(requests[call.name], "abort")
        output = scheduler.schedule()
        if scheduler.waiting and not scheduler.running:
            raise Wrong(f"in step {step} {scheduler.waiting[0].request_id} cannot run: {output.obstacle}.")
        slots.run(step, output.scheduled, scheduler.running)
        computed += output.num_batched_tokens
        scheduler.update(output)
        for item in output.scheduled:
            if item.samples and (reason := item.request.append(next_token(item.request))):
                scheduler.finish(item.request, reason)
        step += 1
    return computed


class Slots:
    """What each slot of the cache holds."""

    def __init__(self, block_size: int):
        self.block_size, self.held = block_size, dict[int, Beginning]()

    def run(self, step: int, scheduled: Sequence[ScheduledRequest], running: Sequence[Request]) -> None:
        """Write the new tokens of all requests, then let each of them look at everything before it."""
        for item in scheduled:
            new = range(item.start, item.start + item.num_tokens)
            for slot, position in self._slots(item.request, new):
                self._alone(step, item.request, item.request.block_table[position // self.block_size], running)
                self.held[slot] = beginning(item.request, position)
        for item in scheduled:
            for slot, position in self._slots(item.request, range(item.start + item.num_tokens)):
                self._own(step, item.request, slot, position)

    def _slots(self, request: Request, positions: range) -> Iterator[tuple[int, int]]:
        size = self.block_size
        return ((request.block_table[i // size] * size + i % size, i) for i in positions)

    def _alone(self, step: int, request: Request, block: int, running: Sequence[Request]) -> None:
        others = [other.request_id for other in running if other is not request and block in other.block_table]
        if others:
            raise Wrong(f"in step {step} {request.request_id} writes into block {block}, which {others[0]} uses.")

    def _own(self, step: int, request: Request, slot: int, position: int) -> None:
        held = self.held.get(slot)
        if held == beginning(request, position):
            return
        what = "which nobody has written" if held is None else "which holds the token of another beginning"
        block = slot // self.block_size
        raise Wrong(f"in step {step} {request.request_id} looks for its token {position} in block {block}, {what}.")


def beginning(request: Request, position: int) -> Beginning:
    """What the keys and values of one position depend on, and who may use them."""
    return request.cache_salt, tuple(request.all_token_ids[: position + 1])


def next_token(request: Request) -> int:
    """Stands in for the model: a number that depends on all tokens so far."""
    return 1000 + (7 * sum(request.all_token_ids) + request.num_tokens) % 97
