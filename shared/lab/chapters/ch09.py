"""Chapter 09: the checks of the exercises, the quiz. The simulator is in ch09_pages, times in ch09_measure."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from shared.batch import slots_of
from shared.block_manager import BlockManager
from shared.lab import Check, Question, Score, call, fail
from shared.lab.chapters.ch07_steps import make_request
from shared.lab.chapters.ch09_pages import ContiguousAllocator

# Exercises


def blocks_of(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def judge_window(fn: Callable) -> Score:
    """No block that somebody still looks at may go; the score is what is held on the way of an answer."""
    held = best = without = 0
    for window, block_size in ((8, 4), (10, 4), (1, 4), (5, 16), (16, 16), (33, 16), (64, 1)):
        for num_tokens in range(1, 121):
            table = blocks_of(num_tokens, block_size)
            can_go = max(0, num_tokens - window) // block_size
            got = call(fn, num_tokens, window, block_size)
            where = f"With num_tokens = {num_tokens}, window = {window}, block_size = {block_size}:"
            _judge_window(where, got, table, can_go, max(0, num_tokens - window), block_size)
            held, best, without = held + table - got, best + table - can_go, without + table
    if held >= without:
        fail(f"No block is needed too long, but none is given back either: {held} blocks held, as without a window.")
    return Score("blocks held", held, best)


def _judge_window(where: str, got: object, table: int, can_go: int, oldest: int, block_size: int) -> None:
    if type(got) is not int or not 0 <= got <= table:
        fail(f"{where} your function returned {got!r}; expected a whole number from 0 to {table}, its blocks.")
    if got > can_go:
        last = min(got * block_size, oldest + block_size) - 1
        fail(f"{where} your function gives back {_blocks(got)}, with the tokens 0 to {got * block_size - 1}. The "
             f"newest token looks back to token {oldest}, so token {max(oldest, last)} is still needed.")


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"


Pool = tuple[Sequence[int], int, int]  # tokens of each running request, blocks needed, block size


def full_pools() -> Iterator[Pool]:
    yield [40, 30, 20, 10], 1, 4
    yield [5, 32, 33], 3, 16  # 32 tokens fill two blocks, 33 need a third
    yield [64, 9, 40, 8], 3, 4
    yield [10, 17, 1, 1, 1], 2, 16
    draw = random.Random(9)
    for _ in range(25):
        tokens = [draw.randint(1, 80) for _ in range(draw.randint(3, 8))]
        block_size = draw.choice([1, 4, 16])
        most = sum(blocks_of(n, block_size) for n in tokens[1:])
        yield tokens, draw.randint(1, max(1, most // 2)), block_size


def cheapest(tokens: Sequence[int], needed: int, block_size: int) -> list[int]:
    """All choices tried: the one that loses the fewest tokens."""
    others = range(1, len(tokens))
    choices = (chosen for count in others for chosen in combinations(others, count)
               if sum(blocks_of(tokens[i], block_size) for i in chosen) >= needed)
    return list(min(choices, key=lambda chosen: sum(tokens[i] for i in chosen)))


def last_first(tokens: Sequence[int], needed: int, block_size: int) -> list[int]:
    """The engine's rule: from the end of the order."""
    chosen, index = [], len(tokens)
    while sum(blocks_of(tokens[i], block_size) for i in chosen) < needed:
        index -= 1
        chosen.append(index)
    return chosen


def judge_victims(fn: Callable) -> Score:
    paid = best = rule = 0
    dearest = (0, "")
    for tokens, needed, block_size in full_pools():
        where = f"With tokens = {list(tokens)}, needed = {needed}, block_size = {block_size}:"
        got = call(fn, list(tokens), needed, block_size)
        _judge_victims(where, got, tokens, needed, block_size)
        cheap = cheapest(tokens, needed, block_size)
        cost, least = (sum(tokens[i] for i in chosen) for chosen in (got, cheap))
        words = f"{where} places {list(got)} lose {cost} tokens, and {cheap} lose {least}."
        dearest = max(dearest, (cost - least, words))
        paid, best = paid + cost, best + least
        rule += sum(tokens[i] for i in last_first(tokens, needed, block_size))
    if paid >= rule:
        fail(f"Enough blocks get free, but {paid} tokens must be run again; taking the last ones costs {rule}. "
             + dearest[1])
    return Score("tokens run again", paid, best)


