"""Chapter 14's clock, ladder and simulator without a kernel, and what its saved measurements promise."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from shared.lab.chapters import ch14, ch14_curve, ch14_ladder, ch14_measure
from shared.lab.chapters.ch14_clock import on_virtual_time, stalling_server
from shared.lab.chapters.ch14_curve import Point, load_explorer, read_points, render_load
from shared.lab.chapters.ch14_ladder import CHAPTERS, Run, rounds, work
from shared.lab.evidence import evidence
from shared.lab.machine import Measurement
from shared.load import RequestRecord, SampleRequest, closed_loop, open_loop
from shared.roofline import Roofline
from shared.summary import percentile, summarize


def plain(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", str(markup)).split())


# The clock


def test_a_stall_is_seen_by_the_open_loop_and_hidden_by_the_closed_one():
    requests, every = [SampleRequest([7], 1)] * 100, [0.2 * i for i in range(100)]
    opened = on_virtual_time(lambda clock: open_loop(stalling_server(clock), requests, every, clock=clock))
    closed = on_virtual_time(lambda clock: closed_loop(stalling_server(clock), requests, 1, clock=clock))
    late = [sum(record.ttft > 1 for record in loop) for loop in (opened, closed)]
    assert late == [41, 1] and max(record.ttft for record in closed) == pytest.approx(5.1)


def test_the_clock_works_inside_a_running_loop():
    import asyncio

    async def outer():
        return on_virtual_time(lambda clock: asyncio.sleep(3600, clock))

    clock = asyncio.run(outer())
    assert clock() == pytest.approx(3600)


# The simulator

POINTS = [
    Point(2.0, 10.0, [(100.0, 20.0), (120.0, 21.0), (150.0, None), (110.0, 22.0)]),
    Point(4.0, 10.0, [(200.0, 40.0), (300.0, 60.0), (900.0, 50.0), (350.0, 40.0)], failed=1),
]


def test_a_point_has_the_numbers_of_its_records():
    records = [RequestRecord(8, due=1.0, arrivals=[(1.2, 1), (1.3, 1)], finished=1.3),
               RequestRecord(8, due=2.0, arrivals=[(2.5, 1)], finished=2.5), RequestRecord(8, due=2.0, error="x")]
    point, summary = Point.of(3.0, records), summarize(records, goodput={"ttft": 300, "tpot": 50})
    assert point.seconds == summary["duration"] and percentile(point.ttft, 90) == summary["p90_ttft_ms"]
    assert point.failed == 1 and point.good(300, 50) / point.seconds == summary["request_goodput"] == 0.0
    assert point.good(300, 100.1) == 1 and point.good(501, 100.1) == 2


def test_limits_decide_what_is_good():
    told = plain(render_load(POINTS, 2.2, 90, 400, 100))
    assert told.startswith("At 2.0 requests a second, 4 of 4 meet TTFT ≤ 400 ms and TPOT ≤ 100 ms: a goodput of 0.4")
    assert "3 of 5 (60%)" in told and "0.4/s" in told
    assert "2 of 5 (40%)" in plain(render_load(POINTS, 2.2, 90, 400, 45))
    assert "At 4.0 requests" in plain(render_load(POINTS, 3.6, 50, 400, 45))


def test_the_slider_and_the_limits_redraw_the_figure():
    made = load_explorer({"saved": POINTS, "here": POINTS[::-1]})
    before = made.frame.value
    assert (made.fields["ttft"].value, made.fields["tpot"].value) == ("330", "60")
    made.fields["ttft"].value, made.fields["tpot"].value = "400", "100"
    made.fields["rate"].value = 4.0
    assert "At 4.0 requests" in plain(made.frame.value) and made.frame.value != before
    made.fields["percent"].value = "99"
    assert "p99 TTFT" in plain(made.frame.value)
    made.fields["source"].value = "here"
    assert "4 of 4" in plain(made.frame.value)
    made.fields["ttft"].value = "-1"
    assert "not a number above 0" in made.fields.error.value
    for bad in ("", "inf", "nan", "1e999", "x" * 99):
        made.fields["tpot"].value, before = bad, made.frame.value
        made.fields["ttft"].value = "10"
        assert "TPOT at most, ms: " in made.fields.error.value and len(plain(made.fields.error.value)) < 120
        assert made.frame.value == before
    made.fields["tpot"].value = "99999999"
    assert "TPOT ≤ 99999999 ms" in plain(made.frame.value)
    made.fields["ttft"].value = "soon"
    assert "is not a number of milliseconds" in made.fields.error.value
    made.fields["ttft"].value = "10"
    assert made.fields.error.value == "" and "0 of 4" in plain(made.frame.value)
    assert "At 2.0 requests" in plain(made.static())


def test_points_survive_the_evidence_file():
    assert read_points([point.plain() for point in POINTS]) == POINTS
    assert ch14_curve.load_chart(POINTS).startswith(b"\x89PNG")


# The ladder


def test_the_work_begins_alike_and_fits_the_cache():
    for sizes in (ch14_ladder.SMALL, ch14_ladder.LARGE):
        given = work(**sizes)
        beginnings = {tuple(each.prompt_token_ids[: sizes["prefix"]]) for each in given.requests}
        assert len(beginnings) == 1 and len({tuple(each.prompt_token_ids) for each in given.requests}) == sizes["count"]
        assert 2 <= given.slots // given.longest < sizes["count"] and given == work(**sizes)
        assert given.chunk >= ch14_ladder.MAX_NUM_SEQS


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Every stage on a tiny random model."""
    from shared.weights import load_model
    from tests.runtime.tiny import ToyTokenizer, save_hf

    folder = save_hf("llama", tmp_path_factory.mktemp("tiny"))
    given = work(5, 32, 8, 6, slots=192, chunk=24)
    given.requests[:] = [
        SampleRequest([3 + token % 100 for token in each.prompt_token_ids], each.max_tokens) for each in given.requests]
    models = [load_model(folder, torch.float32, torch.device("cpu")) for _ in range(2)]
    made = ch14_ladder.stages(*models, ToyTokenizer(), given)
    made[ch14_measure.PEER] = ch14_ladder.transformers_stage(folder, given.requests)
    return given, rounds(made, 2)


