"""OpenAI's wire format, the way out: answers as JSON, whole or in chunks."""
from __future__ import annotations

import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from shared.output import CompletionOutput, RequestOutput
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.sampling import Logprob
    from shared.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Usage:
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(answer.num_tokens for output in outputs for answer in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
                   prompt_tokens_details={"cached_tokens": cached})  # fmt: skip


class Choice(BaseModel):
    """What every choice has; finish_reason is null in all chunks but the last one of a choice."""

    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CompletionChoice(Choice):
    text: str


class ChatChoice(Choice):
    message: dict[str, str]


class ChatDelta(Choice):
    delta: dict[str, str]


class GenerationResponse(BaseModel):
    """A whole response, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice | ChatChoice | ChatDelta]
    usage: Usage | None = None


class Writer:
    """Writes the answers of one completion request. Answer i of prompt p is choice p * n + i."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, params: SamplingParams, tokenizer: Tokenizer):
        self.model, self.n, self.top_logprobs, self.tokenizer = model, params.n, params.logprobs, tokenizer
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._tokens: dict[int, int] = {}  # choice -> tokens written; absent before its first chunk
        self._ended: set[int] = set()
        self._offsets: dict[int, TextOffsets] = defaultdict(TextOffsets)

    def whole(self, outputs: Sequence[RequestOutput]) -> GenerationResponse:
        """The finished answers of all prompts."""
        choices = [self.choice(p * self.n + answer.index, answer)
                   for p, output in enumerate(outputs) for answer in output.outputs]  # fmt: skip
        return self._response(self.whole_object, choices, Usage.of(outputs))

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[GenerationResponse]:
        """A chunk for each answer that has grown or ended since its last chunk; an ended one is written no more."""
        for answer in output.outputs:
            index = prompt_index * self.n + answer.index
            grown = answer.new_text or (answer.logprobs and answer.num_tokens > self._tokens.get(index, 0))
            if index not in self._ended and (grown or answer.finish_reason):
                if answer.finish_reason:
                    self._ended.add(index)
                yield self._response(self.chunk_object, [self.delta(index, answer)])

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> GenerationResponse:
        return self._response(self.chunk_object, [], Usage.of(outputs))

    def choice(self, index: int, answer: CompletionOutput) -> Choice:
        logprobs = self.logprobs(index, answer)
        return CompletionChoice(index=index, text=answer.text, logprobs=logprobs, finish_reason=answer.finish_reason)

    def delta(self, index: int, answer: CompletionOutput) -> Choice:
        return self.choice(index, answer).model_copy(update={"text": answer.new_text})

    def logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        """Parallel lists over the tokens not written yet, as the older API has them."""
        start = self._advance(index, answer)
        if answer.logprobs is None:
            return None
        rows = list(zip(answer.token_ids[start:], answer.logprobs[start:]))
        spelled = [self.tokenizer.token_bytes(token) for token, _ in rows]
        likely = [{token_name(self.tokenizer.token_bytes(other)): finite(found.logprob)
                   for other, found in row.items()} for _, row in rows]  # fmt: skip
        return {"tokens": [token_name(data) for data in spelled], "top_logprobs": likely,
                "token_logprobs": [finite(row[token].logprob) for token, row in rows],
                "text_offset": [self._offsets[index].push(data) for data in spelled]}  # fmt: skip

    def _advance(self, index: int, answer: CompletionOutput) -> int:
        """Tokens of this choice that were written before; those of `answer` count as written from now on."""
        start, self._tokens[index] = self._tokens.get(index, 0), answer.num_tokens
        return start

    def _response(self, kind: str, choices: list, usage: Usage | None = None) -> GenerationResponse:
        return GenerationResponse(
            id=self.id, object=kind, created=self.created, model=self.model, choices=choices, usage=usage)


class ChatWriter(Writer):
    """Writes the answers of one chat request."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, answer: CompletionOutput) -> ChatChoice:
        return ChatChoice(index=index, message={"role": "assistant", "content": answer.text},
                          logprobs=self.logprobs(index, answer), finish_reason=answer.finish_reason)  # fmt: skip

    def delta(self, index: int, answer: CompletionOutput) -> ChatDelta:
        role = {} if index in self._tokens else {"role": "assistant"}
        return ChatDelta(index=index, delta={**role, "content": answer.new_text},
                         logprobs=self.logprobs(index, answer), finish_reason=answer.finish_reason)  # fmt: skip

    def logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        """One entry for each token not written yet; top_logprobs has as many as were asked for."""
        start = self._advance(index, answer)
        if answer.logprobs is None:
            return None
        rows = zip(answer.token_ids[start:], answer.logprobs[start:])
        return {"content": [self._entry(token, row) for token, row in rows]}

    def _entry(self, token: int, row: Mapping[int, Logprob]) -> dict[str, Any]:
        best = sorted(row, key=lambda other: row[other].rank)[: self.top_logprobs]  # row has the chosen one too
        return {**self._named(token, row), "top_logprobs": [self._named(other, row) for other in best]}

    def _named(self, token: int, row: Mapping[int, Logprob]) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": token_name(data), "logprob": finite(row[token].logprob), "bytes": list(data)}


def token_name(data: bytes) -> str:
    """The text of one token; a part of a character is spelled in bytes, so that no two are alike."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffsets:
    """Where each token of an answer begins in its text, in characters."""

    def __init__(self) -> None:
        self.utf8, self.length = codecs.getincrementaldecoder("utf-8")("replace"), 0

    def push(self, token: bytes) -> int:
        start, self.length = self.length, self.length + len(self.utf8.decode(token))
        return start


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
