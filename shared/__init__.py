"""The runtime of Zero to Engine. `from shared import LLM, SamplingParams` is the whole quick start."""
from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "RequestOutput": "output",
    "CompletionOutput": "output",
    "Trace": "trace",
    "Engine": "engine",
    "EngineError": "errors",
    "GenerationError": "llm",
    "InvalidRequestError": "errors",
    "ModelLoadError": "errors",
}
__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import shared` costs nothing and needs no torch."""
    if name not in HOMES:
        raise AttributeError(f"module 'shared' has no attribute {name!r}")
    return getattr(import_module(f"shared.{HOMES[name]}"), name)
