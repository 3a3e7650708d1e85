"""The loop: schedule, run the model, sample, update, report. Every part is passed in."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from shared.batch import num_wanted_rows
from shared.errors import EngineError, InvalidRequestError
from shared.output import RequestGroup, RequestOutput
from shared.processor import InputProcessor, OutputProcessor, TextCodec
from shared.request import Request, RequestLimits
from shared.sampling import SampledToken, Sampler, SamplingState, top_logprobs
from shared.sampling_params import SamplingParams
from shared.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from shared.trace import Trace

Choose = Callable[[Tensor, Sequence[SamplingState]], list[SampledToken]]


class Runner(Protocol):
    """What the engine needs of the data plane. One that holds processes has shutdown() and `failure` as well."""

    def execute(self, scheduled: Sequence[ScheduledRequest], block_size: int) -> Tensor: ...


def execute(
    runner: Runner, sampler: Choose, scheduled: Sequence[ScheduledRequest], block_size: int
) -> dict[Request, SampledToken]:
    """The data plane of a step: scores from the runner, then a token for each request that has caught up."""
    if not scheduled:
        return {}
    logits = runner.execute(scheduled, block_size)  # [rows, vocab_size]
    counts = [num_wanted_rows(item) for item in scheduled]
    ends = list(accumulate(counts))
    for item, count, end in zip(scheduled, counts, ends):
        if item.request.sampling_params.prompt_logprobs is not None:
            record_prompt_logprobs(item, logits[end - count : end])
    last_rows = {item.request: end - 1 for item, end in zip(scheduled, ends) if item.samples}
    if not last_rows:
        return {}
    tokens = sampler(logits if len(last_rows) == len(logits) else logits[[*last_rows.values()]], [*last_rows])
    return dict(zip(last_rows, tokens, strict=True))


def record_prompt_logprobs(item: ScheduledRequest, logits: Tensor) -> None:
    """Logprobs of the prompt tokens that these positions predict; the first token has none. logits [n, vocab]."""
    request = item.request
    known = request.prompt_logprobs
    known += [] if known else [None]
    start = len(known) - 1  # the position that predicts the first prompt token still missing
    end = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
    if start < end:
        targets = request.prompt_token_ids[start + 1 : end + 1]
        count = request.sampling_params.prompt_logprobs
        known += top_logprobs(logits[start - item.start : end - item.start], targets, [count] * len(targets))


class EngineCore:
    """Moves the scheduled requests forward by one step, and ends requests in every part that knows them."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, outputs: OutputProcessor, sampler: Choose,
        trace: Trace | None, clock: Callable[[], float],
    ):
        self.runner, self.scheduler, self.outputs, self.sampler = runner, scheduler, outputs, sampler
        self.trace, self.clock = trace, clock

    def advance(self) -> list[Request]:
        """Schedule, execute, update; returns the requests that gained a token or ended."""
        started = self.clock()
        output = self.scheduler.schedule()
        if not output.scheduled and self.outputs.groups:
            raise EngineError(f"no request can run: {output.obstacle}")
        for item in output.scheduled:
            times = item.request.times
            times.first_scheduled = started if times.first_scheduled is None else times.first_scheduled
        try:
            sampled = execute(self.runner, self.sampler, output.scheduled, self.scheduler.allocator.block_size)
        except Exception as error:
            sampled, touched = {}, self.doomed(output)
            for request in touched:
                self.finish(request, "error", error)
        else:
            self.scheduler.update(output)
            touched = list(sampled)
            for request, token in sampled.items():
                self.add_token(request, token)
        if self.trace is not None:
            tokens = {request.request_id: token.token_id for request, token in sampled.items()}
            self.trace.record(self.scheduler, output, tokens, touched, self.clock() - started)
        return touched

    def doomed(self, output: SchedulerOutput) -> list[Request]:
        """Who ends with a step that failed: those in it, or all if the runner has failed for good."""
        if getattr(self.runner, "failure", None) is not None:
            return [*self.scheduler.running, *self.scheduler.waiting]
        return [item.request for item in output.scheduled]

    def add_token(self, request: Request, token: SampledToken) -> None:
        """If the text of one answer fails, that answer ends with the error; the others go on."""
        if request.finished:
            return  # aborted while the step ran
        try:
            reason = self.outputs.add_token(request, token)
        except Exception as error:
            self.finish(request, "error", error)
        else:
            if reason:
                self.finish(request, reason)

    def finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        if not request.finished:  # a request ends once: within a step, it may have been aborted before
            self.scheduler.finish(request, reason)
            self.outputs.finish(request, error)


class Engine(EngineCore):
    """Serves any number of requests at once; `step()` moves all of them forward."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, tokenizer: TextCodec, limits: RequestLimits,
        sampler: Choose | None = None, trace: Trace | None = None, seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(runner, scheduler, OutputProcessor(clock), sampler or Sampler(), trace, clock)
        self.tokenizer, self.limits = tokenizer, limits
        self.inputs = InputProcessor(tokenizer, limits, scheduler.check_fits, seed, clock)

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None,
        priority: int = 0, cache_salt: str = "",
    ) -> None:
        """Queue a prompt (text or token ids); raises InvalidRequestError and changes nothing if refused."""
        if isinstance(request_id, str) and request_id in self.groups:
            raise InvalidRequestError("request_id", request_id, "a new, non-empty string")
        params = SamplingParams() if sampling_params is None else sampling_params
        group = self.inputs.process(request_id, prompt, params, priority, cache_salt)
        self.outputs.add(group)
        try:
            for answer in group.answers:
                self.scheduler.add(answer.request)
        except BaseException:
            self.abort(request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained a token or ended.

        If the model or the sampler raises, the requests of that step end with finish_reason "error";
        everything else goes on.
        """
        return self.outputs.report(self.advance())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free at once. Unknown ids are ignored."""
        if request_id not in self.groups:
            return None
        requests = [answer.request for answer in self.groups[request_id].answers]
        for request in requests:
            self.finish(request, "abort")
        return self.outputs.report(requests)[0]

    @property
    def groups(self) -> dict[str, RequestGroup]:
        """The callers' requests that have not ended, by id."""
        return self.outputs.groups

    def has_unfinished_requests(self) -> bool:
        return bool(self.groups)

    def shutdown(self) -> None:
        """Release what the runner holds outside this process; an engine without such a runner has nothing to do."""
        getattr(self.runner, "shutdown", lambda: None)()
