"""The teaching instruments: what the notebooks import to ask, show, compare and check.

    show(widget, html=..., text=...)   one output: live widget and static form
    predict(key, options), reveal(key, value)   a guess before a run, the answer after it
    quiz("04")                         the chapter's three questions
    check("04.1", fn)                  judge an exercise
    engine_map("kv_cache")             the drawing of the engine, parts lit

What the chapters' own modules build on: `Question`, `Check`, `Score`, `expect`; `Stepper`, `Explorer` and
their fields; `markup` and `views` for HTML; `charts` for pictures; `machine` for measurements.
"""

from __future__ import annotations

from shared.lab.checks import Check, Score, check
from shared.lab.display import show
from shared.lab.explorer import Explorer
from shared.lab.form import Choice, Field, Slider, Switch
from shared.lab.judging import Wrong, call, expect, expect_error, fail, same
from shared.lab.map import engine_map
from shared.lab.predict import predict, reveal
from shared.lab.progress import progress_table
from shared.lab.quiz import Question, quiz
from shared.lab.stepper import Stepper

__all__ = [
    "Check", "Choice", "Explorer", "Field", "Question", "Score", "Slider", "Stepper", "Switch", "Wrong",
    "call", "check", "engine_map", "expect", "expect_error", "fail", "predict", "progress_table", "quiz",
    "reveal", "same", "show",
]  # fmt: skip
