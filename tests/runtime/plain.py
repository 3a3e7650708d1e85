"""Requests and simulated execution in pure Python: what the control-plane tests stand on. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from shared.request import Request
from shared.sampling_params import SamplingParams
from shared.scheduler import Scheduler, SchedulerOutput

EOS = 0


def make_request(
    name: str, prompt: Sequence[int], max_tokens: int = 8, priority: int = 0, salt: str = "", **params
) -> Request:
    options = SamplingParams(max_tokens=max_tokens, **params)
    return Request(name, list(prompt), options, max_tokens, 0, frozenset({EOS}), priority, salt)


def beginning(request: Request, position: int) -> tuple:
    """What the keys and values of one position depend on: every token up to it (and who may share it)."""
    return request.cache_salt, tuple(request.all_token_ids[: position + 1])


def next_token(request: Request) -> int:
    """A stand-in for a model: a function of all tokens so far, which now and then ends the answer."""
    return (sum(request.all_token_ids) * 7 + request.num_tokens * 3) % 11


class Simulation:
    """Runs a scheduler's decisions without a model: each slot remembers which beginning it holds.

    A step fails here as a model would silently go wrong: a token that attends over a slot with another
    content, a block written by one request while another one uses it.
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.slots = scheduler, {}
        self.finished: list[Request] = []
        self.num_steps = 0

    def slot(self, request: Request, position: int) -> int:
        size = self.scheduler.allocator.block_size
        return request.block_table[position // size] * size + position % size

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        for item in output.scheduled:
            assert item.start == item.request.num_computed_tokens and item.total == item.request.num_tokens
            self._write(item.request, range(item.start, item.start + item.num_tokens))
        for item in output.scheduled:
            for position in range(item.start + item.num_tokens):
                held = self.slots.get(self.slot(item.request, position))
                assert held == beginning(item.request, position), "a token attends over a foreign slot"
        self.scheduler.update(output)
        for item in output.scheduled:
            if item.samples:
                self._sample(item.request)
        self.scheduler.check()
        assert all(request.num_computed_tokens == 0 for request in self.scheduler.waiting)
        self.num_steps += 1
        return output

    def drain(self, limit: int) -> list[Request]:
        """Run to the end; more than `limit` steps means that somebody makes no progress."""
        for _ in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running):
                return self.finished
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def _write(self, request: Request, positions: range) -> None:
        size = self.scheduler.allocator.block_size
        for position in positions:
            block = request.block_table[position // size]
            users = [other for other in self.scheduler.running if block in other.block_table]
            assert users == [request], "a request writes into a block that another one uses"
            self.slots[self.slot(request, position)] = beginning(request, position)

    def _sample(self, request: Request) -> None:
        reason = request.append(next_token(request))
        if reason:
            self.scheduler.finish(request, reason)
            self.finished.append(request)


def answer_alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens of a request that has the engine to itself."""
    request = make_request("alone", prompt, max_tokens)
    while request.append(next_token(request)) is None:
        pass
    return request.output_token_ids
