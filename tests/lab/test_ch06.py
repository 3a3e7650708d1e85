"""Chapter 06's simulator, driven without a kernel or a model, and what its checks and measurements promise."""

from __future__ import annotations

import random

import pytest

from shared.lab.chapters import ch06, ch06_life, ch06_measure
from shared.lab.evidence import evidence
from shared.output import Answer, OutputText, RequestGroup, first_stop, held_length
from shared.request import Request, RequestStatus, RequestTimes
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer
from tests.lab.stepping import plain

END = 3
WORDS = ["The", " sea", " is", "", "\n", "E", "ND", " blue"]
SCRIPTS = {"List three primary colors.": [0, 1, 4, 5, 6, END], "What is the capital of France?": [0, 2, 7, END]}


class ScriptedTurns:
    """The notebook's `Turns` with a script in place of the model; each token is one of WORDS."""

    def __init__(self):
        self.clock, self.scripts = 0, {}

    def submit(self, name, message, **options):
        params = SamplingParams(**options)
        times = RequestTimes(arrival=self.clock)
        request = Request(name, [7] * 5, params, params.max_tokens, params.seed, frozenset([END]), times=times)
        self.scripts[request] = SCRIPTS.get(message, [0, END])
        return Answer(request, OutputText(ch06.Pieces(WORDS), params.stop), RequestGroup(name, message))

    def step(self, answer):
        request, times = answer.request, answer.request.times
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        self.clock += 1
        times.first_token, times.last_token = times.first_token or self.clock, self.clock
        token = self.scripts[request][len(request.output_token_ids)]
        if reason := answer.add_token(token):
            request.status, request.finish_reason = RequestStatus.FINISHED, reason
        return token

    def preempt(self, answer):
        answer.request.status, answer.request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        answer.request.num_preemptions += 1

    def abort(self, answer):
        answer.request.status, answer.request.finish_reason = RequestStatus.FINISHED, "abort"
        answer.text.release()


def frames(stepper) -> list[str]:
    stepper.end.click()
    return [plain(frame) for frame in stepper.frames]


def life(**inputs):
    stepper = ch06_life.life_stepper(ScriptedTurns, WORDS.__getitem__)
    for name, value in inputs.items():
        stepper.fields[name].value = value
    return stepper


def test_the_life_of_two_requests_is_told_step_by_step():
    told = frames(life())
    assert told[0].startswith("Both requests have arrived.")
    assert told[1].startswith("A runs 5 positions, and gets 'The'.".replace("'", "&#x27;"))
    assert told[5].startswith("A must give its place to B.") and "A: waiting → running → finished" in told[5]
    assert "▸ preempted" in told[5] and "A preempted 5 4 0 / 9 1 ×" in told[5]
    assert told[6].startswith("B runs 5 positions")
    assert any("A runs 9 positions, all it has, again" in frame for frame in told)
    assert "A finished 5 6" in told[-1] and "B finished 5 4" in told[-1]


def test_each_state_is_lit_in_words_as_well():
    told = frames(life())
    for status in RequestStatus:
        assert any(f"▸ {status.value}" in frame for frame in told)


def test_a_stop_string_is_held_then_found():
    stepper = life(stop_a="END", preempt="0")
    told = frames(stepper)
    assert "held: E" in told[4]
    assert "stop, by &#x27;END&#x27;" in told[5] and "A finished 5 5" in told[5]
    assert "The·sea⏎" in told[-1] and "END " not in told[-1].replace("&#x27;END&#x27;", "")


def test_a_caller_hangs_up():
    told = frames(life(abort="2"))
    assert any(frame.startswith("B&#x27;s caller hung up") or frame.startswith("B's caller hung up") for frame in told)
    assert "abort" in told[-1] and "B finished 5 2" in told[-1]


def test_a_length_ends_it_too():
    assert "length" in frames(life(max_b="2"))[-1]


def test_without_preemption_b_waits_for_the_end_of_a():
    told = frames(life(preempt="0"))
    assert all("B waiting" in frame for frame in told[:7]) and "B running" in told[7]


def test_steps_go_back_and_bad_input_is_explained():
    stepper = life()
    first = stepper.frame.value
    stepper.step.click()
    assert stepper.frame.value != first
    stepper.back.click()
    assert stepper.frame.value == first
    stepper.fields["max_b"].value = "0"
    assert "B&#x27;s max_tokens: 0 is not between 1 and 40" in stepper.fields.error.value
    stepper.fields["max_b"].value = "5"
    stepper.reset.click()
    assert stepper.fields.error.value == "" and stepper.index == 0


