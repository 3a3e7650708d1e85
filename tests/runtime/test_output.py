"""Growing text: the same however it is cut into tokens, never taken back, ended by the first stop string."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.output import Answer, OutputText, RequestGroup
from tests.runtime.plain import EOS, make_request

TEXT = st.text("ab ", max_size=14)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3)


class Pieces:
    """Token i adds pieces[i]; `end` was held back until the tokens ended."""

    def __init__(self, pieces, end=""):
        self.pieces, self.end = pieces, end

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.end


def cut(text: str, places) -> list[str]:
    """The text in pieces, with borders at some places; two equal places give an empty piece."""
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(borders, borders[1:])]


def first_end(text: str, stops, after: int = 0) -> tuple[int, int, str] | None:
    """The definition: of the stop strings that are complete at the first possible character, the longest."""
    for end in range(after + 1, len(text) + 1):
        hits = [(end - len(stop), end, stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return min(hits)
    return None


def run(pieces, stops=(), include_stop=False, end="", unchecked=0):
    """Push every piece until a stop; returns (text, stop string, what was shown after each token)."""
    output = OutputText(Pieces(pieces, end), stops, include_stop)
    shown, stop = [], None
    for index in range(len(pieces)):
        stop = output.push(index, check_stop=index >= unchecked)
        shown.append(output.text)
        if stop is not None:
            break
    if stop is None:
        stop = output.finish(check_stop=len(pieces) > unchecked)
    return output.text, stop, [*shown, output.text]


@given(TEXT, st.lists(st.integers(0, 20), max_size=8), STOPS, st.booleans())
def test_text_is_cut_at_the_first_stop_wherever_the_borders_fall(text, places, stops, include_stop):
    found = first_end(text, stops)
    start, end, stop = found or (len(text), len(text), None)
    expected = text[: end if include_stop else start]
    assert run(cut(text, places), stops, include_stop)[:2] == (expected, stop)
    assert run(list(text), stops, include_stop)[:2] == run([text], stops, include_stop)[:2] == (expected, stop)


@given(TEXT, st.lists(st.integers(0, 20), max_size=8), STOPS, st.booleans(), st.text("ab ", max_size=3))
def test_nothing_shown_is_ever_taken_back(text, places, stops, include_stop, end):
    final, _, shown = run(cut(text, places), stops, include_stop, end)
    for earlier, later in zip(shown, shown[1:]):
        assert later.startswith(earlier)
    assert shown[-1] == final


@given(TEXT, st.lists(st.integers(0, 20), max_size=8), STOPS)
def test_only_a_possible_beginning_of_a_stop_is_held_back(text, places, stops):
    pieces = cut(text, places)
    _, stop, shown = run(pieces, stops)
    for index in range(len(pieces) - (stop is not None)):
        pushed = "".join(pieces[: index + 1])
        if first_end(pushed, stops):
            break
        held = pushed[len(shown[index]) :]
        assert pushed.startswith(shown[index])
        assert not held or any(len(held) < len(s) and s.startswith(held) for s in stops)


@given(TEXT, st.lists(st.integers(0, 20), max_size=8), STOPS, st.integers(0, 6))
@example("ba", [1, 2], ["a", "ab"], 2)  # held as the beginning of the second, complete as the first too early
@example("aaa", [1, 2], ["aa"], 2)
def test_a_stop_that_is_complete_below_min_tokens_does_not_count(text, places, stops, unchecked):
    pieces = cut(text, places)
    after = sum(map(len, pieces[:unchecked]))
    start, end, stop = first_end(text, stops, after) or (len(text), len(text), None)
    final, found, _ = run(pieces, stops, True, unchecked=unchecked)
    assert found == stop and final == text[:end]
    without = run(pieces, stops, False, unchecked=unchecked)[0]
    assert text.startswith(without) and start <= len(without) <= end  # what was shown below min_tokens stays
    assert unchecked or len(without) == start


def test_what_was_held_is_released_when_the_tokens_end():
    assert run(["UNO", " DUE", " TRE"], ["TRE\nAAAA"])[:2] == ("UNO DUE TRE", None)
    assert run(["x", "ST"], ["STOP"], end="O")[:2] == ("xSTO", None)
    assert run(["x", "ST"], ["STOP"], end="OP!")[:2] == ("x", "STOP")
    assert run(["x", "ST"], ["STOP"], True, end="OP!")[:2] == ("xSTOP", "STOP")


def test_text_that_cannot_begin_a_stop_is_shown_at_once():
    assert run(["abc", "def", "gh"], ["XYZ"])[2] == ["abc", "abcdef", "abcdefgh", "abcdefgh"]
    assert run(["aX", "b"], ["XYZ"])[2][:2] == ["a", "aXb"]


# An answer: tokens and text together


def answer(pieces, max_tokens=16, **params) -> Answer:
    request = make_request("r", [5, 6], max_tokens, **params)
    options = request.sampling_params
    text = OutputText(Pieces(pieces), options.stop, options.include_stop_str_in_output)
    return Answer(request, text, RequestGroup("r", None))


def feed(answer: Answer, tokens) -> list[str | None]:
    return [answer.add_token(token) for token in tokens]


def test_an_end_token_is_in_the_ids_but_not_in_the_text():
    a = answer({EOS: "<end>", 1: "a", 2: "b"})
    assert feed(a, [1, 2, EOS]) == [None, None, "stop"]
    assert a.text.text == "ab" and a.request.output_token_ids == [1, 2, EOS] and a.request.stop_reason is None


def test_an_own_stop_token_is_the_reason():
    a = answer({7: "S", 1: "a"}, stop_token_ids=[7])
    assert feed(a, [1, 7]) == [None, "stop"] and a.text.text == "a" and a.request.stop_reason == 7
    b = answer({7: "S", 1: "a"}, stop_token_ids=[7], include_stop_str_in_output=True)
    assert feed(b, [1, 7])[-1] == "stop" and b.text.text == "aS"


def test_the_last_token_before_the_length_is_in_the_text():
    a = answer({1: "a", 2: "b", 3: "c"}, max_tokens=3)
    assert feed(a, [1, 2, 3]) == [None, None, "length"] and a.text.text == "abc"


def test_end_and_length_at_once_is_stop():
    for last, reason in ((EOS, "stop"), (1, "length")):
        a = answer({1: "a", EOS: "<end>"}, max_tokens=2)
        assert feed(a, [1, last])[-1] == reason
    a = answer({1: "a", 2: "b"}, max_tokens=2, stop=["ab"])
    assert feed(a, [1, 2])[-1] == "stop" and a.request.stop_reason == "ab" and a.text.text == ""


def test_a_stop_string_across_tokens():
    pieces = {1: "one ST", 2: "O", 3: "P two"}
    for include, expected in ((False, "one "), (True, "one STOP")):
        a = answer(pieces, stop=["STOP"], include_stop_str_in_output=include)
        assert feed(a, [1, 2, 3]) == [None, None, "stop"]
        assert a.text.text == expected and a.request.stop_reason == "STOP"


def test_min_tokens_counts_tokens_of_the_answer():
    a = answer({1: "a", EOS: "<end>"}, min_tokens=3, stop=["a"])
    assert feed(a, [1, 1, 1]) == [None, None, "stop"]
    b = answer({1: "a", EOS: "<end>"}, min_tokens=3)
    assert feed(b, [EOS, 1, EOS]) == [None, None, "stop"]


def test_ignore_eos_shows_nothing_special_and_goes_on():
    a = answer({1: "a", EOS: ""}, max_tokens=4, ignore_eos=True)
    assert feed(a, [EOS, 1, EOS, 1]) == [None, None, None, "length"] and a.text.text == "aa"


def test_new_text_is_what_was_added_since_the_last_report():
    a = answer({1: "ab", 2: "S", 3: "x"}, stop=["ST"])
    reports = []
    for token in (1, 2, 3, 2):
        a.add_token(token)
        reports.append(a.completion(0).new_text)
    a.text.release()
    reports.append(a.completion(0).new_text)
    assert reports == ["ab", "", "Sx", "", "S"]


@pytest.mark.parametrize("said", ["ab", "aaa"])
def test_a_stop_string_of_megabytes_costs_next_to_nothing(said):
    """The engine's thread pays for it at every token of every request."""
    text = OutputText(Pieces(said), ["a" * 4_000_000, "b" * 1_000_000 + "c"])
    started = time.perf_counter()
    for _ in range(300):
        for token in range(len(said)):
            text.push(token)
    assert time.perf_counter() - started < 5  # it was hours
    text.finish()
    assert text.text == said * 300
