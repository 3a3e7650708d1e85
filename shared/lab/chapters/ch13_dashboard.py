"""Chapter 13's instrument: a server's own metrics, drawn while threads of clients put it under load."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from prometheus_client.parser import text_string_to_metric_families

from shared.lab import Slider, show
from shared.lab.evidence import evidence, save_evidence
from shared.lab.form import Form
from shared.lab.markup import Html, bar, join, mono, note, panel, strong, table, tag
from shared.lab.widgets import FOCUS_STYLE, button

PERIOD = 0.5  # seconds between two looks at /metrics
LEVELS = "▁▂▃▄▅▆▇█"
HISTORY = 40
LEGEND = ("Rates and means are over the last two seconds, from differences of counters, as Prometheus computes them. "
          "A – means that nothing happened in them.")  # fmt: skip
QUESTIONS = ("List three primary colors.", "What is the capital of France?", "Write one sentence about the sea.",
             "Name a fruit.", "Is fire hot?")  # fmt: skip


# What the server says


@dataclass(frozen=True)
class Sample:
    """One look at /metrics: counts since the server started, except those that say `now`."""

    seconds: float
    running_now: int
    waiting_now: int
    free_blocks_now: int
    num_blocks: int
    tokens: int
    ended: int  # answers that ended by themselves
    aborted: int
    first_tokens: int
    first_token_seconds: float  # the sum over all of them
    gaps: int
    gap_seconds: float


def parse_sample(text: str, seconds: float) -> Sample:
    """A Sample of what /metrics answered."""
    found = {sample.name.removeprefix("zte:") + "".join(sample.labels.get("finished_reason", "")): sample.value
             for family in text_string_to_metric_families(text) for sample in family.samples
             if "le" not in sample.labels}  # fmt: skip
    ended = {name: value for name, value in found.items() if name.startswith("request_success_total")}
    aborted = ended.pop("request_success_totalabort", 0)
    counts = [found[name] for name in ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_blocks",
                                       "generation_tokens_total")]  # fmt: skip
    first, gap = "time_to_first_token_seconds", "inter_token_latency_seconds"
    return Sample(seconds, *map(int, counts), int(sum(ended.values())), int(aborted), int(found[f"{first}_count"]),
                  found[f"{first}_sum"], int(found[f"{gap}_count"]), found[f"{gap}_sum"])  # fmt: skip


# The drawing


def render_dashboard(samples: Sequence[Sample], index: int) -> Html:
    """The state at one look, and the way there."""
    if not samples:
        return tag("div", strong("Nothing has been measured yet. Press Start."), role="status")
    seen = samples[: index + 1]
    now, before = seen[-1], seen[max(0, len(seen) - 5)]
    used = now.num_blocks - now.free_blocks_now
    words = (f"After {now.seconds:.1f} s: {now.running_now} run, {now.waiting_now} wait, "
             f"{now.ended} answers have ended, {now.aborted} were left by their client.")  # fmt: skip
    rows = [
        ["answers that run", now.running_now, spark([s.running_now for s in seen])],
        ["answers that wait", now.waiting_now, spark([s.waiting_now for s in seen])],
        ["blocks in use", f"{used} of {now.num_blocks}", spark([s.num_blocks - s.free_blocks_now for s in seen])],
        ["tokens a second", rate(before, now), spark(rates(seen))],
        ["mean time to first token", mean(before, now, "first_tokens", "first_token_seconds"), ""],
        ["mean gap between tokens", mean(before, now, "gaps", "gap_seconds"), ""],
    ]
    cache = bar(used / now.num_blocks, f"{used} of {now.num_blocks} blocks")
    return join([tag("div", strong(words), role="status"), table(["", "now", "until now"], rows), cache])


def rate(before: Sample, now: Sample) -> str:
    seconds = now.seconds - before.seconds
    return f"{(now.tokens - before.tokens) / seconds:.0f}" if seconds else "–"


def rates(samples: Sequence[Sample]) -> list[float]:
    return [(b.tokens - a.tokens) / max(b.seconds - a.seconds, 1e-9) for a, b in zip(samples, samples[1:])]


def mean(before: Sample, now: Sample, count: str, total: str) -> str:
    """Of what came between two looks, in milliseconds."""
    new = getattr(now, count) - getattr(before, count)
    return f"{(getattr(now, total) - getattr(before, total)) / new * 1e3:.0f} ms" if new else "–"


def spark(values: Sequence[float]) -> Html:
    """The last values as a row of bars, from 0 to the largest."""
    shown = list(values)[-HISTORY:]
    top = max(shown, default=0)
    drawn = "".join(LEVELS[round(value / top * (len(LEVELS) - 1))] if top else LEVELS[0] for value in shown)
    return tag("span", mono(drawn), role="img", aria_label=f"from 0 to {top:.0f}")


# The load


def read_stream(address: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one streamed chat. Closing the iterator closes the connection."""
    client = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    try:
        client.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}),
                       {"Content-Type": "application/json"})  # fmt: skip
        for line in client.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        client.close()