def test_the_seed_and_the_way_to_choose_reach_the_requests():
    made = []

    class Watched(ScriptedTurns):
        def submit(self, name, message, **options):
            made.append((options["temperature"], options["seed"]))
            return super().submit(name, message, **options)

    stepper = ch06_life.life_stepper(Watched)
    assert made[-2:] == [(0.0, 0)] * 2
    stepper.fields["choose"].value = ch06_life.DRAWN
    stepper.seed.value = 5
    assert made[-2:] == [(0.8, 5)] * 2


def test_markup_in_a_stop_string_stays_text():
    stepper = life(stop_a="<b>", message_b="<script>")
    assert "<script>" not in stepper.static((0, -1)) and "<b>" not in "".join(stepper.frames)


@pytest.mark.parametrize("text, stops", [("", []), ("a", ["a"]), (r"\n\n|END", ["\n\n", "END"])])
def test_stop_strings_are_read(text, stops):
    assert ch06_life.stop_strings(text) == stops


@pytest.mark.parametrize("text", ["a||b", "|", "a|b|c|d|e"])
def test_bad_stop_strings_are_refused(text):
    with pytest.raises(ValueError, match="up to 4 strings"):
        ch06_life.stop_strings(text)


def test_random_answers_are_never_taken_back():
    faults, stopped = ch06.text_faults(OutputText, 3000, seed=1)
    assert faults == 0 and stopped > 500


@pytest.mark.parametrize("name", ["_add", "finish", "release"])
def test_the_random_answers_would_find_a_fault(name):
    broken = type("Broken", (OutputText,), {name: lambda self, *_: None})
    assert ch06.text_faults(broken, 200)[0] > 0


@pytest.mark.parametrize("stops", [["\n\n"], ["\n\n", "END."], ["ab", "xabc"], ["\n\n", "\n\n\n"]])
def test_a_stop_string_from_before_min_tokens_does_not_end_the_answer_later(stops):
    whole_before = ["\n\n", "xab"]
    for before in whole_before:
        text = OutputText(ch06.Pieces([before, "z"]), stops)
        assert text.push(0, check_stop=False) is None
        assert text.push(1) is None and text.text == before + "z"


def test_a_stop_string_across_the_border_of_min_tokens_counts():
    text = OutputText(ch06.Pieces(["a\n", "\nb"]), ["\n\n"])
    assert text.push(0, check_stop=False) is None
    assert text.push(1) == "\n\n" and text.text == "a"


def test_unchecked_text_is_never_lost():
    draw = random.Random(0)
    for _ in range(500):
        pieces = ["".join(draw.choices("ab", k=draw.randint(0, 3))) for _ in range(6)]
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(2)]
        text = OutputText(ch06.Pieces(pieces), stops)
        for index in range(6):
            text.push(index, check_stop=False)
        text.finish(check_stop=False)
        assert text.text == "".join(pieces)


@pytest.mark.parametrize("text, stops, length", [
    ("are:\n", ["\n\n"], 1), ("are:\n\n", ["\n\n"], 1), ("caa", ["aab", "b!"], 2), ("x", ["x"], 0), ("abc", [], 0),
])  # fmt: skip
def test_what_is_held_back(text, stops, length):
    assert held_length(text, stops) == length


def test_the_stop_string_complete_first_wins():
    assert first_stop("abcd", ["abcd", "bc"]) == (1, "bc")
    assert first_stop("xabc", ["bc", "abc"]) == (1, "abc")
    assert first_stop("bcxbc", ["bc"], known=2) == (3, "bc")


def test_whose_turn_it_is():
    order = ch06_measure.turns()
    assert order[:8] == [0, 1] * 4 and order[8:] == [0] * 6


def test_the_text_of_a_token_is_timed_with_count_and_spread():
    for result in ch06_measure.text_times(Tokenizer("smollm2-135m"), "All human beings are born free.", n=3):
        assert result.n == 3 and 0 < result.low <= result.median <= result.high and result.unit == "µs"


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("06_request_state")
    assert record["command"] == "python -m shared.lab.chapters.ch06_measure" and len(record["results"]) == 4
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
