"""What every simulator's tests do with it: read its frames, go back and forth, give it what it must refuse."""

from __future__ import annotations

import re

from shared.lab import Stepper


def plain(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", str(markup)).split())


def frames(made: Stepper) -> list[str]:
    """The text of every state, to the end of the run."""
    made.end.click()
    return [plain(frame) for frame in made.frames]


def assert_goes_back_and_resets(made: Stepper, steps: int = 1) -> None:
    first = made.frame.value
    for _ in range(steps):
        made.step.click()
    assert made.index == steps and made.frame.value != first
    for _ in range(steps):
        made.back.click()
    assert made.frame.value == first
    made.end.click()
    made.reset.click()
    assert made.index == 0 and made.frame.value == first


def assert_explains(made: Stepper, name: str, words: str, good: str) -> None:
    """Bad input is explained, and the words go once field `name` holds something good."""
    assert words in made.fields.error.value
    made.fields[name].value = good
    assert made.fields.error.value == ""