def test_every_stage_makes_the_same_tokens(small):
    given, results = small
    assert list(results) == [*CHAPTERS, ch14_measure.PEER]
    naive = results["naive"][0].tokens
    assert [len(tokens) for tokens in naive] == [each.max_tokens for each in given.requests]
    assert all(run.tokens == naive for runs in results.values() for run in runs)


def test_each_stage_saves_what_it_is_there_for(small):
    given, results = small
    runs = {name: found[0] for name, found in results.items()}
    positions = {name: sum(run.sizes) for name, run in runs.items()}
    steps = {name: len(run.sizes) for name, run in runs.items()}
    needed = sum(len(each.prompt_token_ids) + each.max_tokens - 1 for each in given.requests)
    assert positions["naive"] > positions["cached"] == positions["continuous"] == needed
    assert positions["prefix-cached"] < positions["paged"]
    assert steps["cached"] == given.num_tokens > steps["static batches"] >= steps["continuous"]
    assert max(runs["chunked"].sizes) <= given.chunk < max(runs["continuous"].sizes)


def test_times_of_tokens_rise_and_costs_are_those_of_the_runs(small):
    _, results = small
    for name in CHAPTERS:
        for run in results[name]:
            assert all(a <= b for times in run.times for a, b in pairwise(times)) and len(run.costs) == len(run.sizes)
            assert 0 < run.first_token <= 1e3 * run.seconds and run.longest_gap > 0


def test_the_tables_and_charts_hold_every_stage(small):
    _, results = small
    rows = ch14_measure.ladder_rows(results, Roofline(1e10, 1e11))
    told = plain(ch14_measure.ladder_table(rows, "Tiny"))
    assert all(name in told for name in results) and "median of 2" in told and told.count("×") == len(CHAPTERS) - 1
    assert all(row["rate"]["low"] <= row["rate"]["median"] <= row["rate"]["high"] for row in rows)
    assert all(row["bound"] > 0 for row in rows if row["stage"] in CHAPTERS)
    assert ch14_measure.ladder_chart({"one": rows, "two": rows}).startswith(b"\x89PNG")


def test_a_bound_takes_the_best_of_all_rounds():
    slow, fast = (Measurement("memory read", *numbers, 5, "GB/s") for numbers in ((4.0, 3.0, 5.0), (20.0, 18.0, 24.0)))
    whole = ch14_measure.joined([slow, fast])
    assert whole == Measurement("memory read", 12.0, 3.0, 24.0, 10, "GB/s")
    assert ch14_measure.best_roofline([whole, whole]) == Roofline(24e9, 24e9)


def test_a_static_batch_lets_nobody_in(small):
    given, results = small
    rows = given.slots // given.longest
    answers = [each.max_tokens for each in given.requests]
    batches = [answers[first : first + rows] for first in range(0, len(answers), rows)]
    assert len(results["static batches"][0].sizes) == sum(max(batch) for batch in batches)


