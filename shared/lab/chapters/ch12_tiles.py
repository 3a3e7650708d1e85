"""Chapter 12's tile stepper: a softmax over scores that come in tiles."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shared.lab import Field, Stepper, Switch
from shared.lab.form import whole
from shared.lab.markup import Html, join, note, table

MOST_KEYS = 24
# Stands in for triton and triton.language where there is none: kernels can then be defined and read, not run.
NO_TRITON = SimpleNamespace(jit=lambda kernel: kernel, constexpr=int)


@dataclass(frozen=True)
class Moment:
    """What is known after some tiles: those keys, the running numbers, and how much the last peak shrank the rest."""

    scores: list[float]
    tile: int
    done: int  # keys seen so far
    peak: float
    total: float
    mixed: float
    shrink: float | None


def some_scores(text: str) -> list[float]:
    """Numbers separated by spaces; minus infinity is a key that may not be seen."""
    try:
        scores = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError("give numbers separated by spaces, such as 1.5 -2 1000") from None
    if not 1 <= len(scores) <= MOST_KEYS:
        raise ValueError(f"give 1 to {MOST_KEYS} numbers, not {len(scores)}")
    if any(math.isnan(score) or score == math.inf for score in scores):
        raise ValueError("a score is a number; nan and inf are none")
    return scores


def moments(tiles: Callable[..., Iterable], scores: list[float], tile: int) -> Iterator[Moment]:
    """The steps of `tiles(scores, values, tile)`, with the number of each key as its value."""
    yield Moment(scores, tile, 0, -math.inf, 0.0, 0.0, None)
    values = torch.arange(len(scores), dtype=torch.float32)[:, None]  # [keys, 1]
    before = -math.inf
    for done, (peak, total, mixed) in enumerate(tiles(torch.tensor(scores), values, tile), 1):
        shrink = None if before == -math.inf else math.exp(before - float(peak))
        seen = min(done * tile, len(scores))
        yield Moment(scores, tile, seen, float(peak), float(total), float(mixed[0]), shrink)
        before = float(peak)


def render_moment(moment: Moment, index: int) -> Html:
    tiles = [moment.scores[i : i + moment.tile] for i in range(0, len(moment.scores), moment.tile)]
    rows = []
    for number, tile in enumerate(tiles):
        first = number * moment.tile
        state = "done" if first + len(tile) < moment.done or moment.done == len(moment.scores) else "▸ this tile"
        state = state if first < moment.done else "to come"
        rows.append([f"{first} to {first + len(tile) - 1}", "  ".join(f"{score:g}" for score in tile), state])
    parts = [table(["keys", "scores", ""], rows, lit=[max(0, index - 1)] if index else [])]
    if index:
        parts.append(table(["peak", "earlier sums times", "total", "mixed", "mixed / total"], [running(moment)]))
    if moment.done == len(moment.scores):
        parts.append(note(f"All keys at once, in float64: {whole_softmax(moment.scores)}."))
    return join(parts)


def running(moment: Moment) -> list[str]:
    shrink = "–" if moment.shrink is None else f"{moment.shrink:.3g}"
    result = f"{moment.mixed / moment.total:.4f}" if moment.total else "no key so far"
    return [f"{moment.peak:g}", shrink, f"{moment.total:.4g}", f"{moment.mixed:.4g}", result]


def whole_softmax(scores: list[float]) -> str:
    if max(scores) == -math.inf:
        return "no key may be seen"
    weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
    return f"{float(weights @ torch.arange(len(scores), dtype=torch.float64)):.4f}"


def tile_stepper(tiles: Callable[..., Iterable]) -> Stepper:
    """Steps the notebook's own running softmax, a tile at a time. The value of key i is the number i."""
    def make(inputs: dict[str, Any], seed: int) -> Iterator[Moment]:
        scores = inputs["scores"]
        if inputs["draw"]:
            draw = random.Random(seed)
            scores = [round(draw.gauss(0, 3), 1) for _ in range(12)]
        return moments(tiles, scores, inputs["tile"])

    fields = [
        Field("scores", "Scores", "1 0.5 2  3 -1 0  2.5 9 1  0 2 1", some_scores,
              help="One for each key. Try a 1000 at the end, or -inf: a key that may not be seen."),
        Field("tile", "Keys in a tile", "3", whole(1, MOST_KEYS)),
        Switch("draw", "Draw the scores by the seed"),
    ]  # fmt: skip
    return Stepper(make, render_moment, fields, title="A softmax, tile by tile")
