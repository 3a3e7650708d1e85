"""HTML that reads in light and dark pages, and also where a code host removes every style.

Colours are JupyterLab's variables with fallbacks; tints are translucent, so that they suit any background.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

ACCENT = "var(--jp-brand-color1, #1976d2)"
ON_ACCENT = "var(--jp-ui-inverse-font-color1, #fff)"
TINT = "rgba(33, 134, 230, 0.22)"
SHADE = "rgba(128, 128, 128, 0.16)"
LINE = "var(--jp-border-color1, rgba(128, 128, 128, 0.45))"
MONO = "var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace)"
QUIET = "opacity:0.75"
CELL = f"border:1px solid {LINE};padding:2px 8px;text-align:left;vertical-align:top"


class Html(str):
    """Text that is markup already and is not escaped again."""


def esc(value: object) -> Html:
    """`value` as markup: escaped, unless it is `Html`."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def rich(text: str) -> Html:
    """Escaped text in which `words in backticks` become code."""
    return Html(re.sub(r"`([^`]+)`", rf'<code style="font-family:{MONO}">\1</code>', esc(text)))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(esc(part) for part in parts))


def tag(name: str, content: object = "", style: str = "", **attributes: str) -> Html:
    """One element. Attribute names use `_` for `-`; a trailing `_` is dropped (`class_`)."""
    pairs = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    if style:
        pairs["style"] = style
    written = "".join(f' {key}="{html.escape(str(value))}"' for key, value in pairs.items())
    return Html(f"<{name}{written}>{esc(content)}</{name}>")


def panel(*parts: object) -> Html:
    """The frame around every figure: one font, one size, the page's own text colour."""
    style = ("font-family:var(--jp-ui-font-family, system-ui, sans-serif);font-size:13px;line-height:1.5;"
             "color:var(--jp-content-font-color1, inherit);overflow-x:auto")
    return tag("div", join(parts), style)


def note(text: object) -> Html:
    """A quiet line below or above a figure."""
    return tag("div", esc(text), QUIET)


def strong(text: object) -> Html:
    return tag("strong", text)


def mono(text: object) -> Html:
    return tag("code", text, f"font-family:{MONO};background:none;padding:0")


def table(headers: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "",
          lit: Iterable[int] = ()) -> Html:
    """A table. `lit` rows are tinted and have a mark in their first cell, so that colour is not needed."""
    lit = set(lit)
    head = tag("tr", join(tag("th", cell, f"{CELL};font-weight:600;background:{SHADE}", scope="col")
                          for cell in headers))
    body = join(_row(row, index in lit) for index, row in enumerate(rows))
    title = tag("caption", caption, f"text-align:left;padding:2px 0;{QUIET}") if caption else ""
    return tag("table", join([title, tag("thead", head), tag("tbody", body)]),
               "border-collapse:collapse;margin:4px 0;font-size:13px")


def _row(cells: Sequence[object], lit: bool) -> Html:
    style = f"{CELL};background:{TINT}" if lit else f"{CELL};background:none"
    cells = [join(["▸ ", cells[0]]), *cells[1:]] if lit else cells
    return tag("tr", join(tag("td", cell, style) for cell in cells))


def visible(text: str) -> str:
    """Token text with its whitespace drawn: a space as ·, a newline as ⏎, a tab as ⇥."""
    return text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def tokens(texts: Sequence[str], ids: Sequence[int] | None = None, lit: Iterable[int] = ()) -> Html:
    """A row of tokens in boxes, each with its id below; `lit` tokens have an accent border and bold text."""
    lit = set(lit)
    boxes = [_token(text, None if ids is None else ids[i], i, i in lit) for i, text in enumerate(texts)]
    return tag("div", join(boxes, " "), "display:flex;flex-wrap:wrap;gap:3px;margin:4px 0")


def _token(text: str, token_id: int | None, index: int, lit: bool) -> Html:
    tint = (TINT, SHADE)[index % 2]
    border = f"2px solid {ACCENT};font-weight:700" if lit else f"1px solid {LINE}"
    below = "" if token_id is None else tag("div", token_id, f"font-size:10px;{QUIET}")
    return tag("span", join([visible(text) or "∅", below]),
               f"display:inline-block;font-family:{MONO};background:{tint};border:{border};"
               "border-radius:3px;padding:1px 5px;text-align:center;line-height:1.4")


def bar(share: float, label: object = "", width: int = 160) -> Html:
    """A horizontal bar for a share between 0 and 1, with its label in words beside it."""
    inside = max(0, min(width, round(share * width)))
    filled = tag("span", "", f"display:inline-block;width:{inside}px;height:10px;background:{ACCENT}")
    frame = tag("span", filled, f"display:inline-block;width:{width}px;height:10px;background:{SHADE};"
                                "line-height:10px;text-align:left;overflow:hidden")
    return join([frame, " ", label])
