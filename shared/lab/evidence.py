"""Numbers that were measured once and are kept: one JSON file each below evidence/."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared.lab.machine import Measurement, environment

FOLDER = Path(__file__).parents[2] / "evidence"
MACHINE_FACTS = ("python", "torch", "system", "processor", "device")


def save_evidence(name: str, what: str, command: str, measurements: Iterable[Measurement],
                  **more: Any) -> Path:
    """Write evidence/<name>.json: what was measured, how to repeat it, when, on what, and each result."""
    facts = environment()
    record = {
        "what": what, "command": command, "date": datetime.date.today().isoformat(),
        "machine": {fact: facts[fact] for fact in MACHINE_FACTS},
        "results": [asdict(measurement) for measurement in measurements], **more,
    }  # fmt: skip
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def evidence(name: str) -> dict[str, Any]:
    """What evidence/<name>.json holds."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def evidence_lines(name: str) -> str:
    """The saved results as text, to stand beside those of this machine."""
    record = evidence(name)
    machine = record["machine"]
    head = f"saved {record['date']}: {machine['processor']}, {machine['device']}, Python {machine['python']}"
    results = (Measurement(**result) for result in record["results"])
    return "\n".join([head, *(f"saved: {result.what}: {result}" for result in results)])
