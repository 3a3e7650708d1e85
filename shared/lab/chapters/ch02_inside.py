"""Chapter 02's figures: what every stage of one pass takes and gives, and where each head looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shared.lab import Explorer, Field, Slider, Stepper
from shared.lab.form import some_text
from shared.lab.markup import ACCENT, CELL, Html, join, mono, note, strong, table, tag, visible

Shape = tuple[int, ...]
TOO_MANY = 24  # tokens that fit a figure


# One pass, recorded


@dataclass(frozen=True)
class Stage:
    """One part of the model at work. Operations: a product and a sum for each pair of numbers multiplied."""

    name: str
    inputs: tuple[Shape, ...]
    output: Shape
    weight: Shape | None
    operations: int
    bytes_between: int  # of its inputs and its output

    @property
    def layer(self) -> int | None:
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "layers" else None


@dataclass
class Recording:
    """The stages of one pass in order, and each layer's attention weights [heads, T, T] if kept."""

    stages: list[Stage] = field(default_factory=list)
    seen: dict[int, Tensor] = field(default_factory=dict)

    @property
    def operations(self) -> int:
        return sum(stage.operations for stage in self.stages)

    @property
    def attention_operations(self) -> int:
        return sum(stage.operations for stage in self.stages if stage.name.endswith(".attention"))

    @property
    def bytes_between(self) -> int:
        return sum(stage.bytes_between for stage in self.stages)


class RecordedAttention:
    """Any attention object, with what it was given written down."""

    def __init__(self, attention: Callable, recording: Recording, keep_weights: bool):
        self.attention, self.recording, self.keep_weights = attention, recording, keep_weights

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.attention(layer, q, k, v)
        operations = 4 * q.shape[0] ** 2 * q[0].numel()  # queries by keys, then weights by values
        name = f"layers.{layer}.attention"
        self.recording.stages.append(_stage(name, (q, k, v), out, None, operations))
        if self.keep_weights:
            self.recording.seen[layer] = attention_weights(q, k)
        return out


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Where each token looks: q [T, heads, head_dim], k [T, kv_heads, head_dim] -> [heads, T, T]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k).float() / math.sqrt(q.shape[-1])
    visible_ = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~visible_, -math.inf).softmax(-1)


@torch.inference_mode()
def record(model: nn.Module, attention: Callable, ids: Sequence[int],
           keep_weights: bool = False) -> Recording:
    """Run the prompt, score the token after it, and write down every stage, from the live tensors."""
    recording = Recording()
    leaves = {name: module for name, module in model.named_modules()
              if not any(module.children()) and not isinstance(module, nn.Identity)}
    hooks = [module.register_forward_hook(_hook(name, recording)) for name, module in leaves.items()]
    device = model.embed_tokens.weight.device
    try:
        hidden = model(torch.tensor(ids, device=device), torch.arange(len(ids), device=device),
                       RecordedAttention(attention, recording, keep_weights))
        model.logits(hidden[-1:])
    finally:
        for hook in hooks:
            hook.remove()
    return recording


def _hook(name: str, recording: Recording) -> Callable:
    def write_down(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(module, nn.Linear)
        operations = 2 * math.prod(inputs[0].shape[:-1]) * weight.numel() if is_matrix else 0
        first = output[0] if isinstance(output, tuple) else output
        recording.stages.append(_stage(name, inputs, first, weight, operations))
    return write_down


def _stage(name: str, inputs: Sequence[Tensor], output: Tensor, weight: Tensor | None,
           operations: int) -> Stage:
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, output))
    shapes = tuple(tuple(tensor.shape) for tensor in inputs)
    shape = None if weight is None else tuple(weight.shape)
    return Stage(name, shapes, tuple(output.shape), shape, operations, moved)


