"""Chapter 12: the checks of the exercises, the quiz. The tile stepper is in ch12_tiles, times in ch12_measure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch

from shared.lab import Check, Question, Score, call, expect, fail

# Exercises


def judge_combine(fn: Callable) -> None:
    for case, parts in SPANS.items():
        given = [(lse, torch.tensor(out)) for lse, out in parts]
        expect(fn, (given,), combined(parts), case=case, tolerance=1e-4, mistakes=combining_mistakes(parts))
    draw = random.Random(3)
    for _ in range(20):
        parts = [(draw.gauss(0, 4), [draw.gauss(0, 1), draw.gauss(0, 1)]) for _ in range(draw.randint(1, 6))]
        given = [(lse, torch.tensor(out)) for lse, out in parts]
        expect(fn, (given,), combined(parts), tolerance=1e-4)


SPANS: dict[str, list[tuple[float, list[float]]]] = {
    "one span": [(2.0, [1.0, -3.0])],
    "two spans with the same sum": [(0.5, [2.0, 0.0]), (0.5, [4.0, 1.0])],
    "one span holds nearly all of the weight": [(0.0, [1.0, 1.0]), (9.0, [5.0, -5.0])],
    "scores so large that exp overflows": [(1000.0, [1.0, 0.0]), (1001.0, [2.0, 1.0])],
    "a span without keys": [(-math.inf, [0.0, 0.0]), (1.0, [3.0, 4.0])],
    "no keys at all": [(-math.inf, [0.0, 0.0]), (-math.inf, [0.0, 0.0])],
}


def combined(parts: Sequence[tuple[float, list[float]]]) -> list[float]:
    """Each span's result, weighted by its share of the whole sum of exp(score)."""
    peak = max(lse for lse, _ in parts)
    if peak == -math.inf:
        return [0.0] * len(parts[0][1])
    weights = [math.exp(lse - peak) for lse, _ in parts]
    return [sum(w * out[i] for w, (_, out) in zip(weights, parts)) / sum(weights) for i in range(len(parts[0][1]))]


def combining_mistakes(parts: Sequence[tuple[float, list[float]]]) -> Mapping[str, list[float]]:
    count, width = len(parts), len(parts[0][1])
    plain = [sum(out[i] for _, out in parts) / count for i in range(width)]
    return {
        "every span has the same weight there, whatever the sum over its keys": plain,
        "that overflows: take the largest logarithm away before exp": [math.nan] * width,
    }


def judge_sizes(fn: Callable) -> Score:
    total = best = 0
    for case, (counts, most) in BATCHES.items():
        sizes = call(fn, dict(counts), most, case=f"Case {case!r}:")
        total += padded_rows(f"Case {case!r}:", sizes, counts, most)
        best += fewest_padded(counts, most)
    if total > 2 * best + 10:
        fail(f"Every batch has a graph, but {total} padded rows run; {best} would do. Which sizes come often?")
    return Score("padded rows", total, best)


BATCHES: dict[str, tuple[dict[int, int], int]] = {
    "all batches of one size": ({7: 100}, 3),
    "small ones and full ones": ({1: 500, 2: 80, 31: 40, 32: 300}, 3),
    "every size equally often": (dict.fromkeys(range(1, 17), 10), 4),
    "one graph only": ({3: 50, 5: 20, 8: 1}, 1),
    "a rare large batch": ({4: 1000, 5: 900, 64: 1}, 2),
}


def padded_rows(where: str, sizes: object, counts: Mapping[int, int], most: int) -> int:
    """Rows that run for nothing: each batch takes the smallest graph that holds it."""
    if not isinstance(sizes, (list, tuple)) or not all(type(size) is int and size > 0 for size in sizes):
        fail(f"{where} your function returned {sizes!r}; expected a list of sizes above 0.")
    if len(set(sizes)) > most:
        fail(f"{where} {len(set(sizes))} graphs are recorded; at most {most} are allowed.")
    if max(sizes, default=0) < max(counts):
        fail(f"{where} no graph holds the batch of {max(counts)} requests.")
    return sum(times * (min(size for size in sizes if size >= rows) - rows) for rows, times in counts.items())


def fewest_padded(counts: Mapping[int, int], most: int) -> int:
    """By trying every choice: a size that no batch has is never better than the next smaller one that comes."""
    largest, rest = max(counts), [size for size in counts if size != max(counts)]
    choices = itertools.chain.from_iterable(itertools.combinations(rest, k) for k in range(min(most, len(counts))))
    return min(padded_rows("", [*choice, largest], counts, most) for choice in choices)


