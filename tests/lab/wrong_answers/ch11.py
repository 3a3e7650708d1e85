"""Answers to chapter 11's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

import torch


def forgets_the_embedding(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return (2 * layers * tokens * hidden + rows * -(-vocab // ranks)) * itemsize


def scores_every_token(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return ((2 * layers + 1) * tokens * hidden + tokens * -(-vocab // ranks)) * itemsize


def rounds_the_vocabulary_down(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return ((2 * layers + 1) * tokens * hidden + rows * (vocab // ranks)) * itemsize


def a_sum_for_each_matrix(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return ((7 * layers + 1) * tokens * hidden + rows * -(-vocab // ranks)) * itemsize


def divides_the_sums(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return ((2 * layers + 1) * tokens * hidden // ranks + rows * -(-vocab // ranks)) * itemsize


def counts_numbers(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return (2 * layers + 1) * tokens * hidden + rows * -(-vocab // ranks)


def one_run_of_the_stack(sizes, rank, ranks):
    part = sum(sizes) // ranks
    return list(range(rank * part, (rank + 1) * part))


def drops_the_remainder(sizes, rank, ranks):
    rows, start = [], 0
    for size in sizes:
        part = size // ranks
        rows += range(start + rank * part, start + (rank + 1) * part)
        start += size
    return rows


def last_rank_takes_the_rest(sizes, rank, ranks):
    rows, start = [], 0
    for size in sizes:
        part = size // ranks
        end = size if rank == ranks - 1 else (rank + 1) * part
        rows += range(start + rank * part, start + end)
        start += size
    return rows


def forgets_where_each_starts(sizes, rank, ranks):
    return [row for size in sizes for row in range(rank * size // ranks, (rank + 1) * size // ranks)]


def every_so_many(sizes, rank, ranks):
    return list(range(rank, sum(sizes), ranks))


def bias_on_every_rank(x_parts, down_parts, bias, head_parts):
    hidden = sum(x @ weight.T + bias for x, weight in zip(x_parts, down_parts))
    return torch.cat([hidden @ weight.T for weight in head_parts], dim=-1)


def rows_mixed(x_parts, down_parts, bias, head_parts):
    hidden = sum(x @ weight.T for x, weight in zip(x_parts, down_parts)) + bias
    return torch.cat([hidden @ weight.T for weight in head_parts]).reshape(len(hidden), -1)


def interleaved(x_parts, down_parts, bias, head_parts):
    hidden = sum(x @ weight.T for x, weight in zip(x_parts, down_parts)) + bias
    widest = max(len(weight) for weight in head_parts)
    parts = [hidden @ torch.nn.functional.pad(weight, (0, 0, 0, widest - len(weight))).T for weight in head_parts]
    return torch.stack(parts, dim=-1).flatten(1)[:, : sum(map(len, head_parts))]


def no_bias(x_parts, down_parts, bias, head_parts):
    hidden = sum(x @ weight.T for x, weight in zip(x_parts, down_parts))
    return torch.cat([hidden @ weight.T for weight in head_parts], dim=-1)


def ranks_in_reverse(x_parts, down_parts, bias, head_parts):
    hidden = sum(x @ weight.T for x, weight in zip(x_parts, down_parts)) + bias
    return torch.cat([hidden @ weight.T for weight in reversed(head_parts)], dim=-1)


def one_sum_a_layer(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return ((layers + 1) * tokens * hidden + rows * -(-vocab // ranks)) * itemsize


def whole_rows_of_scores(layers, hidden, vocab, ranks, tokens, rows, itemsize):
    return ((2 * layers + 1) * tokens * hidden + rows * vocab) * itemsize


WRONG_ANSWERS = {
    "11.1": [
        (forgets_the_embedding, "leaves out the embedding"), (scores_every_token, "only `rows` are scored"),
        (rounds_the_vocabulary_down, "the narrow parts are filled up"), (a_sum_for_each_matrix, "seven matrices"),
        (divides_the_sums, "divides the sums"), (counts_numbers, "not bytes"), (one_sum_a_layer, "one sum a layer"),
        (whole_rows_of_scores, "the whole vocabulary"),
    ],
    "11.2": [
        (one_run_of_the_stack, "one run of the whole stack"), (drops_the_remainder, "rows are left over"),
        (last_rank_takes_the_rest, "rows are left over"), (forgets_where_each_starts, "places within each matrix"),
        (every_so_many, "takes rows in turn"),
    ],
    "11.b": [
        (bias_on_every_rank, "the bias is in the sum 2 times"), (rows_mixed, "in the wrong places"),
        (interleaved, "in the wrong places"), (no_bias, "the bias is in the sum 0 times"),
        (ranks_in_reverse, "in the wrong places"),
    ],
}  # fmt: skip
