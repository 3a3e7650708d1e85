"""The two ends of the engine: a prompt becomes requests, sampled tokens become outputs. Pure Python."""
from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from shared.errors import InvalidRequestError
from shared.output import Answer, Detokenizer, OutputText, RequestGroup, RequestOutput
from shared.request import Request, RequestLimits, RequestTimes
from shared.sampling_params import SamplingParams, check_integer

if TYPE_CHECKING:
    from shared.sampling import SampledToken


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    eos_token_ids: Sequence[int]

    def encode(self, text: str) -> list[int]: ...

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer: ...


class InputProcessor:
    """Checks a prompt with its options, and makes the n requests that answer it."""

    def __init__(
        self,
        tokenizer: TextCodec,
        limits: RequestLimits,
        check_fits: Callable[[int], None],
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.tokenizer, self.limits, self.check_fits, self.clock = tokenizer, limits, check_fits, clock
        self._random = random.Random(seed)  # draws a seed for each request that brings none

    def process(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: int, cache_salt: str
    ) -> RequestGroup:
        """Raises InvalidRequestError, and draws no seed, if the request is refused."""
        check_arguments(request_id, prompt, params, priority, cache_salt)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        max_tokens, eos = self.limits.check(ids, params), frozenset(self.tokenizer.eos_token_ids)
        self.check_fits(len(ids) + max_tokens)
        group = RequestGroup(request_id, prompt if isinstance(prompt, str) else None)
        for index, seed in enumerate(self._seeds(params)):
            name = request_id if params.n == 1 else f"{request_id}.{index}"
            times = RequestTimes(arrival=self.clock())
            request = Request(name, ids, params, max_tokens, seed, eos, priority, cache_salt, times)
            detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens)
            text = OutputText(detokenizer, params.stop, params.include_stop_str_in_output)
            group.answers.append(Answer(request, text, group))
        return group

    def _seeds(self, params: SamplingParams) -> list[int]:
        """The seed of each of the n answers: seed + index, as in vLLM; without one, from a fresh draw."""
        first = self._random.getrandbits(62) if params.seed is None else params.seed
        return [(first + index + 2**63) % 2**64 - 2**63 for index in range(params.n)]


def check_arguments(request_id: str, prompt, params: SamplingParams, priority: int, cache_salt: str) -> None:
    """The types of a request's parts; raises InvalidRequestError. Lengths and ids are checked by RequestLimits."""
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequestError("request_id", request_id, "a new, non-empty string")
    if not isinstance(prompt, (str, list, tuple)):
        raise InvalidRequestError("prompt", prompt, "a string or a list of token ids")
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("sampling_params", params, "a SamplingParams")
    if not isinstance(cache_salt, str):
        raise InvalidRequestError("cache_salt", cache_salt, "a string")
    check_integer("priority", priority, -(2**31), 2**31)


class OutputProcessor:
    """Keeps the answers that still grow; reports those that changed, and forgets those that ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.groups: dict[str, RequestGroup] = {}
        self.answers: dict[Request, Answer] = {}

    def add(self, group: RequestGroup) -> None:
        self.groups[group.request_id] = group
        self.answers.update((answer.request, answer) for answer in group.answers)

    def add_token(self, request: Request, token: SampledToken) -> str | None:
        """Record a sampled token; returns the reason if the token, its text or the length ends the answer."""
        times = request.times
        times.last_token = self.clock()
        times.first_token = times.last_token if times.first_token is None else times.first_token
        if token.logprobs is not None:
            request.logprobs.append(token.logprobs)
        return self.answers[request].add_token(token.token_id)

    def finish(self, request: Request, error: Exception | None = None) -> None:
        """The answer has ended, by an error if one is given: nothing is held back any more."""
        request.times.finished = self.clock()
        answer = self.answers[request]
        answer.text.release()
        answer.error = None if error is None else f"{type(error).__name__}: {error}"

    def report(self, touched: Sequence[Request]) -> list[RequestOutput]:
        """One output for each caller's request among those that changed; finished ones are forgotten.

        Those that are forgotten already were aborted within the step, and reported by that.
        """
        answers = (self.answers[request] for request in touched if request in self.answers)
        groups = {id(group): group for group in (answer.group for answer in answers)}
        outputs = [group.output() for group in groups.values()]
        for output in outputs:
            if output.finished:
                for answer in self.groups.pop(output.request_id).answers:
                    del self.answers[answer.request]
        return outputs