def judge_store(fn: Callable) -> None:
    for case, (slots, num_slots) in STORES.items():
        keys = torch.arange(float(num_slots))[:, None].repeat(1, 2)  # [slots, 2], row i holds i
        k = torch.full((len(slots), 2), 100.0) + torch.arange(float(len(slots)))[:, None]
        k[[slot is None for slot in slots]] = math.nan  # what lies in a padding row may be anything
        want = keys.clone()
        for slot, row in zip(slots, k):
            if slot is not None:
                want[slot] = row
        before, kept = keys.clone(), keys
        call(fn, keys, list(slots), k.clone(), case=f"Case {case!r}:")
        _judge_stored(f"Case {case!r}:", kept, want, before)


STORES: dict[str, tuple[list[int | None], int]] = {
    "no padding": ([3, 1], 6),
    "one padding row": ([2, None], 6),
    "padding before a real row": ([None, None, 4], 6),
    "nothing but padding": ([None, None], 4),
    "the last slot is really written": ([None, 5, None], 6),
}


def _judge_stored(where: str, keys: torch.Tensor, want: torch.Tensor, before: torch.Tensor) -> None:
    if keys.shape != want.shape:
        fail(f"{where} the cache has the shape {tuple(keys.shape)} now; write into the slots it has.")
    for slot in range(len(want)):
        if torch.equal(keys[slot], want[slot]):
            continue
        if torch.equal(want[slot], before[slot]):
            fail(f"{where} slot {slot} was overwritten by a row that writes nowhere.")
        fail(f"{where} slot {slot} does not hold the key that belongs there.")


CHECKS = {"12.1": Check(judge_combine), "12.2": Check(judge_sizes), "12.b": Check(judge_store)}


# Quiz


def whole_speedup(shares_and_factors: Sequence[tuple[float, float]]) -> float:
    """Amdahl (1967): how much faster the whole is, if these shares of its time get faster by these factors."""
    rest = 1 - sum(share for share, _ in shares_and_factors)
    return 1 / (rest + sum(share / factor for share, factor in shares_and_factors))


def graph_for_five() -> int:
    from shared.cuda_graph import capture_sizes

    return next(size for size in capture_sizes(32) if size >= 5)


def shrunk_sum() -> float:
    """A tile has the scores 3 and 3, the next one the score 3 + log 4."""
    scores = torch.tensor([3.0, 3.0, 3.0 + math.log(4)])
    return round(float((scores - scores.max()).exp().sum()), 4)


QUIZ = [
    Question(
        "Attention takes 40 % of a step and becomes 4 times as fast; the norms take 30 % and become twice as fast. "
        "How many times as fast is the step?",
        {
            "1.8": "0.3 stay as they are, 0.4 become 0.1 and 0.3 become 0.15: together 0.55 of the time before.",
            "3.0": "The mean of the two factors says nothing about the 30 % that nobody touched.",
            "6.0": "Factors do not add up: each applies to its own share of the time only.",
            "8.0": "Factors of one and the same work multiply. These two are different parts of the step.",
        },
        compute=lambda: f"{whole_speedup([(0.4, 4), (0.3, 2)]):.1f}",
    ),
    Question(
        "A running softmax has seen two keys with a score of 3 each. The next tile has one key, with a score of "
        "3 + log 4. What is the running total then, the sum of exp(score - peak)?",
        {
            "1.25": "Then the two earlier keys would count a quarter together; each of them counts a quarter.",
            "1.5": "The new peak makes the new key count 1, and each of the two earlier ones exp(-log 4).",
            "3": "That counts every key as if its score were the peak. The earlier sum has to shrink first.",
            "6": "That takes the peak of the first tile, 3. The peak is the largest score of all tiles.",
        },
        compute=lambda: f"{shrunk_sum():g}",
    ),
    Question(
        "CUDA graphs were recorded for the sizes of `capture_sizes(32)`. Five requests decode. How many rows does "
        "the replayed graph run?",
        {
            "4": "A graph of four rows has no place for the fifth request, and a graph cannot grow.",
            "5": "There is no graph of five rows. Recording every size would take memory and time for each.",
            "8": "The smallest recorded size that holds them; three rows attend over nothing and write nowhere.",
            "32": "The largest would do, but its rows cost time. The smallest that holds the batch is taken.",
        },
        compute=lambda: str(graph_for_five()),
    ),
]
