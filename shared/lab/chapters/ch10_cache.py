"""Chapter 10's simulator: the engine on the reader's prompts, with the names and the users of every block."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequestError
from shared.lab import Choice, Field, Stepper
from shared.lab.chapters.ch07_steps import arrivals_of
from shared.lab.form import whole
from shared.lab.markup import ACCENT, LINE, MONO, QUIET, SHADE, TINT, Html, join, note, strong, table, tag, visible
from shared.request import Request
from shared.sampling_params import SamplingParams

WRITTEN, DRAWN = "as written", "drawn with the seed"
FOX = "The small red fox ran over the hill and saw a bird in the old tree."
DEFAULT = (f"A 0 5 {FOX}\n"
           "B 1 3 The small red fox ran over the hill and slept.\n"
           f"C 0 3 {FOX}\n"
           "D 6 6 On Monday we bake bread, on Tuesday we sell it, on Friday we count the money.\n"
           f"E 13 3 {FOX}\n"
           f"F/secret 14 2 {FOX}")


@dataclass(frozen=True)
class Arrival:
    """One line of the reader's trace."""

    name: str
    salt: str
    step: int
    answer_tokens: int
    prompt: str


def parse_arrival(line: str) -> Arrival:
    """`B/salt 3 5 Once upon a time`: name and salt, step of arrival, answer tokens, prompt."""
    words = line.split(maxsplit=3)
    if len(words) < 4:
        raise ValueError("write a name, a step, a number of answer tokens, and a prompt")
    name, _, salt = words[0].partition("/")
    if not name:
        raise ValueError("write a name before the /")
    return Arrival(name[:8], salt[:12], whole(0, 60)(words[1]), whole(1, 20)(words[2]), words[3][:200])


parse_arrivals = arrivals_of(parse_arrival)


def draw_arrivals(seed: int, count: int = 6) -> list[Arrival]:
    """Prompts of three beginnings and several ends, at random steps."""
    draw = random.Random(seed)
    beginnings = ("The old man and the sea were friends, and", "Once upon a time in a small town",
                  "Dear customer, your order")
    ends = ("it was late in the year.", "nobody knew why.", "everything was ready for the long way home.")
    steps = sorted(draw.randint(0, 16) for _ in range(count))
    return [Arrival("ABCDEFGH"[i], draw.choice(["", "", "", "s"]), step, draw.randint(1, 5),
                    f"{draw.choice(beginnings)} {draw.choice(ends)}") for i, step in enumerate(steps)]


# What a manager does, noted while it does it


@dataclass(frozen=True)
class Event:
    """One thing that the manager did; `kind` is one of KINDS."""

    kind: str
    words: str


KINDS = ("hit", "revived", "miss", "evicted", "published", "copy", "freed")


def short(name: bytes | None) -> str:
    return "no name" if name is None else name.hex()[:4]


