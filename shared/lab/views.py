"""What an engine did, drawn: pure functions from the step records of `shared.trace` to HTML."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from shared.lab import markup
from shared.lab.markup import ACCENT, CELL, LINE, MONO, SHADE, TINT, Html, join, note, strong, table, tag

LEGEND = ("W waits · P5 prefills 5 tokens (or computes them again) · D decodes one token · "
          "X loses its blocks · – is finished")
LOOKS = {"W": f"background:{SHADE}", "P": f"background:{ACCENT};color:{markup.ON_ACCENT};font-weight:700",
         "D": f"background:{TINT}", "X": f"outline:2px solid {ACCENT};outline-offset:-2px;font-weight:700"}


def step_table(records: Sequence, lit: int | None = None) -> Html:
    """One row a step: what ran, who waits, who came, went or finished, and the free blocks."""
    hits = any(record.cache_hits for record in records)
    headers = ["step", "ran (tokens)", "waiting", "admitted", "preempted", "finished", "free blocks"]
    rows = [_step_row(record, hits) for record in records]
    marked = [i for i, record in enumerate(records) if record.step == lit]
    return table(headers + (["cache hits"] if hits else []), rows, lit=marked)


def reasons_table(record) -> Html:
    """Why each request ran, waited or lost its place in this step."""
    rows = [[name, reason] for name, reason in record.reasons.items()]
    return table(["request", f"step {record.step}"], rows) if rows else note("Nothing to decide here.")


def request_ids(records: Sequence) -> list[str]:
    """Every request of the records, in the order in which they were first seen."""
    seen: dict[str, None] = {}
    for record in records:
        known = [*record.admitted, *record.running, *record.scheduled, *record.finished, *record.preempted]
        seen.update(dict.fromkeys([*known, *record.waiting]))
    return list(seen)


def timeline_cells(records: Sequence, requests: Sequence[str] | None = None) -> dict[str, list[str]]:
    """The letters of the timeline: for each request, one cell a step ("" before it arrived)."""
    requests = request_ids(records) if requests is None else list(requests)
    cells: dict[str, list[str]] = {name: [] for name in requests}
    decoding: set[str] = set()
    finished: set[str] = set()
    for record in records:
        for name in requests:
            cells[name].append(_cell(name, record, decoding, finished))
        decoding |= {name for name in requests if name in record.new_tokens}
        decoding -= set(record.preempted)
        finished |= set(record.finished)
    return cells


def timeline(records: Sequence, requests: Sequence[str] | None = None, lit: int | None = None) -> Html:
    """A Gantt chart: a row for each request, a column for each step, a letter in each cell."""
    cells = timeline_cells(records, requests)
    head = join(_column(record.step, record.step == lit) for record in records)
    rows = [tag("tr", join([_name(name), *(_square(cell) for cell in row)])) for name, row in cells.items()]
    drawn = tag("table", join([tag("tr", join([_name("step"), head])), *rows]),
                "border-collapse:collapse;margin:4px 0;font-size:12px")
    return tag("div", join([drawn, note(LEGEND)]), "overflow-x:auto")


def block_owners(block_tables: Mapping[str, Sequence[int]]) -> dict[int, list[str]]:
    """Which requests hold each block; several share a block of a common prefix."""
    owners: dict[int, list[str]] = {}
    for name, blocks in block_tables.items():
        for block in blocks:
            owners.setdefault(block, []).append(name)
    return owners


def block_fill(record) -> dict[int, int]:
    """Tokens in each block that a request holds, counted from its computed tokens."""
    fill: dict[int, int] = {}
    for name, blocks in record.block_tables.items():
        for index, block in enumerate(blocks):
            tokens = record.computed.get(name, 0) - index * record.block_size
            fill[block] = max(fill.get(block, 0), min(record.block_size, max(0, tokens)))
    return fill


def block_grid(record, cached: Collection[int] = (), lit: Iterable[int] = (), columns: int = 8) -> Html:
    """The pool of blocks: owner and fill of each; `cached` ones are free and can still be hit."""
    owners, fill, lit = block_owners(record.block_tables), block_fill(record), set(lit)
    squares = [_block(block, owners.get(block, []), f"{fill.get(block, 0)}/{record.block_size}",
                      block in cached, block in lit) for block in range(record.num_blocks)]
    rows = [tag("tr", join(squares[i:i + columns])) for i in range(0, len(squares), columns)]
    words = (f"{record.num_free_blocks} of {record.num_blocks} blocks free, {record.block_size} tokens each."
             + (" ◇ free, and its contents can still be hit." if cached else ""))
    grid = tag("table", join(rows), "border-collapse:separate;border-spacing:3px;margin:4px 0;font-size:12px")
    return tag("div", join([grid, note(words)]), "overflow-x:auto")


def _step_row(record, hits: bool) -> list[object]:
    ran = ", ".join(f"{name}: {tokens}" for name, tokens in record.scheduled.items())
    cells: list[object] = [record.step, ran, *(", ".join(names) for names in (
        record.waiting, record.admitted, record.preempted, record.finished))]
    cells.append(f"{record.num_free_blocks} of {record.num_blocks}")
    if hits:
        cells.append(", ".join(f"{name}: {tokens}" for name, tokens in record.cache_hits.items()))
    return cells


def _cell(name: str, record, decoding: set[str], finished: set[str]) -> str:
    if name in record.scheduled:
        return "D" if name in decoding else f"P{record.scheduled[name]}"
    if name in record.preempted:
        return "X"
    if name in finished or name in record.finished:
        return "–"
    return "W" if name in record.waiting or name in record.running else ""


def _name(name: str) -> Html:
    return tag("th", name, f"{CELL};border:0;font-weight:600;white-space:nowrap", scope="row")


def _column(step: int, lit: bool) -> Html:
    style = "padding:0 2px;font-weight:400;min-width:26px;text-align:center"
    return tag("th", strong(f"▾{step}") if lit else step, f"{style};opacity:0.75", scope="col")


def _square(cell: str) -> Html:
    style = f"border:1px solid {LINE};padding:1px 3px;text-align:center;font-family:{MONO}"
    return tag("td", cell, f"{style};{LOOKS.get(cell[:1], 'opacity:0.75')}")


def _block(block: int, owners: Sequence[str], fill: str, cached: bool, lit: bool) -> Html:
    held = join([strong(" + ".join(owners)), f" {fill}"]) if owners else "◇ free" if cached else "free"
    tokens, size = map(int, fill.split("/"))
    share = round(100 * tokens / size) if owners else 0
    ground = f"linear-gradient(to right, {TINT} {share}%, {SHADE if owners else 'transparent'} {share}%)"
    border = f"2px solid {ACCENT}" if lit else f"1px {'solid' if owners or cached else 'dashed'} {LINE}"
    number = tag("div", f"▸ {block}" if lit else block, f"font-size:10px;opacity:0.75;font-family:{MONO}")
    style = f"border:{border};background:{ground};border-radius:3px;padding:2px 7px;min-width:54px"
    return tag("td", join([number, held]), f"{style};text-align:left;white-space:nowrap")