class Load:
    """Clients that ask, read, sometimes leave, and ask again; each in a thread, until `stop`."""

    def __init__(self, address: str, model: str, clients: int, max_tokens: int, leave_percent: int, seed: int = 0):
        self.address, self.model, self.max_tokens, self.leave_percent = address, model, max_tokens, leave_percent
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._ask_on, args=(random.Random(seed * 1000 + i),), daemon=True)
                        for i in range(clients)]  # fmt: skip
        for thread in self.threads:
            thread.start()

    def _ask_on(self, draw: random.Random) -> None:
        while not self.over.is_set():
            with suppress(OSError, http.client.HTTPException):
                self._ask(draw)
            self.over.wait(draw.uniform(0.0, 0.3))

    def _ask(self, draw: random.Random) -> None:
        message = {"role": "user", "content": draw.choice(QUESTIONS)}
        body = {"model": self.model, "messages": [message], "max_tokens": self.max_tokens}
        leaves = draw.randint(1, self.max_tokens) if draw.random() * 100 < self.leave_percent else None
        for count, _ in enumerate(read_stream(self.address, body), 1):
            if self.over.is_set() or count == leaves:
                return

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


class Watch:
    """Looks at /metrics every half second, and tells `on_sample`."""

    def __init__(self, address: str, on_sample: Any):
        self.address, self.on_sample, self.over = address, on_sample, threading.Event()
        self.started = time.perf_counter()
        self.thread = threading.Thread(target=self._look_on, daemon=True)
        self.thread.start()

    def _look_on(self) -> None:
        while not self.over.wait(PERIOD):
            with suppress(OSError, http.client.HTTPException):
                self.on_sample(parse_sample(self._metrics(), time.perf_counter() - self.started))

    def _metrics(self) -> str:
        client = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=5)
        try:
            client.request("GET", "/metrics")
            return client.getresponse().read().decode()
        finally:
            client.close()

    def stop(self) -> None:
        self.over.set()
        self.thread.join()


# The widget


