from __future__ import annotations

import sys
import threading
import types

import pytest

from shared.lab import Check, Score, Wrong, check, expect, expect_error, fail, progress, same
from shared.lab.checks import judge
from shared.lab.judging import call, short


def judge_total(fn):
    expect(fn, ([1, 2, 3],), 6)
    expect(fn, ([],), 0, case="an empty list")


@pytest.fixture
def chapter(monkeypatch):
    module = types.ModuleType("shared.lab.chapters.ch99")
    module.CHECKS = {"99.1": Check(judge_total), "99.2": Check(lambda fn: Score("blocks read", fn(), best=8))}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def total(numbers):
    return sum(numbers)


def stub(numbers):
    raise NotImplementedError


def words(fn) -> str:
    return judge("99.1", fn, Check(judge_total)).words


def test_a_right_answer_passes_and_is_recorded(chapter, capsys):
    check("99.1", total)
    assert capsys.readouterr().out == "Exercise 99.1: passed.\n"
    assert progress.load_progress()["passed"] == {"99.1": None}


def test_a_stub_prints_one_fixed_line_and_records_nothing(chapter, capsys, progress_file):
    check("99.1", stub)
    assert capsys.readouterr().out == "Exercise 99.1: not attempted yet.\n"
    assert not progress_file.exists()


def test_a_score_is_shown_and_recorded(chapter, capsys):
    check("99.2", lambda: 12)
    assert capsys.readouterr().out == "Exercise 99.2: passed. Blocks read: 12 (best 8).\n"
    assert progress.load_progress()["passed"] == {"99.2": 12}


