"""What every test relies on: no model hub, a progress file of its own, a GPU where it asks for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads: threads that wait do not spin
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels run on the CPU; checks of a GPU start a process


@pytest.fixture(autouse=True)
def own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's progress is never touched by a test."""
    path = tmp_path / "progress.json"
    monkeypatch.setenv("ZERO_TO_ENGINE_PROGRESS", str(path))
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()
