"""Chapter 13's dashboard, driven without a kernel, on a real server of a scripted model; its checks and times."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import replace

import pytest

from shared.errors import EngineError
from shared.lab.chapters import ch13, ch13_dashboard, ch13_load, ch13_measure
from shared.lab.chapters.ch13_dashboard import Dashboard, render_dashboard, spark
from shared.lab.chapters.ch13_load import Load, Sample, parse_sample
from shared.lab.evidence import evidence
from tests.server.conftest import serve  # noqa: F401, the fixture
from tests.server.served import NAME, scripted, wait_for

START = Sample(0.5, 4, 3, 20, 32, 10, 0, 0, 4, 2.0, 6, 0.3)


def plain(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", str(markup)).split())


@pytest.fixture
def served(serve, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ch13_load, "QUESTIONS", ("ab", "abc"))
    monkeypatch.setattr(ch13_load, "PERIOD", 0.05)
    return serve(scripted(*"abcdefgh" * 8, seconds=0.005, max_num_seqs=2))


# The drawing


def test_the_state_is_told_in_words_and_numbers():
    later = Sample(2.5, 2, 0, 26, 32, 110, 3, 1, 8, 3.0, 96, 4.8)
    told = plain(render_dashboard([START, later], 1))
    assert "After 2.5 s: 2 running, 0 waiting, 3 ended, 1 left by their client." in told
    assert "blocks in use 6 of 32" in told and "tokens a second 50" in told
    assert "mean time to first token 250 ms" in told and "mean gap between tokens 50 ms" in told
    assert "4 running, 3 waiting" in plain(render_dashboard([START, later], 0))


def test_nothing_yet_and_nothing_new_are_said():
    assert "Press Start" in plain(render_dashboard([], 0))
    told = plain(render_dashboard([START], 0))
    assert "tokens a second –" in told and "mean time to first token –" in told


def test_bars_go_from_zero_to_the_largest_and_have_a_label():
    drawn = spark([0, 1, 4])
    assert plain(drawn) == "▁▃█" and 'aria-label="from 0 to 4"' in drawn
    assert plain(spark([0, 0])) == "▁▁" and plain(spark([])) == ""
    assert len(plain(spark(range(1000)))) == ch13_dashboard.HISTORY


# The live part


def test_a_load_runs_until_it_is_stopped_and_the_buttons_look_back(served):
    board = Dashboard(lambda: served.address, NAME)
    assert board.stop_button.disabled and "No client is asking" in board.frame.value
    board.fields["clients"].value, board.fields["leave_percent"].value = 5, 50
    board.start_button.click()

    def seen_enough() -> bool:
        return len(board.samples) > 8 and board.samples[-1].ended > 2 and board.samples[-1].aborted > 0

    assert wait_for(seen_enough, 20)
    assert max(sample.running_now for sample in board.samples) == 2
    assert max(sample.waiting_now for sample in board.samples) >= 1
    board.stop_button.click()
    assert served.idle() and "No client is asking" in board.frame.value
    last = board.frame.value
    board.back_button.click()
    assert board.frame.value != last and f"Sample {len(board.samples) - 1} of" in board.frame.value
    board.step_button.click()
    assert board.frame.value == last and board.step_button.disabled
    board.reset_button.click()
    assert board.samples == [] and "Press Start" in board.frame.value


def test_who_looks_back_is_not_pulled_forward():
    board = Dashboard(lambda: "", NAME)
    for seconds in (0.5, 1.0, 1.5):
        board.add(replace(START, seconds=seconds))
    assert board.index == 2
    board.back_button.click()
    board.add(replace(START, seconds=2.0))
    assert board.index == 1 and "Sample 2 of 4" in board.frame.value
    board.latest_button.click()
    board.add(replace(START, seconds=2.5))
    assert board.index == 4


def test_a_second_start_goes_on_where_the_first_stopped(served):
    board = Dashboard(lambda: served.server.address, NAME)
    for _ in range(2):
        known = len(board.samples)
        board.start_button.click()
        assert wait_for(lambda: len(board.samples) > known + 3, 20)  # noqa: B023
        board.stop_button.click()
        assert (board.samples[-1].running_now, board.samples[-1].waiting_now) == (0, 0)
    times, tokens = ([getattr(sample, name) for sample in board.samples] for name in ("seconds", "tokens"))
    assert times == sorted(times) and tokens == sorted(tokens) and len(set(times)) == len(times)


def test_a_server_that_ends_under_load_is_said_and_a_new_one_begins_anew(served, serve):  # noqa: F811
    address = served.server.address
    board = Dashboard(lambda: address, NAME)
    board.start_button.click()
    assert wait_for(lambda: len(board.samples) > 2, 20)
    served.server.stop()
    assert wait_for(lambda: board.load is None, 20)
    assert "does not answer any more" in board.fields.error.value and "No client is asking" in board.frame.value
    assert board.stop_button.disabled
    address = serve(scripted(*"ab", max_num_seqs=2)).server.address
    board.start_button.click()
    assert board.fields.error.value == "" and wait_for(lambda: board.samples, 20)
    board.stop_button.click()
    assert board.samples[0].tokens < 50


def test_a_server_that_cannot_start_and_one_that_refuses_are_said(served):
    def broken() -> str:
        raise EngineError("the port is taken")

    board = Dashboard(broken, NAME)
    board.start_button.click()
    assert "The server did not start. EngineError: the port is taken" in board.fields.error.value
    assert board.load is None and board.stop_button.disabled
    board = Dashboard(lambda: served.server.address, "another model")
    board.start_button.click()
    assert wait_for(lambda: "404: there is no model" in board.frame.value, 20)
    board.stop_button.click()


def test_a_client_that_waits_in_vain_is_left_alone(monkeypatch):
    monkeypatch.setattr(ch13_load, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        load = Load(f"http://127.0.0.1:{silent.getsockname()[1]}", NAME, 2, 4, 0)
        started = time.monotonic()
        load.stop()
        assert time.monotonic() - started < 5


def test_a_sample_is_what_the_server_says(served):
    served.chat(max_tokens=5)
    sample = parse_sample(served.get("/metrics")[1], 1.0)
    assert (sample.running_now, sample.waiting_now, sample.tokens, sample.ended, sample.aborted) == (0, 0, 5, 1, 0)
    assert (sample.first_tokens, sample.gaps, sample.free_blocks_now, sample.num_blocks) == (1, 4, 64, 64)
    assert sample.first_token_seconds > 0 and sample.gap_seconds > 0


def test_a_load_survives_a_server_that_goes(served):
    load = Load("http://127.0.0.1:9", NAME, 2, 4, 0)
    load.stop()
    assert not any(thread.is_alive() for thread in load.threads)


# Exercises and times


def test_steps_of_the_exercise_are_those_an_engine_reports():
    steps = ch13.steps_of(["ab", "abcd"], ["stop", "length"], lambda step: True)
    assert steps == [[("a", None), ("a", None)], [("ab", "stop"), ("ab", None)], [("ab", "stop"), ("abc", None)],
                     [("ab", "stop"), ("abcd", "length")]]  # fmt: skip
    assert len(ch13.steps_of(["a" * 9], ["stop"], lambda step: step % 3 == 2)) == 3


def test_the_whole_engine_names_every_file_once_and_says_what_it_is():
    markup = ch13.whole_engine()
    named = [plain(name) for name in re.findall(r"<strong><code.*?</strong>", markup)]
    assert sorted(named) == sorted(name for name, chapter in ch13.ch00.CHAPTERS.items() if chapter <= "13")
    assert "scheduler Who runs next, and how many tokens of it." in plain(markup)
    assert "llm LLM : a model, its engine, and a call" in plain(markup)


def test_a_chunk_is_timed():
    result = ch13_measure.chunk_times(n=5)
    assert result.n == 5 and 0 < result.low <= result.median <= result.high and result.unit == "µs"


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("13_serving_engine")
    assert record["command"] == "python -m shared.lab.chapters.ch13_measure" and len(record["results"]) == 4
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
    samples = [Sample(**sample) for sample in evidence("13_dashboard")["samples"]]
    assert samples[-1].free_blocks_now == samples[-1].num_blocks and samples[-1].running_now == 0
    assert max(sample.waiting_now for sample in samples) > 0 and samples[-1].aborted > 0


def test_the_static_form_shows_the_recorded_run():
    told = plain(ch13_dashboard.recorded())
    assert told.startswith("A recorded run, on ") and told.count("tokens a second") == 3
