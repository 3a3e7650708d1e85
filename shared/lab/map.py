"""The one drawing of the engine that every chapter opens with, its own part lit."""

from __future__ import annotations

from dataclasses import dataclass

from shared.lab.charts import ACCENT, INK, PALE, QUIET, to_png
from shared.lab.display import show
from shared.lab.markup import note, panel

BETWEEN = 19.8  # height at which what an arrow between the planes carries is written
LIT, UNLIT = "#dbeafe", "#f7f9fb"


@dataclass(frozen=True)
class Part:
    """One box: left, bottom, width, height in drawing units of 100 by 54.6."""

    label: str
    x: float
    y: float
    width: float
    height: float
    frame: bool = False  # a frame has its label in its upper right corner and other parts inside

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


PARTS = {
    "bench": Part("clients · benchmark", 1, 48.6, 98, 5),
    "server": Part("server", 1, 1, 98, 45.6, frame=True),
    "engine": Part("engine: one loop of steps", 3.5, 2.8, 93, 40, frame=True),
    "control_plane": Part("control plane", 6, 24.2, 88, 15, frame=True),
    "request": Part("request", 8.5, 26.2, 16, 8.6),
    "scheduler": Part("scheduler", 30.5, 26.2, 16, 8.6),
    "block_manager": Part("block\nmanager", 54.5, 26.2, 16, 8.6),
    "prefix_cache": Part("prefix\ncache", 77, 26.2, 14.5, 8.6),
    "data_plane": Part("data plane", 6, 4.4, 88, 17.6, frame=True),
    "tokenizer": Part("tokenizer", 8.5, 6.2, 16, 11.4),
    "model_runner": Part("model\nrunner", 30.5, 6.2, 10, 11.4),
    "model": Part("model", 43.5, 12.6, 13, 5),
    "attention": Part("attention", 43.5, 6.2, 13, 5),
    "kv_cache": Part("KV cache", 59.5, 6.2, 12.5, 5),
    "sampler": Part("sampler", 67, 12.6, 10.5, 5),
    "detokenizer": Part("detokenizer", 80, 6.2, 12.5, 11.4),
}
FLOW = {
    ("tokenizer", "request"): "ids", ("request", "scheduler"): "", ("scheduler", "block_manager"): "",
    ("block_manager", "prefix_cache"): "", ("scheduler", "model_runner"): "batch",
    ("block_manager", "kv_cache"): "slots", ("model_runner", "model"): "", ("model", "attention"): "",
    ("attention", "kv_cache"): "", ("model", "sampler"): "", ("sampler", "detokenizer"): "",
    ("sampler", "control_plane"): "new token",
}  # fmt: skip
ALSO_CALLED = {"weights": "model", "decode": "engine", "sampling": "sampler", "batch": "model_runner",
               "runner": "model_runner", "parallel": "model_runner", "kernels": "attention", "llm": "engine"}


def engine_map(*lit: str) -> None:
    """Draw the engine with the named parts lit: `engine_map("kv_cache", "attention")`.

    Raises ValueError, with the names there are, for an unknown part.
    """
    names = find_parts(lit)
    show(png=draw(names), text=describe(names))
    words = f"Lit: {labels(names)}."
    show(html=panel(note(words)), text=words)


def find_parts(lit: tuple[str, ...]) -> list[str]:
    names = [ALSO_CALLED.get(name, name) for name in lit]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(f"the map has no part {unknown[0]!r}; it has {', '.join(PARTS)}")
    return names


def labels(names: list[str]) -> str:
    words = [PARTS[name].label.replace("\n", " ").partition(":")[0] for name in names]
    return ", ".join(words) or "nothing yet"


def describe(names: list[str]) -> str:
    """One sentence for screen readers and terminals."""
    return (f"Map of the engine. Lit: {labels(names)}. Around the engine, the server; "
            "inside, the control plane (request, scheduler, block manager, prefix cache) and the data plane "
            "(tokenizer, model runner, model with attention and KV cache, sampler, detokenizer).")


def draw(names: list[str]) -> bytes:
    """The drawing as png bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.6), dpi=110, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(0, 54.6))
    axes.axis("off")
    for name, part in PARTS.items():
        _box(axes, part, name in names)
    for (start, end), carried in FLOW.items():
        _arrow(axes, PARTS[start], PARTS[end], carried)
    return to_png(figure)


def _box(axes, part: Part, lit: bool) -> None:
    from matplotlib.patches import FancyBboxPatch

    edge = ACCENT if lit else PALE if part.frame else QUIET
    face = "none" if part.frame else LIT if lit else UNLIT
    axes.add_patch(FancyBboxPatch(
        (part.x, part.y), part.width, part.height, boxstyle="round,pad=0,rounding_size=1", zorder=1,
        edgecolor=edge, facecolor=face, linewidth=2.4 if lit else 1,
        linestyle="--" if part.frame and not lit else "-"))
    x, y = (part.x + part.width - 1.3, part.y + part.height - 2) if part.frame else part.middle
    label = ("▸ " if lit else "") + part.label
    axes.text(x, y, label, ha="right" if part.frame else "center", va="center", zorder=4, linespacing=1.05,
              color=ACCENT if lit else QUIET if part.frame else INK, weight="bold" if lit else "normal",
              fontsize=8.5 if part.frame else 10)


def _arrow(axes, start: Part, end: Part, carried: str) -> None:
    (x0, y0), (x1, y1) = _ends(start, end)
    axes.annotate("", (x1, y1), (x0, y0), zorder=3,
                  arrowprops={"arrowstyle": "-|>", "color": QUIET, "lw": 1.1, "shrinkA": 0, "shrinkB": 0})
    if carried:
        axes.text(x0 + 0.8, BETWEEN, carried, va="center", color=QUIET, fontsize=8.5, style="italic")


def _ends(start: Part, end: Part) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves one box and meets the other: straight across, or straight up or down."""
    if start.x + start.width <= end.x:
        y = min(start, end, key=lambda part: part.height).middle[1]
        return (start.x + start.width, y), (end.x, y)
    left, right = max(start.x, end.x), min(start.x + start.width, end.x + end.width)
    x = (left + right) / 2
    if end.y > start.y:
        return (x, start.y + start.height), (x, end.y)
    return (x, start.y), (x, end.y + end.height)