class Dashboard:
    """Start and stop a load on a live server; step back through what was seen. Tests use `.start_button.click()`.

    `address()` is where the server listens; it may start one first.
    """

    def __init__(self, address: Callable[[], str], model: str):
        self.address, self.model = address, model
        self.samples: list[Sample] = []
        self.index, self.load, self.watch = 0, None, None
        self.fields = Form([
            Slider("clients", "Clients", 8, 1, 16),
            Slider("max_tokens", "Tokens an answer", 24, 4, 64),
            Slider("leave_percent", "Leave early, percent", 25, 0, 100, 5),
            Slider("seed", "Seed", 0, 0, 99),
        ], lambda: None)  # fmt: skip
        self.start_button = button("Start", "Start the clients", self.start, primary=True)
        self.stop_button = button("Stop", "Stop the clients", self.stop)
        self.back_button = button("◂ Back", "Look at the sample before", lambda: self.go(self.index - 1))
        self.step_button = button("Step ▸", "Look at the next sample", lambda: self.go(self.index + 1))
        self.latest_button = button("Latest ▸▸", "Follow the newest sample", lambda: self.go(len(self.samples) - 1))
        self.reset_button = button("↺ Reset", "Forget all samples", self.reset)
        self.frame = widgets.HTML(value="")
        buttons = [self.start_button, self.stop_button, self.back_button, self.step_button, self.latest_button,
                   self.reset_button]  # fmt: skip
        row = widgets.HBox(buttons, layout=widgets.Layout(flex_flow="row wrap"))
        heading = widgets.HTML(value=FOCUS_STYLE + panel(strong("A server under load, live")))
        self.widget = widgets.VBox([heading, self.fields.widget, row, self.frame])
        self.widget.add_class("z2e")
        self.draw()

    def start(self) -> None:
        """A new load with the values of the sliders; the samples go on."""
        self.stop()
        address = self.address()
        self.load = Load(address, self.model, **self.fields.values())
        self.watch = Watch(address, self.add)
        self.draw()

    def stop(self) -> None:
        for part in (self.load, self.watch):
            if part is not None:
                part.stop()
        self.load = self.watch = None
        self.draw()

    def reset(self) -> None:
        self.stop()
        self.samples, self.index = [], 0
        self.draw()

    def add(self, sample: Sample) -> None:
        """A new sample is shown unless the reader looks at an older one."""
        follows = self.index >= len(self.samples) - 1
        self.samples.append(sample)
        self.go(len(self.samples) - 1 if follows else self.index)

    def go(self, index: int) -> None:
        self.index = max(0, min(index, len(self.samples) - 1))
        self.draw()

    def draw(self) -> None:
        last = len(self.samples) - 1
        self.stop_button.disabled = self.load is None
        self.back_button.disabled, self.step_button.disabled = self.index == 0, self.index >= last
        place = f"Sample {self.index + 1} of {last + 1}. " if self.samples else ""
        state = "The clients are asking." if self.load else "No client is asking."
        self.frame.value = panel(note(place + state), render_dashboard(self.samples, self.index), note(LEGEND))

    def show(self) -> None:
        text = "Simulator: a server under load. Its static form shows three moments of a recorded run."
        show(self, html=recorded(), text=text)


def recorded(moments: Sequence[int] = (2, 12, -1)) -> Html:
    """Moments of the saved run, drawn by the same function."""
    record = evidence("13_dashboard")
    samples = [Sample(**sample) for sample in record["samples"]]
    places = [moment % len(samples) for moment in moments]
    blocks = [tag("div", render_dashboard(samples, place), "margin:0 0 10px") for place in places]
    head = f"A recorded run, on {record['machine']['processor']}: {record['load']}."
    return panel(strong(head), *blocks, note(LEGEND))


def save() -> Path:
    """Record a run: `python -m shared.lab.chapters.ch13_dashboard`."""
    from shared.engine_args import EngineArgs, build_engine
    from shared.server import Server, create_app

    engine = build_engine(EngineArgs(max_num_seqs=4, max_model_len=128, num_gpu_blocks_override=32))
    server = Server(create_app(engine, "smollm2-135m"), port=0)
    address = server.start()
    samples: list[Sample] = []
    load, watch = Load(address, "smollm2-135m", 8, 24, 25), Watch(address, samples.append)
    time.sleep(10)
    load.stop()
    time.sleep(2)
    watch.stop()
    server.stop()
    return save_evidence(
        "13_dashboard", "the metrics of a server under load, every half second; the clients stop after ten seconds",
        "python -m shared.lab.chapters.ch13_dashboard", [], samples=[asdict(sample) for sample in samples],
        load="8 clients, 24 tokens an answer, one in four leaves early, at most 4 answers run",
    )


if __name__ == "__main__":
    print(save().name)
