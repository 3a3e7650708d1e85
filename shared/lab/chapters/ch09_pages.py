"""Chapter 09's simulator: neighbouring slots against blocks, one trace, both under the real scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.allocator import RowAllocator, reserved_blocks
from shared.errors import InvalidRequestError
from shared.lab import Choice, Field, Stepper
from shared.lab.chapters.ch07_steps import DRAWN, WRITTEN, Arrival, make_request, parse_arrivals, run_steps
from shared.lab.form import whole
from shared.lab.markup import LINE, MONO, QUIET, SHADE, TINT, Html, join, note, strong, table, tag
from shared.lab.views import reasons_table
from shared.request import Request
from shared.scheduler import Scheduler
from shared.trace import StepRecord, Trace

COLUMNS = 16  # slots in one line of the drawing
DEFAULT = "A 0 5 3\nB 0 9 2\nC 0 7 8\nD 2 5 8\nE 3 7 6"


class ContiguousAllocator(RowAllocator):
    """Reserve exactly: one run of neighbouring slots, as long as the request will ever be; first fit."""

    def __init__(self, num_slots: int):
        super().__init__(num_slots, max_model_len=1)  # blocks of one slot

    def holes(self) -> list[list[int]]:
        """The free slots in runs of neighbours."""
        runs: list[list[int]] = []
        for slot in sorted(self.free_rows):
            if runs and runs[-1][-1] == slot - 1:
                runs[-1].append(slot)
            else:
                runs.append([slot])
        return runs

    @property
    def num_free_blocks(self) -> int:
        """What one request can get: the longest hole."""
        return max(map(len, self.holes()), default=0)

    def blocks_for(self, num_tokens: int) -> int:
        return num_tokens

    def num_new_blocks(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> int:
        return 0 if request.block_table else request.max_num_tokens

    def allocate_slots(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> bool:
        wanted = self.num_new_blocks(request, num_tokens)
        hole = next((hole for hole in self.holes() if len(hole) >= wanted), [])
        if len(hole) < wanted:
            return False
        request.block_table += hole[:wanted]
        self.free_rows = [slot for slot in self.free_rows if slot not in hole[:wanted]]
        return True


@dataclass(frozen=True)
class Slots:
    """What the slots of the cache are doing after a step; the four counts add up to the cache."""

    held: int = 0  # a token lies in it
    empty: int = 0  # given out, and no token lies in it: internal waste
    scattered: int = 0  # free and enough for the first who waits, but no hole is long enough: external waste
    free: int = 0

    def __add__(self, other: Slots) -> Slots:
        return Slots(self.held + other.held, self.empty + other.empty,
                     self.scattered + other.scattered, self.free + other.free)


def count_slots(scheduler: Scheduler) -> Slots:
    allocator, running = scheduler.allocator, scheduler.running
    given = sum(len(request.block_table) for request in running)
    held = sum(request.num_computed_tokens for request in running)
    unused, stuck = allocator.num_blocks - given, False
    if scheduler.waiting:
        first = scheduler.waiting[0]
        wanted = allocator.num_new_blocks(first, first.num_tokens)
        wanted += reserved_blocks(first, running, allocator, scheduler.max_num_batched_tokens)
        stuck = allocator.num_free_blocks < wanted <= unused
    size = allocator.block_size
    free = unused * size
    return Slots(held, given * size - held, free if stuck else 0, 0 if stuck else free)


# The stepper


@dataclass
class Side:
    """One allocator under one scheduler, and what it has done so far."""

    title: str
    scheduler: Scheduler
    requests: Sequence[Request]
    traces: Iterator[Trace]
    records: Sequence[StepRecord] = ()
    total: Slots = Slots()
    recomputed: int = 0
    events: Sequence[str] = ()
    earlier: dict[int, str] = field(default_factory=dict)  # slot -> who held it last, and has gone

    @property
    def ended(self) -> bool:
        return all(request.finish_reason for request in self.requests)

    def step(self) -> None:
        """One step of the scheduler, and what changed in words; nothing once all requests have ended."""
        before = {request.request_id: (list(request.block_table), request.num_computed_tokens)
                  for request in self.scheduler.running}
        trace = next(self.traces, None)
        if trace is None:
            self.events = ()
            return
        record = trace.steps[-1]
        self.records, self.total = list(trace.steps), self.total + count_slots(self.scheduler)
        self.recomputed += sum(before[name][1] for name in record.preempted)
        again = {name for earlier in self.records[:-1] for name in earlier.admitted}
        self.events = [*_changes(record, before, again, self.earlier), *_scattered(self.scheduler)]
        self.earlier.update((slot, name) for slot, (name, _) in owners(record).items())


def _changes(record: StepRecord, before: Mapping[str, tuple], again: set[str],
             earlier: Mapping[int, str]) -> Iterator[str]:
    """Who lost, gained or gave back memory in this step."""
    for name in record.preempted:
        yield f"{name} loses its blocks; {before[name][1]} tokens will be run again."
    for name in record.admitted:
        slots = (slot for slot, (owner, _) in owners(record).items() if owner == name)
        gone = sorted({earlier[slot] for slot in slots if slot in earlier} - {name})
        place = f" where {' and '.join(gone)} {'was' if len(gone) == 1 else 'were'}" if gone else ""
        yield f"{name} comes back{place} and runs its tokens again." if name in again else f"{name} comes in{place}."
    for name, blocks in record.block_tables.items():
        old = before.get(name, (blocks, 0))[0]
        if name not in record.admitted and len(blocks) > len(old):
            grown = blocks[len(old):]
            yield f"{name} grows by block{'s' * (len(grown) > 1)} {', '.join(map(str, grown))}."
    for name in record.finished:
        yield f"{name} ends and gives its slots back."


def _scattered(scheduler: Scheduler) -> Iterator[str]:
    """Who is refused although enough slots are free, and why."""
    slots = count_slots(scheduler)
    if slots.scattered:
        first, allocator = scheduler.waiting[0], scheduler.allocator
        wanted = allocator.num_new_blocks(first, first.num_tokens)
        yield (f"{first.request_id} is refused: it asks for {wanted} neighbouring slots, {slots.scattered} are free, "
               f"and the longest hole has {allocator.num_free_blocks}.")


def memory_stepper(scheduler: Callable[..., Scheduler], contiguous: Callable[[int], Any],
                   blocks: Callable[[int, int], Any]) -> Stepper:
    """Steps the notebook's own allocators side by side on the reader's trace."""
    fields = [
        Field("arrivals", "Requests", DEFAULT, parse_arrivals, rows=6,
              help="One a line: name, step of arrival, prompt tokens, answer tokens."),
        Choice("source", "Arrivals", WRITTEN, (WRITTEN, DRAWN)),
        Field("slots", "Slots in the cache", "32", whole(4, 96)),
        Field("block_size", "Slots in a block", "4", whole(1, 32)),
        Field("max_num_seqs", "max_num_seqs", "6", whole(1, 12)),
    ]

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[list[Side]]:
        arrivals = inputs["arrivals"] if inputs["source"] == WRITTEN else draw_lengths(seed)
        slots, size, seqs = inputs["slots"], inputs["block_size"], inputs["max_num_seqs"]
        if slots % size:
            raise ValueError(f"{slots} slots are not a whole number of blocks of {size}")
        allocators = {"Neighbours, reserved exactly (blocks of 1)": contiguous(slots),
                      f"Blocks of {size} slots": blocks(slots // size, size)}
        return lockstep([_side(title, scheduler(allocator, seqs, 512), arrivals)
                         for title, allocator in allocators.items()])

    return Stepper(make, render_sides, fields, title="Neighbouring slots and blocks, on the same requests")


def draw_lengths(seed: int, count: int = 7) -> list[Arrival]:
    draw = random.Random(seed)
    steps = sorted(draw.choice([0, 0, 1, 3, 5]) for _ in range(count))
    return [Arrival("ABCDEFG"[i], step, draw.randint(2, 9), draw.randint(2, 10)) for i, step in enumerate(steps)]


def _side(title: str, scheduler: Scheduler, arrivals: Sequence[Arrival]) -> Side:
    coming = [(each.step, make_request(each.name, each.prompt_tokens, each.answer_tokens)) for each in arrivals]
    for _, request in coming:
        try:
            scheduler.check_fits(request.max_num_tokens)
        except InvalidRequestError as refused:
            raise ValueError(f"{request.request_id} would be refused: {refused}") from refused
    return Side(title, scheduler, [request for _, request in coming], run_steps(scheduler, coming))


def lockstep(sides: list[Side]) -> Iterator[list[Side]]:
    """The same sides again and again, one step further each time, until both have ended."""
    yield sides
    while not all(side.ended for side in sides):
        for side in sides:
            side.step()
        yield sides


def render_sides(sides: Sequence[Side], index: int) -> Html:
    """Both caches slot by slot, what changed, the reasons, and the slot-steps so far."""
    drawn = [tag("section", _render_side(side), "flex:1 1 27em;min-width:0;overflow-x:auto") for side in sides]
    return join([tag("div", join(drawn), "display:flex;flex-wrap:wrap;gap:20px;align-items:flex-start"),
                 _totals(sides)])


def _render_side(side: Side) -> Html:
    record = side.records[-1] if side.records else None
    allocator = side.scheduler.allocator
    num_slots = allocator.num_blocks * allocator.block_size
    words = "Nothing has run yet." if record is None else f"Engine step {record.step}. " + " ".join(side.events)
    if side.ended:
        words = f"All requests ended in engine step {record.step}."
    slots = count_slots(side.scheduler)
    counts = (f"{slots.held} slots hold a token, {slots.empty} are given out and empty, "
              f"{slots.scattered + slots.free} are free.")
    reasons = reasons_table(record) if record and not side.ended else ""
    return join([strong(side.title), tag("div", words, role="status"),
                 slot_map(owners(record), num_slots, allocator.block_size), note(counts), _tables(record), reasons])


def owners(record: StepRecord | None) -> dict[int, tuple[str, bool]]:
    """Slot -> the request that holds it, and whether a token lies in it."""
    found: dict[int, tuple[str, bool]] = {}
    for name, blocks in (record.block_tables if record else {}).items():
        size = record.block_size
        slots = [block * size + offset for block in blocks for offset in range(size)]
        found.update({slot: (name, i < record.computed[name]) for i, slot in enumerate(slots)})
    return found


def slot_map(held: Mapping[int, tuple[str, bool]], num_slots: int, block_size: int) -> Html:
    """Every slot of the cache: "A" a token of A, "(A)" A's but empty, "·" free; a thick line begins a block."""
    lines = []
    for first in range(0, num_slots, COLUMNS):
        cells = [_slot(held.get(slot), block_size > 1 and slot % block_size == 0)
                 for slot in range(first, min(first + COLUMNS, num_slots))]
        lines.append(tag("tr", join([tag("th", first, f"{QUIET};font-weight:400;padding:0 4px", scope="row"), *cells])))
    return tag("table", join(lines), "border-collapse:collapse;margin:4px 0;font-size:11px")


