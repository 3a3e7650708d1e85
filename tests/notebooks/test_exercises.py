"""Every exercise of every notebook: the solution passes, the stub does not, and its cell says so."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from course import ROOT, Course
from notebooks import Exercise, Notebook, defined_name
from shared.lab.chapters import chapter_module
from shared.lab.checks import check, judge
from tests.notebooks.courses import chapter, write_course

NOTEBOOKS = Course(ROOT).notebooks
EXERCISES = [pytest.param(each, id=each.number) for notebook in NOTEBOOKS for each in notebook.exercises()]
IMPORTS = (ast.Import, ast.ImportFrom)
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.chapter)
each_exercise = pytest.mark.parametrize("exercise", EXERCISES)


def solved(exercise: Exercise) -> Any:
    """What the solution defines, executed in an empty namespace."""
    namespace = {"__name__": "__main__"}
    exec(compile(exercise.solution, f"solution {exercise.number}", "exec"), namespace)
    return namespace[exercise.function]


def unsolved(exercise: Exercise) -> Any:
    """What the stub's cell defines, with the imports of the solution; names in annotations are not looked up."""
    imports = [node for node in ast.parse(exercise.solution).body if isinstance(node, IMPORTS)]
    tree = ast.parse("from __future__ import annotations\n" + exercise.stub)
    future, *rest = (node for node in tree.body if defined_name(node) or isinstance(node, IMPORTS))
    tree.body = [future, *(node for node in imports if getattr(node, "module", "") != "__future__"), *rest]
    namespace = {"__name__": "__main__"}
    exec(compile(tree, f"stub {exercise.number}", "exec"), namespace)
    return namespace[exercise.function]


@each_notebook
def test_every_check_has_its_exercise(notebook: Notebook):
    stated = [exercise.number for exercise in notebook.exercises()]
    assert stated == sorted(getattr(chapter_module(notebook.chapter), "CHECKS", {}))


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
    if exercise.is_numbered:
        assert printed == exercise.output == f"Exercise {exercise.number}: not attempted yet.\n"


def test_exercises_are_taken_out_of_a_notebook_as_its_reader_sees_them(tmp_path):
    first, second = Notebook(write_course(tmp_path, chapter())).exercises()
    assert (first.number, second.number, first.hints) == ("04.1", "04.2", 2)
    assert solved(first)(7) == 3
    with pytest.raises(NotImplementedError):
        unsolved(first)(7)
    assert first.output == "Exercise 04.1: not attempted yet.\n"
