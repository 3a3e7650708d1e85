"""Every exercise of every notebook: the solution passes, the stub does not, wrong answers are told why."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from typing import Any

import pytest

from course import ROOT, Course
from notebooks import Exercise, Notebook, defined_name
from shared.lab.chapters import chapter_module
from shared.lab.checks import check, judge
from tests.notebooks.courses import chapter, write_course

NOTEBOOKS = [notebook for notebook in Course(ROOT).notebooks if notebook.chapter != "00"]
EXERCISES = [pytest.param(each, id=each.number) for notebook in NOTEBOOKS for each in notebook.exercises()]
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.chapter)
each_exercise = pytest.mark.parametrize("exercise", EXERCISES)


def solved(exercise: Exercise) -> Any:
    """What the solution defines, executed in an empty namespace."""
    namespace = {"__name__": "solution"}
    exec(compile(exercise.solution, f"solution {exercise.number}", "exec"), namespace)
    return namespace[exercise.function]


def unsolved(exercise: Exercise) -> Any:
    """What the stub defines; names in annotations are not looked up, and no other cell has run."""
    tree = ast.parse("from __future__ import annotations\n" + exercise.stub)
    imports = (ast.Import, ast.ImportFrom)
    tree.body = [node for node in tree.body if defined_name(node) or isinstance(node, imports)]
    namespace = {"__name__": "stub"}
    exec(compile(tree, f"stub {exercise.number}", "exec"), namespace)
    return namespace[exercise.function]


@cache
def wrong_answers(chapter: str) -> dict[str, list[tuple[Any, str]]]:
    """`WRONG_ANSWERS` of tests/lab/wrong_answers/ch04.py: id -> [(function, word in the message), ...]."""
    path = ROOT / "tests" / "lab" / "wrong_answers" / f"ch{chapter}.py"
    spec = importlib.util.spec_from_file_location(f"wrong_answers_{chapter}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG_ANSWERS


@each_notebook
def test_every_check_has_its_exercise(notebook: Notebook):
    stated = [exercise.number for exercise in notebook.exercises()]
    assert stated == sorted(chapter_module(notebook.chapter).CHECKS)


@each_exercise
def test_the_solution_passes(exercise: Exercise):
    verdict = judge(exercise.number, solved(exercise))
    assert verdict.passed, verdict


@each_exercise
def test_what_the_reader_starts_from_does_not_pass(exercise: Exercise):
    verdict = judge(exercise.number, unsolved(exercise))
    assert not verdict.passed
    assert verdict.attempted != exercise.is_numbered


@each_exercise
def test_an_unattempted_exercise_prints_one_fixed_line(exercise: Exercise, capsys):
    check(exercise.number, unsolved(exercise))
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert exercise.output == printed
    if exercise.is_numbered:
        assert printed == f"Exercise {exercise.number}: not attempted yet.\n"


@each_exercise
def test_wrong_answers_are_rejected_with_the_reason(exercise: Exercise):
    wrong = wrong_answers(exercise.number[:2])[exercise.number]
    assert len(wrong) >= (3 if exercise.is_numbered else 1)
    for function, word in wrong:
        verdict = judge(exercise.number, function)
        assert verdict.attempted and not verdict.passed, function.__name__
        assert word in verdict.words, f"{function.__name__}: {verdict.words}"


def test_exercises_are_taken_out_of_a_notebook_as_its_reader_sees_them(tmp_path):
    first, second = Notebook(write_course(tmp_path, chapter())).exercises()
    assert (first.number, second.number, first.hints) == ("04.1", "04.2", 2)
    assert solved(first)(7) == 3
    with pytest.raises(NotImplementedError):
        unsolved(first)(7)
    assert first.output == "Exercise 04.1: not attempted yet.\n"