def test_a_run_says_its_rate_and_waits():
    run = Run([[1, 2], [3]], [[0.1, 0.4], [0.3]], seconds=0.5)
    assert run.rate == 6.0 and run.first_token == pytest.approx(200) and run.longest_gap == pytest.approx(300)


@pytest.mark.parametrize("panels", [1, 2])
def test_no_word_of_the_ladder_chart_is_cut_off(panels):
    rows = evidence("14_ladder")["ladder"]
    titles = ["8 requests, SmolLM2-135M, float32, two CPU cores, and a machine with a long name"] * panels
    figure = ch14_measure.ladder_figure({f"{i}. {title}": rows for i, title in enumerate(titles)})
    ch14_measure.to_png(figure)  # lays it out
    for side in figure.axes:
        for text in (side.title, side._left_title, side.xaxis.label, *side.get_yticklabels(), *side.texts):
            box = text.get_window_extent()
            assert 0 <= box.x0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, text.get_text()


def test_one_run_has_no_range_and_engines_that_are_missing_are_named():
    one = Measurement("naive", 3.0, 3.0, 3.0, 1, "tokens/s")
    assert ch14_measure.with_range(one) == "3.0"
    assert ch14_measure.with_range(Measurement("naive", 3.0, 2.0, 4.0, 3, "tokens/s")) == "3.0 (2.0–4.0)"
    record = {"what": "w", "dtype": "d", "date": "1", "machine": {"cpu": "c", "threads": "2", "torch": "t"},
              "tokens_per_second": {"workload": {"zero-to-engine": [3.0], "vllm, all cores": [2.0]}},
              "left_out": {"transformers": "it hangs"}}  # fmt: skip
    told = plain(ch14_measure.peer_table(record))
    assert told.endswith("Not measured: transformers (it hangs), llama.cpp (it was not installed).")


# Evidence


def test_the_saved_ladder_is_complete_and_its_tokens_were_the_same():
    record = evidence("14_ladder")
    assert [row["stage"] for row in record["ladder"]] == [*CHAPTERS, ch14_measure.PEER]
    assert all(record["same_tokens"].values()) and record["work"] == ch14_ladder.LARGE
    assert all(row["rate"]["n"] >= 3 for row in record["ladder"]) and record["versions"]["transformers"]


def test_the_saved_loads_go_beyond_what_the_engine_can_do():
    points = read_points(evidence("14_load")["points"])
    rates = [point.rate for point in points]
    assert rates == sorted(rates) and all(point.failed == 0 for point in points)
    assert percentile(points[-1].ttft, 90) > percentile(points[0].ttft, 90)


@pytest.mark.parametrize("rates", [
    {"workload": {"zero-to-engine": [3.0, 1.0, 2.0]}}, {"zero-to-engine": [3.0, 1.0, 2.0]},
])  # fmt: skip
def test_the_comparison_with_peers_is_read_with_count_and_spread(rates):
    record = {"what": "w", "dtype": "d", "date": "1", "machine": {"cpu": "c", "threads": "2", "torch": "t"},
              "tokens_per_second": rates}
    assert ch14_measure.peer_rows(record) == [["zero-to-engine", "–", "workload", "2.0 (1.0–3.0)", "3"]]
    assert "c, 2 threads, torch t" in plain(ch14_measure.peer_table(record))


# Exercises


def test_the_fake_server_charges_for_what_it_does():
    server = ch14.FakeServer([4])
    server.generate([1] * 10, 16)
    assert server.clock() == pytest.approx(8.0 + 0.1 + 0.2)
    server.generate([1] * 10, 2)
    assert server.clock() == pytest.approx(8.4)


def test_a_histogram_agrees_with_its_samples():
    bounds, servers, percent = ch14.FLEETS["a busy server and an idle one"]
    samples = [bound for counts in servers for bound, count in zip(bounds, counts) for _ in range(count)]
    assert ch14.fleet_percentile(bounds, servers, percent) == percentile(samples, percent)


def test_the_waits_put_back_are_those_of_an_open_loop():
    every = [0.5 * i for i in range(20)]
    server = dict(service=0.1, stall_at=2.0, stall=3.0)
    requests = [SampleRequest([7], 1)] * 20
    opened = on_virtual_time(lambda clock: open_loop(stalling_server(clock, **server), requests, every, clock=clock))
    log = [(record.due, record.finished) for record in opened]
    waits = ch14.waits_from_due(log, 0.5, 10.0)
    assert waits == pytest.approx([record.e2el for record in opened])
