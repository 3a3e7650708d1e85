"""Chapter 07's simulator: a scheduler on simulated execution, one step at a time, with its reasons."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.allocator import RowAllocator
from shared.errors import InvalidRequestError
from shared.lab import Choice, Field, Stepper, Switch
from shared.lab.form import lines_of, whole
from shared.lab.markup import CELL, LINE, MONO, QUIET, SHADE, TINT, Html, join, note, strong, table, tag
from shared.lab.views import reasons_table, timeline
from shared.request import Request
from shared.sampling_params import SamplingParams
from shared.scheduler import ScheduledRequest, Scheduler
from shared.trace import StepRecord, Trace

Arrivals = Iterable[tuple[int, Request]]
ROW_SLOTS = 256  # slots of one row in the simulator
WRITTEN, DRAWN = "as written", "drawn with the seed"


def make_request(name: str, prompt_tokens: int, answer_tokens: int, priority: int = 0) -> Request:
    """A request of known lengths: only the lengths matter to a scheduler."""
    params = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
    return Request(name, [7] * prompt_tokens, params, answer_tokens, priority=priority)


def pretend(item: ScheduledRequest) -> int:
    """Stands in for the model: always the same token."""
    return 7


def run_steps(scheduler: Scheduler, arrivals: Arrivals,
              execute: Callable[[ScheduledRequest], int] = pretend) -> Iterator[Trace]:
    """Feed (step, request) pairs, in order, to the scheduler and step until all are done."""
    trace, coming = Trace(), deque(arrivals)
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][0] <= len(trace.steps):
            scheduler.add(coming.popleft()[1])
        output = scheduler.schedule()
        tokens = {item.request: execute(item) for item in output.scheduled}
        scheduler.update(output)
        sampled = {item.request: tokens[item.request] for item in output.scheduled if item.samples}
        for request, token in sampled.items():
            if reason := request.append(token):
                scheduler.finish(request, reason)
        scheduler.check()
        new_tokens = {request.request_id: token for request, token in sampled.items()}
        trace.record(scheduler, output, new_tokens, list(sampled), 0.0)
        yield trace


def last(traces: Iterable[Trace]) -> Trace:
    """The trace of a whole run."""
    *_, trace = traces
    return trace


def first_steps(records: Sequence[StepRecord]) -> dict[str, int]:
    """The step in which each request ran first."""
    first: dict[str, int] = {}
    for record in records:
        for name in record.scheduled:
            first.setdefault(name, record.step)
    return first


class SlotAllocator(RowAllocator):
    """Slots one by one, as tokens come: nothing is reserved, so the cache can run out."""

    def __init__(self, num_slots: int):
        super().__init__(num_slots, 1)

    def blocks_for(self, num_tokens: int) -> int:
        return num_tokens

    def num_new_blocks(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> int:
        return max(0, num_tokens - len(request.block_table))

    def allocate_slots(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> bool:
        wanted = self.num_new_blocks(request, num_tokens)
        if wanted > self.num_free_blocks:
            return False
        request.block_table += [self.free_rows.pop(0) for _ in range(wanted)]
        return True


# Who held which row


def row_grid(records: Sequence[StepRecord], rows: int) -> list[list[str]]:
    """For each row the request that ran in it at each step, "" if none; rows are handed out lowest first."""
    grid: list[list[str]] = [[] for _ in range(rows)]
    held: dict[str, int] = {}
    for record in records:
        for name in record.preempted:
            held.pop(name, None)
        for name in record.admitted:
            held[name] = min(set(range(rows)) - set(held.values()))
        for row in range(rows):
            names = [name for name in record.scheduled if held[name] == row]
            grid[row].append(names[0] if names else "")
        for name in record.finished:
            held.pop(name, None)
    return grid


def idle_steps(records: Sequence[StepRecord], rows: int) -> int:
    """Row-steps in which nothing ran."""
    return sum(rows - len(record.scheduled) for record in records)


def gantt(grid: Sequence[Sequence[str]], title: str) -> Html:
    """Rows against steps: the name of who ran, a dot where nobody did."""
    head = join(tag("th", step, f"padding:0 2px;font-weight:400;min-width:22px;{QUIET}", scope="col")
                for step in range(len(grid[0])))
    name = f"{CELL};border:0;font-weight:600;white-space:nowrap"
    lines = [tag("tr", join([tag("th", "step", name), head]))]
    for row, cells in enumerate(grid):
        squares = [_square(cell) for cell in cells]
        lines.append(tag("tr", join([tag("th", f"row {row}", name, scope="row"), *squares])))
    drawn = tag("table", join(lines), "border-collapse:collapse;margin:2px 0 8px;font-size:12px")
    idle = sum(not cell for row in grid for cell in row)
    total = len(grid) * len(grid[0])
    words = f": {len(grid[0])} steps, {idle} of {total} row-steps idle (·)"
    return tag("div", join([strong(title), words, drawn]), "overflow-x:auto")


def _square(cell: str) -> Html:
    look = f"background:{TINT};font-weight:700" if cell else f"background:{SHADE};{QUIET}"
    return tag("td", cell or "·", f"border:1px solid {LINE};text-align:center;font-family:{MONO};{look}")


# The stepper


@dataclass(frozen=True)
class Arrival:
    """One line of the reader's trace."""

    name: str
    step: int
    prompt_tokens: int
    answer_tokens: int
    priority: int = 0


