"""Chapter 14's numbers: the ladder of stages, and latency against load.

    python -m shared.lab.chapters.ch14_measure [ladder|load]     writes evidence/14_ladder.json, 14_load.json
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.lab.chapters.ch14_curve import Point
from shared.lab.chapters.ch14_ladder import CHAPTERS, LARGE, Run, rounds, stages, transformers_stage, work
from shared.lab.charts import chart, to_png
from shared.lab.machine import GIGA, Measurement, environment, measured_bandwidth, measured_flops
from shared.lab.markup import Html, join, note, table, tag
from shared.roofline import Roofline

PEER = "transformers generate"
COMMAND = "python -m shared.lab.chapters.ch14_measure"


def best_roofline(speeds: Sequence[Measurement]) -> Roofline:
    """From the highest memory and arithmetic rates seen: a bound is about what the machine can do at best."""
    return Roofline(*(GIGA * speed.high for speed in speeds))


def joined(parts: Sequence[Measurement]) -> Measurement:
    """Several measurements of one thing as one."""
    median = statistics.median(part.median for part in parts)
    return Measurement(parts[0].what, median, min(part.low for part in parts), max(part.high for part in parts),
                       sum(part.n for part in parts), parts[0].unit)


def ladder_rows(results: Mapping[str, Sequence[Run]], roofline: Roofline) -> list[dict[str, Any]]:
    """One plain dict a stage: exact counts, and medians with their spread. What the evidence file holds."""
    rows = []
    for name, runs in results.items():
        first = runs[0]
        rates = Measurement.of(name, [run.rate for run in runs], "tokens/s")
        row = {"stage": name, "positions": sum(first.sizes), "runs": len(first.sizes), "longest_run": max(first.sizes),
               "rate": vars(rates)}
        if first.costs:
            least = sum(roofline.seconds(cost) for cost in first.costs)
            tokens = sum(map(len, first.tokens))
            row |= {"bound": tokens / least,
                    "first_token": vars(Measurement.of(name, [run.first_token for run in runs], "ms")),
                    "longest_gap": vars(Measurement.of(name, [run.longest_gap for run in runs], "ms"))}
        rows.append(row)
    return rows


def ladder_table(rows: Sequence[Mapping[str, Any]], caption: str) -> Html:
    """Counts and times of every stage, each beside the one before it."""
    shown, before = [], None
    for row in rows:
        rate = row["rate"]
        known = "first_token" in row
        step = f"× {rate['median'] / before:.2f}" if before and row["stage"] in CHAPTERS else ""
        shown.append([
            row["stage"], CHAPTERS.get(row["stage"], ""), row["positions"], row["runs"], row["longest_run"],
            tag("span", with_range(Measurement(**rate)), "white-space:nowrap"), step,
            *(f"{row[name]['median']:.0f}" if known else "–" for name in ("first_token", "longest_gap")),
            f"{rate['median'] / row['bound']:.0%}" if known else "–",
        ])
        before = rate["median"]
    names = ["stage", "chapter", "positions", "runs of the model", "longest run", "tokens/s (low–high)",
             "against the row above", "mean first token, ms", "longest gap, ms", "share of its bound"]
    n = rows[0]["rate"]["n"]
    about = "Positions and runs are exact. Bound: the least time this machine needs for what the stage ran."
    return join([table(names, shown, caption=f"{caption}; {'one run' if n == 1 else f'median of {n}'}"), note(about)])


def with_range(measured: Measurement) -> str:
    """The median, and what it lies between if there is more than one."""
    spread = "" if measured.n == 1 else f" ({measured.low:.1f}–{measured.high:.1f})"
    return f"{measured.median:.1f}{spread}"


def ladder_chart(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Tokens a second of every stage as bars, one panel a machine, as png bytes."""
    return to_png(ladder_figure(measured))


def ladder_figure(measured: Mapping[str, Sequence[Mapping[str, Any]]]):
    figure, axes = chart(4.9 * len(measured), 3.6, columns=len(measured), title="What each chapter bought")
    for side, (title, rows) in zip([axes] if len(measured) == 1 else axes, measured.items()):
        rates = [row["rate"] for row in rows]
        spread = [[each["median"] - each["low"] for each in rates], [each["high"] - each["median"] for each in rates]]
        places = range(len(rows), 0, -1)
        kinds = [row["stage"] in CHAPTERS for row in rows]
        for place, each, ours in zip(places, rates, kinds):
            side.barh(place, each["median"], color="#1565c0" if ours else "#ffffff", edgecolor="#1f2933",
                      hatch="" if ours else "///")
        if rates[0]["n"] > 1:
            side.errorbar([each["median"] for each in rates], list(places), xerr=spread, fmt="none", color="#1f2933",
                          capsize=3)
        for place, each in zip(places, rates):
            side.annotate(f"{each['median']:.{int(each['median'] < 10)}f}", (each["high"], place), (5, 0),
                          textcoords="offset points", va="center", fontsize=9)
        side.set_yticks(list(places), [row["stage"] for row in rows])
        side.set(xlabel="output tokens a second", xlim=(0, 1.15 * max(each["high"] for each in rates)))
        side.set_title(textwrap.fill(title, 40), fontsize=9, loc="left", linespacing=1.3)
        side.grid(axis="y", visible=False)
    return figure


