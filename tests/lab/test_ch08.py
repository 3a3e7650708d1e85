"""Chapter 08's simulator, driven without a kernel on a tiny model, and what its checks and measurements promise."""

from __future__ import annotations

import re

import pytest

from shared.batch import ForwardBatch
from shared.lab.chapters import ch08, ch08_measure, ch08_steps
from shared.lab.chapters.ch07_steps import idle_steps, make_request
from shared.lab.evidence import evidence
from shared.sampling_params import SamplingParams
from shared.scheduler import ScheduledRequest
from tests.lab.stepping import assert_explains, assert_goes_back_and_resets, plain
from tests.runtime.tiny import ToyTokenizer, make_hf

TRACE = "0 6 ab\n0 3 abcdefgh\n1 5 c\n2 2 defg"


class ChatTokenizer(ToyTokenizer):
    def encode_chat(self, messages):
        return self.encode(messages[0]["content"])

    def token_text(self, token_id):
        return chr(token_id)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from shared.weights import load_model

    folder = tmp_path_factory.mktemp("tiny")
    make_hf("llama").save_pretrained(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def make_engine(model):
    return ch08_measure.engine_maker(model, ChatTokenizer())


def stepper(make_engine, **inputs):
    made = ch08_steps.engine_stepper(make_engine)
    for name, value in ({"arrivals": TRACE, "budget": "6"} | inputs).items():
        made.fields[name].value = value
    return made


def frames(made) -> list[str]:
    made.end.click()
    assert made.fields.error.value == ""
    return [plain(frame) for frame in made.frames]


# The simulator


def test_each_step_shows_rows_slots_the_flat_run_and_reasons(make_engine):
    told = frames(stepper(make_engine))
    assert told[0].startswith("Nothing has run yet.")
    assert told[1].startswith("Engine step 0: one run of the model, 6 of 6 tokens. Prefill: 2, decode: 0, waiting: 0, ")
    assert "1 B tokens 0 to 3 of 8 64 to 67 2 to 5 none, prompt not complete –" in told[1]
    assert "The run, flat: A 1, B 4." in told[2] and "1 B tokens 4 to 7 of 8 68 to 71 1 to 4 row 1" in told[2]
    assert "C waits: max_num_seqs=2 requests are running" in told[2]
    assert "D waits: behind C" in told[3]
    assert re.search(r"ends: length", told[-1])


def test_the_first_trace_queues_cuts_a_prompt_and_mixes_it_with_a_decode(model):
    class Words(ChatTokenizer):
        """Prompts as long as the chat template makes them."""
        def encode_chat(self, messages):
            return self.encode(messages[0]["content"].ljust(34)[:34])

    make = ch08_measure.engine_maker(model, Words())
    told = frames(ch08_steps.engine_stepper(make))
    assert "Prefill: 2, decode: 0" in told[1] and "none, prompt not complete" in told[1]
    assert "Prefill: 1, decode: 1, waiting: 1" in told[2] and "C waits: max_num_seqs=2" in told[2]
    assert "D waits: behind C" in told[3]
    whole = ch08_steps.engine_stepper(make)
    whole.fields["chunked"].value = False
    assert all("not complete" not in frame for frame in frames(whole))


def test_static_batches_leave_rows_idle(make_engine):
    continuous, static = (frames(stepper(make_engine, admission=words))
                          for words in (ch08_steps.CONTINUOUS, ch08_steps.STATIC))
    idle = [sum(int(re.search(r"(\d) of 2 rows idle", frame)[1]) for frame in told[1:])
            for told in (continuous, static)]
    assert len(continuous) < len(static) and idle[0] < idle[1]
    assert [frame.split("answer so far")[1] for frame in (continuous[-1], static[-1])].count("") == 0


def test_the_answers_do_not_depend_on_rows_budget_or_admission(make_engine):
    told = {str(inputs): frames(stepper(make_engine, **inputs))[-1].split("answer so far ")[1] for inputs in (
        {}, {"rows": "4", "budget": "64"}, {"rows": "1"}, {"admission": ch08_steps.STATIC},
        {"budget": "12", "chunked": False})}
    quoted = r"([A-D]) (&#x27;.*?&#x27;|&quot;.*?&quot;)"
    answers = [sorted(re.findall(quoted, words.split(" A (step")[0])) for words in told.values()]
    assert [name for name, _ in answers[0]] == list("ABCD") and all(each == answers[0] for each in answers)


def test_the_seed_draws_other_tokens_only_above_temperature_zero(make_engine):
    for temperature, same in ((0.0, True), (1.5, False)):
        made = stepper(make_engine, temperature=temperature)
        first = frames(made)
        made.seed.value = 9
        assert (frames(made) == first) == same
        made.seed.value = 0
        assert frames(made) == first


def test_steps_go_back_and_reset(make_engine):
    assert_goes_back_and_resets(stepper(make_engine))


def test_a_gap_without_requests_is_stepped_through(make_engine):
    told = frames(stepper(make_engine, arrivals="0 1 a\n3 1 b"))
    assert len(told) == 5 and "no run of the model" in told[2] and "The run, flat: nothing." in told[2]


@pytest.mark.parametrize("name, value, words", [
    ("arrivals", "0 4", "line 1: write the step"), ("arrivals", "x 4 a", "is not a whole number"),
    ("arrivals", "0 99 a", "is not between 1 and 24"), ("rows", "0", "Rows: 0 is not between"),
    ("budget", "1", "1 is too few for 2 rows"), ("row_slots", "8", "B would be refused: prompt: must be at most"),
])  # fmt: skip
def test_bad_input_is_explained(make_engine, name, value, words):
    made = stepper(make_engine, **{name: value})
    assert_explains(made, name, words, good={"budget": "12", "rows": "2", "row_slots": "64"}.get(name, "0 4 a"))


# Exercises


def test_the_exercise_lays_a_step_flat_as_the_engine_does():
    for scheduled, row_slots in ch08.STEPS.values():
        items = []
        for row, start, num_tokens, total in scheduled:
            request = make_request("r", total, 4)
            request.block_table, request.num_computed_tokens = [row], start
            items.append(ScheduledRequest.of(request, num_tokens))
        batch = ForwardBatch.build(items, row_slots)
        got = (batch.positions, batch.slot_mapping, batch.query_start_loc, batch.logits_indices)
        assert [each.tolist() for each in got] == [list(each) for each in ch08.lay_flat(scheduled, row_slots)]


def test_the_best_score_is_below_that_of_equal_parts():
    for seq_lens, calls in ch08.lengths_of_rows().values():
        best = ch08.least_padding(tuple(sorted(seq_lens)), calls)
        assert best <= ch08.padding(ch08.equal_parts(seq_lens, calls), seq_lens, calls, "")
    assert ch08.least_padding((8, 9, 11, 12, 14, 15, 390, 400), 2) == 31


# Measurements


def test_static_batching_takes_more_steps_on_the_measured_trace(make_engine):
    counts = {}
    for static in (True, False):
        engine = make_engine(rows=ch08_measure.ROWS, row_slots=64, budget=64, static=static)
        ch08_measure.serve(engine)
        assert sum(len(step.new_tokens) for step in engine.trace.steps) == sum(ch08_measure.LENGTHS)
        counts[static] = len(engine.trace.steps), idle_steps(engine.trace.steps, ch08_measure.ROWS)
    assert counts == {True: (22, 43), False: (13, 7)}


def test_tokens_scheduled_in_each_step_under_a_budget(make_engine):
    """Three decode when a prompt of 200 tokens comes: what a step has left for it, exactly."""
    for budget, sizes in ((512, [203]), (64, [64, 64, 64, 20]), (50, [50, 50, 50, 50, 15])):
        engine = make_engine(rows=4, row_slots=320, budget=budget)
        options = {"temperature": 0, "ignore_eos": True}
        for name in "ABC":
            engine.add_request(name, [7] * 4, SamplingParams(max_tokens=12, **options))
        engine.step()
        engine.add_request("long", [9] * 200, SamplingParams(max_tokens=1, **options))
        while "long" in engine.groups:
            engine.step()
        steps = engine.trace.steps[1:]
        assert [step.num_batched_tokens for step in steps] == sizes
        assert [step.scheduled["long"] for step in steps] == [size - 3 for size in sizes]


def test_expected_times_lie_on_the_line_between_measured_ones():
    times = {1: 0.1, 8: 0.8, 260: 1.0}
    assert [ch08_measure.expected(times, n) for n in (1, 8, 260, 300)] == [0.1, 0.8, 1.0, 1.0]
    assert ch08_measure.expected(times, 2) == pytest.approx(0.2)


def test_gaps_and_rates_come_with_what_is_expected(make_engine):
    times = dict.fromkeys(ch08_measure.SIZES, 0.01)
    results = [*ch08_measure.throughput(make_engine, times, 2), *ch08_measure.gaps(make_engine, times, 2)]
    assert [round(predicted) for predicted, _ in results[:2]] == [205, 346]
    assert [round(predicted) for predicted, _ in results[2:]] == [10, 10, 10, 50]
    assert all(result.n == 2 and 0 < result.low <= result.median <= result.high for _, result in results)


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("08_continuous_batching")
    assert record["command"] == "python -m shared.lab.chapters.ch08_measure" and len(record["results"]) == 6
    assert len(record["expected"]) == 6
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
