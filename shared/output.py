"""What a caller gets back: text that is never taken back, tokens, reasons, times. Pure Python."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from shared.request import Request, RequestTimes

if TYPE_CHECKING:
    from shared.sampling import Logprob


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that this token makes final."""

    def flush(self) -> str:
        """What was still held when the tokens ended."""


class OutputText:
    """The text of one request. A stop string ends it, wherever the borders between tokens fall."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), include_stop: bool = False):
        self.detokenizer, self.stop, self.include_stop = detokenizer, stop, include_stop
        self.text = ""  # may be shown: no stop string can begin in it any more
        self.held = ""  # might be the beginning of a stop string

    def push(self, token_id: int, check_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, if any."""
        return self._add(self.detokenizer.push(token_id), check_stop)

    def finish(self, check_stop: bool = True) -> str | None:
        """No more tokens: release what was held, unless the last characters complete a stop string."""
        stop = self._add(self.detokenizer.flush(), check_stop)
        self.release()
        return stop

    def release(self) -> None:
        """Show what was held back; used when a request ends without its stop string."""
        self.text, self.held = self.text + self.held, ""

    def _add(self, new: str, check_stop: bool) -> str | None:
        if not self.stop:
            self.text += new
            return None
        known = len(self.held)
        self.held += new
        found = first_stop(self.held, self.stop, known) if check_stop else None
        if found is None:
            cut = len(self.held) - held_length(self.held, self.stop)
            self.text, self.held = self.text + self.held[:cut], self.held[cut:]
            return None
        start, stop = found
        self.text += self.held[: start + len(stop) if self.include_stop else start]
        self.held = ""
        return stop


def first_stop(text: str, stops: Sequence[str], known: int = 0) -> tuple[int, str] | None:
    """Where a stop string starts, and which: the one complete first, in what follows `known` characters."""
    starts = ((text.find(stop, max(0, known + 1 - len(stop))), stop) for stop in stops)
    found = [(start, stop) for start, stop in starts if start >= 0]
    return min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]), default=None)


def held_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of text with which a stop string begins, and is not yet complete."""
    starts = (range(max(0, len(text) - len(stop) + 1), len(text)) for stop in stops)
    firsts = (next((start for start in places if stop.startswith(text[start:])), len(text))
              for places, stop in zip(starts, stops))  # fmt: skip
    return len(text) - min(firsts, default=len(text))


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One answer. `text` is everything so far, `new_text` what this step added to it.

    The lists of the request only grow, so its first num_tokens tokens are copied when somebody asks for them:
    a step costs the same however long the answer is.
    """

    index: int
    text: str
    new_text: str
    num_tokens: int
    finish_reason: str | None  # stop, length, abort or error; None while it runs
    stop_reason: int | str | None
    error: str | None
    growing_token_ids: list[int] = field(compare=False)
    growing_logprobs: list[dict[int, Logprob]] | None = field(compare=False)

    def __repr__(self) -> str:
        names = "index", "text", "new_text", "token_ids", "logprobs", "finish_reason", "stop_reason", "error"
        return f"CompletionOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @cached_property
    def token_ids(self) -> list[int]:
        return self.growing_token_ids[: self.num_tokens]

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return None if self.growing_logprobs is None else self.growing_logprobs[: self.num_tokens]

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' logprobs."""
        if self.logprobs is None:
            return None
        return sum(row[token].logprob for row, token in zip(self.logprobs, self.token_ids))


@dataclass(frozen=True)
class RequestOutput:
    """The state of one prompt's answers (n of them) after a step; final once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: list[RequestTimes]  # one for each answer


@dataclass
class Answer:
    """One of the n requests of a prompt, with its growing text."""

    request: Request
    text: OutputText
    group: RequestGroup
    num_shown: int = 0  # characters already reported as new_text
    error: str | None = None

    def add_token(self, token_id: int) -> str | None:
        """Returns the finish reason, if the token, the length or a stop string ends the answer."""
        request, params = self.request, self.request.sampling_params
        reason = request.append(token_id)
        check_stop = len(request.output_token_ids) >= params.min_tokens
        if reason == "stop" and not params.include_stop_str_in_output:
            stop = None  # the end token is in token_ids, but not in the text
        else:
            stop = self.text.push(token_id, check_stop)
        if reason and stop is None:
            stop = self.text.finish(check_stop)
        if stop is None:
            return reason
        request.stop_reason = stop
        return "stop"

    def completion(self, index: int) -> CompletionOutput:
        request, text, start = self.request, self.text.text, self.num_shown
        self.num_shown = len(text)
        return CompletionOutput(
            index, text, text[start:], len(request.output_token_ids),
            request.finish_reason, request.stop_reason, self.error, request.output_token_ids,
            None if request.sampling_params.logprobs is None else request.logprobs,
        )


@dataclass
class RequestGroup:
    """A caller's request: one prompt, n answers."""

    request_id: str
    prompt: str | None
    answers: list[Answer] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None  # a copy for the caller, who may change it

    @property
    def finished(self) -> bool:
        return all(answer.request.finished for answer in self.answers)

    def output(self) -> RequestOutput:
        requests = [answer.request for answer in self.answers]
        first = requests[0]
        self.prompt_token_ids = self.prompt_token_ids or list(first.prompt_token_ids)
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids,
            None if first.sampling_params.prompt_logprobs is None else list(first.prompt_logprobs),
            [answer.completion(i) for i, answer in enumerate(self.answers)],
            self.finished, first.num_cached_tokens, [RequestTimes(**vars(request.times)) for request in requests],
        )
