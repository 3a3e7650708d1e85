"""Chapter 03's measurement: one naive step at growing lengths.

    python -m shared.lab.chapters.ch03_measure     writes evidence/03_decode.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.lab.machine import Measurement, timed


def step_times(model: Any, lengths: Sequence[int] = (1, 16, 64, 256), n: int = 3) -> list[Measurement]:
    """Milliseconds of one run of the model over `length` tokens."""
    from shared.decode import next_token_logits

    lists = {length: [100 + i % 1000 for i in range(length)] for length in lengths}
    return [timed(f"{length} positions in one run", lambda ids=ids: next_token_logits(model, ids), n)
            for length, ids in lists.items()]  # fmt: skip


def main() -> None:
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    what, command = "one run of the model over growing lists, float32", "python -m shared.lab.chapters.ch03_measure"
    print(save_evidence("03_decode", what, command, step_times(load_model("smollm2-135m"), n=5)).name)


if __name__ == "__main__":
    main()
