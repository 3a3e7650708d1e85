from __future__ import annotations

import json
import os
import sys
import types

import pytest

from shared.lab import progress
from shared.lab.checks import Check
from shared.lab.quiz import Question


def test_a_first_record_creates_the_file(progress_file):
    assert progress.record_pass("04.1")
    assert json.loads(progress_file.read_text())["passed"] == {"04.1": None}


def test_the_lowest_score_is_kept():
    for score in (12, 8, 30):
        progress.record_pass("04.1", score)
    progress.record_pass("04.1")
    assert progress.load_progress()["passed"]["04.1"] == 8


def test_a_right_answer_stays_right():
    progress.record_answer("04", 1, True)
    progress.record_answer("04", 1, False)
    assert progress.load_progress()["quiz"] == {"04": {"1": True}}


@pytest.mark.parametrize("damage", ["", "{", "[1, 2]", '{"passed": 3}', '"text"', "\x00\xff"])
def test_a_damaged_file_counts_as_empty_and_is_replaced(progress_file, damage):
    progress_file.parent.mkdir(parents=True)
    progress_file.write_text(damage, encoding="latin-1")
    assert progress.load_progress() == {"passed": {}, "quiz": {}, "predictions": {}}
    assert progress.record_prediction("04.positions", "119")
    assert progress.prediction("04.positions") == "119"


@pytest.mark.parametrize("damage", ['{"quiz": {"04": 7}}', '{"quiz": {"04": []}}'])
def test_a_damaged_quiz_entry_is_replaced(progress_file, damage):
    progress_file.parent.mkdir(parents=True)
    progress_file.write_text(damage)
    progress.progress_table()
    assert progress.record_answer("04", 1, True)
    assert progress.load_progress()["quiz"]["04"] == {"1": True}


def test_a_folder_that_cannot_be_written_costs_the_record_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO_TO_ENGINE_PROGRESS", str(tmp_path / "file" / "progress.json"))
    assert progress.record_pass("04.1") is False
    assert progress.load_progress()["passed"] == {}


def test_a_failed_write_leaves_the_old_file_and_no_draft(progress_file, monkeypatch):
    progress.record_pass("04.1")
    before = progress_file.read_text()

    def refuse(*_):
        raise OSError("disk full")
    monkeypatch.setattr(os, "replace", refuse)
    assert progress.record_pass("04.2") is False
    assert progress_file.read_text() == before
    assert [path.name for path in progress_file.parent.iterdir()] == [progress_file.name]


def test_the_file_follows_the_course_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("ZERO_TO_ENGINE_PROGRESS")
    monkeypatch.setenv("ZERO_TO_ENGINE_HOME", str(tmp_path))
    assert progress.progress_path() == tmp_path / "progress.json"


def test_the_table_counts_passes_and_right_answers(monkeypatch):
    chapter = types.ModuleType("shared.lab.chapters.ch97")
    chapter.CHECKS = {"97.1": Check(lambda fn: None), "97.2": Check(lambda fn: None)}
    chapter.QUIZ = [Question(str(n), {"a": "x", "b": "y", "c": "z"}, "a") for n in range(3)]
    monkeypatch.setitem(sys.modules, chapter.__name__, chapter)
    monkeypatch.setattr(progress, "existing_chapters", lambda: ["97"])
    progress.record_pass("97.2")
    progress.record_answer("97", 1, True)
    progress.record_answer("97", 2, False)
    drawn = progress.progress_table()
    assert "1 of 2" in drawn and "1 of 3" in drawn
