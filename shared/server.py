"""The HTTP side of the engine: `python -m shared.server --model smollm2-135m --port 8000`."""
from __future__ import annotations

import argparse
import asyncio
import gc
import hmac
import os
import sys
import threading
import time
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from shared.engine import Engine
from shared.engine_args import add_engine_arguments, build_engine, engine_args
from shared.errors import EngineError, InvalidRequestError
from shared.openai_api import ChatRequest, CompletionRequest
from shared.openai_response import ChatWriter, Writer
from shared.sampling_params import check_integer
from shared.serving import IdleConnections, OverloadedError, Service, error_response, stop_accepting

MAX_BODY_BYTES = 4 * 2**20
LIMIT_CONCURRENCY = 512
OPEN_PATHS = ("/health", "/metrics")  # for probes, which have no key
LOOPBACK = ("127.0.0.1", "localhost", "::1")
UVICORN = {"log_level": "warning", "timeout_graceful_shutdown": 0.5, "lifespan": "off", "ws": "none"}


class Gate:
    """ASGI middleware: the key first, then room, then size and pace of the body, before anything is parsed."""

    body_seconds = 60.0

    def __init__(self, app: Any, api_key: str | None, max_body_bytes: int, limit_concurrency: int):
        self.app, self.api_key = app, None if api_key is None else api_key.strip().encode()
        self.max_body_bytes, self.limit_concurrency, self.num_open = max_body_bytes, limit_concurrency, 0

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        if (refusal := self._refusal(scope)) is not None:
            return await (await error_response(None, refusal))(scope, receive, send)
        self.num_open += 1
        try:
            await self.app(scope, self._limited(receive), send)
        finally:
            self.num_open -= 1

    def _refusal(self, scope: dict) -> Exception | None:
        """The key is compared in constant time: how long it takes says nothing about it."""
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        is_theirs = scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.api_key or b"")
        if self.api_key is not None and not is_theirs:
            return HTTPException(401, "this server needs a valid API key")
        if self.num_open >= self.limit_concurrency:
            return OverloadedError(f"{self.num_open} requests are open, of at most {self.limit_concurrency}")
        return None

    def _limited(self, receive: Any) -> Any:
        """receive, but a body that is too long, or too long on its way, is an error."""
        received, more, deadline = 0, True, time.monotonic() + self.body_seconds

        async def limited() -> dict:
            nonlocal received, more
            message = await (asyncio.wait_for(receive(), deadline - time.monotonic()) if more else receive())
            received, more = received + len(message.get("body", b"")), message.get("more_body", False)
            return message

        async def checked() -> dict:
            try:
                message = await limited()
                while received > self.max_body_bytes and more:  # who still sends does not listen
                    message = await limited()
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body took longer than {self.body_seconds:g} seconds") from None
            if received > self.max_body_bytes:
                raise HTTPException(413, f"the body is longer than {self.max_body_bytes} bytes")
            return message

        return checked


def create_app(
    engine: Engine, model_name: str, *, api_key: str | None = None, max_waiting: int = 256,
    max_body_bytes: int = MAX_BODY_BYTES, limit_concurrency: int = LIMIT_CONCURRENCY,
) -> FastAPI:
    """The app around an engine. Its AsyncEngine is `app.state.service.engine`; whoever made the app shuts it down."""
    check_integer("max_body_bytes", max_body_bytes, 1)
    check_integer("limit_concurrency", limit_concurrency, 1)
    if api_key is not None and not api_key.strip():
        raise InvalidRequestError("api_key", api_key, "something that others do not know, or left out")
    app = FastAPI(title="Zero to Engine", docs_url=None, redoc_url=None)
    app.state.service = service = Service(engine, model_name, max_waiting)
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=max_body_bytes, limit_concurrency=limit_concurrency)
    for kind in (EngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, error_response)

    @app.get("/v1/models")
    async def list_models() -> dict:
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict:
        service.check_model(name)
        return service.card

    @app.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await service.answer(body, Writer, request)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await service.answer(body, ChatWriter, request)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.engine.error is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4")

    return app


class Server(uvicorn.Server):
    """uvicorn, which ends the engine before it closes the connections: streams finish, or hear why they don't."""

    def __init__(self, app: FastAPI, host: str = "127.0.0.1", port: int = 8000, shutdown_timeout: float = 1.0):
        super().__init__(uvicorn.Config(app, host=host, port=port, **UVICORN))
        self.engine, self.shutdown_timeout, self.idle = app.state.service.engine, shutdown_timeout, IdleConnections()

    @property
    def address(self) -> str:
        """Where it listens, once it has started; port 0 has become a free one."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread():
            print(f"Serving on {self.address}/v1   (Ctrl-C ends it)", flush=True)

    async def on_tick(self, counter: int) -> bool:
        self.idle.close(self.server_state.connections)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        await asyncio.to_thread(self.engine.shutdown, self.shutdown_timeout)
        await stop_accepting(self.servers)
        await super().shutdown(sockets)

    def start(self) -> str:
        """Serve from a thread of this process, for notebooks and tests; returns the address."""
        self.thread = threading.Thread(target=self.run, name="server", daemon=True)
        self.thread.start()
        while not self.started:
            if not self.thread.is_alive():
                raise EngineError("the server did not start; is the port taken?")
            time.sleep(0.01)
        return self.address

    def stop(self) -> None:
        """What Ctrl-C does; returns when the engine, the server and their threads have ended."""
        self.should_exit = True
        self.thread.join()


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags of the server, and those of the engine: one for each field of EngineArgs."""
    parser = argparse.ArgumentParser(prog="python -m shared.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in; set a key then")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", default=os.environ.get("ZERO_TO_ENGINE_API_KEY"),
                        help="default: the variable ZERO_TO_ENGINE_API_KEY")  # fmt: skip
    parser.add_argument("--served-model-name", help="what clients call the model; default: the value of --model")
    parser.add_argument("--max-waiting", type=int, default=256, help="answers that may wait beside those that run")
    parser.add_argument("--max-body-bytes", type=int, default=MAX_BODY_BYTES, help="a longer request is refused")
    parser.add_argument("--limit-concurrency", type=int, default=LIMIT_CONCURRENCY,
                        help="requests open at once; beyond it they are refused with 503")  # fmt: skip
    parser.add_argument("--shutdown-timeout", type=float, default=1.0, help="seconds that running answers get to end")
    add_engine_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    if args.api_key is None and args.host not in LOOPBACK:
        print(f"Anybody who reaches {args.host} may use this server: it has no --api-key.", file=sys.stderr)
    try:
        check_integer("port", args.port, 0, 65535)
        limits = {n: getattr(args, n) for n in ("api_key", "max_waiting", "max_body_bytes", "limit_concurrency")}
        app = create_app(build_engine(engine_args(args)), args.served_model_name or str(args.model), **limits)
        gc.freeze()  # what is loaded now stays: no collection looks at it again, nor does the end
        Server(app, args.host, args.port, args.shutdown_timeout).run()
    except EngineError as error:
        print(f"The server cannot start. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("The server has stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
