"""Answers to chapter 04's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations


def keys_only(memory_bytes, config, bytes_each, tokens_each):
    per = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * bytes_each
    return memory_bytes // (per * tokens_each)


def query_heads(memory_bytes, config, bytes_each, tokens_each):
    per = 2 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * bytes_each
    return memory_bytes // (per * tokens_each)


def guessed_head_dim(memory_bytes, config, bytes_each, tokens_each):
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    per = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * bytes_each
    return memory_bytes // (per * tokens_each)


def runs_everything_again(run, prompt_ids, max_tokens):
    new = []
    for _ in range(max_tokens):
        new.append(run(prompt_ids + new, 0))
    return new


def one_slot_too_far(run, prompt_ids, max_tokens):
    new = [run(prompt_ids, 0)]
    while len(new) < max_tokens:
        new.append(run(new[-1:], len(prompt_ids) + len(new)))
    return new


def overwrites_the_prompt(run, prompt_ids, max_tokens):
    new = [run(prompt_ids, 0)]
    while len(new) < max_tokens:
        new.append(run(new[-1:], len(new) - 1))
    return new


def positions_restart(num_computed, num_new):
    span = range(num_computed, num_computed + num_new)
    return list(span), list(range(num_new)), [i + 1 for i in span]


def mask_from_the_first_key(num_computed, num_new):
    span = range(num_computed, num_computed + num_new)
    return list(span), list(span), [row + 1 for row in range(num_new)]


def looks_forward(num_computed, num_new):
    span = range(num_computed, num_computed + num_new)
    return list(span), list(span), [num_computed + num_new] * num_new


def one_key_short(num_computed, num_new):
    span = range(num_computed, num_computed + num_new)
    return list(span), list(span), list(span)


WRONG_ANSWERS = {
    "04.1": [(keys_only, "values"), (query_heads, "query head"), (guessed_head_dim, "head_dim")],
    "04.2": [(runs_everything_again, "positions"), (one_slot_too_far, "slot"), (overwrites_the_prompt, "expected")],
    "04.b": [
        (positions_restart, "positions"),
        (mask_from_the_first_key, "keys"),
        (looks_forward, "forward"),
        (one_key_short, "keys"),
    ],
}
