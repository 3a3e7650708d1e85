"""The load generator, what its records come to, and the bound they are measured against."""
from __future__ import annotations

import asyncio
import json
import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.async_engine import AsyncEngine
from shared.bench import main, parse_args
from shared.errors import EngineError, InvalidRequestError
from shared.load import (
    RequestRecord,
    SampleRequest,
    arrival_times,
    closed_loop,
    counts,
    engine_client,
    open_loop,
    random_requests,
)
from shared.roofline import Cost, Roofline, least_seconds, linear_parameters, step_cost, trace_costs
from shared.sampling_params import SamplingParams
from shared.summary import Estimate, percentile, repeat, summarize, table
from tests.runtime.tiny import ScriptedRunner, drain, make_engine

TIMES = st.lists(st.floats(0, 1e3), min_size=1, max_size=40)


class Steady:
    """A server on virtual time: every request takes `service` seconds, one after another, two tokens each."""

    def __init__(self, service: float):
        self.service, self.lock = service, asyncio.Lock()

    async def __call__(self, request):
        async with self.lock:
            await asyncio.sleep(self.service)
            yield 1
            yield 1


def on_virtual_time(make):
    """Run make(clock) on a loop whose clock jumps to the next timer: seconds cost nothing and are exact."""
    loop, now = asyncio.new_event_loop(), [0.0]
    select = loop._selector.select

    def jump(timeout):
        now[0] += timeout or 0.0
        return select(0)

    loop._selector.select, loop.time = jump, lambda: now[0]
    try:
        return loop.run_until_complete(make(loop.time))
    finally:
        loop.close()


REQUESTS = [SampleRequest([5, 6, 7], 2)] * 6


def test_an_open_loop_counts_the_time_a_request_waited_to_be_sent():
    arrivals = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    records = on_virtual_time(lambda clock: open_loop(Steady(2.0), REQUESTS, arrivals, clock=clock))
    assert [record.ttft for record in records] == pytest.approx([2, 3, 4, 5, 6, 7])


def test_a_limit_on_concurrency_hides_no_waiting():
    arrivals = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    records = on_virtual_time(lambda clock: open_loop(Steady(2.0), REQUESTS, arrivals, 1, clock=clock))
    assert [record.ttft for record in records] == pytest.approx([2, 3, 4, 5, 6, 7])


def test_a_closed_loop_waits_for_each_answer_and_so_sees_no_queue():
    records = on_virtual_time(lambda clock: closed_loop(Steady(2.0), REQUESTS, 1, clock=clock))
    assert [record.ttft for record in records] == pytest.approx([2] * 6)
    assert [record.due for record in records] == pytest.approx([0, 2, 4, 6, 8, 10])


def test_a_closed_loop_keeps_as_many_requests_open_as_it_has_users():
    open_now, most = [0], [0]

    async def client(request):
        open_now[0] += 1
        most[0] = max(most[0], open_now[0])
        await asyncio.sleep(1.0)
        open_now[0] -= 1
        yield 1

    records = on_virtual_time(lambda clock: closed_loop(client, REQUESTS, 4, clock=clock))
    assert most == [4] and len(records) == 6


def test_a_failed_request_is_counted_and_spoils_no_time():
    async def client(request):
        yield 1
        if request.max_tokens == 1:
            raise EngineError("broken")

    requests = [SampleRequest([5], 1), SampleRequest([5], 2)]
    result = summarize(on_virtual_time(lambda clock: open_loop(client, requests, [0.0, 0.5], clock=clock)))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (1, 1, 1)


def test_programming_errors_are_not_taken_for_failed_requests():
    async def client(request):
        raise TypeError
        yield

    with pytest.raises(TypeError):
        on_virtual_time(lambda clock: open_loop(client, REQUESTS, [0.0] * 6, clock=clock))


# Workload


def test_lengths_stay_in_range_and_a_seed_gives_the_same_requests():
    requests = random_requests(200, 40, 20, 0.5, seed=3)
    assert {20, 60} <= {len(request.prompt_token_ids) for request in requests} <= set(range(20, 61))
    assert {10, 30} <= {request.max_tokens for request in requests} <= set(range(10, 31))
    assert requests == random_requests(200, 40, 20, 0.5, seed=3) != random_requests(200, 40, 20, 0.5, seed=4)


