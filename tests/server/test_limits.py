"""What a client may hold: connections, requests, bodies that come slowly or never; and who has the key."""

from __future__ import annotations

import json
import time

import pytest

from shared.errors import InvalidRequestError
from shared.openai_response import ChatWriter, Writer
from shared.output import CompletionOutput, RequestOutput
from shared.sampling import Logprob
from shared.sampling_params import SamplingParams
from shared.server import Gate, create_app, main, parse_args
from tests.known_bugs.helpers import tiny
from tests.server.served import (
    NAME,
    has_ended,
    read_all,
    read_events,
    request_head,
    scripted,
    toy_engine,
    wait_for,
)

BODY = json.dumps({"model": NAME, "prompt": "ab", "max_tokens": 2}).encode()
LONG = {"model": NAME, "prompt": "ab", "stream": True, "max_tokens": 150}


def test_beyond_the_limit_of_open_requests_is_a_503_until_one_has_ended(serve):
    served = serve(scripted(*"ab" * 90, seconds=0.01), limit_concurrency=3)
    held = [served.send("/v1/completions", LONG) for _ in range(2)]
    for raw in held:
        read_events(raw, 1)
    slow = served.connect()
    slow.sendall(request_head(len(BODY)))  # its body is still to come, and it counts
    assert wait_for(lambda: served.get("/v1/models")[0] == 503)
    status, head, body = read_all(served.send("/v1/completions", BODY))
    assert status == 503 and json.loads(body)["error"]["code"] == "overloaded" and "retry-after: 1" in head.lower()
    assert json.loads(body)["error"]["type"] == "server_error"
    assert served.get("/health")[0] == 200 and "zte:num_requests_running" in served.get("/metrics")[1]  # probes pass
    held[0].close()
    assert wait_for(lambda: served.get("/v1/models")[0] == 200)
    slow.sendall(BODY)
    assert read_all(slow)[0] == 200
    held[1].close()
    assert served.idle() and all(served.complete(max_tokens=1)[0] == 200 for _ in range(10))


def test_a_body_that_never_ends_is_a_408(serve, monkeypatch):
    monkeypatch.setattr(Gate, "body_seconds", 0.3)
    served = serve(toy_engine(tiny()))
    for pace in (10.0, 0.05):  # nothing at all, and a byte now and then
        raw = served.connect()
        raw.sendall(request_head(1000) + b'{"model": ')
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            time.sleep(min(pace, 0.6))
            if pace < 1:
                try:
                    raw.sendall(b" ")
                except ConnectionError:
                    break
        status, _, body = read_all(raw)
        assert status == 408 and json.loads(body)["error"]["code"] == "request_timeout"
    assert served.complete()[0] == 200


def test_an_answer_may_take_longer_than_a_body(serve, monkeypatch):
    monkeypatch.setattr(Gate, "body_seconds", 0.2)
    served = serve(scripted(*"abcdefgh", seconds=0.1))
    assert served.complete()[1]["choices"][0]["text"] == "abcdefgh"


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: a\r\nX: "])
@pytest.mark.parametrize("after_a_request", [False, True])
def test_a_connection_without_a_request_is_closed(serve, begun, after_a_request):
    """uvicorn waits without end for the head of a request."""
    served = serve(toy_engine(tiny()))
    served.server.idle.seconds = 0.5
    raw = served.connect()
    if after_a_request:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200" in raw.recv(65536)
    raw.sendall(begun)
    started = time.monotonic()
    while time.monotonic() - started < 0.4 and begun:
        time.sleep(0.1)
        raw.sendall(b"a")  # one byte at a time does not help
    assert has_ended(raw) and 0.3 < time.monotonic() - started < 3
    assert wait_for(lambda: not served.server.server_state.connections)


def test_a_connection_with_a_request_stays_however_long_it_waits(serve):
    served = serve(scripted("a", "b", seconds=0.5))
    served.server.idle.seconds = 0.2
    assert served.complete()[1]["choices"][0]["text"] == "ab"


def test_an_upgrade_to_a_websocket_is_passed_over_whatever_is_installed(serve):
    served = serve(scripted("a"))
    raw = served.connect()
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")  # fmt: skip
    assert b" 200 " in raw.recv(65536).split(b"\r\n")[0]
    assert served.server.config.ws_protocol_class is None and served.complete()[0] == 200


def test_who_is_refused_and_goes_on_sending_is_closed(serve):
    served = serve(toy_engine(tiny()), api_key="secret")
    served.server.idle.seconds = 0.3
    raw = served.connect()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n")
    assert b"401" in raw.recv(65536)
    for _ in range(50):
        time.sleep(0.02)
        try:
            raw.sendall(b"a")
        except ConnectionError:
            break
    assert has_ended(raw)


