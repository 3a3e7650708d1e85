"""Answers to chapter 07's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

import heapq


def starts_before_it_comes(arrivals, lengths, rows):
    free_at, waited = [0] * rows, []
    for arrival, length in zip(arrivals, lengths):
        start = heapq.heappop(free_at)
        heapq.heappush(free_at, start + length)
        waited.append(max(0, start - arrival))
    return waited


def whole_batches(arrivals, lengths, rows):
    waited, start = [], 0
    for first in range(0, len(lengths), rows):
        batch = range(first, min(first + rows, len(lengths)))
        start = max(start, *(arrivals[i] for i in batch), 0)
        waited += [start - arrivals[i] for i in batch]
        start += max(lengths[i] for i in batch)
    return waited


def free_one_step_late(arrivals, lengths, rows):
    free_at, waited = [0] * rows, []
    for arrival, length in zip(arrivals, lengths):
        start = max(arrival, heapq.heappop(free_at))
        heapq.heappush(free_at, start + length + 1)
        waited.append(start - arrival)
    return waited


def one_row_only(arrivals, lengths, rows):
    free_at, waited = 0, []
    for arrival, length in zip(arrivals, lengths):
        start = max(arrival, free_at)
        free_at = start + length
        waited.append(start - arrival)
    return waited


def first_come(request):
    return request.arrival_order


def shortest(request):
    return request.num_prompt_tokens


def longest(request):
    return -request.num_prompt_tokens


def last_come(request):
    return -request.arrival_order


def prompts_first(running, waiting, budget, max_num_seqs):
    scheduled = {}
    for name, missing in waiting.items():
        if not budget or len(running) + len(scheduled) == max_num_seqs:
            break
        scheduled[name] = min(missing, budget)
        budget -= scheduled[name]
    return scheduled or {name: min(missing, budget) for name, missing in running.items()}


def whole_prompts_only(running, waiting, budget, max_num_seqs):
    scheduled = {}
    for index, (name, missing) in enumerate(running.items()):
        scheduled[name] = min(missing, budget - (len(running) - index - 1))
        budget -= scheduled[name]
    for name, missing in waiting.items():
        if missing > budget or len(scheduled) == max_num_seqs:
            break
        scheduled[name] = missing
        budget -= missing
    return scheduled


def nothing_kept_back(running, waiting, budget, max_num_seqs):
    scheduled = {}
    for name, missing in [*running.items(), *waiting.items()]:
        if not budget or len(scheduled) == max_num_seqs:
            break
        scheduled[name] = min(missing, budget)
        budget -= scheduled[name]
    return scheduled


def forgets_max_num_seqs(running, waiting, budget, max_num_seqs):
    scheduled = {}
    for index, (name, missing) in enumerate(running.items()):
        scheduled[name] = min(missing, budget - (len(running) - index - 1))
        budget -= scheduled[name]
    for name, missing in waiting.items():
        if budget:
            scheduled[name] = min(missing, budget)
            budget -= scheduled[name]
    return scheduled


def short_ones_overtake(running, waiting, budget, max_num_seqs):
    return nothing_kept_back(running, dict(sorted(waiting.items(), key=lambda item: item[1])), budget, max_num_seqs)


WRONG_ANSWERS = {
    "07.1": [
        (starts_before_it_comes, "free before the request comes"), (whole_batches, "one answer of two has ended"),
        (free_one_step_late, "one row"), (one_row_only, "a row for everybody"),
    ],
    "07.2": [(first_come, "first come first served needs"), (shortest, "starved"), (longest, "starved"),
             (last_come, "starved")],
    "07.b": [
        (prompts_first, "'victim' gets no token"), (whole_prompts_only, "of 200 tokens"),
        (nothing_kept_back, "'b' gets no token"), (forgets_max_num_seqs, "max_num_seqs is 3"),
        (short_ones_overtake, "came in before"),
    ],
}  # fmt: skip
