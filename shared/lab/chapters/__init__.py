"""One module per chapter: `ch04.py` holds chapter 04's `QUIZ`, `CHECKS` and simulators."""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType


def chapter_module(chapter: str) -> ModuleType:
    """The module of chapter "04". Raises ValueError if the course has no such chapter."""
    name = f"{__name__}.ch{chapter}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
    known = ", ".join(existing_chapters()) or "none yet"
    raise ValueError(f"there is no chapter {chapter!r}; there are {known}")


def existing_chapters() -> list[str]:
    """Two-digit numbers of the chapters that have a module."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name[2:] for name in modules if re.fullmatch(r"ch\d\d", name))
