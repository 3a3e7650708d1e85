"""A simulator that steps forward and back through the states of something that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ipywidgets as widgets

from shared.lab.display import show
from shared.lab.form import Choice, Field, Form, Slider, Switch, explain
from shared.lab.markup import Html, join, note, panel, strong, tag
from shared.lab.widgets import FOCUS_STYLE, button


class Stepper:
    """Buttons and a slider over the states that `make` yields, each drawn by `render`.

    `make(inputs, seed)` takes the parsed fields by name and yields states, the first before anything
    happened. `render(state, index)` gives HTML. Each state is rendered the moment it is reached and only the
    HTML is kept, so `make` may yield one live object again and again: the engine itself, stepped. A
    ValueError from a parser or from `make` is shown beside the fields. Tests use `.step.click()`,
    `.fields["n"].value = ...`, `.frame.value`.
    """

    def __init__(self, make: Callable[[dict[str, Any], int], Iterable[Any]],
                 render: Callable[[Any, int], str],
                 fields: Sequence[Field | Slider | Choice | Switch] = (), seed: int | None = 0,
                 title: str = "Simulator", max_steps: int = 200):
        self.make, self.render, self.title, self.max_steps = make, render, title, max_steps
        self.fields = Form(fields, self.restart)
        self.frames: list[str] = []
        self.index = 0
        self._states: Iterator[Any] = iter(())
        self._ended = False
        self._build(seed)
        self.restart()

    def restart(self) -> None:
        """Read the fields again and go back to the first state."""
        self.frames, self.index, self._ended = [], 0, False
        self.fields.complain("")
        try:
            self._states = iter(self.make(self.fields.values(), self.seed.value))
        except Exception as wrong:
            self._stop(wrong)
        self._reach(0)
        self._draw()

    def go(self, index: int) -> None:
        """Show state `index`, or the last one there is."""
        self._reach(index)
        self.index = max(0, min(index, len(self.frames) - 1))
        self._draw()

    def static(self, steps: Sequence[int] = (0, -1)) -> Html:
        """The chosen states (negative: from the end) below one another, drawn by the same `render`."""
        self._reach(self.max_steps if any(step < 0 for step in steps) else max(steps, default=0))
        count = len(self.frames)
        chosen = sorted({min(step, count - 1) if step >= 0 else step % count for step in steps if count})
        self._draw()
        blocks = [tag("section", join([note(f"Step {step} of {self._known()}"), Html(self.frames[step])]),
                      "margin:0 0 10px") for step in chosen]
        return panel(strong(self.title), self.fields.stated(), *blocks)

    def show(self, steps: Sequence[int] = (0, -1), text: str | None = None) -> None:
        """Display the simulator with its static form: `Stepper(...).show(steps=(0, 3, -1))`."""
        show(self, html=self.static(steps), text=text or f"Simulator: {self.title}.")

    def _build(self, seed: int | None) -> None:
        self.back = button("◂ Back", "Go back one step", lambda: self.go(self.index - 1))
        self.step = button("Step ▸", "Go forward one step", lambda: self.go(self.index + 1), primary=True)
        self.end = button("Run to end ▸▸", "Run until it ends", lambda: self.go(self.max_steps))
        self.reset = button("↺ Reset", "Go back to the start", self.restart)
        narrow = {"description_width": "initial"}
        self.slider = widgets.IntSlider(min=0, max=0, description="Step", tooltip="Choose a step",
                                        style=narrow, readout=False, layout=widgets.Layout(width="22em"))
        self.slider.observe(lambda change: self.go(change["new"]), names="value")
        self.seed = widgets.BoundedIntText(value=seed or 0, min=0, max=2**31 - 1, description="Seed",
                                           tooltip="Seed of the random draws", style=narrow,
                                           layout=widgets.Layout(width="10em"))
        self.seed.observe(lambda _: self.restart(), names="value")
        self.status, self.frame = widgets.HTML(value=""), widgets.HTML(value="")
        self.widget = self._arranged(seed is not None)

    def _arranged(self, seeded: bool) -> widgets.VBox:
        row = widgets.Layout(flex_flow="row wrap", align_items="center")
        buttons = widgets.HBox([self.back, self.step, self.end, self.reset], layout=row)
        place = widgets.HBox([self.slider, *([self.seed] if seeded else [])], layout=row)
        heading = widgets.HTML(value=FOCUS_STYLE + panel(strong(self.title)))
        box = widgets.VBox([heading, self.fields.widget, buttons, place, self.status, self.frame])
        box.add_class("z2e")
        return box

    def _reach(self, index: int) -> None:
        """Run until state `index` is drawn, the run ends, or the limit of steps is met."""
        while not self._ended and len(self.frames) <= min(index, self.max_steps):
            try:
                state = next(self._states)
                self.frames.append(str(self.render(state, len(self.frames))))
            except StopIteration:
                self._ended = True
            except Exception as wrong:
                self._stop(wrong)

    def _stop(self, wrong: Exception) -> None:
        self._states, self._ended = iter(()), True
        self.fields.complain(explain(wrong))

    def _place(self) -> str:
        """Where we are, and how far it goes if more is known than this."""
        last = len(self.frames) - 1
        more = self._ended or self.index < last or last >= self.max_steps
        return f"Step {self.index} of {self._known()}" if more else f"Step {self.index}"

    def _known(self) -> str:
        last = max(0, len(self.frames) - 1)
        if self._ended:
            return str(last)
        return f"{last} (limit)" if last >= self.max_steps else f"{last} so far"

    def _draw(self) -> None:
        place = f"{self._place()}." if self.frames else "There is nothing to step."
        self.frame.value = panel(Html(self.frames[self.index])) if self.frames else ""
        last = max(0, len(self.frames) - 1)
        at_end = self.index >= last and (self._ended or last >= self.max_steps)
        done = " Nothing is left to do." if at_end and self._ended and self.frames else ""
        self.status.value = panel(tag("div", f"{place}{done}", role="status"))
        self.back.disabled, self.step.disabled, self.end.disabled = self.index == 0, at_end, at_end
        self.slider.max = last
        self.slider.value = self.index
