"""Guess before the run, compare after it. A guess never blocks: without one the notebook runs on."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from shared.lab.display import show
from shared.lab.markup import Html, esc, join, note, panel, rich, strong, tag
from shared.lab.progress import prediction, record_prediction
from shared.lab.widgets import RADIO_STYLE, radio


class Prediction:
    """Radio buttons for one guess. `choice.value = "119"` stores it, as a click does."""

    def __init__(self, key: str, options: Sequence[str], question: str = "Your guess"):
        self.key, self.options, self.question = key, [str(option) for option in options], question
        if len(set(self.options)) < 2 or len(set(self.options)) != len(self.options):
            raise ValueError(f"prediction {key!r} needs two or more different options, got {self.options}")
        self.choice = radio(self.options, question)
        self.message = widgets.HTML(value="")
        self.choice.observe(self._store, names="value")
        heading = widgets.HTML(value=panel(strong(rich(question))))
        self.widget = widgets.VBox([widgets.HTML(value=RADIO_STYLE), heading, self.choice, self.message])
        self._recall()

    def static(self) -> Html:
        items = join(tag("li", option) for option in self.options)
        return panel(strong(rich(self.question)), tag("ul", items, "margin:2px 0"))

    def _recall(self) -> None:
        guess = prediction(self.key)
        if guess in self.options:
            self.choice.value = guess

    def _store(self, change) -> None:
        saved = record_prediction(self.key, change["new"])
        kept = "" if saved else " It could not be saved on this machine."
        self.message.value = panel(note(esc(f"You predict {change['new']}. Run on to find out.{kept}")))


def predict(key: str, options: Sequence[str], question: str = "Your guess") -> None:
    """Ask for a guess: `predict("04.positions", ["100", "119", "2000", "6950"])`."""
    asked = Prediction(key, options, question)
    show(asked, html=asked.static(), text=f"Predict: {', '.join(asked.options)}.")


def reveal(key: str, value: object) -> None:
    """Print the answer beside the reader's guess: `reveal("04.positions", trace.positions)`."""
    guess = prediction(key)
    print(f"The answer: {value}")
    if guess is None:
        print("You made no prediction.")
    else:
        print(f"You predicted {guess}: {'right.' if _plain(guess) == _plain(value) else 'not this time.'}")


def _plain(value: object) -> str:
    return str(value).replace(",", "").strip().casefold()
