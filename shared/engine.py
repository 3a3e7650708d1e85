"""The loop: schedule, run the model, sample, update, report. Every part is passed in."""
from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from shared.batch import num_wanted_rows
from shared.errors import EngineError, InvalidRequestError
from shared.output import Answer, Detokenizer, OutputText, RequestGroup, RequestOutput
from shared.request import Request, RequestLimits, RequestTimes
from shared.sampling import SampledToken, Sampler, SamplingState, top_logprobs
from shared.sampling_params import SamplingParams, check_integer
from shared.scheduler import ScheduledRequest, Scheduler
from shared.trace import Trace

Choose = Callable[[Tensor, Sequence[SamplingState]], list[SampledToken]]


class Runner(Protocol):
    """What the engine needs of the data plane."""

    def execute(self, scheduled: Sequence[ScheduledRequest], block_size: int) -> Tensor: ...


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    eos_token_ids: Sequence[int]

    def encode(self, text: str) -> list[int]: ...

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer: ...


class Engine:
    """Serves any number of requests at once; `step()` moves all of them forward."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: TextCodec,
        limits: RequestLimits,
        sampler: Choose | None = None,
        trace: Trace | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.runner, self.scheduler, self.tokenizer, self.limits = runner, scheduler, tokenizer, limits
        self.sampler, self.trace, self.clock = sampler or Sampler(), trace, clock
        self.groups: dict[str, RequestGroup] = {}
        self._answers: dict[Request, Answer] = {}
        self._random = random.Random(seed)  # draws a seed for each request that brings none

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue a prompt (text or token ids); raises InvalidRequestError and changes nothing if refused."""
        params = SamplingParams() if sampling_params is None else sampling_params
        self._check_arguments(request_id, prompt, params, priority, cache_salt)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        max_tokens, eos = self.limits.check(ids, params), frozenset(self.tokenizer.eos_token_ids)
        self.scheduler.check_fits(len(ids) + max_tokens)
        group = RequestGroup(request_id, prompt if isinstance(prompt, str) else None)
        for index, seed in enumerate(self._seeds(params)):
            name = request_id if params.n == 1 else f"{request_id}.{index}"
            times = RequestTimes(arrival=self.clock())
            request = Request(name, ids, params, max_tokens, seed, eos, priority, cache_salt, times)
            detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens)
            text = OutputText(detokenizer, params.stop, params.include_stop_str_in_output)
            group.answers.append(Answer(request, text, group))
        for answer in group.answers:
            self.scheduler.add(answer.request)
            self._answers[answer.request] = answer
        self.groups[request_id] = group

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained a token or ended.

        If the model or the sampler raises, the requests of that step end with finish_reason "error";
        everything else goes on.
        """
        started = self.clock()
        output = self.scheduler.schedule()
        if not output.scheduled and self.groups:
            raise EngineError(f"no request can run: {output.obstacle}")
        try:
            sampled = self._execute(output.scheduled)
        except Exception as error:
            sampled, touched = {}, [item.request for item in output.scheduled]
            for request in touched:
                self._finish(request, "error", error)
        else:
            self.scheduler.update(output)
            touched = list(sampled)
            for request, token in sampled.items():
                self._add_token(request, token)
        if self.trace is not None:
            tokens = {request.request_id: token.token_id for request, token in sampled.items()}
            self.trace.record(self.scheduler, output, tokens, touched, self.clock() - started)
        return self._report(touched)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free at once. Unknown ids are ignored."""
        if request_id not in self.groups:
            return None
        unfinished = [answer.request for answer in self.groups[request_id].answers if not answer.request.finished]
        for request in unfinished:
            self._finish(request, "abort")
        return self._report(unfinished)[0]

    def has_unfinished_requests(self) -> bool:
        return bool(self.groups)

    def _execute(self, scheduled: Sequence[ScheduledRequest]) -> dict[Request, SampledToken]:
        """Score the wanted positions, then choose a token for each request that has caught up."""
        if not scheduled:
            return {}
        now = self.clock()
        for item in scheduled:
            times = item.request.times
            times.first_scheduled = now if times.first_scheduled is None else times.first_scheduled
        logits = self.runner.execute(scheduled, self.scheduler.allocator.block_size)
        counts = [num_wanted_rows(item) for item in scheduled]
        ends = list(accumulate(counts))
        for item, count, end in zip(scheduled, counts, ends):
            if item.request.sampling_params.prompt_logprobs is not None:
                record_prompt_logprobs(item, logits[end - count : end])
        last_rows = [end - 1 for item, end in zip(scheduled, ends) if item.samples]
        requests = [item.request for item in scheduled if item.samples]
        if not requests:
            return {}
        tokens = self.sampler(logits if len(last_rows) == len(logits) else logits[last_rows], requests)
        return dict(zip(requests, tokens))

    def _add_token(self, request: Request, token: SampledToken) -> None:
        """Record a sampled token; the request ends if the token, its text or the length says so."""
        times = request.times
        times.last_token = self.clock()
        times.first_token = times.last_token if times.first_token is None else times.first_token
        if token.logprobs is not None:
            request.logprobs.append(token.logprobs)
        try:
            reason = self._answers[request].add_token(token.token_id)
        except Exception as error:
            self._finish(request, "error", error)
        else:
            if reason:
                self._finish(request, reason)

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        self.scheduler.finish(request, reason)
        request.times.finished = self.clock()
        answer = self._answers[request]
        answer.text.release()
        answer.error = None if error is None else f"{type(error).__name__}: {error}"

    def _report(self, touched: Sequence[Request]) -> list[RequestOutput]:
        """One output for each caller's request among those that changed; finished ones are forgotten."""
        groups = {id(group): group for group in (self._answers[request].group for request in touched)}
        outputs = [group.output() for group in groups.values()]
        for output in outputs:
            if output.finished:
                for answer in self.groups.pop(output.request_id).answers:
                    del self._answers[answer.request]
        return outputs

    def _seeds(self, params: SamplingParams) -> list[int]:
        """The seed of each of the n answers: seed + index, as in vLLM; without one, from a fresh draw."""
        first = self._random.getrandbits(62) if params.seed is None else params.seed
        return [(first + index + 2**63) % 2**64 - 2**63 for index in range(params.n)]

    def _check_arguments(self, request_id, prompt, params, priority, cache_salt) -> None:
        if not isinstance(request_id, str) or not request_id or request_id in self.groups:
            raise InvalidRequestError("request_id", request_id, "a new, non-empty string")
        if not isinstance(prompt, (str, list, tuple)):
            raise InvalidRequestError("prompt", prompt, "a string or a list of token ids")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("sampling_params", params, "a SamplingParams")
        if not isinstance(cache_salt, str):
            raise InvalidRequestError("cache_salt", cache_salt, "a string")
        check_integer("priority", priority, -(2**31), 2**31)


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
