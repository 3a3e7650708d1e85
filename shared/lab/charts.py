"""One look for every chart, and small png files.

    figure, axes = chart(title="Positions")
    axes.plot(steps, positions)
    show(png=to_png(figure), text="Positions computed against tokens generated.")
"""

from __future__ import annotations

import io

INK, QUIET, PALE, ACCENT = "#1f2933", "#5b6770", "#9aa5b1", "#1565c0"
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", ":", "-.")
SHADES = (ACCENT, INK, "#6b9bd1", PALE)


def chart(width: float = 7, height: float = 3.4, columns: int = 1, rows: int = 1, title: str = ""):
    """A figure and its axes (an array of them for several) in the course's style, without pyplot.

    Line number i comes with its own marker, dash and shade, so that no chart depends on colour alone.
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"axes.edgecolor": PALE, "axes.labelcolor": INK, "xtick.color": QUIET, "ytick.color": QUIET,
             "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e7eb",
             "axes.axisbelow": True, "font.size": 10, "axes.titlesize": 11,
             "axes.prop_cycle": cycler(color=SHADES, marker=MARKERS[:4], linestyle=LINES)}
    with rc_context(style):
        figure = Figure(figsize=(width, height), dpi=110, facecolor="white", layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
        return figure, figure.subplots(rows, columns)


def to_png(figure) -> bytes:
    """The figure as a small png: 64 colours, no date and no version inside."""
    from PIL import Image

    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    picture = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    picture.save(packed, format="png", optimize=True)
    return packed.getvalue()
