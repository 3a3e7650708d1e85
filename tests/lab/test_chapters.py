"""Rules for every chapter's quiz and checks. Solutions are tested with the notebooks that show them."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from shared.lab.chapters import chapter_module, existing_chapters
from shared.lab.checks import judge
from shared.lab.quiz import Quiz, quiz_faults

pytestmark = pytest.mark.skipif(not existing_chapters(), reason="no chapter has a module yet")
CHAPTERS = existing_chapters()


def exercises() -> list[str]:
    return [exercise for chapter in CHAPTERS for exercise in getattr(chapter_module(chapter), "CHECKS", {})]


def wrong_answers(chapter: str) -> dict[str, list]:
    name = f"tests.lab.wrong_answers.ch{chapter}"
    return importlib.import_module(name).WRONG_ANSWERS if importlib.util.find_spec(name) else {}


@pytest.mark.parametrize("chapter", [name for name in CHAPTERS if hasattr(chapter_module(name), "QUIZ")])
def test_the_quiz_is_fair_and_its_answers_right(chapter):
    questions = chapter_module(chapter).QUIZ
    assert quiz_faults(chapter, questions) == []
    assert Quiz(chapter, questions).static()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_exercises_carry_their_chapters_number(chapter):
    checks = getattr(chapter_module(chapter), "CHECKS", {})
    assert all(exercise.startswith(f"{chapter}.") for exercise in checks)


@pytest.mark.parametrize("exercise", exercises())
def test_a_stub_is_not_attempted_and_doing_nothing_does_not_pass(exercise):
    def stub(*args, **kwargs):
        raise NotImplementedError
    verdict = judge(exercise, stub)
    assert not verdict.attempted and str(verdict) == f"Exercise {exercise}: not attempted yet."
    nothing = judge(exercise, lambda *args, **kwargs: None)
    assert nothing.attempted and not nothing.passed and len(nothing.words) > 10


@pytest.mark.parametrize("exercise", exercises())
def test_wrong_answers_are_rejected_with_the_reason(exercise):
    answers = wrong_answers(exercise.partition(".")[0]).get(exercise, [])
    assert answers, f"tests/lab/wrong_answers has no wrong answer for {exercise}"
    for function, word in answers:
        verdict = judge(exercise, function)
        assert not verdict.passed and word in verdict.words, (function.__name__, verdict.words)
