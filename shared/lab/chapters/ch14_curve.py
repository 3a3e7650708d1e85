"""Chapter 14's simulator: measured loads side by side, and what a limit makes of them. Nothing is modelled."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shared.lab import Choice, Explorer, Field, Slider
from shared.lab.charts import chart, to_png
from shared.lab.markup import Html, bar, join, note, strong, table, tag
from shared.load import RequestRecord
from shared.summary import percentile

PERCENTILES = ("50", "90", "99")


@dataclass(frozen=True)
class Point:
    """One load: requests a second that came, and of each answered request TTFT and TPOT in milliseconds."""

    rate: float
    seconds: float  # from the first arrival to the last answer
    times: list[tuple[float, float | None]]
    failed: int = 0

    @classmethod
    def of(cls, rate: float, records: Sequence[RequestRecord]) -> Point:
        done = [record for record in records if record.error is None and record.arrivals]
        seconds = max(record.finished for record in done) - min(record.due for record in records)
        times = [(1e3 * record.ttft, None if record.tpot is None else 1e3 * record.tpot) for record in done]
        return cls(rate, seconds, times, len(records) - len(done))

    @property
    def ttft(self) -> list[float]:
        return [ttft for ttft, _ in self.times]

    @property
    def tpot(self) -> list[float]:
        return [tpot for _, tpot in self.times if tpot is not None]

    def good(self, ttft_limit: float, tpot_limit: float) -> int:
        """Requests within both limits; one token has no TPOT and can't break its limit."""
        return sum(ttft <= ttft_limit and (tpot or 0.0) <= tpot_limit for ttft, tpot in self.times)

    def plain(self) -> dict[str, Any]:
        rounded = [(round(ttft, 1), None if tpot is None else round(tpot, 2)) for ttft, tpot in self.times]
        return asdict(Point(round(self.rate, 2), round(self.seconds, 3), rounded, self.failed))


def load_explorer(curves: Mapping[str, Sequence[Point]], rank: Callable[..., float] = percentile) -> Explorer:
    """A slider over the arrival rates of measured curves; the first curve is shown first."""
    first = next(iter(curves.values()))
    ttft, tpot = (f"{10 * round(0.3 * percentile(times, 50))}" for times in (first[0].ttft, first[0].tpot))
    highest = max(point.rate for points in curves.values() for point in points)
    fields = [
        Choice("source", "Measured", next(iter(curves)), tuple(curves)),
        Slider("rate", "Requests a second", round(first[-2].rate, 1), 0.0, round(highest + 0.05, 1), 0.1),
        Choice("percent", "Percentile", "90", PERCENTILES),
        Field("ttft", "TTFT at most, ms", ttft, milliseconds),
        Field("tpot", "TPOT at most, ms", tpot, milliseconds,
              help="The limits start at three times the median of the lowest load."),
    ]

    def render(inputs: Mapping[str, Any]) -> Html:
        points = curves[inputs["source"]]
        return render_load(points, inputs["rate"], float(inputs["percent"]), inputs["ttft"], inputs["tpot"], rank)

    return Explorer(render, fields, title="Load, latency and goodput, as measured")


def milliseconds(text: str) -> float:
    """A parser for a limit."""
    shown = text if len(text) <= 30 else f"{text[:27]}..."
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{shown!r} is not a number of milliseconds") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{shown} is not a number above 0 with an end")
    return value


def render_load(points: Sequence[Point], rate: float, percent: float, ttft: float, tpot: float,
                rank: Callable[..., float] = percentile) -> Html:
    """The measured load nearest to `rate` in words, and all of them in a table."""
    chosen = min(range(len(points)), key=lambda i: abs(points[i].rate - rate))
    rows = [_row(point, percent, ttft, tpot, points, rank) for point in points]
    names = ["requests/s offered", "answered", f"p{percent:g} TTFT, ms", f"p{percent:g} TPOT, ms",
             "within both limits", "goodput, requests/s"]
    words = _words(points[chosen], ttft, tpot)
    return join([tag("div", strong(words), role="status"), table(names, rows, lit=[chosen]),
                 note("Only loads that were measured; the slider picks the nearest. Bars: share of the slowest load.")])


def _words(point: Point, ttft: float, tpot: float) -> str:
    good, sent = point.good(ttft, tpot), len(point.times) + point.failed
    return (f"At {point.rate:.1f} requests a second, {good} of {sent} meet TTFT ≤ {ttft:.10g} ms and "
            f"TPOT ≤ {tpot:.10g} ms: a goodput of {good / point.seconds:.1f} requests a second.")


def _row(point: Point, percent: float, ttft: float, tpot: float, points: Sequence[Point],
         rank: Callable[..., float]) -> list[object]:
    good, sent = point.good(ttft, tpot), len(point.times) + point.failed
    waits = [rank(each.ttft, percent) for each in points]
    wait = rank(point.ttft, percent)
    gaps = f"{rank(point.tpot, percent):.0f}" if point.tpot else "–"
    return [f"{point.rate:.1f}", f"{len(point.times) / point.seconds:.1f}/s",
            bar(wait / max(waits), f"{wait:.0f}", width=100), gaps,
            f"{good} of {sent} ({good / sent:.0%})", f"{good / point.seconds:.1f}"]


def load_chart(points: Sequence[Point], about: str = "", percents: Sequence[float] = (50, 90)) -> bytes:
    """Latency against load, as png bytes; `about` says where and when it was measured."""
    counts = [len(point.times) for point in points]
    title = f"Latency against load, {min(counts)} to {max(counts)} requests a point{about and f': {about}'}"
    figure, axes = chart(8.4, 3.0, columns=2, title=textwrap.fill(title, 100))
    for side, (name, words) in zip(axes, (("ttft", "time to first token, ms"), ("tpot", "time per output token, ms"))):
        for percent in percents:
            values = [percentile(getattr(point, name), percent) for point in points]
            side.plot([point.rate for point in points], values, label=f"p{percent:g}")
        side.set(xlabel="requests a second offered", ylabel=words, ylim=(0, None))
        side.legend(frameon=False)
    return to_png(figure)


def read_points(saved: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Points from an evidence file."""
    return [Point(**{**point, "times": [tuple(times) for times in point["times"]]}) for point in saved]
