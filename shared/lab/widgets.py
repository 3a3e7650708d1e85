"""The few controls that every instrument shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets as widgets

FOCUS_STYLE = """<style>
.z2e :is(button, input, select, textarea, .noUi-handle):focus-visible {
  outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px; }
.z2e .widget-html-content { line-height: 1.5; }
.z2e .widget-label { text-align: left; }
</style>"""
RADIO_STYLE = FOCUS_STYLE + """<style>
.z2e-radio .widget-radio-box { width: 100%; max-width: 44em; margin: 0; }
.z2e-radio .widget-radio-box label { display: flex; flex-direction: row-reverse; justify-content: flex-end;
  align-items: center; gap: 6px; height: auto; margin: 0; padding: 3px 0;
  line-height: 1.4; white-space: normal; }
.z2e-radio .widget-radio-box input { position: static; flex: none; margin: 0; height: auto; }
</style>"""


def radio(options: Sequence[str], description: str) -> widgets.RadioButtons:
    """Radio buttons below one another with nothing chosen yet; long options wrap."""
    control = widgets.RadioButtons(options=list(options), index=None, tooltip=description,
                                   layout=widgets.Layout(width="auto", max_width="100%"))
    control.add_class("z2e-radio")
    return control


def button(label: str, tooltip: str, on_click: Callable[[], None], primary: bool = False) -> widgets.Button:
    control = widgets.Button(description=label, tooltip=tooltip, button_style="primary" if primary else "",
                             layout=widgets.Layout(width="auto", min_width="5.5em"))
    control.on_click(lambda _: on_click())
    return control