def ids_for_figure(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    if not 1 <= len(ids) <= TOO_MANY:
        raise ValueError(f"give 1 to {TOO_MANY} tokens, not {len(ids)}")
    return ids


# Shapes, stage by stage

WORDS = {
    "embed_tokens": "each id picks its row of the table",
    "rotary": "cosine and sine of each position's angles",
    "input_layernorm": "bring each vector to one size",
    "q_proj": "what each token looks for", "k_proj": "what each token can be found by",
    "v_proj": "what each token hands over",
    "q_norm": "bring each query to one size", "k_norm": "bring each key to one size",
    "attention": "queries and keys are turned; each token gathers from itself and backwards",
    "o_proj": "the heads' findings become one vector, added to the token's own",
    "post_attention_layernorm": "bring each vector to one size",
    "gate_proj": "how much of each number may pass", "up_proj": "what may pass",
    "down_proj": "back to the model's width, added to the token's own",
    "norm": "bring each vector to one size, for the last time",
    "lm_head": "a score for every token of the vocabulary, from the last position only",
}  # fmt: skip


@dataclass(frozen=True)
class ShapeState:
    """How far a pass has come: `done` of all stages, with one layer shown in full."""

    stages: tuple[Stage, ...]
    done: int
    layer: int

    @property
    def current(self) -> Stage:
        return self.stages[self.done - 1]


def shape_states(stages: Sequence[Stage], layer: int) -> Iterator[ShapeState]:
    """One state for each stage; a layer that is not shown in full is one step."""
    stages = tuple(stages)
    for done, stage in enumerate(stages, 1):
        following = stages[done].layer if done < len(stages) else None
        if stage.layer in (None, layer) or following != stage.layer:
            yield ShapeState(stages, done, layer)


def shape_text(shape: Shape) -> str:
    return "[" + ", ".join(f"{size:,}" for size in shape) + "]"


def render_shapes(state: ShapeState, index: int) -> Html:
    """The stage now, in words; then every stage so far with its shapes; then the sums."""
    stage = state.current
    part = stage.name.split(".")[-1]
    whole_layer = stage.layer not in (None, state.layer)
    words = f"the whole of layer {stage.layer}, as above" if whole_layer else WORDS.get(part, "")
    name = f"layers.{stage.layer}" if whole_layer else stage.name
    head = tag("div", join([strong(f"{name}: "), words]), role="status")
    rows = [_shape_row(stage) for stage in state.stages[: state.done] if stage.layer in (None, state.layer)]
    others = sorted({stage.layer for stage in state.stages[: state.done]} - {None, state.layer})
    lit = [] if whole_layer else [len(rows) - 1]
    headers = ["stage", "takes", "weight", "gives", "operations"]
    done = state.stages[: state.done]
    weights = sum(math.prod(stage.weight) for stage in done if stage.weight and stage.operations)
    sums = (f"So far {sum(stage.operations for stage in done):,} operations; matrices of {weights:,} weights "
            "took part.")
    ran = f" Layers run besides layer {state.layer}: {len(others)}." if others else ""
    return join([head, table(headers, rows, lit=lit), note(sums + ran)])


def _shape_row(stage: Stage) -> list[object]:
    takes = mono(" ".join(shape_text(shape) for shape in stage.inputs))
    weight = mono(shape_text(stage.weight)) if stage.weight else "none"
    return [mono(stage.name), takes, weight, mono(shape_text(stage.output)), f"{stage.operations:,}"]


def shape_inspector(model: nn.Module, attention: Callable, tokenizer: Any) -> Stepper:
    """Step through one pass over your own prompt; every shape is that of a live tensor."""

    def make(inputs: Mapping[str, Any], seed: int) -> Iterator[ShapeState]:
        recording = record(model, attention, ids_for_figure(tokenizer, inputs["text"]))
        return shape_states(recording.stages, int(inputs["layer"]))

    last = model.config.num_hidden_layers - 1
    fields = [
        Field("text", "Prompt", "The capital of France is", some_text(200)),
        Slider("layer", "Layer in full", 0, 0, last),
    ]
    return Stepper(make, render_shapes, fields, seed=None, title="Shapes, stage by stage")


# Where a head looks


def render_attention(pieces: Sequence[str], weights: Tensor) -> Html:
    """One head: a row for each token, a column for each token it can see, percent in each cell."""
    head = [tag("th", "", CELL), *(_label(piece, column, "col") for column, piece in enumerate(pieces))]
    rows = [tag("tr", join(head))]
    for row, piece in enumerate(pieces):
        cells = [_percent(float(weights[row, column]), column <= row) for column in range(len(pieces))]
        rows.append(tag("tr", join([_label(piece, row, "row"), *cells])))
    drawn = tag("table", join(rows), "border-collapse:collapse;margin:4px 0;font-size:12px")
    best = int(weights[-1].argmax())
    words = (f"The last token, {quoted(pieces[-1])}, looks most at {quoted(pieces[best])} at position "
             f"{best}: {float(weights[-1, best]):.0%}.")
    legend = "Each row adds to 100 percent, up to rounding. An empty cell lies ahead: no token looks there."
    drawn = tag("div", drawn, "overflow-x:auto")
    return join([tag("div", strong(words), role="status"), drawn, note(legend)])


def quoted(piece: str) -> str:
    return f"“{visible(piece)}”"


def _label(piece: str, place: int, scope: str) -> Html:
    text = join([visible(piece), tag("span", f" {place}", "opacity:0.6;font-size:10px")])
    return tag("th", text, f"{CELL};font-weight:600;white-space:nowrap", scope=scope)


def _percent(share: float, is_visible: bool) -> Html:
    if not is_visible:
        return tag("td", "", f"{CELL};opacity:0.4")
    strongest = f";font-weight:700;outline:2px solid {ACCENT};outline-offset:-2px" if share >= 0.5 else ""
    style = f"{CELL};background:rgba(33,134,230,{0.6 * share:.2f}){strongest}"
    return tag("td", f"{100 * share:.0f}", style)


def attention_explorer(model: nn.Module, attention: Callable, tokenizer: Any,
                       text: str = "The cat sat. The dog ran. The cat",
                       layer: int = 17, head: int = 5) -> Explorer:
    """Choose a prompt, a layer and a head; see where each token looks."""

    @lru_cache(maxsize=8)
    def seen(prompt: str) -> tuple[list[str], dict[int, Tensor]]:
        ids = ids_for_figure(tokenizer, prompt)
        pieces = [tokenizer.token_text(token_id) for token_id in ids]
        return pieces, record(model, attention, ids, keep_weights=True).seen

    def render(inputs: Mapping[str, Any]) -> Html:
        pieces, weights = seen(inputs["text"])
        return render_attention(pieces, weights[int(inputs["layer"])][int(inputs["head"])])

    config = model.config
    fields = [
        Field("text", "Prompt", text, some_text(200)),
        Slider("layer", "Layer", min(layer, config.num_hidden_layers - 1), 0, config.num_hidden_layers - 1),
        Slider("head", "Head", min(head, config.num_attention_heads - 1), 0, config.num_attention_heads - 1),
    ]
    return Explorer(render, fields, title="Where a head looks")
