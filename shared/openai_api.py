"""OpenAI's wire format, the way in: what clients may send. Names that OpenAI does not have are vLLM's.

pydantic checks the shape; SamplingParams and the engine check the values. A field that we would not obey is
refused, never ignored.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

from shared.errors import InvalidRequestError
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.tokenizer import Tokenizer

MAX_PROMPTS = 128


class Strict(BaseModel):
    """Unknown fields and wrong types are errors: no number from a string, no flag from a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_size(cls, data: Any) -> Any:
        """Each unknown field would be an error of its own: of millions, none is written."""
        if isinstance(data, dict) and len(data) > 100:
            raise ValueError(f"{len(data)} fields, many more than there are")
        return data


class StreamOptions(Strict):
    include_usage: bool = False


class GenerationRequest(Strict):
    """The fields that both kinds of request have. null means the same as a field that is left out."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # what is in it and in lists, SamplingParams and the engine check
    seed: int | None = None
    stop: str | list[Any] | None = None
    max_tokens: int | None = None
    user: str | None = None  # names the end user; no answer depends on it
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", self.stream_options, "left out unless stream is true")
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, **changes: Any) -> SamplingParams:
        """The given fields as SamplingParams, which knows the limits; `changes` replace them."""
        given = {name: value for name, value in self
                 if name in SamplingParams.__dataclass_fields__ and value is not None}  # fmt: skip
        if self.logit_bias is not None:
            given["logit_bias"] = token_biases(self.logit_bias)
        return SamplingParams(**{**given, **changes})


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: a prompt or several, as text or token ids."""

    prompt: str | list[Any]
    logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        return self.options()

    def prompt_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The token ids of each prompt. Long texts take a while: call it outside of the event loop."""
        several = isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], (str, list))
        prompts = self.prompt if several else [self.prompt]
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"{len(prompts)} prompts", f"at most {MAX_PROMPTS} prompts")
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


class Message(Strict):
    role: str
    content: str | list[Any]

    def plain(self) -> dict[str, str]:
        """As a chat template takes it; parts of text are joined."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        for part in self.content:
            if not isinstance(part, dict) or part != {"type": "text", "text": str(part.get("text"))}:
                raise InvalidRequestError("messages", part, "of parts like {'type': 'text', 'text': ...}")
        return {"role": self.role, "content": "".join(part["text"] for part in self.content)}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions: a conversation, answered up to the model's length unless max_tokens says less."""

    messages: Annotated[list[Message], FailFast()]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    def sampling_params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", self.top_logprobs, "left out unless logprobs is true")
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.options(logprobs=wanted, max_tokens=limit)

    def prompt_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.encode_chat([message.plain() for message in self.messages])]


def token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON has only strings for keys."""
    if not all(re.fullmatch("0|[1-9][0-9]{0,9}", token) for token in biases):
        raise InvalidRequestError("logit_bias", dict(biases), "a mapping from token ids to numbers")
    return {int(token): bias for token, bias in biases.items()}
