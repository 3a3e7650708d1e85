"""One request: what was asked, what has been produced, how far the cache has caught up. Pure Python."""
from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidRequestError
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.sampling import Logprob


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # never run yet
    RUNNING = "running"  # holds cache slots, advances at every step
    PREEMPTED = "preempted"  # lost its slots, keeps its tokens, waits to catch up again
    FINISHED = "finished"


@dataclass
class RequestTimes:
    """Seconds on the engine's clock at which things happened to a request; None if not yet."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    def time_per_output_token(self, num_tokens: int) -> float | None:
        """Mean gap between tokens after the first; None below two tokens."""
        if self.first_token is None or self.last_token is None or num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (num_tokens - 1)


@dataclass(eq=False)
class Request:
    """What a loop over tokens must remember once it serves more than one caller. A scheduler lives on two
    counts: `num_computed_tokens` of the `num_tokens` known ones have keys and values in the cache, in the
    slots of `block_table` (which the allocator owns).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""  # requests share cached prefixes only with the same salt
    times: RequestTimes = field(default_factory=lambda: RequestTimes(arrival=0.0))
    arrival_order: int = 0  # set by the scheduler

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache when first admitted
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = [*self.prompt_token_ids, *self.output_token_ids]
        own_stops = frozenset(self.sampling_params.stop_token_ids or ())
        self.stop_token_ids = own_stops if self.sampling_params.ignore_eos else own_stops | self.eos_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens  # it can never have more

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append(self, token_id: int) -> str | None:
        """Add a sampled token; returns the finish reason if the token or the length ends the request."""
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        if token_id in self.stop_token_ids and len(self.output_token_ids) >= self.sampling_params.min_tokens:
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
            return "stop"
        return "length" if len(self.output_token_ids) >= self.max_tokens else None


@dataclass(frozen=True)
class RequestLimits:
    """What an engine can serve; a request beyond it is refused at the door."""

    vocab_size: int
    max_model_len: int  # prompt and output together

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Returns max_tokens in force; raises InvalidRequestError.

        A prompt of max_model_len tokens is refused, since it leaves no room for an answer (vLLM's boundary).
        """
        room = self.max_model_len - len(prompt_token_ids)
        if not prompt_token_ids:
            raise InvalidRequestError("prompt", "empty", "at least one token")
        if room < 1:
            limit = f"at most max_model_len - 1 = {self.max_model_len - 1} tokens"
            raise InvalidRequestError("prompt", f"{len(prompt_token_ids)} tokens", limit)
        self._check_ids("prompt_token_ids", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _check_ids(self, name: str, ids: Any) -> None:
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise InvalidRequestError(name, token, f"token ids from 0 to {self.vocab_size - 1}")
