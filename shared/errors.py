"""The errors that the engine raises on purpose. Each message says what was wrong, and what would be right."""

from __future__ import annotations

from typing import Any


def shown(value: Any) -> str:
    """A value as a message shows it: cut if it is long. Some have no form to show, like a number of 5,000 digits."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


class EngineError(Exception):
    """The parent of every error that the engine raises on purpose."""


class InvalidRequestError(EngineError, ValueError):
    """A request that cannot be served: names the field, its value and the limit that it breaks."""

    def __init__(self, field: str, value: Any, limit: str):
        self.field, self.value, self.limit = field, value, limit
        super().__init__(f"{field}: must be {limit}, got {shown(value)}")

    def __reduce__(self):
        return type(self), (self.field, self.value, self.limit)  # survives the way from another process


class ModelLoadError(EngineError):
    """A model that cannot be found, fetched or read; says which file or tensor, and what to do."""
