"""Chapter 07: the checks of the exercises, the quiz. The simulator is in ch07_steps, times in ch07_measure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence

from shared.allocator import RowAllocator
from shared.lab import Check, Question, Score, call, expect, fail
from shared.lab.chapters.ch07_steps import SlotAllocator, first_steps, last, make_request, run_steps
from shared.request import Request
from shared.scheduler import Policy, Scheduler

# Exercises


def judge_waits(fn: Callable) -> None:
    for name, (arrivals, lengths, rows) in QUEUES.items():
        want = waits(arrivals, lengths, rows)
        case = f"Case {name!r}, arrivals {arrivals}, lengths {lengths}, rows {rows}:"
        starts = [step + wait for step, wait in zip(arrivals, want)]
        mistakes = {"those are the steps in which they start, not the steps waited": starts}
        expect(fn, (arrivals, lengths, rows), want, case=case, mistakes=mistakes)
    draw = random.Random(7)
    for _ in range(30):
        arrivals = sorted(draw.randint(0, 12) for _ in range(draw.randint(1, 9)))
        lengths, rows = [draw.randint(1, 9) for _ in arrivals], draw.randint(1, 4)
        expect(fn, (arrivals, lengths, rows), waits(arrivals, lengths, rows))


QUEUES = {
    "a row for everybody": ([0, 0, 0], [4, 2, 5], 3),
    "one row": ([0, 0, 0], [4, 2, 5], 1),
    "the row is free before the request comes": ([0, 9, 9], [4, 2, 1], 1),
    "a row is free as soon as one answer of two has ended": ([0, 0, 0], [9, 2, 3], 2),
    "a short answer came after a long one": ([0, 1, 2], [6, 8, 1], 1),
    "somebody comes in the step in which a row gets free": ([0, 4, 4], [4, 3, 1], 1),
    "nobody": ([], [], 2),
}


def waits(arrivals: Sequence[int], lengths: Sequence[int], rows: int) -> list[int]:
    """Steps from arrival to the first step of a row, first come first served."""
    free_at, waited = [0] * rows, []  # the step from which each row is free
    for arrival, length in zip(arrivals, lengths):
        start = max(arrival, heapq.heappop(free_at))
        heapq.heappush(free_at, start + length)
        waited.append(start - arrival)
    return waited


Arrivals = Sequence[tuple[int, int]]  # (step, prompt tokens)
PATIENCE = 60  # steps that nobody may wait longer


def streams() -> dict[str, Arrivals]:
    """Traces for one row and four tokens a step: a prompt of 40 takes ten steps, one of 4 a single one."""
    draw = random.Random(3)
    mixed = sorted((draw.randint(0, 60), draw.choice([4, 4, 8, 40])) for _ in range(24))
    return {
        "a long prompt, and a short one at every step": [(0, 4), (0, 40), *((step, 4) for step in range(1, 100))],
        "many prompts of all lengths": mixed,
        "all long ones first": [*((0, 40) for _ in range(3)), *((0, 4) for _ in range(12))],
    }


def policy_waits(policy: str | Policy, arrivals: Arrivals) -> list[int]:
    """Steps waited by each request, in the order of arrival, with one row and a budget of four tokens."""
    requests = [(step, make_request(str(i), prompt, 1)) for i, (step, prompt) in enumerate(arrivals)]
    scheduler = Scheduler(RowAllocator(1, 64), 1, 4, policy=policy)
    first = first_steps(last(run_steps(scheduler, requests)).steps)
    return [first[request.request_id] - step for step, request in requests]


def judge_policy(fn: Callable) -> Score:
    total = 0
    for case, arrivals in streams().items():
        waited = call(policy_waits, fn, arrivals, case=f"Case {case!r}:")
        if max(waited) > PATIENCE:
            longest = waited.index(max(waited))
            fail(f"Case {case!r}: the request with {arrivals[longest][1]} prompt tokens starved; it waited "
                 f"{max(waited)} steps, and {PATIENCE} are allowed.")
        total += sum(waited)
    fcfs, best = (sum(sum(policy_waits(policy, case)) for case in streams().values()) for policy in ("fcfs", aged))
    if total >= fcfs:
        fail(f"Nobody starved, but all together waited {total} steps; first come first served needs {fcfs}.")
    return Score("steps waited", total, best)


def aged(request: Request) -> float:
    """Shortest first, but every later arrival counts as a bit longer."""
    return request.num_prompt_tokens + 0.6 * request.arrival_order


Missing = Mapping[str, int]


def judge_next_step(fn: Callable) -> None:
    for case, (arrivals, budget, max_num_seqs) in LOADS.items():
        _drive(fn, case, arrivals, budget, max_num_seqs)


LOADS = {  # (step, name, prompt tokens, answer tokens)
    "a new prompt at every step beside a running request":
        ([(0, "victim", 4, 40), *((step, f"new {step}", 40, 1) for step in range(1, 30))], 64, 8),
    "a prompt of 200 tokens with a budget of 64": ([(0, "long", 200, 3), (0, "behind", 5, 3)], 64, 4),
    "several long prompts": ([(0, name, 50, 3) for name in "abcd"], 8, 4),
    "a long prompt that ranks before those that run":
        ([(0, "b", 2, 20), (0, "c", 2, 20), (1, "a", 40, 2)], 8, 4),
    "more requests than rows": ([(0, name, 3, 9) for name in "abcdefgh"], 32, 3),
    "a short prompt behind a long one": ([(0, "a", 2, 20), (1, "long", 30, 2), (1, "short", 2, 2)], 8, 3),
}


def _drive(fn: Callable, case: str, arrivals: Sequence[tuple], budget: int, max_num_seqs: int) -> None:
    """Let the reader's function decide until everybody is done, and look at each of its decisions."""
    where, running, waiting, answer = f"Case {case!r}:", {}, {}, {}
    steps = 2 * sum(prompt // budget + 1 + length for _, _, prompt, length in arrivals) + len(arrivals)
    for step in range(steps):
        for _, name, prompt, length in (each for each in arrivals if each[0] == step):
            waiting[name], answer[name] = prompt, length
        if not running and not waiting:
            continue
        running = dict(sorted(running.items()))  # the policy's order is not that of admission
        got = call(fn, dict(running), dict(waiting), budget, max_num_seqs, case=where)
        _judge_step(f"{where} in step {step},", got, running, waiting, budget, max_num_seqs)
        for name, tokens in got.items():
            running[name] = running.get(name, 0) or waiting.pop(name)
            running[name] -= tokens
            if not running[name]:  # it has caught up: a token is sampled, and must be run in turn
                running[name], answer[name] = 1, answer[name] - 1
            if not answer[name]:
                del running[name]


def _judge_step(where: str, got: object, running: Missing, waiting: Missing, budget: int, rows: int) -> None:
    everybody = {**running, **waiting}
    if not isinstance(got, dict) or not all(type(tokens) is int and tokens > 0 for tokens in got.values()):
        fail(f"{where} your function returned {got!r}; expected a dict of names and counts above 0.")
    for name, tokens in got.items():
        if tokens > everybody.get(name, 0):
            fail(f"{where} {name!r} was given {tokens} tokens and misses {everybody.get(name, 0)}.")
    if idle := [name for name in running if name not in got]:
        fail(f"{where} the running request {idle[0]!r} gets no token.")
    if sum(got.values()) > budget:
        fail(f"{where} {sum(got.values())} tokens were given, over the budget of {budget}.")
    if len(got) > rows:
        fail(f"{where} {len(got)} requests run; max_num_seqs is {rows}.")
    admitted = [name for name in got if name in waiting]
    if admitted != list(waiting)[: len(admitted)]:
        fail(f"{where} {admitted} came in before {list(waiting)[0]!r}, which was first.")
    could = sum(running.values()) + sum(list(waiting.values())[: rows - len(running)])
    if sum(got.values()) < min(budget, could):
        fail(f"{where} only {sum(got.values())} tokens run; {min(budget, could)} could, within the budget of {budget}.")


CHECKS = {"07.1": Check(judge_waits), "07.2": Check(judge_policy), "07.b": Check(judge_next_step)}


# Quiz


def idle_of_six() -> int:
    """Static batches of three rows: idle steps of a row."""
    batches = [(9, 2, 4), (5, 5, 1)]
    return sum(max(batch) * len(batch) - sum(batch) for batch in batches)


def tokens_of_a_prompt() -> int:
    """Two requests decode, a prompt of 40 arrives, and a step has 16 tokens."""
    scheduler = Scheduler(RowAllocator(4, 64), 4, 16)
    steps = run_steps(scheduler, [(0, make_request("A", 3, 9)), (0, make_request("B", 4, 9)),
                                  (1, make_request("C", 40, 2))])
    next(steps)
    return next(steps).steps[1].scheduled["C"]


def who_gives_way() -> str:
    """A holds the most, B asks, C came last and has just begun, D waits."""
    scheduler = Scheduler(SlotAllocator(30), 3, 30)
    arrivals = [(0, make_request("A", 12, 9)), (0, make_request("B", 8, 9)), (3, make_request("C", 2, 9)),
                (3, make_request("D", 9, 2))]
    preempted = [name for record in last(run_steps(scheduler, arrivals)).steps for name in record.preempted]
    return preempted[0]


QUIZ = [
    Question(
        "Static batching with three rows. The answers have 9, 2, 4 and then 5, 5, 1 tokens, one token a step. "
        "For how many row-steps is a row idle?",
        {
            "4": "Those of the second batch. In the first one two rows wait for the answer of 9 tokens.",
            "12": "Those of the first batch. In the second one a row waits four steps.",
            "16": "The batches take 9 and 5 steps, that is 42 row-steps, and 26 tokens are made in them.",
            "26": "That many row-steps are used: one for each token.",
        },
        compute=idle_of_six,
    ),
    Question(
        "Two requests decode. A prompt of 40 tokens arrives, and a step has a budget of 16 tokens. How many "
        "tokens of the prompt run in the next step?",
        {
            "0": "A prompt larger than the budget would then never run. It is cut into chunks.",
            "14": "The two that run come first and take one token each. The prompt gets what is left.",
            "16": "Then the two running requests would stand still for as long as prompts keep coming.",
            "40": "The budget is there so that no step gets that long.",
        },
        compute=tokens_of_a_prompt,
    ),
    Question(
        "First come first served, and the cache is full. A came first and holds the most, B comes next and "
        "asks for a slot, C came last and has just begun, D has not run yet. Who loses its slots?",
        {
            "A": "It holds the most, but it came first. If the first can be thrown out, nobody is sure to finish.",
            "B": "The one who asks gives way only if nobody comes after it in the order.",
            "C": "The last in the order gives way. It has the least right to its place, and comes back before "
                 "anybody newer.",
            "D": "It waits, so it holds nothing that could be taken.",
        },
        compute=who_gives_way,
    ),
]
