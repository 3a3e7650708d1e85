"""Chapter 11's simulator: one layer on several ranks, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.lab import Choice, Field, Stepper
from shared.lab.chapters.ch11_ranks import SHAPES
from shared.lab.form import whole
from shared.lab.markup import Html, bar, join, note, strong, table, tag
from shared.model import ModelConfig

ITEMSIZES = {"float32": 4, "bfloat16": 2}
WHOLE, PART, PARTIAL = "whole", "a part", "a summand"


@dataclass(frozen=True)
class Operation:
    """One operation of a layer. `width` says how wide a rank's result is, `weights` how many it reads."""

    name: str
    words: str
    holds: str
    width: Callable[[Any], int]
    weights: Callable[[Any], int]
    reduces: bool = False


def _hidden(shard: Any) -> int:
    return shard.full.hidden_size


def _heads(shard: Any) -> int:
    return len(shard.heads) * shard.full.head_dim


def _qkv(shard: Any) -> int:
    return (len(shard.heads) + 2 * len(shard.kv_heads)) * shard.full.head_dim


def _columns(shard: Any) -> int:
    return len(shard.columns)


def _none(shard: Any) -> int:
    return 0


OPERATIONS = (
    Operation("input", "Every rank has the same hidden states.", WHOLE, _hidden, _none),
    Operation("norm", "Every rank does the same work: a row's norm needs the whole row.", WHOLE, _hidden, _hidden),
    Operation("q, k, v", "Each rank makes the queries, keys and values of its own heads.", PART, _qkv,
              lambda shard: _qkv(shard) * _hidden(shard)),
    Operation("attention", "Heads do not look at each other, so nothing is sent. Keys and values go to the "
              "rank's own cache.", PART, _heads, _none),
    Operation("o_proj", "Each rank multiplies its heads with its columns of the weight: summands of every "
              "output.", PARTIAL, _hidden, lambda shard: _heads(shard) * _hidden(shard)),
    Operation("all-reduce", "The first sum: after it every rank has the attention's whole output.", WHOLE,
              _hidden, _none, reduces=True),
    Operation("add, norm", "Every rank adds the same numbers and does the same norm.", WHOLE, _hidden, _hidden),
    Operation("gate, up", "Each rank makes its own columns of the MLP.", PART, lambda shard: 2 * _columns(shard),
              lambda shard: 2 * _columns(shard) * _hidden(shard)),
    Operation("silu · up", "Number by number, so every column stays where it is.", PART, _columns, _none),
    Operation("down_proj", "Summands again: each rank knows what its columns add to every output.", PARTIAL,
              _hidden, lambda shard: _columns(shard) * _hidden(shard)),
    Operation("all-reduce", "The second sum, and the last of the layer.", WHOLE, _hidden, _none, reduces=True),
    Operation("add", "The next layer begins with the same hidden states on every rank.", WHOLE, _hidden, _none),
)


@dataclass(frozen=True)
class Place:
    """Where the layer is: the shards of all ranks, and the operations done so far."""

    shards: Sequence[Any]
    done: int
    tokens: int
    itemsize: int

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.done]


def layer_stepper(shard_of: Callable[[ModelConfig, int, int], Any]) -> Stepper:
    """Steps one layer through the notebook's own `Shard.of`."""
    fields = [
        Choice("model", "Model", "SmolLM2-135M", tuple(SHAPES)),
        Field("ranks", "Ranks", "2", whole(1, 16), help="Try 3, 4 and 6 with this model, and 4 with Qwen2.5."),
        Field("tokens", "Tokens in the step", "5", whole(1, 8192)),
        Choice("dtype", "Numbers", "float32", tuple(ITEMSIZES)),
    ]

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[Place]:
        config, size = SHAPES[inputs["model"]], inputs["ranks"]
        shards = [shard_of(config, rank, size) for rank in range(size)]
        return (Place(shards, i, inputs["tokens"], ITEMSIZES[inputs["dtype"]]) for i in range(len(OPERATIONS)))

    return Stepper(make, render_place, fields, seed=None, title="One layer on several ranks")


def render_place(place: Place, index: int) -> Html:
    """What every rank holds after this operation, the weights it has read and the bytes it has handed over."""
    operation, done = place.operation, OPERATIONS[: place.done + 1]
    full, size = place.shards[0].full, len(place.shards)
    widest = max(2 * full.intermediate_size, 3 * full.hidden_size)
    rows = [_row(place, shard, done, widest) for shard in place.shards]
    headers = ["rank", "query heads", "kv heads", "holds", "shape", "width", "weights read so far"]
    sums = sum(each.reduces for each in done)
    sent = sums * place.tokens * full.hidden_size * place.itemsize if size > 1 else 0
    read = [sum(each.weights(shard) for each in done) for shard in place.shards]
    return join([
        tag("div", join([strong(f"{operation.name}. "), operation.words]), role="status"),
        table(headers, rows), _line(size, sums, sent, place.itemsize * max(read)), _copies(place.shards),
    ])


def _row(place: Place, shard: Any, done: Sequence[Operation], widest: int) -> list[object]:
    operation, width = place.operation, place.operation.width(shard)
    mark = {WHOLE: "= whole", PART: "/ part", PARTIAL: "+ summand"}[operation.holds]
    read = sum(each.weights(shard) for each in done)
    return [shard.rank, _span(shard.heads), _span(shard.kv_heads), mark, f"[{place.tokens}, {width}]",
            bar(width / widest, "", width=120), f"{read:,}"]


def _span(part: range) -> str:
    return str(part.start) if len(part) == 1 else f"{part.start} to {part.stop - 1}"


def _line(size: int, sums: int, sent: int, read: int) -> Html:
    if size == 1:
        return note("One rank: it holds everything and sends nothing.")
    return note(f"So far in this layer: {sums} of 2 all-reduces, {sent:,} bytes handed over by each rank; "
                f"the rank with most to do has read {read:,} bytes of weights.")


def _copies(shards: Sequence[Any]) -> Html:
    """A sentence where ranks are unequal or keep the same key-value head."""
    kept, there = sum(len(shard.kv_heads) for shard in shards), shards[0].full.num_key_value_heads
    sizes = sorted({len(shard.heads) for shard in shards})
    words = []
    if kept > there:
        words.append(f"Fewer key-value heads than ranks: {there} heads are kept {kept} times.")
    if len(sizes) > 1:
        words.append(f"The heads do not divide evenly: ranks have {sizes[0]} to {sizes[-1]} of them, and all "
                     "wait for the one with the most.")
    return note(" ".join(words)) if words else Html("")
