from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def progress_file(tmp_path, monkeypatch):
    """A fresh progress file for each test."""
    path = tmp_path / "progress" / "progress.json"
    monkeypatch.setenv("ZERO_TO_ENGINE_PROGRESS", str(path))
    return path
