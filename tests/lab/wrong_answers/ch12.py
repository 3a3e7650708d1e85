"""Answers to chapter 12's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

import torch


def every_span_counts_the_same(parts):
    return sum(out for _, out in parts) / len(parts)


def without_taking_the_largest_away(parts):
    weights = [torch.tensor(lse).exp() for lse, _ in parts]
    return sum(weight * out for weight, (_, out) in zip(weights, parts)) / sum(weights)


def logarithms_as_weights(parts):
    return sum(lse * out for lse, out in parts) / sum(lse for lse, _ in parts)


def no_keys_is_forgotten(parts):
    lse = torch.tensor([own for own, _ in parts])
    weights = (lse - lse.max()).exp()
    return sum(weight * out for weight, (_, out) in zip(weights, parts)) / weights.sum()


def the_most_frequent(counts, most):
    return sorted(counts, key=counts.get, reverse=True)[:most]


def every_size(counts, most):
    return sorted(counts)


def only_the_largest(counts, most):
    return [max(counts)]


def powers_of_two(counts, most):
    return [2**power for power in range(most)]


def into_the_first_slot(keys, slots, k):
    keys[torch.tensor([0 if slot is None else slot for slot in slots])] = k


def real_rows_in_the_wrong_places(keys, slots, k):
    real = [slot for slot in slots if slot is not None]
    keys[real] = k[: len(real)]


def one_more_slot(keys, slots, k):
    longer = torch.cat([keys, torch.zeros(1, keys.shape[1])])
    longer[torch.tensor([len(keys) if slot is None else slot for slot in slots])] = k
    return longer[:-1]


def zeros_instead_of_padding(keys, slots, k):
    rows = [row if slot is not None else torch.zeros_like(row) for slot, row in zip(slots, k)]
    keys[torch.tensor([-1 if slot is None else slot for slot in slots])] = torch.stack(rows)


WRONG_ANSWERS = {
    "12.1": [
        (every_span_counts_the_same, "same weight"),
        (without_taking_the_largest_away, "overflows"),
        (logarithms_as_weights, "one span holds nearly all"),
        (no_keys_is_forgotten, "no keys at all"),
    ],
    "12.2": [
        (the_most_frequent, "no graph holds"),
        (every_size, "at most"),
        (only_the_largest, "would do"),
        (powers_of_two, "no graph holds"),
    ],
    "12.b": [
        (into_the_first_slot, "slot 0 was overwritten"),
        (real_rows_in_the_wrong_places, "does not hold"),
        (one_more_slot, "does not hold"),
        (zeros_instead_of_padding, "was overwritten"),
    ],
}
