"""Chapter 11: the checks of the exercises, the quiz. The simulator is in ch11_shards, times in ch11_measure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from shared.kv_cache import kv_bytes_per_token
from shared.lab import Check, Question, call, expect, fail
from shared.lab.chapters.ch11_ranks import shape
from shared.parallel import Shard, split

# Exercises


def handed_over(layers: int, hidden: int, vocab: int, ranks: int, tokens: int, rows: int, itemsize: int) -> int:
    """Bytes that one rank hands to collectives in a step."""
    sums = (2 * layers + 1) * tokens * hidden  # two a layer, and the embedding's
    gathered = rows * -(-vocab // ranks)  # every rank hands over as much as the one with the widest part
    return (sums + gathered) * itemsize


STEPS = {
    "one request decodes": (30, 576, 49152, 2, 1, 1, 4),
    "a prompt of 200 tokens, of which one is scored": (30, 576, 49152, 2, 200, 1, 4),
    "a chunk of a prompt that scores nothing": (30, 576, 49152, 2, 64, 0, 4),
    "a vocabulary that three ranks cannot share evenly": (2, 8, 131, 3, 5, 2, 2),
    "eight ranks, bfloat16": (80, 8192, 128256, 8, 32, 32, 2),
}


def judge_bytes(fn: Callable) -> None:
    for case, args in STEPS.items():
        expect(fn, args, handed_over(*args), case=case, mistakes=_byte_mistakes(*args))
    draw = random.Random(11)
    for _ in range(20):
        tokens = draw.randint(1, 99)
        args = (draw.randint(1, 9), draw.choice([8, 48]), draw.randint(100, 999), draw.randint(2, 8), tokens,
                draw.randint(0, tokens), draw.choice([2, 4]))
        expect(fn, args, handed_over(*args), mistakes=_byte_mistakes(*args))


def _byte_mistakes(layers: int, hidden: int, vocab: int, ranks: int, tokens: int, rows: int, itemsize: int) -> dict:
    """What comes of plausible mistakes, by the words that name them."""
    sums, own = (2 * layers + 1) * tokens * hidden, -(-vocab // ranks)
    numbers = {
        "that leaves out the embedding's sum": sums - tokens * hidden + rows * own,
        "that leaves out the scores": sums,
        "that hands over the scores of every token; only `rows` are scored": sums + tokens * own,
        "that hands over scores of the whole vocabulary; a rank has a part of it": sums + rows * vocab,
        "that rounds the part of the vocabulary down; the narrow parts are filled up": sums + rows * (vocab // ranks),
        "that sums after each of the seven matrices; only two of them end in summands":
            (7 * layers + 1) * tokens * hidden + rows * own,
        "that has one sum a layer; attention and MLP end with one each": (layers + 1) * tokens * hidden + rows * own,
        "that divides the sums by the ranks; each rank hands over a summand of every number":
            sums // ranks + rows * own,
    }
    found = {words: count * itemsize for words, count in numbers.items()}
    found["that counts numbers, not bytes"] = sums + rows * own
    right = (sums + rows * own) * itemsize
    return {words: value for words, value in found.items() if value != right}


def merged_rows(sizes: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Rows of a merged matrix that a rank needs: its part of each of the matrices that were stacked."""
    rows, start = [], 0
    for size in sizes:
        rows += [start + row for row in split("rows", size, rank, ranks)]
        start += size
    return rows


STACKS = {
    "gate over up, two ranks": ([6, 6], 2),
    "one matrix alone": ([8], 4),
    "queries, keys and values": ([12, 4, 4], 4),
    "seven rows on two ranks": ([7, 7], 2),
    "three matrices, nothing divides": ([9, 5, 4], 4),
}


def judge_merged(fn: Callable) -> None:
    for case, (sizes, ranks) in STACKS.items():
        seen: list[int] = []
        for rank in range(ranks):
            got = expect(fn, (list(sizes), rank, ranks), merged_rows(sizes, rank, ranks),
                         case=f"{case}, rank {rank} of {ranks}", mistakes=_row_mistakes(sizes, rank, ranks))
            seen += got
        if sorted(seen) != list(range(sum(sizes))):
            fail(f"Case {case!r}: the ranks together do not read every row once.")


def _row_mistakes(sizes: Sequence[int], rank: int, ranks: int) -> dict[str, list[int]]:
    """What comes of plausible mistakes, by the words that name them."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [(start, n, n // ranks) for start, n in zip(starts, sizes)]
    last, whole = rank == ranks - 1, sum(sizes)
    found = {
        "that is one run of the whole stack; a rank needs a part of each matrix":
            list(range(rank * (whole // ranks), (rank + 1) * (whole // ranks))),
        "those are places within each matrix; in the stack, later ones start further down":
            [row for n in sizes for row in split("rows", n, rank, ranks)],
        "rows are left over: the first ranks hold one more":
            [start + row for start, n, part in parts for row in range(rank * part, (rank + 1) * part)],
        "the last rank takes all that is left over; the first ranks should hold one more each":
            [start + row for start, n, part in parts for row in range(rank * part, n if last else (rank + 1) * part)],
        "every rank takes rows in turn; each should have neighbours": list(range(rank, whole, ranks)),
    }
    right = merged_rows(sizes, rank, ranks)
    return {words: rows for words, rows in found.items() if rows != right}


Parts = Sequence[torch.Tensor]


def last_scores(x_parts: Parts, down_parts: Parts, bias: torch.Tensor, head_parts: Parts) -> torch.Tensor:
    """The end of a step on all ranks: a sum with its bias, and the head's parts side by side."""
    hidden = sum(x @ weight.T for x, weight in zip(x_parts, down_parts)) + bias
    return torch.cat([hidden @ weight.T for weight in head_parts], dim=-1)


