"""Models that are made or read once for all runtime tests. torch is imported only by the tests that use it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("search", deadline=None, max_examples=1000, stateful_step_count=60)
settings.load_profile(os.environ.get("ZERO_TO_ENGINE_HYPOTHESIS", "fixed"))


@dataclass(frozen=True)
class Family:
    """One tiny model twice: transformers' own, and ours, read from the folder that it saved."""

    hf: Any
    model: Any
    folder: Path


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    from shared.weights import load_model
    from tests.runtime.tiny import make_hf, save_hf

    @functools.cache
    def load(variant: str) -> Family:
        folder = save_hf(variant, tmp_path_factory.mktemp(variant))
        return Family(make_hf(variant), load_model(folder), folder)

    return load


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template, as LLM wants it."""
    from tests.runtime.tiny import save_hf, save_tokenizer

    folder = save_hf("llama", tmp_path_factory.mktemp("llm"))
    return save_tokenizer(folder)


@pytest.fixture(scope="session")
def real_llm() -> Any:
    """The default model, read once."""
    from shared import LLM

    return LLM(dtype="float32", enforce_eager=True)