@dataclass(frozen=True)
class Moment:
    """The steps so far."""

    arrivals: Sequence[Arrival]
    records: Sequence[StepRecord]
    max_num_seqs: int
    budget: int


def parse_arrival(line: str) -> Arrival:
    """`B 0 20 6` or `B 0 20 6 1`: name, step of arrival, prompt tokens, answer tokens, priority."""
    words = line.split()
    if len(words) not in (4, 5):
        raise ValueError("write a name, then step, prompt tokens, answer tokens and, if you like, priority")
    step, prompt, answer = whole(0, 60)(words[1]), whole(1, 150)(words[2]), whole(1, 40)(words[3])
    return Arrival(words[0][:8], step, prompt, answer, whole(0, 9)(words[4]) if len(words) == 5 else 0)


def arrivals_of(parse_line: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser for one arrival a line, with `step` and a `name` of its own each; in the order of their steps."""
    def parse(text: str) -> list[Any]:
        arrivals = sorted(lines_of(parse_line)(text), key=lambda each: each.step)
        names = [each.name for each in arrivals]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two requests are called {twice!r}")
        return arrivals
    return parse


parse_arrivals = arrivals_of(parse_arrival)


def draw_arrivals(seed: int, count: int = 8) -> list[Arrival]:
    draw = random.Random(seed)
    steps = sorted(draw.randint(0, 10) for _ in range(count))
    return [Arrival("ABCDEFGH"[i], step, draw.choice([2, 4, 8, 30]), draw.randint(1, 9), draw.randint(0, 2))
            for i, step in enumerate(steps)]


def schedule_stepper(scheduler: Callable[..., Scheduler], rows: Callable[[int, int], Any],
                     slots: Callable[[int], Any], run: Callable[..., Iterator[Trace]]) -> Stepper:
    """Steps the notebook's own scheduler, allocators and loop on the reader's trace of arrivals."""
    fields = [
        Field("arrivals", "Requests", "A 0 4 10\nB 0 6 3\nC 1 30 4\nD 2 3 5\nE 3 2 2", parse_arrivals, rows=6,
              help="One a line: name, step of arrival, prompt tokens, answer tokens, priority (may be left out)."),
        Choice("source", "Arrivals", WRITTEN, (WRITTEN, DRAWN)),
        Field("max_num_seqs", "max_num_seqs", "3", whole(1, 12)),
        Field("budget", "Tokens a step", "12", whole(1, 256)),
        Choice("policy", "Policy", "fcfs", ("fcfs", "priority", "shortest_first")),
        Field("slots", "Slots in the cache", "0", whole(0, 1000),
              help="0: a whole row for each request. Otherwise slots are handed out one by one; try 30."),
        Switch("chunked", "Prompts may be cut", True),
    ]

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[Moment]:
        arrivals = inputs["arrivals"] if inputs["source"] == WRITTEN else draw_arrivals(seed)
        seqs, budget = inputs["max_num_seqs"], inputs["budget"]
        allocator = slots(inputs["slots"]) if inputs["slots"] else rows(seqs, ROW_SLOTS)
        made = scheduler(allocator, seqs, budget, inputs["chunked"], inputs["policy"])
        requests = [(each.step, make_request(each.name, each.prompt_tokens, each.answer_tokens, each.priority))
                    for each in arrivals]
        for _, request in requests:
            try:
                made.check_fits(request.max_num_tokens)
            except InvalidRequestError as wrong:
                raise ValueError(f"{request.request_id}: {wrong}") from wrong
        return moments(arrivals, run(made, requests), seqs, budget)

    return Stepper(make, render_moment, fields, title="A scheduler, and why it decides as it does")


def moments(arrivals: Sequence[Arrival], traces: Iterable[Trace], seqs: int, budget: int) -> Iterator[Moment]:
    yield Moment(arrivals, [], seqs, budget)
    for trace in traces:
        yield Moment(arrivals, list(trace.steps), seqs, budget)


def render_moment(moment: Moment, index: int) -> Html:
    """The last decision in words, the timeline so far, the reasons, and the steps waited."""
    names = [each.name for each in moment.arrivals]
    if not moment.records:
        return join([tag("div", strong("Nothing has been decided yet."), role="status"), _waits(moment)])
    record = moment.records[-1]
    busy, tokens = len(record.scheduled), record.num_batched_tokens
    idle = idle_steps(moment.records, moment.max_num_seqs)
    words = (f"Engine step {record.step}: {tokens} of {moment.budget} tokens, "
             f"{busy} of {moment.max_num_seqs} rows busy. Idle row-steps so far: {idle}.")
    return join([tag("div", strong(words), role="status"),
                 timeline(moment.records, names, lit=record.step), reasons_table(record), _waits(moment)])


def _waits(moment: Moment) -> Html:
    first = first_steps(moment.records)
    ended = {name: record.step for record in moment.records for name in record.finished}
    rows = [[each.name, each.step, each.prompt_tokens, each.answer_tokens, each.priority,
             *_progress(each, first, ended)] for each in moment.arrivals]
    headers = ["request", "comes", "prompt", "answer", "priority", "first ran", "steps waited", "ended"]
    return join([table(headers, rows), note("Lengths in tokens, times in steps.")])


def _progress(each: Arrival, first: Mapping[str, int], ended: Mapping[str, int]) -> list[object]:
    started = first.get(each.name)
    waited = "–" if started is None else started - each.step
    return ["–" if started is None else started, waited, ended.get(each.name, "–")]
