"""Chapter 08's simulator: the real engine on the real model, one step at a time, with its rows and slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shared.engine import Engine
from shared.errors import InvalidRequestError
from shared.lab import Choice, Field, Slider, Stepper, Switch
from shared.lab.form import lines_of, whole
from shared.lab.markup import Html, bar, join, note, strong, table, tag, tokens
from shared.lab.views import reasons_table, timeline
from shared.sampling_params import SamplingParams
from shared.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from shared.trace import StepRecord

CONTINUOUS, STATIC = "as soon as a row is free", "when all rows are free (static)"
QUESTIONS = "0 6 Name a fruit.\n0 3 Is fire hot?\n1 5 What is the capital of France?\n2 4 Say hello."


class StaticBatches(Scheduler):
    """Nobody gets in until all have left."""

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        if not self.running:
            super()._schedule_waiting(output, budget)


@dataclass(frozen=True)
class Arrival:
    """One line of the reader's trace."""

    name: str
    step: int
    max_tokens: int
    question: str


@dataclass(frozen=True)
class Piece:
    """Tokens of one request in one run of the model, and the row that it owns."""

    name: str
    row: int
    start: int
    total: int
    num_prompt_tokens: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def decodes(self) -> bool:
        return self.start >= self.num_prompt_tokens


@dataclass(frozen=True)
class Moment:
    """What the reader sees after a step."""

    arrivals: Sequence[Arrival]
    rows: int
    row_slots: int
    budget: int
    pieces: Sequence[Piece] = ()
    records: Sequence[StepRecord] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    token_text: Callable[[int], str] = str


class Recorder:
    """Stands before a runner and keeps what the last run was made of."""

    def __init__(self, runner: Any):
        self.runner, self.pieces = runner, []

    def execute(self, scheduled: Sequence[ScheduledRequest], block_size: int) -> Tensor:
        self.pieces = [piece_of(item) for item in scheduled]
        return self.runner.execute(scheduled, block_size)


def piece_of(item: ScheduledRequest) -> Piece:
    request = item.request
    token_ids = request.all_token_ids[item.start : item.start + item.num_tokens]
    return Piece(request.request_id, request.block_table[0], item.start, item.total,
                 request.num_prompt_tokens, token_ids)


def parse_arrival(line: str) -> tuple[int, int, str]:
    """`1 5 Is fire hot?`: step of arrival, tokens of the answer at most, question."""
    words = line.split(maxsplit=2)
    if len(words) < 3:
        raise ValueError("write the step of arrival, the most tokens of the answer, and a question")
    return whole(0, 40)(words[0]), whole(1, 24)(words[1]), words[2][:400]


def parse_arrivals(text: str) -> list[Arrival]:
    parsed = enumerate(lines_of(parse_arrival, at_most=8)(text))
    return sorted((Arrival("ABCDEFGH"[i], *words) for i, words in parsed), key=lambda each: each.step)


def engine_stepper(make_engine: Callable[..., Engine]) -> Stepper:
    """Steps the notebook's own engine on the reader's questions.

    `make_engine(rows, row_slots, budget, chunked, static)` builds one whose allocator hands out rows.
    """
    fields = [
        Field("arrivals", "Questions", QUESTIONS, parse_arrivals, rows=5,
              help="One a line: step of arrival, most tokens of the answer, question. The first is A, the next B."),
        Field("rows", "Rows", "2", whole(1, 8)),
        Field("budget", "Tokens a step", "48", whole(1, 256)),
        Field("row_slots", "Slots of a row", "64", whole(8, 512)),
        Choice("admission", "A request gets in", CONTINUOUS, (CONTINUOUS, STATIC)),
        Switch("chunked", "Prompts may be cut", True),
        Slider("temperature", "Temperature", 0.0, 0.0, 2.0, 0.1, help="Above 0 the tokens are drawn with the seed."),
    ]  # fmt: skip

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[Moment]:
        sizes = {name: inputs[name] for name in ("rows", "row_slots", "budget")}
        if sizes["budget"] < sizes["rows"]:
            raise ValueError(f"Tokens a step: {sizes['budget']} is too few for {sizes['rows']} rows, since each "
                             "request that runs needs one")
        engine = make_engine(**sizes, chunked=inputs["chunked"], static=inputs["admission"] == STATIC)
        prompts = []
        for index, each in enumerate(inputs["arrivals"]):
            ids = engine.tokenizer.encode_chat([{"role": "user", "content": each.question}])
            params = SamplingParams(temperature=inputs["temperature"], max_tokens=each.max_tokens, seed=seed + index)
            try:
                engine.inputs.process(each.name, ids, params, 0, "")
            except InvalidRequestError as refused:
                raise ValueError(f"{each.name} would be refused: {refused}") from refused
            prompts.append((each, ids, params))
        return moments(engine, prompts, sizes)

    return Stepper(make, render_moment, fields, title="The engine, step by step", max_steps=120)


