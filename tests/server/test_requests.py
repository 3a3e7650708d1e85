"""What the server refuses, how, and that the next good request is served each time."""

from __future__ import annotations

import json

import pytest

from shared.server import parse_args
from tests.known_bugs.helpers import tiny
from tests.server.served import NAME, USER, read_all, scripted, toy_engine

BAD_COMPLETIONS = [
    {"prompt": 1}, {"prompt": {"a": 1}}, {"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": ["a", 1]},
    {"prompt": [5, "a"]}, {"prompt": [-1]}, {"prompt": [128]}, {"prompt": [True]}, {"prompt": [1.5]},
    {"prompt": "\ud800"}, {"prompt": "a" * 5000}, {"prompt": ["a"] * 200}, {"prompt": None},
    {"max_tokens": "5"}, {"max_tokens": 2.5}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": True},
    {"temperature": "hot"}, {"temperature": -1}, {"temperature": [1]}, {"temperature": 101}, {"top_p": 0},
    {"top_p": 2}, {"n": 0}, {"n": "2"}, {"n": 1000}, {"n": 10**30}, {"logprobs": 1000}, {"logprobs": True},
    {"logprobs": -1}, {"stop": ""}, {"stop": 5}, {"stop": [1]}, {"logit_bias": {"a": 1}}, {"logit_bias": {"999": 1}},
    {"logit_bias": {"5": 1000}}, {"logit_bias": [1]}, {"stream": "yes"}, {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"other": 1}}, {"top_k": -5}, {"min_tokens": 50, "max_tokens": 3},
    {"stop_token_ids": [999]}, {"priority": 2**40}, {"cache_salt": 5}, {"best_of": 2}, {"echo": True}, {"suffix": "a"},
    {"prompt_logprobs": 1}, {"model": 5}, {"model": None}, {"unknown": None},
]  # fmt: skip
BAD_CHATS = [
    {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user"}]}, {"messages": [{"content": "a"}]},
    {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"messages": [{"role": "user", "content": ["a"]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]}]},
    {"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, {"messages": ["hi"]},
    {"messages": [{"role": "wizard", "content": "a"}]},
    {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}, {"tools": []},
    {"max_completion_tokens": 0}, {"response_format": {"type": "json_object"}}, {"prompt": "a"},
]  # fmt: skip
BAD_BODIES = [
    b"", b"{", b"[]", b"null", b'"text"', b"5", b'{"model": "tiny", "prompt": ',
    b'{"model": "tiny", "prompt": "\xff\xfe"}',
    b'\xff\xfe{"model": "tiny"}', b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', b"[" * 100_000, b'{"\\ud800": 1}',
    b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", b"\x00" * 100, b'{"prompt": "a"}',
]  # fmt: skip


def is_error(status: int, body, expected: int = 400) -> bool:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"], body
    return status == expected and error["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def served():
    from tests.server.served import Served

    served = Served(toy_engine(tiny(), max_model_len=64))
    yield served
    served.server.stop()


def test_every_bad_field_of_a_completion_is_a_400_and_the_next_request_is_served(served):
    good = served.complete(max_tokens=3)
    assert good[0] == 200
    for change in BAD_COMPLETIONS:
        assert is_error(*served.complete(**change)), change
        assert served.complete(max_tokens=3)[1]["choices"] == good[1]["choices"], change
    assert served.idle()


def test_every_bad_field_of_a_chat_is_a_400(served):
    for change in BAD_CHATS:
        assert is_error(*served.chat(max_tokens=3, **change)), change
    assert served.chat(max_tokens=3)[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_no_request(served, path):
    for body in BAD_BODIES:
        assert is_error(*served.post(path, body)), body[:60]
    assert served.complete(max_tokens=3)[0] == 200


def test_the_wrong_type_of_content_and_a_length_that_lies(served):
    body = {"model": NAME, "prompt": "ab"}
    assert is_error(*served.post("/v1/completions", body, Content_Type="text/plain"))
    status, *_ = read_all(served.send("/v1/completions", body, Content_Length="abc"))
    assert status == 400
    raw = served.send("/v1/completions", body, Content_Length="1000")  # the rest never comes
    raw.close()
    assert served.complete(max_tokens=3)[0] == 200


@pytest.mark.parametrize("method, path, status", [
    ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v1/other", 404), ("GET", "/", 404),
    ("DELETE", "/v1/chat/completions", 405),
])  # fmt: skip
def test_paths_and_methods_that_there_are_not(served, method, path, status):
    raw = served.connect()
    raw.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
    found, _, body = read_all(raw)
    assert found == status and is_error(found, json.loads(body), status)


def test_a_body_that_is_too_long_is_a_413_however_it_is_sent(serve):
    served = serve(scripted("a"), max_body_bytes=10_000)
    big = json.dumps({"model": NAME, "prompt": "a" * 300_000}).encode()
    assert is_error(*served.post("/v1/completions", big), 413)
    raw = served.connect()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
    for start in range(0, len(big), 5000):
        piece = big[start : start + 5000]
        raw.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    raw.sendall(b"0\r\n\r\n")
    assert read_all(raw)[0] == 413
    assert served.complete()[0] == 200


def test_a_full_queue_is_a_429_until_somebody_has_left(serve):
    served = serve(scripted(*"ab" * 90, seconds=0.005, max_num_seqs=1), max_waiting=1)
    body = {"model": NAME, "prompt": "ab", "stream": True, "max_tokens": 150}
    held = [served.send("/v1/completions", body) for _ in range(2)]
    for raw in held[:1]:
        raw.recv(10)
    status, answer = served.complete(max_tokens=1)
    while status == 200:  # the second has not been read yet
        status, answer = served.complete(max_tokens=1)
    assert status == 429 and answer["error"]["code"] == "queue_full"
    assert "retry-after: 1" in read_all(served.send("/v1/completions", {"model": NAME, "prompt": "a"}))[1].lower()
    for raw in held:
        raw.close()
    assert served.idle() and served.complete(max_tokens=1)[0] == 200


def test_no_prompt_of_a_request_runs_if_one_of_them_is_refused(served):
    before = served.engine.scheduler._arrivals
    assert is_error(*served.complete(prompt=[[5], [6], [999]]))
    assert served.idle() and served.engine.scheduler._arrivals <= before + 2


def test_an_error_of_the_model_is_a_500_or_ends_the_stream_and_the_next_is_served(serve):
    engine = scripted("a", "b")
    execute, broken = engine.runner.execute, []

    def sometimes(scheduled, block_size):
        if broken:
            raise RuntimeError(broken.pop())
        return execute(scheduled, block_size)

    engine.runner.execute = sometimes
    served = serve(engine)
    broken.append("bad luck")
    status, body = served.complete()
    assert status == 500 and "bad luck" in body["error"]["message"] and body["error"]["type"] == "server_error"
    broken.append("bad luck")
    events = served.events()
    assert "bad luck" in events[-1]["error"]["message"] and "[DONE]" not in events
    assert served.complete()[1]["choices"][0]["text"] == "ab"


def test_a_fault_of_the_server_itself_is_told_without_its_words(serve):
    served = serve(scripted(*"abcd"))

    def fail(token_id):
        raise RuntimeError("a secret of ours")

    served.engine.tokenizer.token_bytes = fail
    status, body = served.complete(logprobs=1)
    assert status == 500 and body["error"]["message"] == "internal error"
    raw = served.send("/v1/completions", {"model": NAME, "prompt": "ab", "stream": True, "logprobs": 1})
    head, _, events = raw.makefile("rb").read().decode().partition("\r\n\r\n")
    assert " 200 " in head and json.loads(events.removeprefix("data: "))["error"]["message"] == "internal error"
    assert served.idle() and served.complete()[1]["choices"][0]["text"] == "abcd"


def test_a_dead_engine_is_unhealthy_and_answers_500(serve):
    served = serve(scripted("a"))
    assert served.get("/health")[0] == 200

    def die():
        raise AssertionError("a block is lost")

    served.engine.step, step = die, served.engine.step
    assert served.complete()[0] == 500 and served.complete()[0] == 500
    assert served.get("/health")[0] == 503
    served.engine.step = step
    for name in list(served.engine.groups):
        served.engine.abort(name)


def test_flags_are_the_fields_of_engine_args_by_vllms_names():
    args = parse_args(["--model", "m", "--max-model-len", "64", "--max-num-seqs", "3", "--no-enable-prefix-caching",
                       "--gpu-memory-utilization", "0.5", "--port", "1", "--api-key", "k"])  # fmt: skip
    assert (args.host, args.port, args.api_key, args.model) == ("127.0.0.1", 1, "k", "m")
    assert (args.max_model_len, args.max_num_seqs, args.enable_prefix_caching) == (64, 3, False)
    assert args.gpu_memory_utilization == 0.5 and args.num_gpu_blocks_override is None and args.block_size == 16


def test_a_conversation_is_answered_up_to_the_models_length(served):
    status, body = served.chat(messages=USER, ignore_eos=True)
    assert status == 200 and body["usage"]["total_tokens"] == 64
