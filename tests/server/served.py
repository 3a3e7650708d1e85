"""An engine behind a real server on a free port, and clients of every kind: openai's, and plain sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import torch

from shared.engine import Engine
from shared.server import Server, create_app
from shared.tokenizer import check_messages
from tests.known_bugs.helpers import END, LETTERS, PIECES, PieceTokenizer, cached_engine
from tests.runtime.tiny import VOCAB, ScriptedRunner, ToyTokenizer

NAME = "tiny"
USER = [{"role": "user", "content": "ab"}]


class ToyApiTokenizer(ToyTokenizer):
    """Token i is chr(i); a conversation is the text of its last message."""

    def encode_chat(self, messages) -> list[int]:
        return self.encode(check_messages(messages)[-1]["content"])

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class PieceApiTokenizer(PieceTokenizer):
    def encode_chat(self, messages) -> list[int]:
        return self.encode(check_messages(messages)[-1]["content"])

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


class PacedRunner(ScriptedRunner):
    """Says its script; a step takes `seconds`, and counts."""

    def __init__(self, script: Sequence[int], seconds: float = 0.0, lengths: Sequence[int] | None = None, **options):
        super().__init__(script, **options)
        self.seconds, self.lengths, self.steps = seconds, lengths, 0

    def execute(self, scheduled, block_size):
        self.steps += 1
        time.sleep(self.seconds)
        logits = super().execute(scheduled, block_size) * 100  # sure at any temperature
        rows = [item.request for item in scheduled if item.samples]
        for row, request in enumerate(rows if self.lengths else ()):
            length = self.lengths[int(request.request_id.rpartition(".")[2])]
            if len(request.output_token_ids) >= length:
                logits[row] = torch.nn.functional.one_hot(torch.tensor(self.after), self.vocab_size) * 1000.0
        return logits


def scripted(*texts: str, seconds: float = 0.0, lengths: Sequence[int] | None = None, **parts) -> Engine:
    """An engine whose model says these pieces, one a token, then its end token; answer i after lengths[i]."""
    pieces = list(dict.fromkeys([*PIECES, *LETTERS, *texts]))
    size = max(VOCAB, len(pieces))
    script = [pieces.index(text) for text in texts]
    runner = PacedRunner(script, seconds, lengths, vocab_size=size, after=END)
    return cached_engine(runner=runner, tokenizer=PieceApiTokenizer(pieces), trace=False, **parts)


def toy_engine(model, **parts) -> Engine:
    return cached_engine(model, tokenizer=ToyApiTokenizer(), trace=False, **parts)


class Served:
    """A running server; `post` and `stream` are plain HTTP, `client` is OpenAI's."""

    def __init__(self, engine: Engine, **options: Any):
        self.engine = engine
        self.app = create_app(engine, NAME, **options)
        self.server = Server(self.app, port=0, shutdown_timeout=0.5)
        self.address = self.server.start()
        self.port = int(self.address.rpartition(":")[2])
        self.async_engine = self.app.state.service.engine
        self.api_key = options.get("api_key") or "none"

    @property
    def base(self) -> dict[str, Any]:
        return {"base_url": f"{self.address}/v1", "api_key": self.api_key, "max_retries": 0, "timeout": 20}

    def client(self, **changes: Any) -> openai.OpenAI:
        return openai.OpenAI(**{**self.base, **changes})

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self.base)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", self.port))
        return raw

    def send(self, path: str, body: Any, raw: socket.socket | None = None, **headers: str) -> socket.socket:
        """Send a request; HTTP/1.0, so that the answer is not chunked and ends with the connection."""
        raw = raw or self.connect()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Content_Type": "application/json", "Content_Length": str(len(data)),
                  "Authorization": f"Bearer {self.api_key}", **headers}  # fmt: skip
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        raw.sendall(f"POST {path} HTTP/1.0\r\n{head}\r\n".encode() + data)
        return raw

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and parsed JSON."""
        status, _, data = read_all(self.send(path, body, **headers))
        return status, json.loads(data)

    def get(self, path: str) -> tuple[int, str]:
        raw = self.connect()
        raw.sendall(f"GET {path} HTTP/1.0\r\nAuthorization: Bearer {self.api_key}\r\n\r\n".encode())
        status, _, data = read_all(raw)
        return status, data.decode()

    def complete(self, **options: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", {"model": NAME, "prompt": "ab", "temperature": 0, **options})

    def chat(self, **options: Any) -> tuple[int, Any]:
        return self.post("/v1/chat/completions", {"model": NAME, "messages": USER, "temperature": 0, **options})

    def events(self, path: str = "/v1/completions", **options: Any) -> list[Any]:
        """The JSON of each event of a stream, and the string [DONE]."""
        what = {"messages": USER} if "chat" in path else {"prompt": "ab"}
        body = {"model": NAME, **what, "temperature": 0, "stream": True, **options}
        status, headers, data = read_all(self.send(path, body))
        assert status == 200 and "text/event-stream" in headers, (status, data)
        return parse_events(data)

    def idle(self, seconds: float = 5.0) -> bool:
        """Wait until nothing is open and every block is free."""
        allocator = self.engine.scheduler.allocator
        return wait_for(lambda: not self.async_engine.mailboxes.open and not self.engine.groups
                        and allocator.num_free_blocks == allocator.num_blocks, seconds)  # fmt: skip


def request_head(length: int) -> bytes:
    """A completion request without anything that could be left out."""
    fields = f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"POST /v1/completions HTTP/1.0\r\n{fields}\r\n".encode()


def read_all(raw: socket.socket) -> tuple[int, str, bytes]:
    """Status, head and body of an answer that ends with its connection."""
    data = b""
    while piece := raw.recv(65536):
        data += piece
    raw.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


def has_ended(raw: socket.socket, seconds: float = 5.0) -> bool:
    """Whether the server closes this connection; what it still sends is read."""
    raw.settimeout(seconds)
    try:
        while raw.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def parse_events(data: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def read_events(raw: socket.socket, count: int) -> bytes:
    """What has come once `count` events have."""
    data = b""
    while data.count(b"\n\n") < count:
        piece = raw.recv(65536)
        assert piece, data
        data += piece
    return data


def choices(events: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for event in events:
        yield from event["choices"] if isinstance(event, dict) and "choices" in event else ()


def texts(events: Sequence[Any]) -> dict[int, str]:
    """The streamed text of each choice."""
    joined: dict[int, str] = {}
    for choice in choices(events):
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        joined[choice["index"]] = joined.get(choice["index"], "") + text
    return joined


def wait_for(done: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.005)
    return done()