@pytest.mark.parametrize(
    "wrong",
    [dict(num_prompts=0), dict(input_len=-1), dict(output_len=1.5), dict(range_ratio=1), dict(range_ratio=-0.1)],
)
def test_impossible_workloads_are_refused(wrong):
    with pytest.raises(InvalidRequestError) as caught:
        random_requests(**{**dict(num_prompts=1, input_len=1, output_len=1), **wrong})
    assert caught.value.field == next(iter(wrong))


@pytest.mark.parametrize("burstiness, variation", [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_arrivals_have_the_wanted_rate_and_burstiness(burstiness, variation):
    times = arrival_times(20_000, 8.0, burstiness)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("rate, burstiness, field", [
    (0, 1, "request_rate"), (-1, 1, "request_rate"), (math.nan, 1, "request_rate"), (1, 0, "burstiness"),
])  # fmt: skip
def test_impossible_rates_are_refused(rate, burstiness, field):
    with pytest.raises(InvalidRequestError) as caught:
        arrival_times(3, rate, burstiness)
    assert caught.value.field == field
    assert arrival_times(3, math.inf) == [0.0] * 3


def test_the_engine_gives_each_client_its_tokens():
    engine = AsyncEngine(make_engine(runner=ScriptedRunner([7] * 9)))
    try:
        requests = [SampleRequest([5, 6], n) for n in (1, 4, 9)]
        records = asyncio.run(open_loop(engine_client(engine), requests, [0.0] * 3))
    finally:
        engine.shutdown()
    assert [record.output_len for record in records] == [1, 4, 9] and not any(record.error for record in records)


def test_a_refused_request_is_a_failed_one():
    engine = AsyncEngine(make_engine(runner=ScriptedRunner([7]), max_model_len=8))
    try:
        (record,) = asyncio.run(open_loop(engine_client(engine), [SampleRequest([5] * 50, 4)], [0.0]))
    finally:
        engine.shutdown()
    assert "prompt" in record.error and record.finished is None


def test_a_stream_of_events_is_counted_by_chunks_and_put_right_by_usage():
    async def events(*parts):
        for part in parts:
            yield part if isinstance(part, str) else f"data: {json.dumps(part)}"

    async def read(*parts):
        return [count async for count in counts(events(*parts))]

    text, usage = {"choices": [{}]}, {"choices": [], "usage": {"completion_tokens": 5}}
    assert asyncio.run(read(text, "", text, usage, "data: [DONE]")) == [1, 1, 3]
    with pytest.raises(EngineError, match="shutting down"):
        asyncio.run(read(text, {"error": {"message": "shutting down"}}))


# What the records come to


def test_a_summary_by_hand():
    first = RequestRecord(10, due=0.0, arrivals=[(0.1, 1), (0.2, 1), (0.5, 2)], finished=0.5)
    second = RequestRecord(20, due=1.0, arrivals=[(1.5, 1)], finished=2.0)
    result = summarize([first, second], percentiles=[50, 99], goodput={"ttft": 200, "tpot": 150})
    assert result["duration"] == 2.0 and result["output_throughput"] == 2.5
    assert result["total_token_throughput"] == 17.5 and result["request_throughput"] == 1.0
    assert result["mean_ttft_ms"] == pytest.approx(300) and result["p50_ttft_ms"] == pytest.approx(100)
    assert result["p99_ttft_ms"] == pytest.approx(500)
    assert result["mean_tpot_ms"] == pytest.approx(400 / 3)  # the second has one token and no gap
    assert result["mean_itl_ms"] == pytest.approx(200) and result["mean_e2el_ms"] == pytest.approx(750)
    assert result["request_goodput"] == 0.5


def test_no_answer_at_all_is_still_a_summary():
    assert summarize([RequestRecord(1, 0.0, error="x")]) == {"completed": 0, "failed": 1}


@given(TIMES, st.floats(1, 100))
def test_a_percentile_is_a_sample_that_enough_do_not_exceed(samples, percent):
    value = percentile(samples, percent)
    assert value in samples
    assert sum(sample <= value for sample in samples) >= percent / 100 * len(samples) - 1e-9
    assert sum(sample < value for sample in samples) < percent / 100 * len(samples) + 1e-9


def test_a_whole_rank_is_not_rounded_up():
    assert [percentile(range(1, 101), percent) for percent in range(1, 101)] == list(range(1, 101))


@pytest.mark.parametrize("n", [2, 5, 11, 30])
def test_the_interval_covers_the_mean_as_often_as_it_says(n):
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(4000, n, generator=generator) + 10
    hits = sum(abs(e.mean - 10) <= e.half_width for e in map(Estimate.of, draws.tolist()))
    assert hits / 4000 == pytest.approx(0.95, abs=0.015)


def test_one_run_claims_no_interval():
    assert Estimate.of([3.0]) == Estimate(3.0, None, 1) and "one run" in table({"x": Estimate.of([3.0])})


def test_repetitions_keep_the_numbers_that_every_run_has():
    assert repeat(lambda i: {"a": i, **({"b": 1} if i else {})}, 3) == {"a": Estimate.of([0, 1, 2])}


# The bound


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_counted_weights_are_those_of_the_model(variant, family):
    model = family(variant).model
    held = sum(p.numel() for layer in model.layers for n, p in layer.named_parameters() if "proj.weight" in n)
    assert linear_parameters(model.config) == held


def test_chunks_cost_the_operations_of_the_whole_and_the_weights_again(family):
    config = family("llama").model.config
    whole = step_cost(config, torch.float32, [(10, 10)], 1)
    parts = [step_cost(config, torch.float32, [piece], rows) for piece, rows in (((4, 4), 0), ((6, 10), 1))]
    assert sum(part.flops for part in parts) == whole.flops
    assert sum(part.num_bytes for part in parts) > whole.num_bytes


def test_pairs_of_queries_and_keys_are_counted_one_by_one(family):
    config = family("llama").model.config
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    pairs = sum(position + 1 for position in range(3, 8))
    cost = step_cost(config, torch.float32, [(5, 8)], 0)
    assert cost.flops == 2 * linear_parameters(config) * 5 + per_pair * pairs


@pytest.mark.parametrize("blocks", [64, 9])
def test_a_trace_with_and_without_preemption_costs_what_its_steps_ran(blocks, family):
    model = family("llama").model
    engine = make_engine(model, num_blocks=blocks, max_num_batched_tokens=16)
    for name in "abc":
        engine.add_request(name, [5] * 9, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    drain(engine)
    steps = engine.trace.steps
    assert any(step.preempted for step in steps) == (blocks == 9)
    costs = trace_costs(model.config, torch.float32, steps)
    assert len(costs) == len(steps) and all(cost.intensity > 0 for cost in costs)
    fast, slow = Roofline(1e9, 1e12), Roofline(1e9, 1e3)
    assert least_seconds(model.config, torch.float32, steps, fast) == pytest.approx(
        sum(cost.num_bytes for cost in costs) / 1e9
    )
    assert least_seconds(model.config, torch.float32, steps, slow) == pytest.approx(sum(c.flops for c in costs) / 1e3)
    assert fast.seconds(Cost(10**9, 1)) == 1.0


# The command


def test_flags_carry_the_names_of_vllm():
    args = parse_args([
        "serve", "--request-rate", "4", "--burstiness", "2", "--max-concurrency", "8", "--goodput", "ttft:500",
        "tpot:50", "--max-num-seqs", "4", "--no-enable-prefix-caching", "--num-prompts", "7",
    ])  # fmt: skip
    assert (args.request_rate, args.max_num_seqs, args.enable_prefix_caching) == (4.0, 4, False)
    assert args.goodput == [("ttft", 500.0), ("tpot", 50.0)]


CLOSED, OPEN = ["serve", "--max-concurrency", "2"], ["serve", "--request-rate", "50"]


@pytest.mark.parametrize("command", [CLOSED, OPEN, ["throughput"]])
def test_the_command_measures_and_writes_what_it_measured_on(command, tiny_folder, tmp_path, capsys):
    output = tmp_path / "result.json"
    lengths = ["--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "4", "--num-repeats", "2"]
    common = ["--vocab-size", "100", "--model", str(tiny_folder), "--output-json", str(output)]
    assert main([*command, *lengths, *common]) == 0
    report = json.loads(output.read_text())
    assert report["results"]["output_throughput"]["n"] == 2 and report["machine"]["torch"] == torch.__version__
    assert "output_throughput" in capsys.readouterr().out


def test_latency_is_of_the_whole_batch(tiny_folder, capsys):
    sizes = ["--batch-size", "2", "--input-len", "4", "--output-len", "3", "--num-iters", "2"]
    assert main(["latency", *sizes, "--vocab-size", "100", "--model", str(tiny_folder)]) == 0
    assert "latency_ms" in capsys.readouterr().out


def test_a_wrong_option_is_named(tiny_folder, capsys):
    assert main(["throughput", "--model", str(tiny_folder), "--max-num-seqs", "0"]) == 1
    assert "max_num_seqs" in capsys.readouterr().err
