"""`LLM`: a model, its engine, and a call that answers a list of prompts."""
from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.engine import Engine
from shared.engine_args import EngineArgs, build_engine
from shared.errors import EngineError, InvalidRequestError
from shared.output import RequestOutput
from shared.sampling_params import SamplingParams
from shared.trace import Trace
from shared.weights import DEFAULT_MODEL


class GenerationError(EngineError):
    """Some requests ended with an error; `outputs` holds those of all requests, finished ones included."""

    def __init__(self, outputs: list[RequestOutput]):
        self.outputs = outputs
        failed = {o.request_id: c.error for o in outputs for c in o.outputs if c.finish_reason == "error"}
        super().__init__(f"{len(failed)} of {len(outputs)} requests failed: {failed}")


class OutputStreams:
    """Steps an engine for several callers at once, of any thread: what others report waits until they ask."""

    def __init__(self, engine: Engine):
        self.engine, self._lock, self._count = engine, threading.RLock(), 0
        self._inboxes: dict[str, list[RequestOutput]] = {}  # of each unfinished request: where its caller looks

    @classmethod
    def of(cls, engine: Engine) -> OutputStreams:
        """One for each engine: all who step it must share it."""
        return vars(engine).setdefault("streams", cls(engine))

    def add(self, prompt: Mapping[str, Any], params: SamplingParams | None, inbox: list[RequestOutput]) -> str:
        """Queue a prompt whose outputs go to `inbox`; returns its id. Raises InvalidRequestError if it is refused."""
        with self._lock:
            while (name := str(self._count)) in self.engine.groups:
                self._count += 1  # somebody has used it on the engine itself
            self.engine.add_request(name, prompt["prompt"], params, cache_salt=prompt["cache_salt"])
            self._inboxes[name], self._count = inbox, self._count + 1
            return name

    def take(self, names: Iterable[str], inbox: list[RequestOutput]) -> list[RequestOutput]:
        """Step until one of these requests has something to report; nothing if all were aborted on the engine."""
        while True:
            with self._lock:
                if inbox or not any(name in self.engine.groups for name in names):
                    taken, inbox[:] = inbox[:], []
                    return taken
                for output in self.engine.step():
                    self._inboxes.get(output.request_id, []).append(output)
                    if output.finished:
                        self._inboxes.pop(output.request_id, None)

    def stream(
        self, prompts: Sequence[Mapping[str, Any]], params: Sequence[SamplingParams | None]
    ) -> Iterator[RequestOutput]:
        """Yield each output of these prompts; whatever is unfinished when the caller leaves is dropped."""
        names, inbox = set(), []
        try:
            for prompt, options in zip(prompts, params):
                names.add(self.add(prompt, options, inbox))
            while outputs := self.take(names, inbox):
                for output in outputs:
                    if output.finished:
                        names.remove(output.request_id)
                    yield output
        finally:
            for name in names:
                self.drop(name)

    def drop(self, name: str) -> None:
        """End a request that nobody waits for any more."""
        with self._lock:
            self.engine.abort(name)
            self._inboxes.pop(name, None)


class LLM:
    """`LLM("smollm2-135m").generate("Once upon a time")`; options are those of EngineArgs."""

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, trace: Trace | None = None, **options: Any):
        known = sorted(set(EngineArgs.__dataclass_fields__) - {"model"})
        for name in options:
            if name not in known:
                raise InvalidRequestError("option", name, f"one of {known}")
        self._use(build_engine(EngineArgs(model, **options), trace))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """The same calls, on an engine made of one's own parts."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _use(self, engine: Engine) -> None:
        self.engine, self.tokenizer, self.model = engine, engine.tokenizer, getattr(engine.runner, "model", None)
        self._streams = OutputStreams.of(engine)

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts (text or token ids, one or a list), in their order.

        Raises InvalidRequestError before anything runs if one is refused, and GenerationError, which holds
        all outputs, if a request failed on the way.
        """
        finished = [output for output in self.stream(prompts, sampling_params) if output.finished]
        outputs = sorted(finished, key=lambda output: int(output.request_id))
        if any(answer.finish_reason == "error" for output in outputs for answer in output.outputs):
            raise GenerationError(outputs)
        return outputs

    def stream(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yield each request's output whenever it grows; closing the iterator aborts what is unfinished."""
        prompts = prompt_list(prompts)
        yield from self._streams.stream(prompts, params_list(sampling_params, len(prompts)))

    def chat(self, messages: Any, sampling_params: SamplingParams | None = None) -> list[RequestOutput]:
        """Answer one conversation or a list of them; without options, up to the model's length."""
        several = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple))
        conversations = messages if several else [messages]
        prompts = [self.tokenizer.encode_chat(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params or SamplingParams(max_tokens=None))

    def shutdown(self) -> None:
        """End what the engine started outside this process; `with LLM(...) as llm:` does it too."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def prompt_list(prompts: Any) -> list[dict[str, Any]]:
    """One prompt or several, as strings, token ids or vLLM's dicts, all as {"prompt": text or ids, ...}."""
    is_list = isinstance(prompts, (list, tuple))
    if isinstance(prompts, (str, Mapping)) or (is_list and prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError("prompts", prompts, "a string, a list of token ids, or a list of those")
    return [prompt_dict(prompt if isinstance(prompt, Mapping) else {"prompt": prompt}) for prompt in prompts]


def prompt_dict(prompt: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        limit = "a dict with prompt or prompt_token_ids, and maybe cache_salt"
        raise InvalidRequestError("prompt", dict(prompt), limit)
    text_or_ids = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    return {"prompt": text_or_ids, "cache_salt": prompt.get("cache_salt", "")}


def params_list(params: Any, count: int) -> list[SamplingParams | None]:
    """The same options for all, or one for each."""
    if not isinstance(params, (list, tuple)):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError("sampling_params", f"{len(params)} of them", f"one, or {count}: one for each prompt")
    return list(params)