def _judge_victims(where: str, got: object, tokens: Sequence[int], needed: int, block_size: int) -> None:
    if not isinstance(got, (list, tuple, set)) or not all(type(i) is int and 0 <= i < len(tokens) for i in got):
        fail(f"{where} your function returned {got!r}; expected a list of places from 1 to {len(tokens) - 1}.")
    if 0 in got:
        fail(f"{where} the first request would lose its blocks; then nobody is sure to end.")
    if len(set(got)) < len(got):
        fail(f"{where} {list(got)} names a request twice; it can give its blocks only once.")
    freed = sum(blocks_of(tokens[i], block_size) for i in got)
    if freed < needed:
        fail(f"{where} the places {list(got)} hold {_blocks(freed)} in all, and {needed} must get free.")


SCRIPTS = {  # blocks, slots in a block, then (name, tokens) to allocate or (name, None) to release
    "an answer that grows token by token": (8, 4, [("a", n) for n in range(1, 30)]),
    "a prompt that fills its blocks exactly": (8, 4, [("a", 8), ("b", 4), ("a", 9)]),
    "blocks of one slot": (6, 1, [("a", 3), ("b", 3), ("a", None), ("c", 3)]),
    "a request that does not fit, then one that does": (5, 4, [("a", 9), ("b", 12), ("c", 8)]),
    "a request that cannot grow, then one that ends": (5, 4, [("a", 12), ("b", 8), ("a", 17), ("b", None), ("a", 17)]),
    "aborted after it has ended": (6, 4, [("a", 8), ("a", None), ("a", None), ("b", 12), ("c", 12)]),
    "aborted before it was admitted": (4, 4, [("a", None), ("b", 16)]),
    "a name that comes again": (4, 4, [("a", 16), ("a", None), ("a", 5), ("b", 8)]),
}


def judge_pool(fn: Callable) -> None:
    for case, (num_blocks, block_size, script) in SCRIPTS.items():
        pool, held = call(fn, num_blocks, block_size, case=case), {}
        if missing := [name for name in ("allocate", "release", "tables") if not hasattr(pool, name)]:
            fail(f"Your class makes a pool without {missing[0]}.")
        for name, tokens in script:
            if tokens is None:
                call(pool.release, name, case=f"Case {case!r}:")
                held.pop(name, None)
            else:
                _judge_allocate(f"Case {case!r}:", pool, held, name, tokens, num_blocks, block_size)
            _judge_tables(f"Case {case!r}:", pool, held, num_blocks)


def _judge_allocate(where: str, pool, held: dict[str, int], name: str, tokens: int, blocks: int, size: int) -> None:
    free, wanted = blocks - sum(held.values()), blocks_of(tokens, size)
    fits = wanted - held.get(name, 0) <= free
    got = call(pool.allocate, name, tokens, case=where)
    if got is not fits:
        had = f"{wanted} blocks, {held.get(name, 0)} of them held, {free} free"
        fail(f"{where} allocate({name!r}, {tokens}) returned {got!r}; expected {fits} ({had}).")
    if fits:
        held[name] = max(wanted, held.get(name, 0))
        has = len(pool.tables.get(name, ()))
        if has != held[name]:
            fail(f"{where} {tokens} tokens of {name!r} have {_blocks(has)} of {size} slots; they fill {held[name]}.")


def _judge_tables(where: str, pool, held: dict[str, int], num_blocks: int) -> None:
    owner: dict[int, str] = {}
    for name, blocks in pool.tables.items():
        if len(blocks) != held.get(name, 0):
            fail(f"{where} {name!r} has {_blocks(len(blocks))} in its table; it should have {held.get(name, 0)}.")
        for block in blocks:
            if block in owner or not 0 <= block < num_blocks:
                fail(f"{where} block {block} belongs to {owner.get(block, 'nobody')!r} and to {name!r}.")
            owner[block] = name


PREEMPTED: dict[str, dict] = {
    "a request in the middle of its answer": dict(prompt=[5, 6, 7], output=[8, 9], computed=4, blocks=[3, 1]),
    "its last token has no keys yet, the others have": dict(prompt=[5, 6], output=[7], computed=2, blocks=[0]),
    "a prompt that has run in part": dict(prompt=[4, 5, 6, 7, 8], output=[], computed=3, blocks=[2]),
    "preempted before, and answered on": dict(prompt=[9], output=[4, 4, 4, 4], computed=4, blocks=[6, 2, 5]),
}


