from __future__ import annotations

import sys
import types

import pytest

from shared.lab import progress, quiz
from shared.lab.quiz import Question, Quiz, arrange, quiz_faults


def question(prompt: str, right: str, *wrong: str, **more) -> Question:
    options = {option: f"because {option}" for option in (right, *wrong)}
    return Question(prompt, options, **({"answer": right} | more))


GOOD = [question("one?", "bb", "a", "ccc"), question("two?", "a", "bb", "ccc"),
        question("three?", "ccc", "bb", "a")]


def test_a_good_quiz_has_no_faults():
    assert quiz_faults("04", GOOD) == []


@pytest.mark.parametrize("questions, fault", [
    (GOOD[:2], "2 questions, not three"),
    ([*GOOD, GOOD[0]], "4 questions, not three"),
    ([question(f"{n}?", "longest", "a", "b") for n in range(3)], "always the longest"),
    ([question(f"{n}?", "a", "long", "longer") for n in range(3)], "always the shortest"),
    ([*GOOD[:2], Question("x?", {"a": "y", "b": " ", "c": "y"}, "a")], "option 'b' has no explanation"),
    ([*GOOD[:2], Question("x?", {"a": "why", "b": "why"}, "a")], "fewer than three options"),
    ([*GOOD[:2], question("x?", "a", "b", "c", answer=None)], "neither an answer nor a way"),
    ([*GOOD[:2], question("x?", "a", "b", "c", answer="d")], "the answer 'd' is not one"),
    ([*GOOD[:2], question("x?", "5", "6", "7", answer=None, compute=lambda: 8)], "answer 8 is not one"),
    ([*GOOD[:2], question("x?", "5", "6", "7", compute=lambda: 6)], "says '5', the computation 6"),
])
def test_a_bad_quiz_is_rejected_in_words(questions, fault):
    assert any(fault in found for found in quiz_faults("04", questions))


def test_a_computed_number_names_the_right_option():
    asked = question("x?", "119", "100", "6950", answer=None, compute=lambda: 20 + 99)
    assert asked.right() == "119" and quiz_faults("04", [*GOOD[:2], asked]) == []


def test_a_question_without_its_answer_raises():
    with pytest.raises(ValueError, match="is not one of its options"):
        question("x?", "a", "b", "c", answer="d").right()


def test_the_order_is_fixed_and_independent_of_how_options_are_written():
    turned = [Question(q.prompt, dict(reversed(q.options.items())), q.answer) for q in GOOD]
    assert arrange("04", GOOD) == arrange("04", GOOD) == arrange("04", turned)


def test_right_options_are_never_all_in_one_place():
    for n in range(200):
        questions = [question(f"{n}/{k}?", "a", "b", "c") for k in range(3)]
        orders = arrange("04", questions)
        assert len({order.index("a") for order in orders}) > 1


def test_places_are_spread_over_many_quizzes():
    places = [order.index("a") for n in range(200)
              for order in arrange("04", [question(f"{n}/{k}?", "a", "b", "c", "d") for k in range(3)])]
    assert all(0.15 < places.count(place) / len(places) < 0.35 for place in range(4))


def test_each_option_is_explained_and_a_right_answer_is_recorded():
    asked = Quiz("04", GOOD)
    asked.choices[0].value = "a"
    assert "✗ Not this one." in asked.feedback[0].value and "because a" in asked.feedback[0].value
    assert progress.load_progress()["quiz"]["04"] == {"1": False}
    asked.choices[0].value = "bb"
    assert "✓ Right." in asked.feedback[0].value
    assert progress.load_progress()["quiz"]["04"] == {"1": True}
    assert asked.feedback[1].value == ""


def test_the_static_form_shows_no_answer_and_escapes():
    drawn = Quiz("04", [*GOOD[:2], question("<script>?", "<b>", "y", "z")]).static()
    assert "because" not in drawn and "✓" not in drawn and "<script>" not in drawn and "<b>" not in drawn
    for asked in GOOD[:2]:
        assert all(f"<li>{option}</li>" in drawn for option in asked.options)


def test_a_chapter_shows_its_quiz(monkeypatch, capsys):
    chapter = types.ModuleType("shared.lab.chapters.ch98")
    chapter.QUIZ = GOOD
    monkeypatch.setitem(sys.modules, chapter.__name__, chapter)
    quiz("98")
    assert "Quiz of chapter 98: 3 questions." in capsys.readouterr().out


def test_an_unknown_chapter_is_an_error_in_words():
    with pytest.raises(ValueError, match="no chapter '77'"):
        quiz("77")