ENDS = {  # rows, vocabulary parts, size of the bias
    "one row, no bias": (1, [3, 3], 0),
    "one row, a bias, two ranks": (1, [3, 3], 1),
    "two rows, no bias": (2, [3, 3], 0),
    "five rows, a bias, three ranks": (5, [4, 4, 4], 1),
    "a vocabulary of seven on two ranks": (3, [4, 3], 1),
}


def end_of_step(rows: int, parts: Sequence[int], size: int) -> tuple[list, list, torch.Tensor, list]:
    """Whole numbers, so that every order of adding gives the same."""
    draw = torch.Generator().manual_seed(rows + len(parts))

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=draw).float()

    ranks = range(len(parts))
    bias = size * torch.arange(1, 5).float()
    return ([numbers(rows, 2) for _ in ranks], [numbers(4, 2) for _ in ranks], bias, [numbers(n, 4) for n in parts])


def judge_end(fn: Callable) -> None:
    for case, described in ENDS.items():
        args = end_of_step(*described)
        want = last_scores(*args)
        got = call(fn, *args, case=f"Case {case!r}:")
        if not isinstance(got, torch.Tensor) or got.shape != want.shape:
            found = list(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
            fail(f"Case {case!r}: expected scores of shape {list(want.shape)}, got {found}.")
        if not torch.allclose(got, want):
            fail(f"Case {case!r}: {_fault(got, want, args)}")


def _fault(got: torch.Tensor, want: torch.Tensor, args: tuple) -> str:
    """Which of the faults explains wrong scores."""
    x_parts, down_parts, bias, head_parts = args
    for times in {0, len(x_parts)}:
        if torch.allclose(got, last_scores(x_parts, down_parts, times * bias, head_parts)):
            return f"the bias is in the sum {times} times; it belongs there once."
    if torch.equal(got.flatten().sort().values, want.flatten().sort().values):
        row = next(i for i in range(len(want)) if not torch.allclose(got[i], want[i]))
        return f"the scores are right, but in the wrong places: row {row} is {got[row].tolist()}, " \
               f"expected {want[row].tolist()}."
    return f"row 0 is {got[0].tolist()}, expected {want[0].tolist()}."


CHECKS = {"11.1": Check(judge_bytes), "11.2": Check(judge_merged), "11.b": Check(judge_end)}


# Quiz


def sums_of_a_step() -> int:
    """32 layers: o_proj and down_proj of each, and the embedding."""
    return handed_over(32, 1, 1, 2, 1, 0, 1)


def kept_by_a_rank() -> int:
    """Bytes a token and layer on one of eight ranks, with four key-value heads of 64 numbers in float16."""
    config = shape(1, 512, 1024, 16, 4, 64, 1000)
    return kv_bytes_per_token(Shard.of(config, 7, 8).config, torch.float16)


QUIZ = [
    Question(
        "A model has 32 layers and runs on two ranks, cut as in this chapter. How many all-reduces does one step "
        "need?",
        {
            "32": "One a layer would do if the MLP stood alone. Attention ends with a sum of its own.",
            "64": "Two a layer, for o_proj and down_proj. One more comes before the first layer.",
            "65": "Two a layer, and one for the embedding, since each rank has the vectors of some tokens only.",
            "224": "That is one for each of the seven matrices of a layer. Five of them hand their parts on as they "
                   "are.",
        },
        compute=sums_of_a_step,
    ),
    Question(
        "A model has 4 key-value heads; in one process a token keeps 1,024 bytes in each layer. On eight ranks, how "
        "many bytes does a token keep in a layer on one rank?",
        {
            "128": "An eighth would be half a head. A rank keeps whole heads, so here two ranks keep the same one.",
            "256": "One head of four. Each head is kept twice, on two ranks, since a query head needs all of it.",
            "512": "Two heads of four would be needed if a rank's query heads read two of them; they read one.",
            "1024": "A rank keeps the keys and values that its own query heads read, and no others.",
        },
        compute=kept_by_a_rank,
    ),
    Question(
        "Suppose down_proj were cut by its outputs, like gate and up. How many collectives would the MLP need so that "
        "every rank ends with the whole result?",
        {
            "0": "Each output needs all columns of the input, and a rank has only its own.",
            "1": "One gather brings the input together. But then each rank has a part of the outputs.",
            "2": "One to gather the columns before down_proj, and one to gather its outputs after it.",
            "3": "gate and up give their columns to the same rank, and their product stays there.",
        },
        answer="2",
    ),
]