def test_a_pass_that_cannot_be_saved_says_so(chapter, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO_TO_ENGINE_PROGRESS", str(tmp_path / "file" / "p.json"))
    check("99.1", total)
    assert "could not be saved" in capsys.readouterr().out


def test_an_unknown_exercise_is_an_error_in_words(chapter):
    with pytest.raises(ValueError, match="no exercise '99.7'; this chapter has 99.1, 99.2"):
        check("99.7", total)


def test_the_first_wrong_case_is_named(chapter, capsys):
    check("99.1", lambda numbers: 7)
    assert capsys.readouterr().out == (
        "Exercise 99.1: not yet. With numbers = [1, 2, 3]: your function returned 7; expected 6.\n")
    assert "Case 'an empty list': your function returned None" in words(lambda n: sum(n) if n else None)


def test_what_the_function_raises_is_named_with_its_line():
    def fails(numbers):
        return numbers[0] + sum(numbers[1:])
    line = fails.__code__.co_firstlineno + 1
    assert f"raised IndexError: list index out of range (line {line} of its cell)" in words(fails)


@pytest.mark.parametrize("fn", [lambda: 1, lambda a, b: 1, None, 3])
def test_a_wrong_signature_or_no_function_is_wrong_in_words(fn):
    assert "raised TypeError" in words(fn)


def test_an_endless_loop_is_stopped():
    def loops(numbers):
        while True:
            try:
                len(numbers)
            except Exception:
                pass
    fast = Check(lambda fn: expect(fn, ([1],), 1, seconds=0.3) and None)
    assert "did not return within 0.3 seconds" in judge("99.1", loops, fast).words


def test_the_time_limit_works_outside_the_main_thread():
    def loops(numbers):
        while True:
            pass
    found = []
    fast = Check(lambda fn: expect(fn, ([1],), 1, seconds=0.3) and None)
    thread = threading.Thread(target=lambda: found.append(judge("99.1", loops, fast).words))
    thread.start()
    thread.join(10)
    assert "did not return" in found[0]


def test_many_quick_calls_leave_no_late_interruption():
    def busy(n):
        return sum(k * k for k in range(n))
    outcomes = []
    for n in range(0, 30_000, 100):  # some of these end just before the limit, some just after it
        try:
            outcomes.append(call(busy, n, seconds=0.0005) == busy(n))
        except Wrong as wrong:
            outcomes.append("did not return" in str(wrong))
    assert all(outcomes) and len(outcomes) == 300


def test_the_case_survives_a_function_that_changes_its_arguments():
    cases = [[3, 1, 2]]

    def destroys(numbers):
        numbers.clear()
        return 0
    verdict = judge("99.1", destroys, Check(lambda fn: expect(fn, (cases[0],), 6)))
    assert "With numbers = [3, 1, 2]" in verdict.words
    assert cases == [[3, 1, 2]]


def test_changing_arguments_is_wrong_only_where_the_check_says_so():
    def sorts(numbers):
        numbers.sort()
        return numbers[0]
    expect(sorts, ([3, 1],), 1)
    with pytest.raises(Wrong, match="changed the arguments"):
        expect(sorts, ([3, 1],), 1, keeps_arguments=True)
    expect(min, ([3, 1],), 1, keeps_arguments=True)


def test_words_returned_or_raised_by_a_judge_are_shown():
    verdict = judge("99.1", total, Check(lambda fn: "Two blocks lost."))
    assert str(verdict) == "Exercise 99.1: not yet. Two blocks lost."
    assert judge("99.1", total, Check(lambda fn: fail("a reason"))).words == "a reason"


def test_a_result_that_the_judge_cannot_use_is_the_readers_wrong_case():
    verdict = judge("99.1", total, Check(lambda fn: len(None)))
    assert not verdict.passed and "could not be used: TypeError" in verdict.words


def test_expect_error():
    def refuses(x):
        raise ValueError("no")
    assert str(expect_error(refuses, (1,), ValueError)) == "no"
    with pytest.raises(Wrong, match="returned 1; expected it to raise ValueError"):
        expect_error(lambda x: x, (1,), ValueError)
    with pytest.raises(Wrong, match="raised ValueError: no .*expected KeyError"):
        expect_error(refuses, (1,), KeyError)
    with pytest.raises(NotImplementedError):
        expect_error(stub, (1,), Exception)


@pytest.mark.parametrize("got, want, equal", [
    ([1, 2], (1, 2), True), (1, 1.0, True), (0.1 + 0.2, 0.3, True), (0.31, 0.3, False), ("1", 1, False),
    (float("nan"), float("nan"), True), (float("nan"), 1.0, False), (None, 0, False),
    ({1: [2]}, {1: (2,)}, True),
    ({1: 2}, {1: 2, 3: 4}, False), ([1, 2, 3], [1, 2], False), ({1, 2}, {2, 1}, True), (True, 1, True),
    ("ab", ["a", "b"], False), (float("-inf"), float("-inf"), True), (None, 0.5, False),
])
def test_equality(got, want, equal):
    assert same(got, want) is equal


def test_tensors_and_arrays_compare_by_their_numbers():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    assert same(torch.tensor([[1, 2]]), [[1, 2]]) and same(numpy.array([0.5]), torch.tensor([0.5]))
    assert same(torch.tensor(3), 3) and not same(torch.tensor([1]), [2])


def test_long_results_are_shortened_and_the_first_difference_is_located():
    with pytest.raises(Wrong) as wrong:
        expect(lambda n: [*range(50), 7, *range(51, n)], (100,), list(range(100)))
    assert "The first difference is item 50: 7 instead of 50." in str(wrong.value)
    assert len(str(wrong.value)) < 300
    with pytest.raises(Wrong, match="It has 8 items instead of 7"):
        expect(lambda: list(range(8)), (), list(range(7)))
    with pytest.raises(Wrong) as wrong:
        expect(lambda: [1, 2, 3], (), [1, 2])
    assert str(wrong.value) == "Without arguments: your function returned [1, 2, 3]; expected [1, 2]."


def test_a_known_mistake_is_named_and_a_case_that_ends_in_a_colon_stays_as_it_is():
    mistakes = {"that counts the last one twice": 11, "that counts from 1": 12}
    with pytest.raises(Wrong) as wrong:
        expect(lambda: 12, (), 10, case="With ten apples:", mistakes=mistakes)
    assert str(wrong.value) == "With ten apples: your function returned 12; that counts from 1. Expected 10."
    with pytest.raises(Wrong, match="With ten apples: your function returned 13; expected 10"):
        expect(lambda: 13, (), 10, case="With ten apples:", mistakes=mistakes)
    assert expect(lambda: 10, (), 10, mistakes={"a mistake that gives the right answer": 10}) == 10


def test_no_memory_address_and_no_line_break_in_words():
    assert "0x" not in short([object(), lambda: 1]) and "\n" not in short("a\nb")