def peer_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Rows for a table from evidence/peers.json: engine, version, work, tokens/s with n and spread."""
    rates = record["tokens_per_second"]
    nested = rates if isinstance(next(iter(rates.values())), Mapping) else {"workload": rates}
    rows = []
    for kind, by_name in nested.items():
        for name, samples in by_name.items():
            version = record.get("versions", {}).get(name) or record["machine"].get(name.partition(" ")[0], "")
            found = Measurement.of(name, samples, "tokens/s")
            rows.append([name, version or "–", kind, with_range(found), str(found.n)])
    return rows


PEERS = ("transformers", "vllm", "llama.cpp")


def peer_table(record: Mapping[str, Any]) -> Html:
    """The saved comparison with other engines, what it was measured on, and who is missing in it."""
    machine, rows = record["machine"], peer_rows(record)
    caption = (f"{record['what']}; {record['dtype']}, {machine['cpu']}, {machine['threads']} threads, "
               f"torch {machine['torch']}, {record['date']}")
    drawn = table(["engine", "version", "work", "tokens/s, median (low–high)", "n"], rows, caption)
    measured, why = {row[0].partition(",")[0] for row in rows}, record.get("left_out", {})
    missing = [f"{name} ({why.get(name, 'it was not installed')})" for name in PEERS if name not in measured]
    return join([drawn, note(f"Not measured: {', '.join(missing)}.")]) if missing else drawn


def save_ladder(n: int = 3) -> Path:
    """n rounds; what is known is saved after each one."""
    from shared.tokenizer import Tokenizer
    from shared.weights import load_model, resolve

    tokenizer, given = Tokenizer("smollm2-135m"), work(**LARGE)
    made = stages(load_model("smollm2-135m"), load_model("smollm2-135m"), tokenizer, given)
    made[PEER] = transformers_stage(resolve("smollm2-135m"), given.requests)
    speeds: list[tuple[Measurement, ...]] = []
    results: dict[str, list[Run]] = {name: [] for name in made}
    for index in range(n):
        for name, (run,) in rounds(made, 1, before=() if index else ("cached", "optimised")).items():
            results[name].append(run)
        speeds.append((measured_bandwidth(), measured_flops()))
        path = write_ladder(results, [joined(parts) for parts in zip(*speeds)])
    return path


def write_ladder(results: Mapping[str, Sequence[Run]], speeds: Sequence[Measurement]) -> Path:
    """The evidence file and the picture of it."""
    from shared.lab.evidence import save_evidence

    same = {name: all(run.tokens == results["naive"][0].tokens for run in runs) for name, runs in results.items()}
    rows = ladder_rows(results, best_roofline(speeds))
    rates = [Measurement(**row["rate"]) for row in rows]
    what = f"{LARGE['count']} requests through every stage on the same {LARGE['slots']} slots, float32"
    versions = {"transformers": importlib.metadata.version("transformers")}
    draw_ladder(rows, Path(__file__).parents[3] / "docs" / "ladder.png")
    return save_evidence("14_ladder", what, f"{COMMAND} ladder", [*speeds, *rates], work=LARGE, versions=versions,
                         same_tokens=same, ladder=rows)


def draw_ladder(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    on = environment()["processor"]
    path.write_bytes(ladder_chart({f"{LARGE['count']} requests, SmolLM2-135M, float32, {on}": rows}))


def save_load(shares: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2), seconds: float = 10.0) -> Path:
    from shared.async_engine import AsyncEngine
    from shared.engine_args import EngineArgs, build_engine
    from shared.lab.evidence import save_evidence

    engine = AsyncEngine(build_engine(EngineArgs(num_gpu_blocks_override=256, max_num_seqs=8)), max_waiting=1000)
    try:
        capacity, points = asyncio.run(measure_load(engine, shares, seconds))
    finally:
        engine.shutdown()
    results = [Measurement.of(f"TTFT at {point.rate:.1f} requests/s", point.ttft, "ms") for point in points]
    what = f"requests of {INPUT} + {OUTPUT} tokens in an open loop; a closed loop of 8 got {capacity:.1f} a second"
    return save_evidence("14_load", what, f"{COMMAND} load", results, capacity=round(capacity, 2),
                         points=[point.plain() for point in points])


INPUT, OUTPUT = 32, 16


async def measure_load(engine: Any, shares: Sequence[float], seconds: float) -> tuple[float, list[Point]]:
    """What eight users in a closed loop get, and an open loop at shares of it."""
    from shared.load import arrival_times, closed_loop, engine_client, open_loop, random_requests
    from shared.summary import summarize

    client: Callable = engine_client(engine)
    await closed_loop(client, random_requests(8, INPUT, OUTPUT, seed=99), 8)
    users = await closed_loop(client, random_requests(64, INPUT, OUTPUT, seed=98), 8)
    capacity, points = summarize(users)["request_throughput"], []
    for seed, share in enumerate(shares):
        rate = share * capacity
        requests = random_requests(max(8, round(rate * seconds)), INPUT, OUTPUT, seed=seed)
        records = await open_loop(client, requests, arrival_times(len(requests), rate, seed=seed))
        points.append(Point.of(rate, records))
    return capacity, points


if __name__ == "__main__":
    for name in sys.argv[1:] or ("ladder", "load"):
        print({"ladder": save_ladder, "load": save_load}[name]().name)
