"""Chapter 13: the checks of the exercises, the quiz. The dashboard is in ch13_dashboard, times in ch13_measure."""

from __future__ import annotations

import json
import queue
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shared.lab import Check, Question, call, expect, fail
from shared.lab.chapters import ch00
from shared.lab.markup import Html, join, mono, rich, strong, table, tag

# Exercise 13.1: events from bytes

STREAMS = {
    "two events and the end": [{"text": "a"}, {"text": "b"}],
    "characters of several bytes": [{"text": "日本"}, {"text": "👍"}, {"text": "é"}],
    "a line separator inside a string": [{"text": "a\u2028b"}, {"text": "c\x85d"}],
    "an escaped blank line inside a string": [{"text": "a\n\nb"}, {"text": "data: x"}],
    "an answer that says [DONE]": [{"text": "[DONE]"}, {"text": "data: [DONE]"}],
    "no event at all": [],
}


def wire(events: Iterable[dict], done: bool = True) -> bytes:
    """Events as a server writes them."""
    texts = [json.dumps(event, ensure_ascii=False) for event in events] + ["[DONE]"] * done
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def judge_parse_events(fn: Callable) -> None:
    for case, events in STREAMS.items():
        data = wire(events)
        _expect_events(fn, [data], events, True, f"{case}, in one piece")
        _expect_events(fn, [data[i : i + 1] for i in range(len(data))], events, True, f"{case}, byte by byte")
    draw = random.Random(13)
    events = [{"text": draw.choice(["日本", "a", "é ", "\n\n"]), "n": i} for i in range(30)]
    data = wire(events)
    for _ in range(20):
        borders = sorted(draw.sample(range(len(data)), 9))
        pieces = [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)])]
        _expect_events(fn, pieces, events, True, "thirty events cut at random")
    cut = wire(events[:3], done=False)
    _expect_events(fn, [cut], events[:3], False, "a stream that ends without [DONE]")
    _expect_events(fn, [wire([{"text": "[DONE]"}], done=False)], [{"text": "[DONE]"}], False,
                   "an answer that says [DONE], and then the connection ends")
    _expect_events(fn, [cut, b'data: {"text": "ha'], events[:3], False, "a stream that ends inside an event")
    _expect_events(fn, [cut, b'data: {"text": "ha"}'], events[:3], False, "a stream that ends before a blank line")


def _expect_events(fn: Callable, pieces: list[bytes], events: list[dict], done: bool, case: str) -> None:
    right, found = (events, done), _parse_mistakes(pieces, events)
    mistakes = {words: value for words, value in found.items() if value != right}
    expect(fn, (pieces,), right, case=case, mistakes=mistakes)


def _parse_mistakes(pieces: Sequence[bytes], events: list[dict]) -> dict[str, tuple[list[dict], bool]]:
    """What comes of plausible mistakes, by the words that name them."""
    in_one = [event for piece in pieces for event in piece.split(b"\n\n")[:-1]]
    whole = [json.loads(event[6:]) for event in in_one if event.startswith(b"data: {") and event.endswith(b"}")]
    rest = b"".join(pieces).rpartition(b"\n\n")[2]
    found = {"`data: [DONE]` never came as an event of its own": (events, True), "`data: [DONE]` came": (events, False),
             "events that the border of a piece cuts are missing": (whole, b"data: [DONE]" in in_one)}  # fmt: skip
    if rest.endswith(b"}"):
        found["the last event has no blank line after it, so it never ended"] = ([*events, json.loads(rest[6:])], False)
    return found


# Exercise 13.2: the loop of the thread


class ScriptedEngine:
    """Counts steps; a request is a number of steps. `during` are commands that come while it runs."""

    def __init__(self, during: dict[int, list] | None = None):
        self.left: dict[str, int] = {}
        self.log: list[str] = []
        self.steps, self.during, self.inbox = 0, during or {}, None

    def add(self, name: str, steps: int) -> Callable[[], None]:
        def command() -> None:
            self.left[name] = steps
            self.log.append(f"add {name}")
        return command

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> None:
        if not self.left:
            fail("`engine.step()` was called although no request is unfinished: an idle engine should sleep.")
        self.log.append(f"step {self.steps}: {' '.join(self.left)}")
        self.inbox.in_vain = 0
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        for command in self.during.get(self.steps, ()):
            self.inbox.items.append(command)
        self.steps += 1


