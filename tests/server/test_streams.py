"""Streams on the wire: cut anywhere, read slowly, left early, two hundred at once; and what /metrics counts."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.known_bugs.helpers import greedy, oracle, random_prompt, tiny
from tests.server.served import (
    NAME,
    has_ended,
    parse_events,
    read_all,
    read_events,
    request_head,
    scripted,
    texts,
    toy_engine,
    wait_for,
)

WORLD = ["日本", "語の", " 👩‍👩‍👧", "é", "ü\n", "\n\ndata: x", "\u2028", "end"]


def test_text_of_many_bytes_survives_any_cut_of_the_wire(serve):
    served = serve(scripted(*WORLD))
    raw = served.send("/v1/completions", {"model": NAME, "prompt": "ab", "stream": True, "temperature": 0})
    data = b""
    while piece := raw.recv(1):  # one byte at a time: a character comes in pieces
        data += piece
    assert texts(parse_events(data.partition(b"\r\n\r\n")[2])) == {0: "".join(WORLD)}
    whole = served.complete()[1]["choices"][0]["text"]
    assert whole == "".join(WORLD)


def test_a_body_that_comes_byte_by_byte_is_read_whole(serve):
    served = serve(toy_engine(tiny()))
    body = json.dumps({"model": NAME, "prompt": "ab", "stop": "日本"}, ensure_ascii=False).encode()
    raw = served.connect()
    raw.sendall(request_head(len(body)))
    for i in range(len(body)):
        raw.sendall(body[i : i + 1])
    assert read_all(raw)[0] == 200


def test_a_chunk_is_written_as_soon_as_its_token_is_there(serve):
    served = serve(scripted(*"abcdef", seconds=0.05))
    raw = served.send("/v1/completions", {"model": NAME, "prompt": "ab", "stream": True, "temperature": 0})
    started = time.monotonic()
    read_events(raw, 1)
    assert time.monotonic() - started < 0.25  # and not after all six
    assert served.engine.groups
    raw.makefile("rb").read()


def test_a_reader_that_stalls_stalls_nobody_and_loses_nothing(serve):
    pieces = [f"{i:04}" + "x" * 4000 for i in range(500)]
    served = serve(scripted(*pieces, max_model_len=1000, num_blocks=500))
    body = {"model": NAME, "prompt": "ab", "stream": True, "max_tokens": 600, "temperature": 0}
    slow = served.send("/v1/completions", body, served.connect(receive_buffer=4096))
    read_events(slow, 1)
    assert served.complete(max_tokens=5)[0] == 200
    assert served.idle(20)  # the engine has finished the slow reader's answer as well
    events = parse_events(b"\n\n" + slow.makefile("rb").read())
    said = [choice["text"] for event in events[1:-1] if isinstance(event, dict) for choice in event["choices"]]
    assert "".join(said).endswith("".join(pieces[-20:])) and events[-1] == "[DONE]"
    assert len(said) < 500  # what it did not read in time came in one piece


def test_clients_that_leave_at_any_moment_leave_nothing_behind(serve):
    served = serve(scripted(*"abcdefgh" * 15, seconds=0.002, max_num_seqs=4))
    body = {"model": NAME, "prompt": "ab", "temperature": 0}
    for stream in (True, False):
        clients = [served.send("/v1/completions", {**body, "stream": stream, "n": 1 + i % 2}) for i in range(12)]
        for delay, raw in enumerate(clients):
            time.sleep(0.004 * (delay % 3))
            raw.close()
        assert served.idle(), stream
    assert served.complete(max_tokens=8)[1]["choices"][0]["text"] == "abcdefgh"


# Load


async def stream_once(port: int, body: dict) -> dict[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(request_head(len(data)) + data)
    answer = await reader.read()
    writer.close()
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], answer[:300]
    parsed = parse_events(events)
    assert parsed[-1] == "[DONE]" and parsed[-2]["usage"]["completion_tokens"] > 0
    return texts(parsed)


def test_two_hundred_streams_are_complete_equal_to_offline_and_cost_no_memory(serve):
    prompts = [random_prompt(4 + i % 9, i) for i in range(200)]
    expected = ["".join(chr(t) for t in oracle(tiny(), prompt, greedy(4 + i % 13)) if t > 2)
                for i, prompt in enumerate(prompts)]  # fmt: skip
    served = serve(toy_engine(tiny(), num_blocks=150, max_num_seqs=24, max_num_batched_tokens=64))

    async def all_at_once():
        bodies = [{"model": NAME, "prompt": prompt, "max_tokens": 4 + i % 13, "temperature": 0, "stream": True,
                   "stream_options": {"include_usage": True}} for i, prompt in enumerate(prompts)]  # fmt: skip
        return await asyncio.gather(*(stream_once(served.port, body) for body in bodies))

    objects = []
    for _ in range(3):
        answers = asyncio.run(asyncio.wait_for(all_at_once(), 60))
        assert [answer.get(0, "") for answer in answers] == expected
        assert served.idle()
        gc.collect()
        objects.append(len(gc.get_objects()))
    assert objects[2] - objects[1] < 1000, objects
    assert served.app.state.service.metrics._seen == {}


# Metrics


def scraped(served) -> dict[str, float]:
    families = text_string_to_metric_families(served.get("/metrics")[1])
    return {sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in families for sample in family.samples}  # fmt: skip


def test_metrics_count_what_happened(serve):
    served = serve(scripted(*"abcdefgh"))
    for _ in range(3):
        served.complete(n=2)
    served.complete(max_tokens=4)
    served.complete(temperature=-1)
    found = scraped(served)
    assert found["zte:request_success_total[stop]"] == 6 and found["zte:request_success_total[length]"] == 1
    assert found["zte:generation_tokens_total"] == 6 * 9 + 4 and found["zte:prompt_tokens_total"] == 7 * 2
    assert found["zte:time_to_first_token_seconds_count"] == 7
    assert found["zte:inter_token_latency_seconds_count"] == 6 * 8 + 3
    assert found["zte:num_free_blocks"] == found["zte:num_blocks"] == 64
    assert found["zte:num_requests_running"] == found["zte:num_requests_waiting"] == 0
    assert found["zte:prefix_cache_queries_total"] == 14


def test_gauges_show_who_runs_and_who_waits(serve):
    served = serve(scripted(*"ab" * 90, seconds=0.01, max_num_seqs=2))
    body = {"model": NAME, "prompt": "ab", "stream": True, "max_tokens": 150, "temperature": 0}
    held = [served.send("/v1/completions", body) for _ in range(5)]
    assert wait_for(lambda: scraped(served)["zte:num_requests_waiting"] == 3)
    found = scraped(served)
    assert found["zte:num_requests_running"] == 2 and found["zte:num_free_blocks"] < 64
    for raw in held:
        raw.close()
    assert served.idle()
    assert scraped(served)["zte:request_success_total[abort]"] == 5


def test_two_apps_in_one_process_count_apart(serve):
    one, two = serve(scripted("a")), serve(scripted("b"))
    one.complete()
    assert scraped(one)["zte:request_success_total[stop]"] == 1
    assert "zte:request_success_total[stop]" not in scraped(two)


# The end


@pytest.mark.parametrize("stream", [True, False])
def test_a_shutdown_finishes_short_answers_and_says_so_to_long_ones(stream):
    from tests.server.served import Served

    served = Served(scripted(*"abcdefgh" * 20, seconds=0.02))
    body = {"model": NAME, "prompt": "ab", "temperature": 0, "stream": stream}
    short = served.send("/v1/completions", {**body, "max_tokens": 10})
    long = served.send("/v1/completions", {**body, "max_tokens": 160})
    assert wait_for(lambda: len(served.engine.scheduler.running) == 2)
    started = time.monotonic()
    served.server.stop()
    assert time.monotonic() - started < 3
    whole, cut = read_all(short), read_all(long)
    if stream:
        assert texts(parse_events(whole[2])) == {0: "abcdefghab"} and parse_events(whole[2])[-1] == "[DONE]"
        assert parse_events(cut[2])[-1]["error"]["code"] == "shutting_down"
    else:
        assert json.loads(whole[2])["choices"][0]["text"] == "abcdefghab"
        assert cut[0] == 503 and json.loads(cut[2])["error"]["code"] == "shutting_down"
    assert not served.engine.groups and not served.server.thread.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="its event loop cannot stop accepting")
@pytest.mark.parametrize("num_clients", [1, 8])
def test_who_is_accepted_as_the_listening_socket_closes_is_closed_too(num_clients):
    """The loop is held until both are due in one round: to accept the clients, and to stop listening."""
    from tests.server.served import Served

    served, late = Served(scripted("a")), []
    end_engine, loop = served.async_engine.shutdown, served.server.servers[0].get_loop()

    def end_as_clients_come(timeout: float) -> None:
        end_engine(timeout)
        loop.call_soon_threadsafe(time.sleep, 0.3)
        time.sleep(0.05)
        late.extend(served.connect() for _ in range(num_clients))

    served.async_engine.shutdown = end_as_clients_come
    served.server.stop()
    assert len(late) == num_clients and all(has_ended(raw, 1.0) for raw in late)


def test_who_comes_while_the_server_ends_is_refused(serve):
    served = serve(scripted(*"ab" * 90, seconds=0.02))
    long = served.send("/v1/completions", {"model": NAME, "prompt": "ab", "max_tokens": 160, "stream": True})
    late = served.connect()
    read_events(long, 1)
    served.server.should_exit = True
    assert wait_for(lambda: served.async_engine.error is not None)
    status, _, body = read_all(served.send("/v1/completions", {"model": NAME, "prompt": "ab"}, late))
    assert status == 503 and json.loads(body)["error"]["code"] == "shutting_down"
