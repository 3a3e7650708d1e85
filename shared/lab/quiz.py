"""Three questions a chapter, with an explanation behind every option."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from shared.lab.chapters import chapter_module
from shared.lab.display import show
from shared.lab.markup import Html, esc, join, panel, rich, strong, tag
from shared.lab.progress import record_answer
from shared.lab.widgets import RADIO_STYLE, radio


@dataclass(frozen=True)
class Question:
    """One question.

    `options` maps each option to its explanation: why it is right, or which mistake leads to it. The right
    one is named by `answer`, or found by `compute`, whose value, as text, must be one of the options; with
    both, CI compares them. The order of `options` does not matter: they are shuffled, always the same way.
    """

    prompt: str
    options: Mapping[str, str]
    answer: str | None = None
    compute: Callable[[], object] | None = None

    def right(self) -> str:
        """The right option. Raises ValueError if it is not among the options."""
        answer = str(self.compute()) if self.answer is None and self.compute else self.answer
        if answer not in self.options:
            raise ValueError(f"question {self.prompt!r}: the answer {answer!r} is not one of its options")
        return answer


def arrange(chapter: str, questions: Sequence[Question]) -> list[list[str]]:
    """Each question's options in the order shown: a fixed shuffle, right ones not all in one place."""
    for salt in itertools.count():
        orders = [_shuffled(f"{chapter}/{salt}/{asked.prompt}", asked.options) for asked in questions]
        if len(_places(questions, orders)) > 1 or len(questions) < 2:
            return orders


def _places(questions: Sequence[Question], orders: Sequence[list[str]]) -> set[int]:
    return {order.index(question.right()) for question, order in zip(questions, orders, strict=True)}


def _shuffled(key: str, options: Mapping[str, str]) -> list[str]:
    order = sorted(options)
    random.Random(hashlib.sha256(key.encode()).digest()).shuffle(order)
    return order


def quiz_faults(chapter: str, questions: Sequence[Question]) -> list[str]:
    """What is wrong with a quiz, in words; an empty list if nothing is. Used by the tests."""
    faults = [] if len(questions) == 3 else [f"chapter {chapter} has {len(questions)} questions, not three"]
    for number, question in enumerate(questions, 1):
        faults += [f"question {number}: {fault}" for fault in _question_faults(question)]
    if faults:
        return faults
    for name, choose in (("longest", max), ("shortest", min)):
        if all(_stands_out(question, choose) for question in questions):
            faults.append(f"the right option is always the {name}")
    return faults


def _question_faults(question: Question) -> list[str]:
    unexplained = [option for option, why in question.options.items() if not why.strip()]
    faults = [f"option {option!r} has no explanation" for option in unexplained]
    if len(question.options) < 3:
        faults.append("it has fewer than three options")
    if question.answer is None and question.compute is None:
        return [*faults, "it has neither an answer nor a way to compute it"]
    if question.compute is not None and str(question.compute()) not in question.options:
        faults.append(f"the computed answer {question.compute()!r} is not one of its options")
    elif question.answer is not None and question.answer not in question.options:
        faults.append(f"the answer {question.answer!r} is not one of its options")
    elif question.answer is not None and question.compute and str(question.compute()) != question.answer:
        faults.append(f"the answer says {question.answer!r}, the computation {question.compute()!r}")
    return faults


def _stands_out(question: Question, choose) -> bool:
    """True if the right option alone is the longest (or the shortest) of its question."""
    extreme = choose(len(option) for option in question.options)
    return [option for option in question.options if len(option) == extreme] == [question.right()]


class Quiz:
    """Radio buttons and feedback for each question. `choices[0].value = option` answers, as a click does."""

    def __init__(self, chapter: str, questions: Sequence[Question]):
        self.chapter, self.questions = chapter, list(questions)
        self.orders = arrange(chapter, self.questions)
        self.choices = [radio(order, f"Question {number}") for number, order in enumerate(self.orders, 1)]
        self.feedback = [widgets.HTML(value="") for _ in self.questions]
        for number, choice in enumerate(self.choices, 1):
            choice.observe(lambda change, number=number: self._answered(number, change["new"]), names="value")
        self.widget = widgets.VBox([widgets.HTML(value=RADIO_STYLE), *self._rows()])

    def static(self) -> Html:
        """The questions and their options; nothing shows which one is right."""
        asked = enumerate(zip(self.questions, self.orders, strict=True), 1)
        blocks = [join([_prompt(number, question), _listed(order)]) for number, (question, order) in asked]
        return panel(*blocks, tag("div", "Run this cell to answer."))

    def _rows(self) -> list[widgets.Widget]:
        rows = []
        for number, question in enumerate(self.questions, 1):
            heading = widgets.HTML(value=panel(_prompt(number, question)))
            rows += [heading, self.choices[number - 1], self.feedback[number - 1]]
        return rows

    def _answered(self, number: int, option: str | None) -> None:
        if option is None:
            return
        question = self.questions[number - 1]
        right = option == question.right()
        record_answer(self.chapter, number, right)
        verdict = strong("✓ Right. " if right else "✗ Not this one. ")
        words = join([verdict, rich(question.options[option])])
        box = tag("div", words, "max-width:48em;padding:2px 0 8px", role="status")
        self.feedback[number - 1].value = panel(box)


def _prompt(number: int, question: Question) -> Html:
    return tag("div", join([strong(f"{number}. "), rich(question.prompt)]), "max-width:48em;padding-top:6px")


def _listed(order: Sequence[str]) -> Html:
    return tag("ul", join(tag("li", esc(option)) for option in order), "margin:2px 0")


def quiz(chapter: str) -> None:
    """Show the three questions of a chapter: `quiz("04")`."""
    asked = Quiz(chapter, chapter_module(chapter).QUIZ)
    show(asked, html=asked.static(), text=f"Quiz of chapter {chapter}: {len(asked.questions)} questions.")
