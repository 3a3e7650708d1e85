"""Chapter 08: the checks of the exercises, the quiz. The simulator is in ch08_steps, times in ch08_measure."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate

from shared.allocator import RowAllocator
from shared.batch import ForwardBatch, slots_of
from shared.lab import Check, Question, Score, call, fail, same
from shared.lab.chapters.ch07_steps import make_request, run_steps
from shared.lab.judging import short
from shared.scheduler import ScheduledRequest, Scheduler

# Exercises

Step = Sequence[tuple[int, int, int, int]]  # row, start, num_tokens, total


def judge_lay_flat(fn: Callable) -> None:
    for case, (scheduled, row_slots) in STEPS.items():
        _judge_flat(fn, scheduled, row_slots, f"Case {case!r}, scheduled = {scheduled}, row_slots = {row_slots}:")
    draw = random.Random(8)
    for _ in range(30):
        scheduled = [draw_piece(draw, row) for row in draw.sample(range(6), draw.randint(1, 6))]
        _judge_flat(fn, scheduled, 40, f"With scheduled = {scheduled}, row_slots = 40:")


def _judge_flat(fn: Callable, scheduled: Step, row_slots: int, where: str) -> None:
    """One list after the other, so that the message is about the first that is wrong."""
    got = call(fn, list(scheduled), row_slots, case=where)
    if not isinstance(got, (list, tuple)) or len(got) != 4:
        fail(f"{where} your function returned {short(got)}; expected four lists.")
    for name, mine, want in zip(FLAT, got, lay_flat(scheduled, row_slots), strict=True):
        if not same(mine, want):
            fail(f"{where} {name} are {short(mine)}; expected {want}. {FLAT[name]}")


FLAT = {  # the four lists, and the rule that a wrong one breaks
    "the positions": "They count within each request, from its start.",
    "the slots": "A position's slot is the row times row_slots, plus the position.",
    "the beginnings": "Each request begins where the one before it ends; the last entry is the end of the line.",
    "the places that are scored": "That is the last token of each request that has caught up with what is known of it.",
}


STEPS = {
    "one request, its whole prompt": ([(0, 0, 5, 5)], 16),
    "one request decodes in row 2": ([(2, 7, 1, 8)], 16),
    "a prompt that is not complete": ([(1, 4, 4, 12)], 16),
    "a decode, a chunk that does not end its prompt, a decode": ([(0, 9, 1, 10), (2, 0, 4, 11), (1, 3, 1, 4)], 16),
    "the last slot of a row": ([(0, 15, 1, 16), (1, 0, 2, 2)], 16),
    "rows in another order than requests": ([(3, 2, 3, 5), (0, 6, 1, 7)], 8),
}


def draw_piece(draw: random.Random, row: int) -> tuple[int, int, int, int]:
    total = draw.randint(1, 30)
    start = draw.randint(0, total - 1)
    return row, start, draw.randint(1, total - start), total


def lay_flat(scheduled: Step, row_slots: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """positions, slots, query_start_loc, logits_indices of a step."""
    positions, slots, indices = [], [], []
    for row, start, num_tokens, total in scheduled:
        span = range(start, start + num_tokens)
        positions += span
        slots += slots_of([row], span, row_slots)
        indices += [len(positions) - 1] if span.stop == total else []
    return positions, slots, list(accumulate((item[2] for item in scheduled), initial=0)), indices


def lengths_of_rows() -> dict[str, tuple[list[int], int]]:
    draw = random.Random(4)
    return {
        "one call": ([5, 9, 2], 1),
        "a call for each": ([5, 9, 2], 3),
        "two long ones among short ones": ([12, 400, 9, 15, 390, 11, 8, 14], 2),
        "three sizes": ([20, 900, 22, 200, 25, 210, 19, 880, 24, 205], 3),
        "all alike": ([64] * 7, 3),
        "sixteen of a busy engine": ([draw.choice([30, 40, 60, 500]) + draw.randint(0, 30) for _ in range(16)], 4),
    }  # fmt: skip


def judge_groups(fn: Callable) -> Score:
    total = best = plain = 0
    for case, (seq_lens, calls) in lengths_of_rows().items():
        got = call(fn, list(seq_lens), calls, case=f"Case {case!r}:")
        total += padding(got, seq_lens, calls, f"Case {case!r}:")
        best += least_padding(tuple(sorted(seq_lens)), calls)
        plain += padding(equal_parts(seq_lens, calls), seq_lens, calls, "")
    if total >= plain:
        fail(f"All cases together read {total} padded positions; sorting by length and cutting into equal parts "
             f"reads {plain}.")
    return Score("padded positions", total, best)


def padding(groups: object, seq_lens: Sequence[int], calls: int, where: str) -> int:
    """Positions that are read and masked; fails for what is no grouping."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        fail(f"{where} your function returned {groups!r}; expected a list of lists of request numbers.")
    if sorted(index for group in groups for index in group) != list(range(len(seq_lens))):
        fail(f"{where} the groups are {groups!r}; each number from 0 to {len(seq_lens) - 1} must occur once.")
    if len(groups) > calls:
        fail(f"{where} {len(groups)} groups need {len(groups)} calls; at most {calls} are allowed.")
    lengths = ([seq_lens[index] for index in group] for group in groups if group)
    return sum(max(group) * len(group) - sum(group) for group in lengths)