def judge_preempt(fn: Callable) -> None:
    for case, state in PREEMPTED.items():
        where, request, free = f"Case {case!r}:", {**copy.deepcopy(state), "state": "running"}, [7]
        got = call(fn, request, free, case=where)
        if request.get("output") != state["output"]:
            fail(f"{where} the caller has read {state['output']}, and the request remembers {request.get('output')}.")
        if request.get("prompt") != state["prompt"]:
            fail(f"{where} the prompt was {state['prompt']} and is {request.get('prompt')} now; what it has of the "
                 "answer would run twice if the request is preempted again.")
        if request.get("computed") != 0:
            fail(f"{where} computed is {request.get('computed')}, and no key or value of it is left in the cache.")
        if sorted(free) != sorted([7, *state["blocks"]]) or request.get("blocks"):
            fail(f"{where} free blocks are {sorted(free)}, its own are {request.get('blocks')}; it held "
                 f"{state['blocks']}, and block 7 was free.")
        known = state["prompt"] + state["output"]
        if not isinstance(got, (list, tuple)) or list(got) != known:
            fail(f"{where} your function returned {got!r}, to run when it comes back; all of {known} must, so that the "
                 "next token is the one it would have been.")


CHECKS = {
    "09.1": Check(judge_window), "09.2": Check(judge_victims), "09.b": Check(judge_pool), "09.c": Check(judge_preempt),
}  # fmt: skip


# Quiz


def slot_of_token_37() -> int:
    return slots_of([9, 4, 7], range(37, 38), 16)[0]


def empty_slots() -> int:
    """Three requests in blocks of 16."""
    manager, lengths = BlockManager(16, 16), (17, 32, 5)
    requests = [make_request(str(i), n, 1) for i, n in enumerate(lengths)]
    for request in requests:
        manager.allocate_slots(request, request.num_tokens)
    return sum(len(request.block_table) for request in requests) * 16 - sum(lengths)


def who_can_take_d() -> str:
    """24 slots: A takes 8, B 8, C 8; then A and C end, and D wants 14, the whole answer included."""
    admits = []
    for words, allocator in (("the one that reserves neighbours", ContiguousAllocator(24)),
                             ("the one with blocks", BlockManager(6, 4))):
        a, b, c, d = (make_request(name, n - 2, 2) for name, n in zip("ABCD", (8, 8, 8, 14)))
        for request in (a, b, c):
            assert allocator.allocate_slots(request, 8)
        allocator.free(a)
        allocator.free(c)
        admits += [words] if allocator.allocate_slots(d, 14) else []
    return {0: "neither", 1: f"only {admits[0]}" if admits else "", 2: "both"}[len(admits)]


QUIZ = [
    Question(
        "Blocks of 16 slots. A request has the block table [9, 4, 7]. In which slot does its token 37 lie? "
        "Tokens count from 0.",
        {
            "37": "That is its place within the request. The table says where in the cache that is.",
            "69": "This is offset 5 in block 4. Token 37 is in the third block: tokens 0 to 15 and 16 to 31 come "
                  "before.",
            "117": "37 // 16 = 2, so block 7; 37 % 16 = 5; 7 * 16 + 5.",
            "149": "This is offset 5 in block 9. Tokens 0 to 15 are there.",
        },
        compute=slot_of_token_37,
    ),
    Question(
        "Three requests hold 17, 32 and 5 tokens in blocks of 16. How many slots are given out and empty?",
        {
            "10": "That is 64 minus the tokens. But 17 tokens alone fill two blocks, so five are held, not four.",
            "26": "They hold 2, 2 and 1 blocks, 80 slots, and have 54 tokens. The one with 32 wastes nothing.",
            "42": "That gives the request with 32 tokens a third block. It gets one when token 32 comes.",
            "48": "A whole block for each would be the waste if all three had just begun one without a token in it.",
        },
        compute=empty_slots,
    ),
    Question(
        "A cache of 24 slots. A, B and C came one after another and have 8 slots each. A and C end. D asks for 14, "
        "its answer included. Blocks have 4 slots. Which allocator can take D?",
        {
            "both": "16 slots are free in both, but B lies between them: the longest hole has 8.",
            "neither": "16 slots are free, and with blocks any of them will do: 14 tokens need four blocks.",
            "only the one with blocks": "Four blocks are free, two on each side of B, and a table may name any of "
                                        "them. The other one needs 14 neighbours.",
            "only the one that reserves neighbours": "Its longest hole has 8 slots. It is the one that cannot.",
        },
        compute=who_can_take_d,
    ),
]
