"""Exercise checks: judge the reader's function on cases that the notebook does not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.lab.chapters import chapter_module
from shared.lab.judging import Wrong, describe_error
from shared.lab.progress import record_pass


@dataclass(frozen=True)
class Score:
    """What a right answer cost: `Score("blocks read", 12, best=8)`; less is better."""

    what: str
    value: int | float
    best: int | float

    def __str__(self) -> str:
        return f"{self.what}: {self.value} (best {self.best})"


@dataclass(frozen=True)
class Check:
    """`judge` gets the reader's function and calls it through `expect` and `call`.

    It returns None for a pass or a `Score` for a pass with a cost; it returns words or raises `Wrong`
    for the first wrong case. A `NotImplementedError` from the reader's function means: not attempted.
    """

    judge: Callable[[Any], Score | str | None]


@dataclass(frozen=True)
class Verdict:
    """What `judge` found. `attempted` is False for a stub; `words` say the first wrong case or the score."""

    exercise: str
    attempted: bool
    passed: bool
    words: str = ""
    score: Score | None = None

    def __str__(self) -> str:
        if not self.attempted:
            return f"Exercise {self.exercise}: not attempted yet."
        state = "passed." if self.passed else "not yet."
        return f"Exercise {self.exercise}: {state} {self.words}".rstrip()


def judge(exercise: str, fn: Any, check: Check | None = None) -> Verdict:
    """Judge `fn` as exercise "04.1" without printing or recording; never raises for what `fn` does."""
    check = check or find_check(exercise)
    try:
        outcome = check.judge(fn)
    except NotImplementedError:
        return Verdict(exercise, attempted=False, passed=False)
    except Wrong as wrong:
        return Verdict(exercise, attempted=True, passed=False, words=str(wrong))
    except Exception as raised:
        words = f"Your function's result could not be used: {describe_error(raised, check.judge).split(' (line')[0]}."
        return Verdict(exercise, attempted=True, passed=False, words=words)
    if isinstance(outcome, Score):
        return Verdict(exercise, True, True, f"{str(outcome)[:1].upper()}{str(outcome)[1:]}.", outcome)
    return Verdict(exercise, True, outcome is None, outcome or "")


def find_check(exercise: str) -> Check:
    """The check of exercise "04.1". Raises ValueError, with the ids there are, if there is none."""
    checks = chapter_module(exercise.partition(".")[0]).CHECKS
    if exercise not in checks:
        raise ValueError(f"there is no exercise {exercise!r}; this chapter has {', '.join(sorted(checks))}")
    return checks[exercise]


def check(exercise: str, fn: Any) -> None:
    """Judge the reader's function and print one line: `check("04.1", my_function)`. A pass is recorded."""
    verdict = judge(exercise, fn)
    print(verdict)
    if verdict.passed and not record_pass(exercise, verdict.score.value if verdict.score else None):
        print("The pass could not be saved on this machine.")