def _slot(held: tuple[str, bool] | None, begins: bool) -> Html:
    name, full = held or ("·", False)
    look = f"background:{TINT};font-weight:700" if full else f"background:{SHADE if held else 'none'};{QUIET}"
    left = f"border-left:3px solid {LINE}" if begins else ""
    style = f"border:1px solid {LINE};{left};text-align:center;font-family:{MONO};min-width:20px;padding:1px 0;{look}"
    return tag("td", name if full or not held else f"({name})", style)


def _tables(record: StepRecord | None) -> Html:
    """The block tables, where blocks have more than one slot."""
    if record is None or record.block_size == 1 or not record.block_tables:
        return Html("")
    rows = [[name, " ".join(map(str, blocks)), record.computed[name], _place(blocks, record, name)]
            for name, blocks in record.block_tables.items()]
    return table(["request", "block table", "tokens", "slot of its last token"], rows)


def _place(blocks: Sequence[int], record: StepRecord, name: str) -> str:
    size, last = record.block_size, record.computed[name] - 1
    block = blocks[last // size]
    return f"{block} · {size} + {last % size} = {block * size + last % size}"


def _totals(sides: Sequence[Side]) -> Html:
    rows = [[side.title, len(side.records), side.total.held, side.total.empty, side.total.scattered,
             side.total.free, side.recomputed] for side in sides]
    headers = ["slot-steps so far", "steps", "with a token", "given out, empty", "free, too scattered", "other free",
               "tokens to run again"]
    legend = note("A: a token of A · (A): A's, and empty · dot: free. Thick lines begin a block.")
    return join([legend, table(headers, rows)])


