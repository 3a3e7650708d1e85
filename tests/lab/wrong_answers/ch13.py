"""Answers to chapter 13's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

import json
import queue


def each_piece_is_text(pieces):
    text = "".join(piece.decode() for piece in pieces)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(event) for event in events if event != "[DONE]"], "[DONE]" in events


def each_piece_is_an_event(pieces):
    events = [line[6:] for piece in pieces for line in piece.split(b"\n\n") if line]
    return [json.loads(event) for event in events if event != b"[DONE]"], b"[DONE]" in events


def any_line_border(pieces):
    lines = b"".join(pieces).decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(event) for event in events if event != "[DONE]"], "[DONE]" in events


def always_complete(pieces):
    events = [line[6:] for line in b"".join(pieces).split(b"\n\n") if line]
    return [json.loads(event) for event in events if event != b"[DONE]"], True


def reads_the_rest_as_an_event(pieces):
    events = [line[6:] for line in b"".join(pieces).split(b"\n\n") if line]
    return [json.loads(event) for event in events if event != b"[DONE]"], b"[DONE]" in events


def whole_events_of_each_piece(pieces):
    texts = [event[6:].decode() for piece in pieces for event in piece.split(b"\n\n")[:-1]]
    texts = [text for text in texts if text == "[DONE]" or (text.startswith("{") and text.endswith("}"))]
    return [json.loads(text) for text in texts if text != "[DONE]"], "[DONE]" in texts


def done_anywhere(pieces):
    *events, _ = b"".join(pieces).split(b"\n\n")
    texts = [event.removeprefix(b"data: ").decode() for event in events]
    return [json.loads(text) for text in texts if text != "[DONE]"], b"[DONE]" in b"".join(pieces)


def whatever_can_be_parsed(pieces):
    events, complete = [], False
    for event in b"".join(pieces).split(b"\n\n"):
        text = event.removeprefix(b"data: ").decode()
        complete = complete or text == "[DONE]"
        try:
            events += [] if text == "[DONE]" else [json.loads(text)]
        except ValueError:
            pass
    return events, complete


def steps_without_end(engine, inbox):
    stopping = False
    while not stopping or engine.has_unfinished_requests():
        while not inbox.empty():
            command = inbox.get()
            stopping = stopping or command is None
            if command is not None:
                command()
        engine.step()


def asks_again_and_again(engine, inbox):
    stopping = False
    while not stopping or engine.has_unfinished_requests():
        while True:
            try:
                command = inbox.get_nowait()
            except queue.Empty:
                break
            if command is None:
                stopping = True
            else:
                command()
        if engine.has_unfinished_requests():
            engine.step()


def always_waits(engine, inbox):
    while (command := inbox.get()) is not None:
        command()
        while engine.has_unfinished_requests():
            engine.step()


def one_command_a_step(engine, inbox):
    stopping = False
    while not stopping or engine.has_unfinished_requests():
        try:
            command = inbox.get(block=not engine.has_unfinished_requests())
            if command is None:
                stopping = True
            else:
                command()
        except queue.Empty:
            pass
        if engine.has_unfinished_requests():
            engine.step()


def leaves_at_once(engine, inbox):
    while True:
        try:
            command = inbox.get(block=not engine.has_unfinished_requests())
        except queue.Empty:
            engine.step()
            continue
        if command is None:
            return
        command()


def ends_again_and_again(steps):
    shown = {}
    for step in steps:
        for index, (text, reason) in enumerate(step):
            yield {"index": index, "text": text[shown.get(index, 0) :], "finish_reason": reason}
            shown[index] = len(text)


def empty_string_for_none(steps):
    shown, ended = {}, set()
    for step in steps:
        for index, (text, reason) in enumerate(step):
            new = text[shown.get(index, 0) :]
            if index not in ended and (new or reason):
                shown[index] = len(text)
                ended |= {index} if reason else set()
                yield {"index": index, "text": new, "finish_reason": reason or ""}


def only_the_last_choice_ends(steps):
    shown = {}
    for step in steps:
        over = all(reason for _, reason in step)
        for index, (text, reason) in enumerate(step):
            new = text[shown.get(index, 0) :]
            last = over and index == len(step) - 1
            if new or last:
                shown[index] = len(text)
                yield {"index": index, "text": new, "finish_reason": reason if last else None}


def one_character_a_chunk(steps):
    ended = set()
    for step in steps:
        for index, (text, reason) in enumerate(step):
            if index not in ended:
                ended |= {index} if reason else set()
                yield {"index": index, "text": text[-1:], "finish_reason": reason}


WRONG_ANSWERS = {
    "13.1": [
        (each_piece_is_text, "byte by byte"), (each_piece_is_an_event, "byte by byte"),
        (any_line_border, "a line separator inside"), (always_complete, "without [DONE]"),
        (reads_the_rest_as_an_event, "inside an event"),
        (whole_events_of_each_piece, "events that the border of a piece cuts are missing"),
        (done_anywhere, "never came as an event of its own"),
        (whatever_can_be_parsed, "no blank line after it, so it never ended"),
    ],
    "13.2": [
        (steps_without_end, "no request is unfinished"), (asks_again_and_again, "should sleep"),
        (always_waits, "it ran 'step 0: a' while 'add b' was waiting in the inbox"),
        (one_command_a_step, "while 'add b' was waiting"), (leaves_at_once, "it ended before 'step 0: a'"),
    ],
    "13.b": [
        (ends_again_and_again, "times"), (empty_string_for_none, "it is None"),
        (only_the_last_choice_ends, "ends 0 times"), (one_character_a_chunk, "join to"),
    ],
}  # fmt: skip
