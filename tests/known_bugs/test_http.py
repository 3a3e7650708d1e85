"""Known faults of inference engines that only a server shows: over HTTP, on loopback."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared.async_engine import AsyncEngine
from tests.known_bugs.helpers import greedy, tiny
from tests.server.conftest import serve  # noqa: F401, the fixture
from tests.server.served import NAME, choices, read_events, scripted, texts, toy_engine, wait_for

WORDS = ["It", " ", " was ", "a ", "dark ", "and ", "stormy ", "night", ", ", "was it?"]


def test_b14_stop_holds_over_http(serve):  # noqa: F811
    served = serve(scripted(*WORDS))
    for answer in (served.complete(stop=["was"]), served.complete(stop="was"), served.chat(stop=["was"])):
        choice = answer[1]["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == ("It  ", "stop")
    events = served.events(stop=["was"])
    assert texts(events) == {0: "It  "} and list(choices(events))[-1]["finish_reason"] == "stop"


def test_b14_what_is_not_supported_is_refused_and_not_ignored(serve):  # noqa: F811
    served = serve(scripted(*WORDS))
    for option in ({"best_of": 2}, {"suffix": "x"}, {"echo": True}, {"guided_regex": "a"}):
        assert served.complete(**option)[0] == 400
    assert served.chat(tools=[{"type": "function"}])[0] == 400


def test_b24_logprobs_without_top_logprobs(serve):  # noqa: F811
    served = serve(scripted("é", "b", "c"))
    status, body = served.chat(logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert status == 200 and len(content) == body["usage"]["completion_tokens"] == 4
    assert [entry["token"] for entry in content[:3]] == ["é", "b", "c"]
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode()) and entry["top_logprobs"] == []
        assert entry["logprob"] <= 0


def test_b28_extreme_seeds_over_http(serve):  # noqa: F811
    served = serve(toy_engine(tiny()))

    def ask(seed):
        return served.complete(seed=seed, temperature=1, max_tokens=20)

    for seed in (0, 2**63 - 1, -(2**63)):
        first, second = ask(seed), ask(seed)
        assert first[0] == 200 and first[1]["choices"] == second[1]["choices"], seed
    for seed in (2**63, 2**64, -(2**63) - 1, 1.5, "1", True):
        status, body = ask(seed)
        assert status == 400 and body["error"]["param"].startswith("seed"), seed
        assert ask(0)[0] == 200
    for unset in (-1, None):  # -1 means no seed, as in vLLM
        assert len({json.dumps(ask(unset)[1]["choices"]) for _ in range(4)}) > 1
    assert ask(0)[1]["choices"] != ask(1)[1]["choices"]


def test_b36_an_engine_that_waits_sleeps_and_serves_who_comes_late():
    async def late(engine):
        await asyncio.sleep(0.3)
        started = time.process_time()
        await asyncio.sleep(0.5)
        spent = time.process_time() - started
        outputs = [output async for output in await engine.add_request("late", [5], greedy(5))]
        return spent, outputs[-1].outputs[0].text

    engine = AsyncEngine(scripted("a", "b"))
    spent, text = asyncio.run(late(engine))
    engine.shutdown()
    assert text == "ab" and spent < 0.1, f"{spent} s of CPU in half a second of waiting"


def test_b65_prompts_around_the_models_length(serve):  # noqa: F811
    served = serve(toy_engine(tiny(), max_model_len=64))
    for length, tokens in ((62, 2), (63, 1)):
        status, body = served.complete(prompt=[5] * length, ignore_eos=True)
        assert status == 200 and body["usage"]["completion_tokens"] == tokens
        assert body["choices"][0]["finish_reason"] == "length"
        status, body = served.chat(messages=[{"role": "user", "content": "a" * length}], ignore_eos=True)
        assert status == 200 and body["usage"]["completion_tokens"] == tokens
    for length in (64, 65):
        status, body = served.complete(prompt=[5] * length)
        assert status == 400 and body["error"]["param"] == "prompt" and "63 tokens" in body["error"]["message"]


def test_b67_a_chat_without_max_tokens_ends_by_itself(serve):  # noqa: F811
    served = serve(scripted(*(f"{i} " for i in range(40))))
    choice = served.chat()[1]["choices"][0]
    assert choice["message"]["content"] == "".join(f"{i} " for i in range(40)) and choice["finish_reason"] == "stop"
    assert texts(served.events("/v1/chat/completions"))[0] == choice["message"]["content"]
    assert served.complete()[1]["usage"]["completion_tokens"] == 16  # the older API has this default


@pytest.mark.parametrize("stream", [False, None, "absent"])
def test_b68_no_stream_unless_asked(serve, stream):  # noqa: F811
    served = serve(scripted("a", "b"))
    options = {} if stream == "absent" else {"stream": stream}
    status, body = served.chat(**options)
    assert status == 200 and body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
                             "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_b69_a_client_that_leaves_frees_its_blocks_at_once(serve, path, n):  # noqa: F811
    engine = scripted(*"abcd" * 40, seconds=0.03)
    served = serve(engine)
    what = {"messages": [{"role": "user", "content": "ab"}]} if "chat" in path else {"prompt": "ab"}
    raw = served.send(path, {"model": NAME, **what, "stream": True, "max_tokens": 150, "n": n})
    read_events(raw, 3 * n)
    raw.close()
    steps = engine.runner.steps
    assert served.idle() and engine.runner.steps - steps <= 3


def test_b69_a_client_that_leaves_the_queue_or_waits_for_the_whole(serve):  # noqa: F811
    engine = scripted(*"abcd" * 40, seconds=0.01, max_num_seqs=1)
    served = serve(engine)
    body = {"model": NAME, "prompt": "ab", "max_tokens": 150}
    running = served.send("/v1/completions", body)
    waiting = served.send("/v1/completions", {**body, "stream": True})
    assert wait_for(lambda: len(engine.scheduler.waiting) == 1)
    waiting.close()
    assert wait_for(lambda: not engine.scheduler.waiting) and len(engine.scheduler.running) == 1
    running.close()
    assert served.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 4}, {"stop": "c"}, {"logprobs": True}])
def test_b70_each_choice_ends_once(serve, path, options):  # noqa: F811
    options = {**options, "logprobs": 1} if "logprobs" in options and "chat" not in path else options
    served = serve(scripted(*"abcdef", lengths=(2, 5, 1)))
    events = served.events(path, n=3, **options)
    for index in range(3):
        reasons = [choice["finish_reason"] for choice in choices(events) if choice["index"] == index]
        assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) <= {None}, (index, reasons)


def test_b71_one_bad_request_leaves_the_server_standing(serve):  # noqa: F811
    """Many more in tests/server/test_requests.py."""
    served = serve(toy_engine(tiny()))
    bad = ({"temperature": -1}, {"top_p": 0}, {"top_p": 2}, {"n": 0}, {"max_tokens": "many"}, {"logprobs": 999})
    for change in bad:
        assert served.complete(**change)[0] == 400
        assert served.complete(max_tokens=2)[0] == 200
    assert served.chat(messages=[{"role": "wizard", "content": "a"}])[0] == 400
    assert served.complete(prompt="a" * 10_000_000)[0] == 413
    assert served.post("/v1/completions", b'{"model": "tiny", "prompt": "\xc3\x28"}')[0] == 400
    assert served.complete(max_tokens=2)[0] == 200 and served.idle()


def test_b72_all_choices_stream_to_their_end(serve):  # noqa: F811
    served = serve(scripted(*"abcdefghi", lengths=(2, 5, 9)))
    assert texts(served.events(n=3)) == {0: "ab", 1: "abcde", 2: "abcdefghi"}
    assert texts(served.events("/v1/chat/completions", n=3)) == {0: "ab", 1: "abcde", 2: "abcdefghi"}
    body = served.complete(n=3)[1]
    assert [choice["text"] for choice in body["choices"]] == ["ab", "abcde", "abcdefghi"]
    assert body["usage"]["completion_tokens"] == 3 + 6 + 10


# Ctrl-C


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    from tests.runtime.tiny import save_hf, save_tokenizer

    return save_tokenizer(save_hf("llama", tmp_path_factory.mktemp("served")))


@pytest.fixture
def processes(tiny_folder):
    """Two servers, each in a process of its own, started together; killed if a test leaves one."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "shared.server", "--model", str(tiny_folder), "--port", "0",
               "--served-model-name", NAME, "--max-num-seqs", "21"]  # fmt: skip
    started = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(2)]  # fmt: skip
    yield started
    for process in started:
        process.kill()
        process.communicate()


def open_stream(port: int) -> http.client.HTTPResponse:
    """A stream that would go on for long; its first event has been read."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = {"model": NAME, "prompt": "ab", "n": 20, "max_tokens": 400, "ignore_eos": True, "stream": True}
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = client.getresponse()
    assert response.readline().startswith(b"data: ")
    return response


def test_b76_ctrl_c_ends_the_server_idle_or_in_the_middle_of_streams(processes):
    ports = [int(process.stdout.readline().split("/v1")[0].rpartition(":")[2]) for process in processes]
    response, unread = open_stream(ports[1]), open_stream(ports[1])
    started = time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    processes[1].send_signal(signal.SIGINT)  # impatient
    last_line = response.read().decode().rstrip().splitlines()[-1]
    for process in processes:
        assert process.wait(timeout=15) == 0, process.stderr.read()
        assert time.monotonic() - started < 5, process.args
        assert "Traceback" not in process.stderr.read() and not psutil.pid_exists(process.pid)
    assert "shutting_down" in last_line
    unread.close()