class ScriptedInbox:
    """A queue whose waiting is watched: whoever waits gets the next command of `later`."""

    def __init__(self, engine: ScriptedEngine, items: Sequence, later: Sequence = ()):
        self.engine, self.items, self.later = engine, deque(items), deque(later)
        self.in_vain, engine.inbox = 0, self

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.items:
            self.in_vain = 0
            return self.items.popleft()
        if block and timeout is None:
            if self.engine.has_unfinished_requests():
                fail("The loop waits for a command while a request is unfinished: that request stands still.")
            if not self.later:
                fail("The loop waits for a command after None has come and nothing is left to run.")
            return self.later.popleft()
        self.in_vain += 1
        if self.in_vain > 3 and not self.engine.has_unfinished_requests():
            fail("The loop asks again and again while nothing runs: an idle engine should sleep in `get`.")
        raise queue.Empty

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self.items


def judge_run(fn: Callable) -> None:
    for case, (during, items, later, want) in LOOPS.items():
        engine = ScriptedEngine()
        made = {name: engine.add(name, steps) for name, steps in (("a", 3), ("b", 2), ("c", 1))}

        def commands(names: str) -> list:
            return [made.get(name) for name in names]  # noqa: B023, used before the next turn

        engine.during = {step: commands(names) for step, names in during.items()}
        inbox = ScriptedInbox(engine, commands(items), commands(later))
        call(fn, engine, inbox, case=f"Case {case!r}:")
        if engine.log != want:
            fail(f"Case {case!r}: your loop did {engine.log}; {_loop_fault(engine.log, want)}. Expected {want}.")


def _loop_fault(log: Sequence[str], want: Sequence[str]) -> str:
    """What the first difference between two logs means."""
    place = next((i for i, pair in enumerate(zip(log, want)) if pair[0] != pair[1]), min(len(log), len(want)))
    if place == len(log):
        return f"it ended before {want[place]!r}, though a request was unfinished or a command had come"
    if place < len(want) and want[place].startswith("add"):
        return f"it ran {log[place]!r} while {want[place]!r} was waiting in the inbox"
    return f"it did {log[place]!r} where nothing of the kind was due"


LOOPS: dict[str, tuple[dict[int, str], str, str, list[str]]] = {  # commands by name; "." is None
    "one request, then None": ({}, "a.", "", ["add a", "step 0: a", "step 1: a", "step 2: a"]),
    "None while two requests run": ({}, "ab.", "", ["add a", "add b", "step 0: a b", "step 1: a b", "step 2: a"]),
    "requests that come while one runs": (
        {0: "bc", 1: "."}, "a", "", ["add a", "step 0: a", "add b", "add c", "step 1: a b c", "step 2: a b"]),
    "a request after a time of rest": ({}, "c", "b.", ["add c", "step 0: c", "add b", "step 1: b", "step 2: b"]),
    "nothing but None": ({}, "", ".", []),
}


# Exercise 13.b: each choice ends once

Step = Sequence[tuple[str, "str | None"]]  # of each choice: the text so far, and why it has ended


def steps_of(texts: Sequence[str], reasons: Sequence[str], keep: Callable[[int], bool]) -> list[Step]:
    """What an engine reports of choices that grow by a character a step. `keep` says which a slow reader sees."""
    last = max(map(len, texts))
    steps = [[(text[:size], reason if size >= len(text) else None) for text, reason in zip(texts, reasons)]
             for size in range(1, last + 1)]
    return [step for i, step in enumerate(steps) if keep(i) or i == last - 1]


CHOICES = {
    "one choice": (["abc"], ["stop"]),
    "three choices of 2, 5 and 9 tokens": (["ab", "abcde", "abcdefghi"], ["stop", "length", "stop"]),
    "the first is the longest": (["abcdef", "a"], ["length", "stop"]),
    "two that end together": (["abc", "xyz"], ["stop", "length"]),
}


def judge_write_chunks(fn: Callable) -> None:
    for case, (texts, reasons) in CHOICES.items():
        for words, keep in (("", lambda step: True), (", read slowly", lambda step: step % 3 == 2)):
            where = f"Case {case + words!r}:"
            chunks = call(lambda steps: list(fn(steps)), steps_of(texts, reasons, keep), case=where)
            _judge_chunks(where, chunks, texts, reasons)
    held = [[("a", None)], [("a", None)], [("abc", "stop")]]
    chunks = call(lambda steps: list(fn(steps)), held, case="Case 'a step without new text':")
    _judge_chunks("Case 'a step without new text':", chunks, ["abc"], ["stop"])
    silent = call(lambda steps: list(fn(steps)), [[("", "stop")]], case="Case 'an answer without text':")
    _judge_chunks("Case 'an answer without text':", silent, [""], ["stop"])


