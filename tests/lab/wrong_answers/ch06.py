"""Answers to chapter 06's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

from itertools import pairwise


def divides_by_chunks(sent, chunks, num_tokens):
    times = [seconds for seconds, text in chunks if text]
    if not times:
        return None, None, None
    pause = max((late - early for early, late in pairwise(times)), default=None)
    per_token = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return times[0] - sent, per_token, pause


def counts_empty_chunks(sent, chunks, num_tokens):
    times = [seconds for seconds, text in chunks]
    if not times:
        return None, None, None
    pause = max((late - early for early, late in pairwise(times)), default=None)
    per_token = (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None
    return times[0] - sent, per_token, pause


def divides_by_zero(sent, chunks, num_tokens):
    times = [seconds for seconds, text in chunks if text]
    pause = max((late - early for early, late in pairwise(times)), default=None)
    return times[0] - sent, (times[-1] - times[0]) / (num_tokens - 1), pause


def forgets_when_it_was_sent(sent, chunks, num_tokens):
    times = [seconds for seconds, text in chunks if text]
    if not times:
        return None, None, None
    pause = max((late - early for early, late in pairwise(times)), default=None)
    return times[0], (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None, pause


def compares_whole_tokens(token_texts, stops):
    for count, text in enumerate(token_texts):
        if text in stops:
            return "".join(token_texts[:count]), count
    return "".join(token_texts), len(token_texts)


def first_of_the_list(token_texts, stops):
    text = "".join(token_texts)
    for stop in stops:
        if stop in text:
            text = text[: text.find(stop)]
            break
    count = length = 0
    while length < len(text):
        length += len(token_texts[count])
        count += 1
    return text, count


def starts_first(token_texts, stops):
    text = "".join(token_texts)
    starts = [text.find(stop) for stop in stops if stop in text]
    if starts:
        text = text[: min(starts)]
    count = length = 0
    while length < len(text):
        length += len(token_texts[count])
        count += 1
    return text, count


def drops_the_token_that_is_cut(token_texts, stops):
    text = "".join(token_texts)
    hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if hits:
        text = text[: min(hits)[1]]
    count = length = 0
    while count < len(token_texts) and length + len(token_texts[count]) <= len(text):
        length += len(token_texts[count])
        count += 1
    return text, count


def never_flushed(pieces, stop):
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            yield held[: held.find(stop)]
            return
        ready = max(0, len(held) - len(stop))
        if ready:
            yield held[:ready]
        held = held[ready:]


def flushed_but_late(pieces, stop):
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            held = held[: held.find(stop)]
            break
        ready = max(0, len(held) - len(stop))
        if ready:
            yield held[:ready]
        held = held[ready:]
    if held:
        yield held


def sends_empty_pieces(pieces, stop):
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            held = held[: held.find(stop)]
            break
        sizes = range(min(len(held), len(stop) - 1), 0, -1)
        keep = next((size for size in sizes if stop.startswith(held[-size:])), 0)
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held


def all_at_the_end(pieces, stop):
    text = "".join(pieces).partition(stop)[0]
    return [text] if text else []


def shows_at_once(pieces, stop):
    for piece in pieces:
        if stop in piece:
            return
        if piece:
            yield piece


WRONG_ANSWERS = {
    "06.1": [
        (divides_by_chunks, "several tokens in a chunk"), (counts_empty_chunks, "an empty first chunk"),
        (divides_by_zero, "one token"), (forgets_when_it_was_sent, "one token a chunk"),
    ],
    "06.2": [
        (compares_whole_tokens, "spread over two tokens"), (first_of_the_list, "the second is complete first"),
        (starts_first, "a short one is complete first"), (drops_the_token_that_is_cut, "begins inside a token"),
    ],
    "06.b": [
        (never_flushed, "join to"), (flushed_but_late, "late"), (sends_empty_pieces, "empty piece"),
        (all_at_the_end, "late"), (shows_at_once, "over two tokens"),
    ],
}  # fmt: skip
