"""What many requests and many runs come to: percentiles, goodput, and how sure a mean is. Pure Python."""
from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.load import RequestRecord

TIMES = ("ttft", "tpot", "itl", "e2el")
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 97.5 % quantile for 1 to 9 degrees of freedom


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of them do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]


@dataclass(frozen=True)
class Estimate:
    """A mean of n repetitions, and the half width of its 95 % confidence interval; None for one repetition."""

    mean: float
    half_width: float | None
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """Student's interval: it holds if the repetitions are independent and roughly normal."""
        n, mean = len(samples), statistics.fmean(samples)
        if n < 2:
            return cls(mean, None, n)
        t = STUDENT_T[n - 2] if n - 2 < len(STUDENT_T) else 1.96 + 2.5 / (n - 1)
        return cls(mean, t * statistics.stdev(samples) / math.sqrt(n), n)

    def __str__(self) -> str:
        spread = "one run" if self.half_width is None else f"± {self.half_width:.1f}, n = {self.n}"
        return f"{self.mean:.1f} ({spread})"


def samples_of(records: Sequence[RequestRecord], name: str) -> list[float]:
    """One time of all requests, in seconds: of each request once, or each gap for "itl"."""
    if name == "itl":
        return [gap for record in records for gap in record.itl]
    return [value for record in records if (value := getattr(record, name)) is not None]


def meets(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether each named time of the request stays within its limit, in milliseconds."""
    values = {name: samples_of([record], name) for name in limits}
    return all(1e3 * value <= limits[name] for name in limits for value in values[name])


def summarize(
    records: Sequence[RequestRecord], percentiles: Sequence[float] = (50, 90, 99),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The numbers of one run, by the names in vLLM's result files; times in milliseconds.

    `goodput` gives limits, such as {"ttft": 500, "tpot": 50}: request_goodput counts only who met them all.
    """
    done = [record for record in records if record.error is None and record.arrivals]
    summary: dict[str, Any] = {"completed": len(done), "failed": len(records) - len(done)}
    if not done:
        return summary
    seconds = max(record.finished for record in done) - min(record.due for record in records)
    inputs, outputs = sum(record.prompt_len for record in done), sum(record.output_len for record in done)
    summary |= {
        "duration": seconds, "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds, "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    if goodput:
        summary["request_goodput"] = sum(meets(record, goodput) for record in done) / seconds
    for name in TIMES:
        if samples := [1e3 * value for value in samples_of(done, name)]:
            summary |= {f"mean_{name}_ms": statistics.fmean(samples), f"median_{name}_ms": statistics.median(samples)}
            summary |= {f"p{percent:g}_{name}_ms": percentile(samples, percent) for percent in percentiles}
    return summary


def repeat(run: Callable[[int], Mapping[str, Any]], repeats: int) -> dict[str, Estimate]:
    """run(0), run(1), ...; each number becomes an Estimate. The same prompts twice would meet a warm prefix cache."""
    runs = [run(index) for index in range(repeats)]
    shared = [name for name in runs[0] if all(isinstance(result.get(name), (int, float)) for result in runs)]
    return {name: Estimate.of([result[name] for result in runs]) for name in shared}


def table(results: Mapping[str, Estimate | float]) -> str:
    """One line for each number."""
    width = max(map(len, results), default=0)
    lines = (f"{name:<{width}}  {value if isinstance(value, Estimate) else format(value, '.1f')}"
             for name, value in results.items())  # fmt: skip
    return "\n".join(lines)
