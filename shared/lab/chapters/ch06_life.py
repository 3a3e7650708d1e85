"""Chapter 06's simulator: two requests, one place, and the states that they pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.lab import Choice, Field, Stepper
from shared.lab.form import some_text, whole
from shared.lab.markup import ACCENT, LINE, MONO, QUIET, TINT, Html, join, note, table, tag, visible
from shared.output import Answer
from shared.request import Request, RequestStatus

GREEDY, DRAWN = "the most likely token", "a draw at temperature 0.8"


class Turns(Protocol):
    """What the simulator steps: the notebook's own class of this name."""

    def submit(self, name: str, message: str, **options: Any) -> Answer:
        """Take in a request; it waits."""

    def step(self, answer: Answer) -> int:
        """Run what the request has not computed yet; the token that came of it."""

    def preempt(self, answer: Answer) -> None: ...

    def abort(self, answer: Answer) -> None: ...


@dataclass(frozen=True)
class Moment:
    """What has just happened, and the two answers, which live on."""

    words: str
    answers: Sequence[Answer]
    acted: int | None = None  # the answer that something happened to


def life_states(turns: Turns, inputs: Mapping[str, Any], seed: int,
                show_token: Callable[[int], str] = str) -> Iterator[Moment]:
    """There is one place. A has it first; at a chosen token it must give way, and B's caller may hang up."""
    draw = {"temperature": 0.0 if inputs["choose"] == GREEDY else 0.8, "seed": seed}
    a = turns.submit("A", inputs["message_a"], stop=inputs["stop_a"], max_tokens=40, **draw)
    b = turns.submit("B", inputs["message_b"], max_tokens=inputs["max_b"], **draw)
    answers, queue, gives_way = (a, b), [a, b], inputs["preempt"]
    yield Moment("Both requests have arrived. Nothing has run.", answers)
    while queue:
        answer = queue[0]
        words = run_once(turns, answer, show_token)
        yield Moment(words, answers, answers.index(answer))
        count = len(answer.request.output_token_ids)
        if answer.request.finished:
            queue.pop(0)
        elif answer is a and count == gives_way and len(queue) > 1:
            turns.preempt(a)
            queue.reverse()
            yield Moment("A must give its place to B. Its cache is gone, its tokens stay.", answers, 0)
        elif answer is b and count == inputs["abort"]:
            turns.abort(b)
            queue.pop(0)
            yield Moment("B's caller hung up. What was made so far is reported, and the place is free.", answers, 1)


def run_once(turns: Turns, answer: Answer, show_token: Callable[[int], str]) -> str:
    """One step, told in words."""
    request = answer.request
    missing = request.num_tokens - request.num_computed_tokens
    again = is_in(request, RequestStatus.PREEMPTED)
    shown = show_token(turns.step(answer))
    ran = f"{missing} positions" if missing > 1 else "1 position"
    words = f"{request.request_id} runs {ran}{', all it has, again' if again else ''}, and gets {visible(shown)!r}."
    return words + (f" It is finished: {reason_of(request)}." if request.finished else "")


def reason_of(request: Request) -> str:
    if request.finish_reason != "stop":
        return str(request.finish_reason)
    if request.stop_reason is None:
        return "stop, by the model's end token"
    return f"stop, by {visible(request.stop_reason)!r}" if isinstance(request.stop_reason, str) else \
        f"stop, by token {request.stop_reason}"


def render_life(moment: Moment, index: int) -> Html:
    """The event, the table of requests, and for each the state diagram and the text."""
    rows = [_row(answer.request) for answer in moment.answers]
    headers = ["request", "state", "prompt tokens", "output tokens", "computed / known", "preempted",
               "first token", "between tokens", "why it ended"]
    lit = [] if moment.acted is None else [moment.acted]
    texts = [_answer(answer) for answer in moment.answers]
    legend = ("Times count runs of the model since the request came. In the text, a dashed box is held back: "
              "a stop string could begin there. · is a space, ⏎ a new line.")
    return join([tag("div", tag("strong", moment.words), role="status"), table(headers, rows, lit=lit),
                 *texts, note(legend)])


def _row(request: Request) -> list[object]:
    times = request.times
    between = times.time_per_output_token(len(request.output_token_ids))
    first = times.time_to_first_token()
    return [request.request_id, request.status.value, request.num_prompt_tokens, len(request.output_token_ids),
            f"{request.num_computed_tokens} / {request.num_tokens}", f"{request.num_preemptions} ×",
            "–" if first is None else f"{first:g}", "–" if between is None else f"{between:.2f}",
            reason_of(request) if request.finished else "–"]


def _answer(answer: Answer) -> Html:
    name = tag("span", f"{answer.request.request_id}: ", "font-weight:600")
    shown = tag("span", visible(answer.text.text) or "∅", f"background:{TINT};padding:1px 3px")
    held = visible(answer.text.held)
    box = tag("span", f"held: {held}", f"border:1px dashed {LINE};padding:1px 3px;margin-left:3px") if held else ""
    text = tag("div", join([name, shown, box]), f"font-family:{MONO};white-space:pre-wrap;margin:2px 0 8px")
    return tag("div", join([diagram(answer.request), text]))


def diagram(request: Request) -> Html:
    """waiting → running → finished, and running ⇄ preempted, with the request's own state lit."""
    chips = [_chip(status, is_in(request, status)) for status in LINE_OF_LIFE]
    line = join([tag("span", f"{request.request_id}: ", "font-weight:600"), join(chips, " → ")])
    aside = _chip(RequestStatus.PREEMPTED, is_in(request, RequestStatus.PREEMPTED))
    return tag("div", join([line, " · running ⇄ ", aside]), "margin-top:4px")


def is_in(request: Request, status: RequestStatus) -> bool:
    """By value: a notebook's requests have the notebook's own RequestStatus."""
    return request.status.value == status.value


LINE_OF_LIFE = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED)


def _chip(status: RequestStatus, lit: bool) -> Html:
    border = f"2px solid {ACCENT};font-weight:700" if lit else f"1px solid {LINE};{QUIET}"
    return tag("span", ("▸ " if lit else "") + status.value,
               f"display:inline-block;padding:1px 8px;border-radius:10px;border:{border}")


def life_stepper(start: Callable[[], Turns], show_token: Callable[[int], str] = str) -> Stepper:
    """Two requests and one place; `start` makes the notebook's `Turns` afresh."""
    fields = [
        Field("message_a", "A asks", "List three primary colors.", some_text(200)),
        Field("stop_a", "A's stop strings", "WHITE", stop_strings,
              help=r"Separated by `|`; write a new line as `\n`. Empty: none."),
        Field("message_b", "B asks", "What is the capital of France?", some_text(200)),
        Field("max_b", "B's max_tokens", "12", whole(1, 40)),
        Field("preempt", "A gives way after token", "4", whole(0, 40), help="0: never, so B waits for A's end."),
        Field("abort", "B hangs up after token", "0", whole(0, 40), help="0: never."),
        Choice("choose", "Next token", GREEDY, (GREEDY, DRAWN)),
    ]

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[Moment]:
        return life_states(start(), inputs, seed, show_token)

    return Stepper(make, render_life, fields, title="The life of two requests with one place")


def stop_strings(text: str) -> list[str]:
    """`"END|\\n\\n"` as a list; at most four, none empty."""
    if not text:
        return []
    stops = [part.replace("\\n", "\n") for part in text.split("|")]
    if len(stops) > 4 or "" in stops:
        raise ValueError(f"give up to 4 strings between |, none of them empty, not {text!r}")
    return stops
