"""One module per chapter: `ch04.py` holds chapter 04's `QUIZ`, `CHECKS` and simulators."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


def chapter_module(chapter: str) -> ModuleType:
    """The module of chapter "04". Raises ValueError if the course has no such chapter."""
    name = f"{__name__}.ch{chapter}"
    if not chapter.isdigit() or importlib.util.find_spec(name) is None:
        raise ValueError(f"there is no chapter {chapter!r}; chapters are named by two digits, such as '04'")
    return importlib.import_module(name)


def existing_chapters() -> list[str]:
    """Two-digit numbers of the chapters that have a module."""
    numbers = [f"{number:02d}" for number in range(100)]
    return [number for number in numbers if importlib.util.find_spec(f"{__name__}.ch{number}")]
