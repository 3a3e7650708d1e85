"""Chapter 03's measurements: one naive step at growing lengths, and each token of one generation.

    python -m shared.lab.chapters.ch03_measure     writes evidence/03_decode.json
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from shared.lab.charts import INK, chart, to_png
from shared.lab.machine import Measurement, timed


def step_times(model: Any, lengths: Sequence[int] = (1, 16, 64, 256), n: int = 3) -> list[Measurement]:
    """Milliseconds of one run of the model over `length` tokens."""
    from shared.decode import next_token_logits

    lists = {length: [100 + i % 1000 for i in range(length)] for length in lengths}
    return [timed(f"{length} positions in one run", lambda ids=ids: next_token_logits(model, ids), n)
            for length, ids in lists.items()]  # fmt: skip


def loop_times(steps: Iterator[Any], count: int) -> list[float]:
    """Milliseconds of each of the first `count` steps of a generation."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        next(steps)
        times.append((time.perf_counter() - started) * 1e3)
    return times


def time_chart(prompt_len: int, times: Sequence[float], alone: float) -> bytes:
    """Time of each token against its position, and of a run over one position alone, as png."""
    figure, axes = chart(height=3.2, title="Time of each token, against its position")
    positions = range(prompt_len, prompt_len + len(times))
    axes.plot(positions, times, linestyle="", markersize=4, label="this loop: everything before it runs again")
    axes.axhline(alone, color=INK, linestyle="--", label="a run over one position alone")
    axes.set(xlabel="position of the new token", ylabel="ms", ylim=(0, None))
    axes.legend(loc="upper left", fontsize=9)
    return to_png(figure)


def main() -> None:
    from shared.lab.evidence import save_evidence
    from shared.weights import load_model

    what, command = "one run of the model over growing lists, float32", "python -m shared.lab.chapters.ch03_measure"
    print(save_evidence("03_decode", what, command, step_times(load_model("smollm2-135m"), n=5)).name)


if __name__ == "__main__":
    main()
