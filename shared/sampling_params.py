"""How a request wants its tokens chosen and when it wants to stop. Pure Python; names are vLLM's."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOPS = 64  # every token of an answer is compared with all of them


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request; every value is checked here, so nothing later needs to.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch their filter off. seed None or -1
    draws a fresh seed. max_tokens None means up to the model's length. repetition_penalty looks at prompt
    and output, presence_penalty and frequency_penalty at the output only. logprobs and prompt_logprobs
    count the alternatives wanted beside the token itself.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._normalise()
        check_counts(self)
        check_distribution(self)
        check_stops_and_flags(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def _normalise(self) -> None:
        """One form for each meaning: tuples for lists, None for an unset seed, 0 for no top_k."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for field, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if not isinstance(value, (list, tuple, set, frozenset, type(None))):
                raise InvalidRequestError(field, value, "a list")
            object.__setattr__(self, field, tuple(value or ()))
        for field, unset, meaning in (("seed", -1, None), ("top_k", -1, 0)):
            value = getattr(self, field)
            if isinstance(value, int) and value == unset:
                object.__setattr__(self, field, meaning)
        if isinstance(self.logit_bias, Mapping):  # a copy: what the caller changes later was never checked
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))


def check_counts(params: SamplingParams) -> None:
    """The whole numbers: how many answers, tokens, alternatives."""
    check_integer("n", params.n, 1, 128)
    check_integer("top_k", params.top_k, 0)
    check_integer("min_tokens", params.min_tokens, 0)
    optional = (("max_tokens", 1, None), ("logprobs", 0, MAX_LOGPROBS), ("prompt_logprobs", 0, MAX_LOGPROBS),
                ("seed", -(2**63), 2**63 - 1))  # fmt: skip
    for field, low, high in optional:
        if getattr(params, field) is not None:
            check_integer(field, getattr(params, field), low, high)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequestError("min_tokens", params.min_tokens, f"at most max_tokens={params.max_tokens}")


def check_distribution(params: SamplingParams) -> None:
    """What reshapes the distribution. A top_p of 0 would leave nothing to draw."""
    check_number("temperature", params.temperature, 0.0, 100.0)
    check_number("top_p", params.top_p, 0.0, 1.0)
    check_number("min_p", params.min_p, 0.0, 1.0)
    check_number("presence_penalty", params.presence_penalty, -1000.0, 1000.0)
    check_number("frequency_penalty", params.frequency_penalty, -1000.0, 1000.0)
    check_number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)  # scores are divided by it
    if params.top_p == 0:
        raise InvalidRequestError("top_p", 0, "above 0")
    bias = {} if params.logit_bias is None else params.logit_bias
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias", bias, "a mapping from token id to a number")
    for token, value in bias.items():
        check_integer("logit_bias", token, 0)
        check_number("logit_bias", value, -100.0, 100.0)


def check_stops_and_flags(params: SamplingParams) -> None:
    """Stop strings, stop tokens, and the switches."""
    if len(params.stop) > MAX_STOPS:
        raise InvalidRequestError("stop", list(params.stop), f"at most {MAX_STOPS} strings")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError("stop", text, "a non-empty string")
    for token in params.stop_token_ids:
        check_integer("stop_token_ids", token, 0)
    for field in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        if not isinstance(getattr(params, field), bool):
            raise InvalidRequestError(field, getattr(params, field), "True or False")


def check_integer(field: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise InvalidRequestError unless value is a whole number in [low, high]."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(field, value, f"a whole number {limit}")


def check_number(field: str, value: Any, low: float, high: float) -> None:
    """Raise InvalidRequestError unless value is a number in [low, high]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # NaN is in no range
        raise InvalidRequestError(field, value, f"a number from {low:g} to {high:g}")
