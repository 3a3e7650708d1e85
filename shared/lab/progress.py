"""The reader's progress, in one small local JSON file: passed checks, quiz answers, predictions.

The file is `$ZERO_TO_ENGINE_PROGRESS`, or else `progress.json` in `$ZERO_TO_ENGINE_HOME` or
`~/.cache/zero-to-engine`. A missing or damaged file counts as empty; a folder that cannot be written to costs
the record, never the lesson.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from shared.default_model import cache_home
from shared.lab.chapters import chapter_module, existing_chapters
from shared.lab.markup import Html, bar, join, note, panel, table

SECTIONS = ("passed", "quiz", "predictions")


def progress_path() -> Path:
    chosen = os.environ.get("ZERO_TO_ENGINE_PROGRESS")
    return Path(chosen).expanduser() if chosen else cache_home() / "progress.json"


def load_progress() -> dict[str, dict]:
    """`{"passed": {"04.1": score or None}, "quiz": {"04": {"1": option}}, "predictions": {key: guess}}`."""
    try:
        stored = json.loads(progress_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = {}
    if not isinstance(stored, dict):
        stored = {}
    progress = {name: stored[name] if isinstance(stored.get(name), dict) else {} for name in SECTIONS}
    answers = progress["quiz"].items()
    progress["quiz"] = {chapter: known for chapter, known in answers if isinstance(known, dict)}
    return progress


def save_progress(progress: dict[str, dict]) -> bool:
    """Replace the file in one move. False if it could not be written."""
    path = progress_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".draft")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(progress, file, indent=1, sort_keys=True)
        os.replace(draft, path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        return False
    return True


def record_pass(exercise: str, score: int | float | None = None) -> bool:
    """Note a passed check; with a score, the lowest one is kept."""
    progress = load_progress()
    known = progress["passed"].get(exercise)
    scores = [value for value in (known, score) if isinstance(value, (int, float))]
    progress["passed"][exercise] = min(scores, default=None)
    return save_progress(progress)


def record_prediction(key: str, guess: str) -> bool:
    progress = load_progress()
    progress["predictions"][key] = guess
    return save_progress(progress)


def record_answer(chapter: str, number: int, right: bool) -> bool:
    """Note that question `number` (from 1) was answered; once right it stays right."""
    progress = load_progress()
    answers = progress["quiz"].setdefault(chapter, {})
    answers[str(number)] = bool(answers.get(str(number)) or right)
    return save_progress(progress)


def prediction(key: str) -> str | None:
    guess = load_progress()["predictions"].get(key)
    return guess if isinstance(guess, str) else None


def progress_table() -> Html:
    """Exercises passed and questions answered right, a row for each chapter, for the start page."""
    progress = load_progress()
    rows = [_chapter_row(chapter, progress) for chapter in existing_chapters()]
    return panel(table(["chapter", "exercises passed", "quiz answered right"], rows),
                 note("Run this cell again to refresh it. What you passed is recorded on this machine only."))


def _chapter_row(chapter: str, progress: dict[str, dict]) -> list[object]:
    module = chapter_module(chapter)
    exercises, questions = list(getattr(module, "CHECKS", {})), list(getattr(module, "QUIZ", []))
    passed = sum(exercise in progress["passed"] for exercise in exercises)
    answers = progress["quiz"].get(chapter, {})
    right = sum(answers.get(str(number)) is True for number in range(1, len(questions) + 1))
    return [chapter, _share(passed, len(exercises)), _share(right, len(questions))]


def _share(done: int, total: int) -> Html:
    return bar(done / total, f"{done} of {total}", width=90) if total else join(["none"])