def _judge_chunks(where: str, chunks: Sequence, texts: Sequence[str], reasons: Sequence[str]) -> None:
    if not all(isinstance(c, dict) and set(c) == {"index", "text", "finish_reason"} for c in chunks):
        fail(f"{where} a chunk is a dict with index, text and finish_reason.")
    for index, (text, reason) in enumerate(zip(texts, reasons)):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        found = [chunk["finish_reason"] for chunk in own]
        if any(each not in (None, reason) for each in found):
            fail(f"{where} choice {index} has the finish_reasons {found}; before the end it is None.")
        if found.count(reason) != 1 or found[-1] != reason:
            fail(f"{where} choice {index} ends {found.count(reason)} times, with finish_reasons {found}.")
        if (joined := "".join(chunk["text"] for chunk in own)) != text:
            fail(f"{where} the pieces of choice {index} join to {joined!r}; expected {text!r}.")
        if any(not chunk["text"] and chunk["finish_reason"] is None for chunk in own):
            fail(f"{where} choice {index} has a chunk that says nothing.")


CHECKS = {"13.1": Check(judge_parse_events), "13.2": Check(judge_run), "13.b": Check(judge_write_chunks)}


# The whole engine


def whole_engine() -> Html:
    """Every file up to this chapter, by the chapter that built it: what decides, what computes, and what each is."""
    chapters = sorted({chapter for chapter in ch00.CHAPTERS.values() if chapter <= "13"})
    rows = [[chapter, *(described(files_of(chapter, control)) for control in (True, False))] for chapter in chapters]
    return table(["chapter", "control plane: decides", "data plane: computes"], rows)


def described(files: Sequence[str]) -> Html:
    """Each file on a line of its own, with the first sentence of what it says about itself."""
    return join([tag("div", join([strong(mono(name)), " ", rich(sentence(name))])) for name in files])


def sentence(name: str) -> str:
    """The first sentence of a file's docstring; a colon in a command is no end."""
    line = ch00.first_line(ch00.RUNTIME / f"{name}.py")
    return line.partition(". ")[0].rstrip(".") + "."


def files_of(chapter: str, control: bool) -> list[str]:
    return [name for name, home in ch00.CHAPTERS.items() if home == chapter and (name in ch00.CONTROL_PLANE) == control]


# Quiz


def events_of_a_stream() -> int:
    """Chunks with a finish_reason in a stream of n=3 answers of 2, 5 and 9 tokens."""
    texts, reasons = CHOICES["three choices of 2, 5 and 9 tokens"]
    chunks = right_chunks(steps_of(texts, reasons, lambda step: True))
    return sum(chunk["finish_reason"] is not None for chunk in chunks)


def right_chunks(steps: Iterable[Step]) -> Iterable[dict[str, Any]]:
    shown: dict[int, int] = {}
    ended: set[int] = set()
    for step in steps:
        for index, (text, reason) in enumerate(step):
            new = text[shown.get(index, 0) :]
            if index not in ended and (new or reason):
                shown[index] = len(text)
                ended |= {index} if reason else set()
                yield {"index": index, "text": new, "finish_reason": reason}


def outputs_kept() -> int:
    """Outputs that the mailbox of a reader holds which has read nothing for 500 steps."""
    mailbox: deque = deque(maxlen=1)
    for step in range(500):
        mailbox.append(step)
    return len(mailbox)


QUIZ = [
    Question(
        "A client asks for three answers in one stream, and they have 2, 5 and 9 tokens. How many chunks carry "
        "a finish_reason that is not null?",
        {
            "1": "Then a client could not tell when the first two answers ended.",
            "3": "One for each choice, in its last chunk. All other chunks say null.",
            "9": "The longest answer has nine steps, and the short ones are over in most of them.",
            "16": "One for each token. A reason stands only where an answer ends.",
        },
        compute=events_of_a_stream,
    ),
    Question(
        "A reader stops reading for 500 steps of the engine. How many outputs does the engine hold for it?",
        {
            "0": "Then the reader would miss what was said meanwhile.",
            "1": "The newest replaces the one before it, and it holds the whole answer so far.",
            "64": "A queue of a fixed length would have to stall the engine or drop text once it is full.",
            "500": "That is an unbounded queue: every slow reader would cost memory without end.",
        },
        compute=outputs_kept,
    ),
    Question(
        "Which part of the server must never wait for a step of the model?",
        {
            "The thread of the engine.": "It runs the steps, so it does nothing else meanwhile. Commands wait for it.",
            "The event loop.": "One blocking call in it stops everybody at once: all streams, /health, new requests.",
            "A client that reads a stream.": "It waits for the next token, which is what it came for.",
        },
        answer="The event loop.",
    ),
]