def watched(kind: type) -> type:
    """The same manager, noting what it does; `kind` is the notebook's own class."""

    class Watched(kind):
        def __init__(self, num_blocks: int, block_size: int):
            super().__init__(num_blocks, block_size)
            self.events: list[Event] = []
            self.seen: dict[str, Request] = {}
            self.content: dict[int, list[int]] = {}

        def allocate_slots(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> bool:
            admitted, place = not request.block_table, len(self.events)
            allocated = super().allocate_slots(request, num_tokens, computed)
            if allocated and admitted:
                self.seen[request.request_id] = request
                self.events[place:place] = missed(self, request, len(computed))
            return allocated

        def share(self, block: int) -> None:
            users = self.ref_counts[block]
            super().share(block)
            where = f"block {block} ({short(self.hash_of.get(block))})"
            if users:
                self.events.append(Event("hit", f"{where} is in use, and has {self.ref_counts[block]} users now"))
            else:
                self.events.append(Event("revived", f"{where} was free and still held its content; it is in use again"))

        def take(self) -> int:
            names = dict(self.hash_of)
            block = super().take()
            self.content.pop(block, None)
            if block in names:
                words = f"block {block} was free the longest; {short(names[block])} is forgotten"
                self.events.append(Event("evicted", words))
            return block

        def publish(self, block: int, block_hash: bytes) -> None:
            known = block in self.hash_of
            super().publish(block, block_hash)
            if block in self.hash_of and not known:
                self.events.append(Event("published", f"block {block} is full and computed: {short(block_hash)}"))
            elif not known:
                other = self.block_of[block_hash]
                words = f"block {block} holds what block {other} holds, which keeps the name {short(block_hash)}"
                self.events.append(Event("copy", words))

        def cache_blocks(self, request: Request, start: int) -> None:
            for index, block in enumerate(request.block_table):
                ids = request.all_token_ids[index * self.block_size : request.num_computed_tokens]
                self.content[block] = ids[: self.block_size]
            super().cache_blocks(request, start)

        def free(self, request: Request) -> None:
            blocks = ", ".join(str(block) for block in reversed(request.block_table))
            self.events.append(Event("freed", f"{request.request_id} gives back its blocks, the last first: {blocks}"))
            super().free(request)

    return Watched


def missed(manager: Any, request: Request, found: int) -> list[Event]:
    """Where the run of found blocks ended, if a full block before the last token was left to find."""
    num_full = (request.num_tokens - 1) // manager.block_size
    if found >= num_full:
        return []
    name = short(manager.hashes(request, num_full)[found])
    return [Event("miss", f"{request.request_id}'s block {found} would be {name}, and nobody published that; "
                          "what follows is not looked for")]


# The state after a step


@dataclass(frozen=True)
class Slot:
    """One block of the pool; `place` is its place among the free ones, 1 being taken next."""

    block: int
    users: tuple[str, ...]
    ref_count: int
    name: str
    text: str
    place: int | None


@dataclass(frozen=True)
class Chain:
    """A request's blocks in order: text, name, and the block of the pool ("" if it has none)."""

    request: str
    links: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Moment:
    step: int | None
    events: tuple[Event, ...]
    chains: tuple[Chain, ...]
    pool: tuple[Slot, ...]
    rows: tuple[tuple[object, ...], ...]
    computed: int  # tokens run by the model so far
    found: int  # tokens found so far
    evictions: int


def snapshot(engine: Any, arrivals: Sequence[Arrival], decode: Callable[[list[int]], str]) -> Moment:
    manager, records = engine.scheduler.allocator, engine.trace.steps
    chains = tuple(chain_of(manager, request, decode) for request in engine.scheduler.running)
    return Moment(
        records[-1].step if records else None, tuple(manager.events), chains, pool_of(manager, engine, decode),
        tuple(row_of(each, manager.seen.get(each.name), records, decode) for each in arrivals),
        sum(record.num_batched_tokens for record in records),
        sum(sum(record.cache_hits.values()) for record in records),
        sum(len(record.evicted) for record in records),
    )


def chain_of(manager: Any, request: Request, decode: Callable[[list[int]], str]) -> Chain:
    size, links = manager.block_size, []
    for index in range(-(-request.num_tokens // size)):
        ids = request.all_token_ids[index * size : (index + 1) * size]
        name = short(manager.hashes(request, index + 1)[index]) if len(ids) == size else "not full"
        block = str(request.block_table[index]) if index < len(request.block_table) else ""
        links.append((decode(ids), name, block))
    return Chain(request.request_id, tuple(links))


def pool_of(manager: Any, engine: Any, decode: Callable[[list[int]], str]) -> tuple[Slot, ...]:
    places = {block: place for place, block in enumerate(manager.free_blocks, 1)}
    slots = []
    for block in range(manager.num_blocks):
        users = tuple(request.request_id for request in engine.scheduler.running if block in request.block_table)
        name = short(manager.hash_of[block]) if block in manager.hash_of else ""
        text = decode(manager.content.get(block, []))
        slots.append(Slot(block, users, manager.ref_counts[block], name, text, places.get(block)))
    return tuple(slots)


def row_of(each: Arrival, request: Request | None, records: Sequence, decode: Callable) -> tuple[object, ...]:
    if request is None:
        return (each.name, each.salt or "–", each.step, "not yet", "–", "–", "–", "")
    run = sum(record.scheduled.get(each.name, 0) for record in records)
    return (each.name, each.salt or "–", each.step, request.status.value, request.num_prompt_tokens,
            request.num_cached_tokens, run, visible(decode(request.output_token_ids)))


# The stepper


def moments(engine: Any, arrivals: Sequence[Arrival], decode: Callable) -> Iterator[Moment]:
    manager, coming = engine.scheduler.allocator, deque(arrivals)
    yield snapshot(engine, arrivals, decode)
    while coming or engine.has_unfinished_requests():
        manager.events.clear()
        while coming and coming[0].step <= len(engine.trace.steps):
            each = coming.popleft()
            params = SamplingParams(temperature=0, max_tokens=each.answer_tokens, ignore_eos=True)
            engine.add_request(each.name, each.prompt, params, cache_salt=each.salt)
        engine.step()
        yield snapshot(engine, arrivals, decode)


def prefix_stepper(manager: type, build: Callable[[Any, int], Any], tokenizer: Any) -> Stepper:
    """Steps the engine that `build(manager, tokens a step)` makes around the notebook's own manager."""
    fields = [
        Field("arrivals", "Requests", DEFAULT, parse_arrivals, rows=7,
              help="One a line: name (or `name/salt`), step of arrival, answer tokens, prompt."),
        Choice("source", "Arrivals", WRITTEN, (WRITTEN, DRAWN)),
        Field("num_blocks", "Blocks in the pool", "15", whole(1, 64)),
        Field("block_size", "Tokens in a block", "4", whole(1, 16)),
        Field("budget", "Tokens a step", "64", whole(8, 256)),
    ]

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[Moment]:
        arrivals = inputs["arrivals"] if inputs["source"] == WRITTEN else draw_arrivals(seed)
        engine = build(watched(manager)(inputs["num_blocks"], inputs["block_size"]), inputs["budget"])
        for each in arrivals:
            try:
                engine.scheduler.check_fits(len(tokenizer.encode(each.prompt)) + each.answer_tokens)
            except InvalidRequestError as refused:
                raise ValueError(f"{each.name} would be refused: {refused}") from refused
        return moments(engine, arrivals, tokenizer.decode)

    return Stepper(make, render_moment, fields, title="Names, users and evictions, on your own prompts")


def render_moment(moment: Moment, index: int) -> Html:
    """What happened in this step, the chains of the requests that run, the pool, and the requests."""
    head = "Nothing has run yet." if moment.step is None else f"Engine step {moment.step}."
    words = (f"{head} So far {moment.computed} tokens computed, {moment.found} found, "
             f"{moment.evictions} blocks forgotten.")
    headers = ["request", "salt", "comes", "state", "prompt", "found", "computed", "answer"]
    parts = [tag("div", strong(words), role="status"), _events(moment.events), *map(_chain, moment.chains),
             _pool(moment), table(headers, moment.rows)]
    return join(parts)


def _events(events: Sequence[Event]) -> Html:
    if not events:
        return note("The pool did not change hands.")
    return table(["event", "what happened"], [[strong(event.kind), event.words] for event in events])


def _chain(chain: Chain) -> Html:
    boxes = [_link(*link) for link in chain.links]
    row = tag("div", join([strong(f"{chain.request}: "), join(boxes, " → ")]), "margin:4px 0;line-height:2.9")
    return row


def _link(text: str, name: str, block: str) -> Html:
    where = f"block {block}" if block else "no block"
    below = tag("div", f"{name} · {where}", f"font-size:11px;{QUIET}")
    look = f"border:1px solid {LINE}" if name == "not full" else f"border:1px solid {ACCENT};background:{TINT}"
    return tag("span", join([visible(text), below]),
               f"display:inline-block;vertical-align:top;font-family:{MONO};{look};border-radius:3px;"
               "padding:1px 6px;line-height:1.4")


def _pool(moment: Moment, columns: int = 5) -> Html:
    cells = [_slot(slot) for slot in moment.pool]
    rows = [tag("tr", join(cells[i : i + columns])) for i in range(0, len(cells), columns)]
    grid = tag("table", join(rows), "border-collapse:separate;border-spacing:3px;margin:4px 0;font-size:12px")
    free = sum(slot.place is not None for slot in moment.pool)
    words = (f"{free} of {len(moment.pool)} blocks are free. “Free 1” is taken next. A free block with a name (◇) "
             "can still be found.")
    return tag("div", join([grid, note(words)]), "overflow-x:auto")


def _slot(slot: Slot) -> Html:
    if slot.place is None:
        state = join([strong(" + ".join(slot.users)), f" · {slot.ref_count} user{'s' if slot.ref_count > 1 else ''}"])
    else:
        state = f"{'◇ ' if slot.name else ''}free {slot.place}"
    lines = [tag("div", f"block {slot.block} {slot.name}", f"font-size:11px;{QUIET};font-family:{MONO}"),
             tag("div", state), tag("div", visible(slot.text) or "–", f"font-family:{MONO}")]
    ground = TINT if slot.place is None else SHADE if slot.name else "transparent"
    border = f"1px {'dashed' if slot.place else 'solid'} {LINE}"
    return tag("td", join(lines), f"border:{border};background:{ground};border-radius:3px;padding:2px 7px;"
                                  "text-align:left;vertical-align:top;white-space:nowrap")
