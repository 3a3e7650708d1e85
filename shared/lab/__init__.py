"""The teaching instruments: what the notebooks import to ask, show, compare and check.

    show(widget, html=..., text=...)   one output: live widget and static form
    predict(key, options), reveal(key, value)   a guess before a run, the answer after it
    quiz("04")                         the chapter's three questions
    check("04.1", fn)                  judge an exercise
    engine_map("kv_cache")             the drawing of the engine, parts lit
"""

from __future__ import annotations

from shared.lab.checks import check
from shared.lab.display import show
from shared.lab.map import engine_map
from shared.lab.predict import predict, reveal
from shared.lab.progress import progress_table
from shared.lab.quiz import quiz

__all__ = ["check", "engine_map", "predict", "progress_table", "quiz", "reveal", "show"]
