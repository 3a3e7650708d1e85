"""Requests of the API become requests of the engine; its outputs become a response or a stream of events."""
from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from shared.async_engine import AsyncEngine, EngineStoppedError, QueueFullError, RequestOutputCollector
from shared.engine import Engine
from shared.errors import EngineError, InvalidRequestError
from shared.metrics import EngineMetrics
from shared.openai_api import ChatRequest, CompletionRequest
from shared.openai_response import Writer
from shared.output import RequestOutput
from shared.sampling_params import SamplingParams


class OverloadedError(EngineError):
    """More requests are open than the server takes, whether or not they have reached the engine."""


STATUS = {InvalidRequestError: 400, QueueFullError: 429, EngineStoppedError: 503, OverloadedError: 503}  # others: 500
CODES = {400: "invalid_value", 401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed",
         408: "request_timeout", 413: "body_too_large", 429: "queue_full", 503: "shutting_down",
         OverloadedError: "overloaded"}  # fmt: skip
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error, in OpenAI's shape. What nobody foresaw is not told to the client."""
    status, message, param = 500, "internal error", getattr(error, "field", None)
    if isinstance(error, EngineError):
        status, message = next((STATUS[kind] for kind in STATUS if isinstance(error, kind)), 500), str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or "body"
        status, message = 400, f"{param}: {first['msg']}"
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    code = CODES.get(type(error), CODES.get(status))
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def error_response(request: Request | None, error: Exception) -> Response:
    status, body = describe(error)
    headers = {**HEADERS.get(status, {}), **(getattr(error, "headers", None) or {})}  # a 405 names what is allowed
    return Response(json.dumps(body), status, headers, "application/json")


async def stop_accepting(servers: Iterable[asyncio.Server]) -> None:
    """Let who was accepted become a connection, which takes two rounds of the loop. asyncio never closes whom it
    accepts in the round in which the listening socket closes.
    """
    if sys.platform != "win32":  # whose loop has no readers
        for listener in [each for server in servers for each in server.sockets]:
            asyncio.get_running_loop().remove_reader(listener)
    for _ in range(2):
        await asyncio.sleep(0)


class Service:
    """Takes the requests of the API to one engine, and its outputs back."""

    def __init__(self, engine: Engine, model_name: str, max_waiting: int = 256):
        self.model_name, self.tokenizer = model_name, engine.tokenizer
        self.metrics = EngineMetrics(engine)
        self.engine = AsyncEngine(engine, max_waiting, self.metrics.observe)
        self.card = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "zero-to-engine",
                     "max_model_len": engine.limits.max_model_len}  # fmt: skip

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            raise HTTPException(404, f"there is no model {name!r} here; this server has {self.model_name!r}")

    async def answer(self, body: CompletionRequest | ChatRequest, kind: type[Writer], request: Request) -> Response:
        """Queue all prompts of a request, then answer with a stream or with the whole."""
        self.check_model(body.model)
        params, include_usage = body.sampling_params(), body.include_usage
        prompts = await asyncio.to_thread(body.prompt_ids, self.tokenizer)
        collectors = await self._submit(prompts, params, body.priority or 0, body.cache_salt or "")
        writer = kind(self.model_name, params, self.tokenizer)
        watcher = asyncio.create_task(abort_on_disconnect(request, collectors))
        if body.stream:
            events = write_events(collectors, writer, include_usage, watcher)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            outputs = await final_outputs(collectors)
            return Response(writer.whole(outputs).model_dump_json(), media_type="application/json")
        finally:
            release(collectors, watcher)

    async def _submit(
        self, prompts: list[list[int]], params: SamplingParams, priority: int, cache_salt: str
    ) -> list[RequestOutputCollector]:
        """All prompts, or none of them and the first error."""
        results = await asyncio.gather(
            *(self.engine.add_request(uuid.uuid4().hex, ids, params, priority, cache_salt) for ids in prompts),
            return_exceptions=True,
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            release([result for result in results if isinstance(result, RequestOutputCollector)])
            raise errors[0]
        return results


async def merge(collectors: Sequence[RequestOutputCollector]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of several requests as they come, each with the place of its request."""
    pending = {asyncio.ensure_future(collector.__anext__()): i for i, collector in enumerate(collectors)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, output = pending.pop(task), task.result()
                yield index, output
                if not output.finished:
                    pending[asyncio.ensure_future(collectors[index].__anext__())] = index
    finally:
        for task in pending:
            task.cancel()


async def write_events(
    collectors: Sequence[RequestOutputCollector], writer: Writer, include_usage: bool, watcher: asyncio.Task
) -> AsyncIterator[str]:
    """Server-sent events. A stream that does not end with [DONE] is not complete."""
    latest: dict[int, RequestOutput] = {}
    try:
        async for index, output in merge(collectors):
            latest[index] = check_outcome(output)
            for chunk in writer.chunks(index, output):
                yield f"data: {chunk.model_dump_json()}\n\n"
        if include_usage:
            yield f"data: {writer.usage_chunk(list(latest.values())).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield f"data: {json.dumps(describe(error)[1])}\n\n"
        if not isinstance(error, EngineError):
            raise  # for the log
    finally:
        release(collectors, watcher)


async def final_outputs(collectors: Sequence[RequestOutputCollector]) -> list[RequestOutput]:
    """The last output of each request, in their order."""
    latest: dict[int, RequestOutput] = {}
    async for index, output in merge(collectors):
        latest[index] = check_outcome(output)
    return [latest[index] for index in range(len(collectors))]


def check_outcome(output: RequestOutput) -> RequestOutput:
    """Raise for an answer that is not whole: the model failed on it, or it was cut off."""
    for answer in output.outputs:
        if answer.finish_reason == "error":
            raise EngineError(answer.error)
        if answer.finish_reason == "abort":
            raise EngineStoppedError("the answer was cut off: the server is shutting down")
    return output


async def abort_on_disconnect(request: Request, collectors: Sequence[RequestOutputCollector]) -> None:
    """Wait until the client has gone; nobody reads the answer then, so nobody should compute it."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    release(collectors)


def release(collectors: Sequence[RequestOutputCollector], watcher: asyncio.Task | None = None) -> None:
    """Abort what is unfinished, and stop watching."""
    for collector in collectors:
        collector.close()
    if watcher is not None:
        watcher.cancel()


class IdleConnections:
    """Ends connections without a request; uvicorn waits for ever for who sends none, or a byte at a time."""

    def __init__(self, seconds: float = 30.0):
        self.seconds, self.since = seconds, {}

    def close(self, connections: Iterable[Any]) -> None:
        """Called several times a second with uvicorn's connections, each with its request in `cycle`."""
        now = time.monotonic()
        idle = [each for each in connections if each.cycle is None or each.cycle.response_complete]
        self.since = {each: self.since.get(each, now) for each in idle}
        for connection, since in self.since.items():
            if now - since > self.seconds:
                connection.transport.close()
