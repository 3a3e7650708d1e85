"""Answers to chapter 03's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations


def the_list_does_not_grow(prompt_len, new_tokens):
    return prompt_len * new_tokens


def runs_the_last_token_too(prompt_len, new_tokens):
    return new_tokens * prompt_len + new_tokens * (new_tokens - 1) // 2 + prompt_len + new_tokens


def starts_after_the_first_token(prompt_len, new_tokens):
    return sum(range(prompt_len + 1, prompt_len + min(new_tokens, 1000) + 1))


def length_wins_a_tie(next_token, prompt_ids, max_tokens, eos_token_ids):
    new = []
    while True:
        new.append(next_token(prompt_ids + new))
        if len(new) == max_tokens:
            return new, "length"
        if new[-1] in eos_token_ids:
            return new, "stop"


def swallows_the_last_token(next_token, prompt_ids, max_tokens, eos_token_ids):
    new = []
    while len(new) < max_tokens:
        new.append(next_token(prompt_ids + new))
        if new[-1] in eos_token_ids:
            return new[:-1], "stop"
    return new[:-1], "length"


def knows_one_end_token(next_token, prompt_ids, max_tokens, eos_token_ids):
    new = []
    while len(new) < max_tokens:
        new.append(next_token(prompt_ids + new))
        if new[-1] == 2:
            return new, "stop"
    return new, "length"


def still_counts_the_prompt(next_token, prompt_ids, max_tokens):
    ids = list(prompt_ids)
    while len(ids) < max_tokens:
        ids.append(next_token(ids))
    return ids[len(prompt_ids) :]


def still_writes_into_the_prompt(next_token, prompt_ids, max_tokens):
    start = len(prompt_ids)
    for _ in range(max_tokens):
        prompt_ids.append(next_token(prompt_ids))
    return prompt_ids[start:]


def returns_the_prompt_as_well(next_token, prompt_ids, max_tokens):
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
    return ids


WRONG_ANSWERS = {
    "03.1": [
        (the_list_does_not_grow, "grows"),
        (runs_the_last_token_too, "last"),
        (starts_after_the_first_token, "expected"),
    ],
    "03.2": [
        (length_wins_a_tie, "reason"),
        (swallows_the_last_token, "every token"),
        (knows_one_end_token, "two end tokens"),
    ],
    "03.b": [
        (still_counts_the_prompt, "new tokens"),
        (still_writes_into_the_prompt, "caller"),
        (returns_the_prompt_as_well, "without the prompt"),
    ],
}
