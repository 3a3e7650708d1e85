"""Chapter 10: the checks of the exercises and the quiz. The simulator is in ch10_cache, times in ch10_measure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from shared.block_manager import BlockManager
from shared.lab import Check, Question, Score, Wrong, call, expect, fail
from shared.lab.chapters.ch10_run import Call, serve
from shared.prefix_cache import PrefixCachingBlockManager
from shared.request import Request
from shared.sampling_params import SamplingParams

Turn = tuple[Sequence[int], Sequence[int]]  # prompt, answer

# Exercise 10.1


def judge_found(fn: Callable) -> None:
    for case, (turns, prompt, size) in HISTORIES.items():
        where = f"Case {case!r}, turns = {turns}, prompt = {prompt}, block_size = {size}:"
        _judge_found(fn, turns, prompt, size, where)
    draw = random.Random(1)
    for _ in range(60):
        turns = [(_drawn(draw, 1, 9), _drawn(draw, 1, 9)) for _ in range(draw.randint(0, 4))]
        prompt = _drawn(draw, 1, 4) if not turns or draw.random() < 0.2 else _continued(draw, *draw.choice(turns))
        size = draw.randint(1, 4)
        _judge_found(fn, turns, prompt, size)


def _judge_found(fn: Callable, turns: Sequence[Turn], prompt: Sequence[int], size: int, where: str = "") -> None:
    given = (turns, prompt, size)
    expect(fn, given, found(*given), case=where, mistakes=mistakes(*given))


def mistakes(turns: Sequence[Turn], prompt: Sequence[int], size: int) -> dict[str, int]:
    """What comes of forgetting one of the rules, by the words that say which."""
    def most(runs: Iterable[Sequence[int]], limit: int, whole: bool = True) -> int:
        common = max((min(_common(run, prompt), limit) for run in runs), default=0)
        return common // size * size if whole else common

    last, runs = len(prompt) - 1, [[*asked, *answer][:-1] for asked, answer in turns]
    return {
        "a block is found only if all of it is equal": most(runs, last, whole=False),
        "the last token of the prompt is always left to compute": most(runs, last + 1),
        "the tokens of the answers went through the model too": most((asked for asked, _ in turns), last),
        "the last token of an answer never went through the model": most(([*a, *b] for a, b in turns), last),
        "any of the turns may have left the beginning": most(runs[-1:], last),
    }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _drawn(draw: random.Random, low: int, high: int) -> list[int]:
    return [draw.randint(0, 1) for _ in range(draw.randint(low, high))]


def _continued(draw: random.Random, prompt: list[int], answer: list[int]) -> list[int]:
    whole = prompt + answer
    return whole[: draw.randint(1, len(whole))] + _drawn(draw, 0, 4)


HISTORIES: dict[str, tuple[list[Turn], list[int], int]] = {
    "nothing was served": ([], [1, 2, 3, 4, 5], 2),
    "the same beginning": ([([1, 2, 3, 4, 5, 6], [7])], [1, 2, 3, 4, 9, 9], 2),
    "a block that is not full": ([([1, 2, 3, 4, 5, 6], [7])], [1, 2, 3, 4, 5, 9], 4),
    "the same prompt again": ([([1, 2, 3, 4], [5])], [1, 2, 3, 4], 2),
    "the next turn of a chat": ([([1, 2, 3], [4, 5, 6])], [1, 2, 3, 4, 5, 6, 7, 8], 2),
    "the last token of an answer": ([([1, 2, 3], [4, 5, 6, 7, 8])], [1, 2, 3, 4, 5, 6, 7, 8, 9], 4),
    "the same block after another beginning": ([([1, 1, 2, 2], [3])], [9, 9, 2, 2, 5], 2),
    "the second of two conversations fits": ([([1, 2], [3, 4]), ([1, 9], [5, 6, 7])], [1, 9, 5, 6, 8], 2),
}


def found(turns: Sequence[Turn], prompt: Sequence[int], size: int) -> int:
    """Tokens of `prompt` that a cache which forgets nothing finds, after it served these turns one by one."""
    manager = PrefixCachingBlockManager(400, size)
    for index, (asked, answer) in enumerate(turns):
        compute(manager, str(index), [*asked, *answer][:-1])
    request = Request("q", list(prompt), SamplingParams(), 1)
    return len(manager.get_computed_blocks(request)) * size


def compute(manager: PrefixCachingBlockManager, name: str, ids: Sequence[int]) -> Request:
    """Admit a request, compute all its tokens, publish; the request still holds its blocks."""
    request = Request(name, list(ids), SamplingParams(), 1)
    computed = manager.get_computed_blocks(request)
    manager.allocate_slots(request, len(ids), computed)
    request.num_computed_tokens = len(ids)
    manager.cache_blocks(request, len(computed) * manager.block_size)
    return request


# Exercise 10.2

Parts = Mapping[str, Sequence[int]]  # the parts of one prompt by name
SIZE = 4


def part_traces() -> dict[str, list[Parts]]:
    """Requests whose parts have few or many different values; every value is as long as its part's others."""
    draw = random.Random(5)

    def value(part: str, which: int, length: int) -> list[int]:
        first = {"rules": 0, "date": 1, "user": 2, "question": 3, "tools": 4, "document": 5}[part]
        return [first * 100_000 + which * 100 + i for i in range(length)]

    assistant = [{"question": value("question", i, 6), "date": value("date", i // 8, 4),
                  "user": value("user", draw.randrange(6), 8), "rules": value("rules", 0, 40)} for i in range(16)]
    library = [{"date": value("date", 0, 4), "question": value("question", i, 5), "rules": value("rules", 0, 24),
                "document": value("document", draw.randrange(3), 80)} for i in range(12)]
    agent = [{"user": value("user", i, 12), "tools": value("tools", i % 2, 60), "rules": value("rules", 0, 20),
              "date": value("date", i // 2, 4)} for i in range(12)]
    return {"an assistant with rules": assistant, "questions about three documents": library,
            "an agent with two sets of tools": agent}


def part_cost(order: Sequence[str], requests: Sequence[Parts]) -> int:
    """Tokens computed when each prompt is its parts in this order and one comes after the other."""
    prompts = [[token for part in order for token in request[part]] for request in requests]
    calls = [Call(str(i), prompt, step=2 * i, answer=1) for i, prompt in enumerate(prompts)]
    return serve(PrefixCachingBlockManager(800, SIZE), calls, budget=512)


def judge_order(fn: Callable) -> Score:
    total = best = 0
    for case, requests in part_traces().items():
        where = f"Case {case!r}:"
        order = call(fn, [dict(request) for request in requests], case=where)
        if not isinstance(order, (list, tuple)) or sorted(map(str, order)) != sorted(requests[0]):
            fail(f"{where} your function returned {order!r}; expected the names {sorted(requests[0])} in some order.")
        costs = {each: part_cost(each, requests) for each in itertools.permutations(requests[0])}
        cost, least = costs[tuple(order)], min(costs.values())
        if cost > 1.1 * least:
            fail(f"{where} with {', '.join(order)} the model computes {cost} tokens; {least} are enough.")
        total, best = total + cost, best + least
    return Score("tokens computed", total, best)


# Break it: managers with a planted fault


def judge_manager(fn: Callable, cases: Mapping[str, tuple[int, list[Call], int]]) -> Score:
    """Serve each case with the reader's manager; right first, then cheap."""
    total = best = plain = 0
    for case, (num_blocks, calls, budget) in cases.items():
        where = f"Case {case!r}:"
        manager = call(fn, num_blocks, SIZE, case=where)
        if not hasattr(manager, "allocate_slots"):
            fail(f"{where} {_name(fn)} was called with the number of blocks and their size, and made a "
                 f"{type(manager).__name__}; expected a block manager.")
        try:
            total += call(serve, manager, calls, budget, case=where)
        except Wrong as wrong:
            words = str(wrong)
            fail(words if words.startswith("Case") else f"{where} {words}")
        best += serve(PrefixCachingBlockManager(num_blocks, SIZE), calls, budget)
        plain += serve(BlockManager(num_blocks, SIZE), calls, budget)
    if total > best + (plain - best) // 2:
        fail(f"No token is wrong, but {total} tokens are computed. Without any cache it is {plain}, and {best} "
             "are enough: too much is not found any more.")
    return Score("tokens computed", total, best)


LONG, OTHER = list(range(100, 130)), list(range(200, 230))
HANG_UPS = {  # blocks, calls, tokens a step
    "a prompt is served twice": (24, [Call("A", LONG), Call("B", LONG, step=8)], 64),
    "a long prompt in chunks, then the same": (24, [Call("A", LONG), Call("B", LONG, step=9)], 10),
    "the caller hangs up in the middle of a prompt":
        (24, [Call("A", LONG, hangs_up=1), Call("B", LONG, step=2)], 10),
    "the caller hangs up, others come between":
        (24, [Call("A", LONG, hangs_up=2), Call("B", OTHER[:9], step=2), Call("C", LONG, step=6)], 7),
    "the same prompt comes while the first answers": (32, [Call("A", LONG, answer=9), Call("B", LONG, step=4)], 64),
    "the next turn": (32, [Call("A", LONG[:9], answer=8), Call("B", LONG[:9] + OTHER, step=12)], 64),
}
OWNERS = {
    "a prompt is served twice": (16, [Call("A", LONG[:17]), Call("B", LONG[:17], step=8)], 64),
    "two requests share a beginning":
        (16, [Call("A", LONG[:17], answer=9), Call("B", LONG[:12] + [7], step=2, answer=9)], 64),
    "a freed beginning is found, then others need blocks":
        (10, [Call("A", LONG[:17]), Call("B", LONG[:17], step=6, answer=9), Call("C", OTHER[:17], step=7)], 64),
    "one of two ends, then others need blocks":
        (11, [Call("A", LONG[:17], answer=2), Call("B", LONG[:17], step=1, answer=12),
              Call("C", OTHER[:17], step=4)], 64),
    "other prompts take all blocks in between":
        (8, [Call("A", LONG[:17]), Call("B", OTHER[:27], step=6), Call("C", LONG[:17], step=13)], 64),
    "three conversations take turns in a small pool":
        (14, [Call(f"{name}{turn}", [start + i for i in range(13 + 2 * turn)], step=6 * turn + 2 * place)
              for turn in range(3) for place, (name, start) in enumerate((("A", 0), ("B", 300), ("C", 600)))], 64),
}  # fmt: skip


def _name(fn: object) -> str:
    return getattr(fn, "__name__", "your class")


def judge_hang_ups(fn: Callable) -> Score:
    return judge_manager(fn, HANG_UPS)


def judge_owners(fn: Callable) -> Score:
    return judge_manager(fn, OWNERS)


CHECKS = {"10.1": Check(judge_found), "10.2": Check(judge_order), "10.b": Check(judge_hang_ups),
          "10.c": Check(judge_owners)}


# Quiz


def found_of_the_same() -> int:
    return found([(range(56), [60])], list(range(56)), 8)


def found_in_the_next_turn() -> int:
    prompt, answer = list(range(21)), list(range(100, 112))
    return found([(prompt, answer)], [*prompt, *answer, 7, 7, 7], 4)


def overwritten() -> str:
    """A ended, then B ended; three blocks are taken from a pool of six."""
    manager = PrefixCachingBlockManager(6, 4)
    a, b = compute(manager, "A", range(16)), compute(manager, "B", range(50, 58))
    names = {block: f"A{i}" for i, block in enumerate(a.block_table, 1)}
    names |= {block: f"B{i}" for i, block in enumerate(b.block_table, 1)}
    manager.free(a)
    manager.free(b)
    taken = compute(manager, "C", range(90, 102)).block_table
    return ", ".join(names[block] for block in taken)


QUIZ: list[Question] = [
    Question(
        "A prompt of 56 tokens was served. The very same prompt comes again, and blocks have 8 tokens. How many of "
        "its tokens are found in the cache?",
        {
            "0": "The first request is over, but its blocks keep their content until somebody needs them.",
            "48": "The last token must be computed, for its scores, and what is found comes in whole blocks.",
            "55": "The last token must be computed, but a part of a block is never shared.",
            "56": "Then nothing would be left to run, and no scores would come out of it.",
        },
        compute=found_of_the_same,
    ),
    Question(
        "A prompt of 21 tokens got an answer of 12 tokens. The next turn's prompt begins with these 33 tokens. "
        "Blocks have 4 tokens. How many are found?",
        {
            "20": "That is the prompt alone. The answer's tokens went through the model too.",
            "28": "One block more was full: the last token of the answer is the only one that was never run.",
            "32": "33 tokens, but for the last one of the answer, in whole blocks.",
            "33": "The last token of the answer was sampled and never run, so it has no keys and values.",
        },
        compute=found_in_the_next_turn,
    ),
    Question(
        "A pool of six blocks. A used four of them, A1 to A4 in order, and ended; then B, with B1 and B2, ended. "
        "Nothing was found since. A new request takes three blocks. Which?",
        {
            "A1, A2, A3": "A's blocks were freed first, but the last one before the others. Without A1 the other "
                          "three could not be found.",
            "A4, A3, A2": "A has been unused the longest, and its end is overwritten before its beginning.",
            "B1, B2, A4": "B is the one that was used last.",
            "B2, A4, B1": "Blocks are not taken by their place in a request, but by the time they were freed.",
        },
        compute=overwritten,
    ),
]
