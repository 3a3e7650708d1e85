"""Show one figure as a live widget and, in the same output, as a form that needs no kernel."""

from __future__ import annotations

import base64

from IPython.display import display


def show(widget=None, html: str | None = None, png: bytes | None = None,
         text: str = "Interactive figure.", alt: str | None = None) -> None:
    """Display one bundle: `widget` where there is a kernel, `html` or `png` everywhere else.

    `widget` is an ipywidgets widget or anything with a `.widget` (a Stepper, an Explorer). `text` is one
    fixed sentence for terminals and screen readers; `alt` describes a picture (default: `text`).
    """
    bundle: dict[str, object] = {}
    if widget is not None:
        widget = getattr(widget, "widget", widget)
        bundle.update(widget._repr_mimebundle_())
    if html is not None:
        bundle["text/html"] = str(html)
    if png is not None:
        bundle["image/png"] = base64.b64encode(png).decode("ascii")
    bundle["text/plain"] = text
    metadata = {"image/png": {"alt": alt or text}} if png is not None else {}
    display(bundle, raw=True, metadata=metadata)
