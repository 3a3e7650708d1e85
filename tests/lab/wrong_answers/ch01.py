"""Answers to chapter 01's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations


def parents_only(token, merges):
    return [pair for pair in merges if pair[0] + pair[1] == token][:1]


def each_time_it_is_used(token, merges):
    made_by = {a + b: (a, b) for a, b in reversed(merges)}
    if token not in made_by:
        return []
    a, b = made_by[token]
    return [*each_time_it_is_used(a, merges), *each_time_it_is_used(b, merges), (a, b)]


def latest_merge_wins(token, merges):
    made_by = {a + b: (a, b) for a, b in merges}
    needed, todo = set(), [token]
    while todo:
        pair = made_by.get(todo.pop())
        if pair and pair not in needed:
            needed.add(pair)
            todo += pair
    return [pair for pair in merges if pair in needed]


def not_in_order(token, merges):
    made_by = {a + b: (a, b) for a, b in reversed(merges)}
    found, todo = [], [token]
    while todo:
        pair = made_by.get(todo.pop(0))
        if pair and pair not in found:
            found.append(pair)
            todo += pair
    return found


def every_merge_inside_the_token(token, merges):
    return [pair for pair in merges if pair[0] + pair[1] in token]


def drops_the_system_message(messages, limit, count_tokens):
    while count_tokens(messages) > limit:
        messages = messages[1:]
        if not messages:
            raise ValueError
    return messages


def adds_up_messages(messages, limit, count_tokens):
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]
    for start in range(len(turns)):
        kept = system + turns[start:]
        if sum(len(message["content"].split()) for message in kept) <= limit:
            return kept
    raise ValueError


def one_turn_too_few(messages, limit, count_tokens):
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]
    for start in range(len(turns)):
        if count_tokens(system + turns[start:]) < limit:
            return system + turns[start:]
    raise ValueError


def gives_up_quietly(messages, limit, count_tokens):
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]
    while turns and count_tokens(system + turns) > limit:
        turns = turns[1:]
    return system + turns


def answers_how_many(messages, limit, count_tokens):
    return len(messages)


def one_token_at_a_time(tokenizer, ids):
    for token_id in ids:
        yield tokenizer.decode([token_id])


def never_flushed(tokenizer, ids):
    held = []
    for token_id in ids:
        held.append(token_id)
        text = tokenizer.decode(held)
        if not text.endswith("\ufffd"):
            yield text
            held = []


def flushed_without_the_mark(tokenizer, ids):
    held = []
    for token_id in ids:
        held.append(token_id)
        text = tokenizer.decode(held)
        if not text.endswith("\ufffd"):
            yield text
            held = []
    yield tokenizer.decode(held).replace("\ufffd", "")


def all_at_the_end(tokenizer, ids):
    yield tokenizer.decode(ids)


def gives_ids(tokenizer, ids):
    yield from ids


WRONG_ANSWERS = {
    "01.1": [
        (parents_only, "abab"), (each_time_it_is_used, "abab"), (latest_merge_wins, "abc"), (not_in_order, "abab"),
        (every_merge_inside_the_token, "expected"),
    ],
    "01.2": [
        (drops_the_system_message, "a system message stays"), (adds_up_messages, "over the limit"),
        (one_turn_too_few, "exactly at the limit"), (gives_up_quietly, "ValueError"),
        (answers_how_many, "not a list"),
    ],
    "01.b": [
        (one_token_at_a_time, "join to"), (never_flushed, "cut after"), (flushed_without_the_mark, "cut after"),
        (all_at_the_end, "one piece"), (gives_ids, "no text"),
    ],
}  # fmt: skip