def moments(engine: Engine, prompts: Sequence[tuple], sizes: Mapping[str, int]) -> Iterator[Moment]:
    """Step until all are answered."""
    engine.runner = recorder = Recorder(engine.runner)
    arrivals, texts = [each for each, _, _ in prompts], {}
    shown = {"token_text": engine.tokenizer.token_text, **sizes}
    yield Moment(arrivals, **shown)
    coming = deque(prompts)
    while coming or engine.has_unfinished_requests():
        while coming and coming[0][0].step <= len(engine.trace.steps):
            each, ids, params = coming.popleft()
            engine.add_request(each.name, ids, params)
        recorder.pieces = []
        for output in engine.step():
            texts[output.request_id] = output.outputs[0].text
        yield Moment(arrivals, pieces=recorder.pieces, records=list(engine.trace.steps), texts=dict(texts), **shown)


# Drawing


def render_moment(moment: Moment, index: int) -> Html:
    """What ran in words, who owns which row, the run token by token, the timeline, who waits and why."""
    names = [each.name for each in moment.arrivals]
    questions = join([f"{each.name} (step {each.step}, at most {each.max_tokens}): {each.question}"
                      for each in moment.arrivals], " · ")
    if not moment.records:
        return join([tag("div", strong("Nothing has run yet."), role="status"), note(questions)])
    record = moment.records[-1]
    return join([
        tag("div", strong(summary(moment)), role="status"), row_table(moment), flat_run(moment),
        timeline(moment.records, names, lit=record.step), reasons_table(record), answers(moment), note(questions),
    ])  # fmt: skip


def summary(moment: Moment) -> str:
    record, pieces = moment.records[-1], moment.pieces
    decoding = sum(piece.decodes for piece in pieces)
    return (f"Engine step {record.step}: {'one run' if pieces else 'no run'} of the model, {record.num_batched_tokens} "
            f"of {moment.budget} tokens. Prefill: {len(pieces) - decoding}, decode: {decoding}, waiting: "
            f"{len(record.waiting)}, new tokens: {len(record.new_tokens)}; "
            f"{moment.rows - len(pieces)} of {moment.rows} rows idle.")


def row_table(moment: Moment) -> Html:
    """A line for each row of the cache: its owner, what ran, where it went, what came out."""
    owners = {piece.row: piece for piece in moment.pieces}
    headers = ["row", "request", "ran", "slots", "place in the run", "scores", "new token", "slots in use"]
    return table(headers, [_row(moment, row, owners.get(row)) for row in range(moment.rows)])


def _row(moment: Moment, row: int, piece: Piece | None) -> list[object]:
    if piece is None:
        return [row, "idle", *["–"] * 5, bar(0, f"0 of {moment.row_slots}", 80)]
    start = sum(len(each.token_ids) for each in moment.pieces[: moment.pieces.index(piece)])
    first, count = row * moment.row_slots + piece.start, len(piece.token_ids)
    sampling = [each.name for each in moment.pieces if each.end == each.total]
    scores = f"row {sampling.index(piece.name)}" if piece.name in sampling else "none, prompt not complete"
    token = moment.records[-1].new_tokens.get(piece.name)
    ended = moment.records[-1].finished.get(piece.name)
    new = "–" if token is None else repr(moment.token_text(token)) + (f", ends: {ended}" if ended else "")
    return [row, piece.name, f"tokens {piece.start} to {piece.end - 1} of {piece.total}",
            f"{first} to {first + count - 1}", f"{start} to {start + count - 1}", scores, new,
            bar(piece.end / moment.row_slots, f"{piece.end} of {moment.row_slots}", 80)]


def flat_run(moment: Moment) -> Html:
    """The tokens as the model got them, each with its slot below."""
    texts, slots, lit = [], [], []
    for number, piece in enumerate(moment.pieces):
        places = range(len(texts), len(texts) + len(piece.token_ids))
        lit += places if number % 2 else []
        texts += [moment.token_text(token_id) for token_id in piece.token_ids]
        slots += [piece.row * moment.row_slots + position for position in range(piece.start, piece.end)]
    owners = ", ".join(f"{piece.name} {len(piece.token_ids)}" for piece in moment.pieces)
    words = f"The run, flat: {owners or 'nothing'}. Below each token its slot; every other request is bold."
    return join([note(words), tokens(texts, slots, lit)])


def answers(moment: Moment) -> Html:
    rows = [[name, repr(text)] for name, text in moment.texts.items()]
    return table(["request", "answer so far"], rows) if rows else Html("")
