"""Chapter 13's instrument: a server's own metrics, drawn while threads of clients put it under load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import ipywidgets as widgets

from shared.lab import Slider, show
from shared.lab.chapters.ch13_load import Load, Sample, Watch
from shared.lab.evidence import evidence, save_evidence
from shared.lab.form import Form, explain
from shared.lab.markup import Html, bar, join, mono, note, panel, strong, table, tag
from shared.lab.widgets import FOCUS_STYLE, button

LEVELS = "▁▂▃▄▅▆▇█"
HISTORY = 40
LEGEND = ("Rates and means are over the last two seconds, from differences of counters, as Prometheus computes them. "
          "A – means that nothing happened in them. Time stands still while nobody looks.")  # fmt: skip


# The drawing


def render_dashboard(samples: Sequence[Sample], index: int) -> Html:
    """The state at one look, and the way there."""
    if not samples:
        return tag("div", strong("Nothing has been measured yet. Press Start."), role="status")
    seen = samples[: index + 1]
    now, before = seen[-1], seen[max(0, len(seen) - 5)]
    used = now.num_blocks - now.free_blocks_now
    words = (f"After {now.seconds:.1f} s: {now.running_now} running, {now.waiting_now} waiting, {now.ended} ended, "
             f"{now.aborted} left by their client.")
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


# The widget


class Dashboard:
    """Start and stop a load on a live server; step back through what was seen. Tests use `.start_button.click()`.

    `address()` is where the server listens; it may start one first.
    """

    def __init__(self, address: Callable[[], str], model: str):
        self.address, self.model = address, model
        self.samples: list[Sample] = []
        self.index, self.load, self.watch, self.seen_address = 0, None, None, ""
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
        """A new load with the values of the sliders; the samples go on, unless it is another server."""
        self.stop()
        try:
            address = self.address()
        except Exception as wrong:
            self.fields.complain(f"The server did not start. {explain(wrong)}")
            return
        if address != self.seen_address:
            self.samples, self.index, self.seen_address = [], 0, address
        since = self.samples[-1].seconds if self.samples else 0.0
        self.load = Load(address, self.model, **self.fields.values())
        self.watch = Watch(address, self.add, self.lose, since)
        self.draw()

    def stop(self) -> None:
        """End the clients, and look on until their answers have left the engine."""
        self.fields.complain("")
        load, watch, self.load, self.watch = self.load, self.watch, None, None
        if load is not None:
            load.stop()
        if watch is not None:
            watch.stop()
            watch.look_until_quiet()
        self.draw()

    def lose(self, words: str) -> None:
        """On the thread of the watch: the server has gone, so nobody asks any more."""
        load, self.load, self.watch = self.load, None, None
        if load is not None:
            load.over.set()
            self.fields.complain(words)
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
        self.latest_button.disabled = self.step_button.disabled
        place = f"Sample {self.index + 1} of {last + 1}. " if self.samples else ""
        state = "The clients are asking." if self.load else "No client is asking."
        if self.load and self.load.refused:
            state += f" The server refused one of them, {self.load.refused}."
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