@pytest.mark.parametrize("header, status", [
    ("Bearer k\u00e9y", 200), ("bearer k\u00e9y", 200), ("BEARER   k\u00e9y ", 200), ("Bearer key", 401),
    ("Bearer k\u00e9y2", 401), ("Basic k\u00e9y", 401), ("k\u00e9y", 401), ("Bearer", 401), ("", 401),
])  # fmt: skip
def test_the_key_is_compared_and_the_word_before_it_in_any_case(serve, header, status):
    served = serve(scripted("a"), api_key="k\u00e9y")
    assert read_all(served.send("/v1/completions", BODY, Authorization=header))[0] == status


@pytest.mark.parametrize("key", ["", "  ", "\n"])
def test_a_key_that_everybody_has_is_refused(key):
    with pytest.raises(InvalidRequestError, match="api_key"):
        create_app(toy_engine(tiny()), NAME, api_key=key)


def test_flags_of_the_limits():
    args = parse_args(["--max-body-bytes", "1000", "--limit-concurrency", "7"])
    assert (args.max_body_bytes, args.limit_concurrency) == (1000, 7)
    for name in ("max_body_bytes", "limit_concurrency"):
        with pytest.raises(InvalidRequestError, match=name):
            create_app(toy_engine(tiny()), NAME, **{name: 0})


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_there_is_not_is_refused_before_the_model_is_loaded(port, capsys):
    assert main(["--model", "/no/such/folder", "--port", port]) == 1
    assert "port: must be a whole number from 0 to 65535" in capsys.readouterr().err


def test_a_405_names_what_is_allowed(serve):
    served = serve(scripted("a"))
    raw = served.connect()
    raw.sendall(b"GET /v1/completions HTTP/1.0\r\n\r\n")
    status, head, _ = read_all(raw)
    assert status == 405 and "allow: post" in head.lower()


@pytest.mark.parametrize("key", [" 5", "5 ", "05", "1_0", "+5", "\u0665", "", "-1", "9" * 5000, "5.0", "0x5"])
def test_keys_of_logit_bias_are_numbers_as_json_writes_them(serve, key):
    served = serve(scripted("a"))
    status, body = served.complete(logit_bias={key: 1})
    assert status == 400 and body["error"]["param"] == "logit_bias"
    assert served.complete(logit_bias={"5": 1})[0] == 200


# A body of megabytes: read and refused without a million errors, each of which would be written


def completion(**texts: str) -> tuple[str, bytes]:
    fields = "".join(f', "{name}": {text}' for name, text in texts.items())
    return "/v1/completions", f'{{"model": "{NAME}"{fields}}}'.encode()


def chat(messages: str) -> tuple[str, bytes]:
    return "/v1/chat/completions", f'{{"model": "{NAME}", "messages": {messages}}}'.encode()


LARGE = {
    "ids and one text": completion(prompt="[" + "5," * 1_900_000 + '"a"]'),
    "dicts": completion(prompt="[" + "{}," * 1_300_000 + "{}]"),
    "stops": completion(prompt='"a"', stop="[" + "5," * 1_900_000 + "5]"),
    "stop tokens": completion(prompt='"a"', stop_token_ids="[" + '"",' * 1_300_000 + "5]"),
    "biases": completion(prompt='"a"', logit_bias="{" + ",".join(f'"{i}": "x"' for i in range(300_000)) + "}"),
    "fields": completion(prompt='"a"', **{f"k{i}": "1" for i in range(300_000)}),
    "messages": chat("[" + "{}," * 1_300_000 + "{}]"),
    "parts": chat('[{"role": "user", "content": [' + "{}," * 1_300_000 + "{}]}]"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_that_is_wrong_everywhere_stalls_nobody(serve, name):
    served = serve(toy_engine(tiny()))
    path, body = LARGE[name]
    assert len(body) < 4 * 2**20
    raw = served.send(path, body)
    started = time.monotonic()
    assert served.complete(max_tokens=1)[0] == 200
    status, _, answer = read_all(raw)
    assert time.monotonic() - started < 8  # it was minutes, in which the server did nothing else
    assert status == 400 and len(answer) < 500


# A stream of scores costs the same at every token


class CountingTokenizer:
    def __init__(self) -> None:
        self.calls = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.calls += 1
        return "é".encode()[token_id : token_id + 1] if token_id < 2 else b"ab"


@pytest.mark.parametrize("kind", [Writer, ChatWriter])
def test_each_token_of_a_stream_is_spelled_once(kind):
    tokenizer, ids = CountingTokenizer(), [2, 0, 1, 2] * 50
    writer, rows = kind(NAME, SamplingParams(logprobs=0), tokenizer), [{token: Logprob(-1.0, 1)} for token in ids]
    chunks = []
    for count in range(1, len(ids) + 1):
        answer = CompletionOutput(0, "x" * count, "x", count, None, None, None, ids, rows)
        chunks += writer.chunks(0, RequestOutput("r", None, [5], None, [answer], False, 0, []))
    assert len(chunks) == len(ids) and tokenizer.calls <= 3 * len(ids)
    if kind is Writer:
        offsets = [chunk.choices[0].logprobs["text_offset"] for chunk in chunks]
        assert offsets[:6] == [[0], [2], [2], [3], [5], [7]]  # abéab: half a character has no length yet
