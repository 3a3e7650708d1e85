"""A figure that is drawn again whenever one of its controls changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from shared.lab.display import show
from shared.lab.form import Choice, Field, Form, Slider, Switch, explain
from shared.lab.markup import Html, panel, strong
from shared.lab.widgets import FOCUS_STYLE


class Explorer:
    """Controls above a figure: `render(inputs)` gives HTML for the parsed fields by name.

    A ValueError from a parser or from `render` is shown beside the fields and the last good figure stays.
    Tests use `.fields["name"].value = ...` and `.frame.value`.
    """

    def __init__(self, render: Callable[[dict[str, Any]], str],
                 fields: Sequence[Field | Slider | Choice | Switch], title: str = "Explorer"):
        self.render, self.title = render, title
        self.fields = Form(fields, self.redraw)
        self.frame = widgets.HTML(value="")
        heading = widgets.HTML(value=FOCUS_STYLE + panel(strong(title)))
        self.widget = widgets.VBox([heading, self.fields.widget, self.frame])
        self.widget.add_class("z2e")
        self.redraw()

    def redraw(self) -> None:
        try:
            drawn = self.render(self.fields.values())
        except Exception as wrong:
            self.fields.complain(explain(wrong))
            return
        self.fields.complain("")
        self.frame.value = panel(Html(drawn))

    def static(self) -> Html:
        """The figure for the values that it starts with."""
        return panel(strong(self.title), self.fields.stated(), Html(self.render(self.fields.defaults())))

    def show(self, text: str | None = None) -> None:
        """Display the figure with its static form."""
        show(self, html=self.static(), text=text or f"Explorer: {self.title}.")
