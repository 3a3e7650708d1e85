"""Answers to chapter 03's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations


def the_list_does_not_grow(prompt_len, new_tokens):
    return prompt_len * new_tokens


def runs_the_last_token_too(prompt_len, new_tokens):
    return new_tokens * prompt_len + new_tokens * (new_tokens - 1) // 2 + prompt_len + new_tokens


def starts_after_the_first_token(prompt_len, new_tokens):
    return sum(range(prompt_len + 1, prompt_len + min(new_tokens, 1000) + 1))


def one_run_for_each_token(run, prompt_ids, draft_ids):
    agreed = 0
    while agreed < len(draft_ids) and run([*prompt_ids, *draft_ids[:agreed]])[-1] == draft_ids[agreed]:
        agreed += 1
    return agreed


def compares_each_token_with_its_own_row(run, prompt_ids, draft_ids):
    rows = run([*prompt_ids, *draft_ids])[len(prompt_ids) :]
    agreed = 0
    while agreed < len(draft_ids) and rows[agreed] == draft_ids[agreed]:
        agreed += 1
    return agreed


def counts_every_match(run, prompt_ids, draft_ids):
    rows = run([*prompt_ids, *draft_ids])[len(prompt_ids) - 1 :]
    return sum(row == token for row, token in zip(rows, draft_ids))


def asks_once_for_all(run, prompt_ids, draft_ids):
    return len(draft_ids) if run(prompt_ids)[-1] == draft_ids[0] else 0


def length_wins_a_tie(next_token, prompt_ids, max_tokens, eos_token_ids):
    new = []
    while True:
        new.append(next_token(prompt_ids + new))
        if len(new) == max_tokens:
            return [token for token in new if token not in eos_token_ids], "length"
        if new[-1] in eos_token_ids:
            return new[:-1], "stop"


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
        token = next_token(prompt_ids + new)
        if token == 2:
            return new, "stop"
        new.append(token)
    return new, "length"


def keeps_the_end_token(next_token, prompt_ids, max_tokens, eos_token_ids):
    new = []
    while len(new) < max_tokens:
        new.append(next_token(prompt_ids + new))
        if new[-1] in eos_token_ids:
            return new, "stop"
    return new, "length"


def writes_into_the_prompt(next_token, prompt_ids, max_tokens, eos_token_ids):
    start = len(prompt_ids)
    while len(prompt_ids) - start < max_tokens:
        token = next_token(prompt_ids)
        if token in eos_token_ids:
            return prompt_ids[start:], "stop"
        prompt_ids.append(token)
    return prompt_ids[start:], "length"


WRONG_ANSWERS = {
    "03.1": [
        (the_list_does_not_grow, "grows"),
        (runs_the_last_token_too, "last"),
        (starts_after_the_first_token, "after its new token"),
    ],
    "03.2": [
        (one_run_for_each_token, "runs of the model"),
        (compares_each_token_with_its_own_row, "place after it"),
        (counts_every_match, "nothing counts"),
        (asks_once_for_all, "expected"),
    ],
    "03.b": [
        (length_wins_a_tie, "reason"),
        (swallows_the_last_token, "expected [8, 9, 7]"),
        (knows_one_end_token, "two end tokens"),
        (keeps_the_end_token, "expected [8, 9]"),
        (writes_into_the_prompt, "caller"),
    ],
}
