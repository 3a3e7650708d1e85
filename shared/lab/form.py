"""Labelled controls whose values reach a simulator checked, with bad input explained beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from shared.lab.markup import ACCENT, Html, join, note, panel, rich, strong, tag

WIDE = widgets.Layout(width="auto", min_width="16em", max_width="44em", flex="1 1 auto")


class InputError(ValueError):
    """An input that a simulator cannot use, in words for the reader."""


def explain(wrong: Exception) -> str:
    """An error as a line for the reader: a ValueError's own words, else its type and words."""
    return str(wrong) if isinstance(wrong, ValueError) else f"{type(wrong).__name__}: {wrong}"


@dataclass(frozen=True)
class Field:
    """A line of text, or several with `rows`. `parse` makes it a value or raises ValueError with words."""

    name: str
    label: str
    value: str
    parse: Callable[[str], Any] = str
    rows: int = 1
    help: str = ""

    def control(self) -> widgets.Widget:
        kind = widgets.Text if self.rows == 1 else widgets.Textarea
        extra = {} if self.rows == 1 else {"rows": self.rows}
        return kind(value=self.value, continuous_update=False, layout=WIDE, **extra)


@dataclass(frozen=True)
class Slider:
    """A number between `low` and `high`; whole if `step` is whole."""

    name: str
    label: str
    value: float
    low: float
    high: float
    step: float = 1
    help: str = ""

    def control(self) -> widgets.Widget:
        kind = widgets.IntSlider if isinstance(self.step, int) else widgets.FloatSlider
        return kind(value=self.value, min=self.low, max=self.high, step=self.step, continuous_update=False,
                    layout=widgets.Layout(width="auto", max_width="34em"))

    def parse(self, value: float) -> float:
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few options."""

    name: str
    label: str
    value: str
    options: Sequence[str]
    help: str = ""

    def control(self) -> widgets.Widget:
        return widgets.Dropdown(options=list(self.options), value=self.value,
                                layout=widgets.Layout(width="auto", min_width="10em", max_width="44em"))

    def parse(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class Switch:
    """On or off."""

    name: str
    label: str
    value: bool = False
    help: str = ""

    def control(self) -> widgets.Widget:
        return widgets.Checkbox(value=self.value, indent=False, layout=widgets.Layout(width="auto"))

    def parse(self, value: bool) -> bool:
        return value


class Form:
    """The controls of one figure. `form["prompt"].value = "..."` sets one, as typing does."""

    def __init__(self, fields: Sequence[Field | Slider | Choice | Switch], on_change: Callable[[], None]):
        self.fields = list(fields)
        self.controls = {field.name: field.control() for field in self.fields}
        self.error = widgets.HTML(value="")
        for field in self.fields:
            self._label(field)
        for control in self.controls.values():
            control.observe(lambda _: on_change(), names="value")
        self.widget = widgets.VBox([*(self._explained(field) for field in self.fields), self.error])

    def __getitem__(self, name: str) -> widgets.Widget:
        return self.controls[name]

    def values(self) -> dict[str, Any]:
        """The parsed values by name. Raises InputError, naming the field, for the first bad one."""
        return {field.name: self._parsed(field) for field in self.fields}

    def defaults(self) -> dict[str, Any]:
        """The parsed values that the figure starts with."""
        return {field.name: field.parse(field.value) for field in self.fields}

    def stated(self) -> Html:
        """The values that the figure starts with, in one line, for its static form."""
        words = (f"{field.label}: {_in_words(field.value)}" for field in self.fields)
        return note(join(words, " · ")) if self.fields else Html("")

    def complain(self, words: str) -> None:
        """Show what is wrong with the input; an empty string clears it."""
        style = f"border-left:3px solid {ACCENT};padding:2px 8px"
        box = tag("div", strong(f"⚠ {words}"), style, role="alert")
        self.error.value = panel(box) if words else ""

    def _parsed(self, field: Field | Slider | Choice | Switch) -> Any:
        try:
            return field.parse(self.controls[field.name].value)
        except ValueError as wrong:
            raise InputError(f"{field.label}: {wrong}") from wrong

    def _label(self, field: Field | Slider | Choice | Switch) -> None:
        """Name a control by its own label; the labels of a form share one width."""
        control = self.controls[field.name]
        control.description, control.tooltip = field.label, field.label
        if not isinstance(field, Switch):
            longest = max(len(other.label) for other in self.fields if not isinstance(other, Switch))
            control.style.description_width = f"{min(20.0, 1 + 0.6 * longest):.1f}em"

    def _explained(self, field: Field | Slider | Choice | Switch) -> widgets.Widget:
        control = self.controls[field.name]
        if not field.help:
            return control
        return widgets.VBox([control, widgets.HTML(value=panel(note(rich(field.help))))])


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " / ".join(str(value).splitlines())


def whole(low: int = 0, high: int | None = None) -> Callable[[str], int]:
    """A parser for one whole number between `low` and `high`."""
    def parse(text: str) -> int:
        return _whole(text.strip(), low, high)
    return parse


def whole_numbers(low: int = 0, high: int | None = None, at_most: int = 64) -> Callable[[str], list[int]]:
    """A parser for whole numbers separated by spaces or commas."""
    def parse(text: str) -> list[int]:
        words = text.replace(",", " ").split()
        if not 1 <= len(words) <= at_most:
            raise ValueError(f"give 1 to {at_most} whole numbers, not {len(words)}")
        return [_whole(word, low, high) for word in words]
    return parse


def some_text(at_most: int = 400) -> Callable[[str], str]:
    """A parser for text that is not empty and not too long for the figure."""
    def parse(text: str) -> str:
        if not 1 <= len(text) <= at_most:
            raise ValueError(f"give 1 to {at_most} characters, not {len(text)}")
        return text
    return parse


def lines_of(parse_line: Callable[[str], Any], at_most: int = 12) -> Callable[[str], list[Any]]:
    """A parser for one item a line; a bad line is named by its number."""
    def parse(text: str) -> list[Any]:
        lines = [line for line in text.splitlines() if line.strip()]
        if not 1 <= len(lines) <= at_most:
            raise ValueError(f"give 1 to {at_most} lines, not {len(lines)}")
        return [_line(parse_line, number, line) for number, line in enumerate(lines, 1)]
    return parse


def _line(parse_line: Callable[[str], Any], number: int, line: str) -> Any:
    try:
        return parse_line(line.strip())
    except ValueError as wrong:
        raise ValueError(f"line {number}: {wrong}") from wrong


def _whole(word: str, low: int, high: int | None) -> int:
    limits = f"{low} or more" if high is None else f"between {low} and {high}"
    try:
        number = int(word)
    except ValueError:
        shown = word if len(word) <= 30 else f"{word[:27]}..."
        raise ValueError(f"{shown!r} is not a whole number ({limits})") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{number} is not {limits}")
    return number