def equal_parts(seq_lens: Sequence[int], calls: int) -> list[list[int]]:
    order, size = sorted(range(len(seq_lens)), key=seq_lens.__getitem__), -(-len(seq_lens) // calls)
    return [order[i : i + size] for i in range(0, len(order), size)]


def least_padding(lengths: tuple[int, ...], calls: int) -> int:
    """lengths ascending: neighbours share a call, so only the places of the cuts are open."""
    @cache
    def best(end: int, calls: int) -> float:
        if not end or not calls:
            return 0 if not end else float("inf")
        last = lengths[end - 1]
        return min(best(start, calls - 1) + sum(last - n for n in lengths[start:end]) for start in range(end))
    return int(best(len(lengths), calls))


Sampling = tuple[Sequence[tuple[str, int, int, int]], Sequence[Sequence[float]], dict[str, Collection[int]]]


def judge_new_tokens(fn: Callable) -> None:
    for case, given in BATCHES.items():
        _judge_tokens(fn, given, f"Case {case!r}:")
    draw = random.Random(5)
    for _ in range(30):
        given = draw_batch(draw)
        _judge_tokens(fn, given, f"With scheduled = {short(given[0])}:")


def _judge_tokens(fn: Callable, given: Sampling, where: str) -> None:
    """Who got a token, then which: the first fault in words."""
    scheduled, scores, banned = given
    got, want = call(fn, *copy.deepcopy(given), case=where), new_tokens(*given)
    if not isinstance(got, Mapping):
        fail(f"{where} your function returned {short(got)}; expected a dict from names to tokens.")
    for name, start, count, total in scheduled:
        if name in got and name not in want:
            fail(f"{where} {name} got token {got[name]!r}, and has run {start + count} of the {total} tokens that are "
                 "known: its next token is known.")
        if name in want and name not in got:
            fail(f"{where} {name} has caught up and got no token.")
    if strange := [name for name in got if name not in want]:
        fail(f"{where} {short(strange[0])} got a token, and is not in the batch.")
    for place, (name, token) in enumerate(want.items()):
        if got[name] != token:
            fail(f"{where} {name} got token {short(got[name])}; expected {token}. Its scores are "
                 f"{list(scores[place])}, and {name} has banned {list(banned[name]) or 'nothing'}.")


FREE: dict[str, Collection[int]] = {"A": [], "B": [], "C": []}
BATCHES: dict[str, Sampling] = {
    "two requests decode": ([("A", 8, 1, 9), ("B", 5, 1, 6)], [[1, 3, 2], [4, 0, 2]], FREE),
    "the middle one is a chunk that does not end its prompt":
        ([("A", 8, 1, 9), ("B", 0, 4, 9), ("C", 5, 1, 6)], [[1, 3, 2], [0, 2, 4]], FREE),
    "only a chunk": ([("A", 0, 4, 9)], [], FREE),
    "the last chunk": ([("A", 4, 5, 9)], [[1, 3, 2]], FREE),
    "bans, and the rows are not in the order of arrival":
        ([("B", 5, 1, 6), ("A", 8, 1, 9)], [[1, 3, 2], [4, 0, 2]], {"A": [0], "B": [1]}),
    "bans, and a request that waits": ([("B", 5, 1, 6)], [[1, 3, 2]], {"A": [1], "B": [2], "C": [0]}),
}  # fmt: skip


def draw_batch(draw: random.Random) -> Sampling:
    names = list("ABCDEF")
    banned = {name: draw.sample(range(5), draw.randint(0, 2)) for name in names}
    scheduled = [(name, *draw_piece(draw, 0)[1:]) for name in draw.sample(names, draw.randint(1, 6))]
    sampling = sum(start + count == total for _, start, count, total in scheduled)
    return scheduled, [draw.sample(range(10), 5) for _ in range(sampling)], banned


def new_tokens(scheduled, scores, banned) -> dict[str, int]:
    names = [name for name, start, num_tokens, total in scheduled if start + num_tokens == total]
    return {name: max((i for i in range(len(row)) if i not in banned[name]), key=row.__getitem__)
            for name, row in zip(names, scores, strict=True)}


CHECKS = {"08.1": Check(judge_lay_flat), "08.2": Check(judge_groups), "08.b": Check(judge_new_tokens)}


# Quiz


def slot_of_the_next_token() -> int:
    """Row 2 of rows of 64 slots; ten tokens are in the cache."""
    return slots_of([2], range(10, 11), 64)[0]


def rows_of_scores() -> int:
    """A and C decode, B runs 16 of 40 prompt tokens, D the last five of its prompt."""
    scheduled = []
    for row, (prompt, computed, count) in enumerate([(9, 8, 1), (40, 0, 16), (12, 11, 1), (25, 20, 5)]):
        request = make_request("ABCD"[row], prompt, 4)
        request.block_table, request.num_computed_tokens = [row], computed
        scheduled.append(ScheduledRequest.of(request, count))
    return len(ForwardBatch.build(scheduled, 64).logits_indices)


def steps_of_a_long_prompt() -> int:
    """Three decode; a prompt of 200 tokens comes; 50 tokens a step."""
    scheduler = Scheduler(RowAllocator(4, 256), 4, 50)
    arrivals = [(0, make_request(name, 4, 40)) for name in "ABC"] + [(1, make_request("long", 200, 2))]
    for trace in run_steps(scheduler, arrivals):
        if "long" in trace.steps[-1].new_tokens:
            return sum("long" in record.scheduled for record in trace.steps)
    raise AssertionError("the prompt never ended")


QUIZ = [
    Question(
        "Rows have 64 slots. The request in row 2 has ten tokens in the cache, and its next token runs. Into which "
        "slot do its key and value go?",
        {
            "74": "That is row 1. Rows count from 0, so row 2 begins at slot 128.",
            "128": "That slot holds the request's first token.",
            "138": "2 times 64, plus position 10: the eleventh token has position 10.",
            "139": "One too far: ten tokens fill the positions 0 to 9.",
        },
        compute=slot_of_the_next_token,
    ),
    Question(
        "A step: A and C run one token each, B the first 16 of 40 prompt tokens, D the last 5 tokens of its prompt. "
        "How many rows of scores are computed?",
        {
            "2": "A and C. But D's prompt is complete in this step, and its last position scores the first token.",
            "3": "A, C and D have caught up. B has not: the next token of its prompt is known.",
            "4": "One for each request. B's would score a token that the prompt already has.",
            "23": "One for each token. Nobody asks for the scores of the others, and each row costs a run of the head.",
        },
        compute=rows_of_scores,
    ),
    Question(
        "Three requests decode, and a prompt of 200 tokens arrives. A step has a budget of 50 tokens. After how many "
        "steps does the new request have its first token?",
        {
            "1": "Only if the whole prompt fits into one step.",
            "4": "That is 200 divided by 50. But the three that run take one token of each step.",
            "5": "Each step has 47 tokens left for it. Four make 188, and the fifth brings the last twelve.",
            "200": "Prompt tokens need not come one by one: they are all known.",
        },
        compute=steps_of_a_long_prompt,
    ),
]
