"""Chapter 05's figures: one token through the sampler step by step, and the sampling playground."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shared import sampling
from shared.lab import Choice, Explorer, Field, Slider, Stepper
from shared.lab.form import some_text, whole
from shared.lab.markup import QUIET, Html, bar, join, mono, note, table, tag, visible
from shared.sampling_params import SamplingParams

# Counts against theory


@dataclass(frozen=True)
class Fit:
    """How well counts fit a distribution. `p_value`: share of fair experiments at least this far off."""

    statistic: float
    bins: int
    p_value: float

    def __str__(self) -> str:
        freedom = f"{self.bins - 1} degrees of freedom"
        return f"chi-square {self.statistic:.1f} on {freedom}, p-value {self.p_value:.3f}"


def chi_square(counts: Sequence[int], probs: Sequence[float], least: float = 5.0) -> Fit | None:
    """Pearson's test of counts against probs; None if fewer than two bins expect `least` draws.

    Outcomes that expect fewer share one bin. A count where nothing is expected makes the statistic infinite.
    """
    total = sum(counts)
    expected = [p * total / sum(probs) for p in probs]
    bins = [(count, want) for count, want in zip(counts, expected, strict=True) if want >= least]
    rest = total - sum(count for count, _ in bins), total - sum(want for _, want in bins)
    if rest[1] >= least:
        bins.append(rest)
    elif bins and (rest[0] or rest[1] > 0):
        bins[-1] = bins[-1][0] + rest[0], bins[-1][1] + rest[1]
    if len(bins) < 2:
        return None
    impossible = any(count for count, want in zip(counts, expected, strict=True) if want == 0)
    statistic = float("inf") if impossible else sum((count - want) ** 2 / want for count, want in bins)
    halves = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return Fit(statistic, len(bins), float(torch.special.gammaincc(halves[0], halves[1])))


def race(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each row: the largest probability divided by its own exponential number. [rows]."""
    numbers = torch.rand(probs.shape, generator=generator, dtype=torch.float64)
    return (probs / -torch.log1p(-numbers)).argmax(-1)


# From scores to probabilities, stage by stage


@dataclass(frozen=True)
class Parts:
    """The functions that the figures run: those of the notebook, or the engine's."""

    adjust: Callable = sampling.adjust
    probabilities: Callable = sampling.probabilities
    uniform: Callable = sampling.uniform
    draw: Callable = sampling.draw


ENGINE = Parts()


@dataclass(frozen=True)
class Scored:
    """What the model said after a text: raw scores [vocab_size] of the next token."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logits: Tensor


class Scores:
    """The model's scores after a prompt and the answer so far, kept for the last few texts.

    Rounded to two decimals, so that a figure shows the same numbers on every machine.
    """

    def __init__(self, next_token_logits: Callable[[Any, list[int]], Tensor], model: Any, tokenizer: Any):
        self.tokenizer = tokenizer
        self._model, self._next_token_logits = model, next_token_logits
        self.after = lru_cache(maxsize=16)(self._after)

    def _after(self, prompt: str, answer: str) -> Scored:
        ids = self.tokenizer.encode(prompt), self.tokenizer.encode(answer)
        logits = self._next_token_logits(self._model, [*ids[0], *ids[1]])
        return Scored(tuple(ids[0]), tuple(ids[1]), logits.float().cpu().round(decimals=2))

    def text(self, token: int) -> str:
        return visible(self.tokenizer.decode([token], skip_special_tokens=False)) or "∅"


STAGES = (
    ("raw scores", "What the model says: softmax of the raw scores. Logprobs are of these."),
    ("penalties", "Scores of tokens that have occurred are lowered. Logit bias would be added here too."),
    ("temperature", "Scores are divided by the temperature. The order of the tokens stays. "
                    "A share too small for 32 bits is 0."),
    ("min_p", "Tokens less likely than `min_p` times the likeliest leave. The rest is scaled up to 1."),
    ("top_k", "Only the `top_k` likeliest stay. The rest is scaled up to 1."),
    ("top_p", "The smallest set that holds `top_p` of what is left stays. The rest is scaled up to 1."),
)


def stage_probs(parts: Parts, scored: Scored, params: SamplingParams) -> list[Tensor]:
    """The distribution [vocab_size] after each of STAGES."""
    state = SimpleNamespace(sampling_params=params, seed=0, prompt_token_ids=scored.prompt_ids,
                            output_token_ids=scored.answer_ids, stop_token_ids=())
    adjusted = parts.adjust(scored.logits[None], [state])

    def filtered(**filters: float) -> Tensor:
        if params.greedy:
            return torch.nn.functional.one_hot(adjusted[0].argmax(), adjusted.shape[-1]).float()
        return parts.probabilities(adjusted, [SamplingParams(temperature=params.temperature, **filters)])[0]

    return [
        scored.logits.softmax(-1), adjusted[0].softmax(-1), filtered(), filtered(min_p=params.min_p),
        filtered(min_p=params.min_p, top_k=params.top_k),
        filtered(min_p=params.min_p, top_k=params.top_k, top_p=params.top_p),
    ]  # fmt: skip


def cut_by(stages: Sequence[Tensor], token: int) -> str:
    """The filter that took a token out; empty if it is still there."""
    for (name, _), before, after in zip(STAGES[3:], stages[2:], stages[3:]):
        if before[token] > 0 and after[token] == 0:
            return name
    return ""


def params_of(inputs: Mapping[str, Any]) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return SamplingParams(**{name: inputs[name] for name in (*names, *penalties)})


def option_fields(top_k: int, top_p: float, min_p: float) -> list[Field | Slider]:
    """The text and the options, in the order in which the sampler applies them."""
    return [
        Field("prompt", "Prompt", PROMPT, some_text(300)),
        Field("answer", "Answer so far", "", short_text,
              help="Presence and frequency penalties count these tokens."),
        Slider("repetition_penalty", "repetition_penalty", 1.0, 0.5, 2.0, 0.05),
        Slider("frequency_penalty", "frequency_penalty", 0.0, -2.0, 2.0, 0.1),
        Slider("presence_penalty", "presence_penalty", 0.0, -2.0, 2.0, 0.1),
        Slider("temperature", "temperature", 1.0, 0.0, 2.0, 0.05),
        Slider("min_p", "min_p", min_p, 0.0, 0.5, 0.01),
        Slider("top_k", "top_k", top_k, 0, 100),
        Slider("top_p", "top_p", top_p, 0.05, 1.0, 0.01),
    ]


LIKELIEST = "The model's likeliest tokens"
PROMPT = "My favourite animal is the"


def short_text(text: str) -> str:
    if len(text) > 300:
        raise ValueError(f"give at most 300 characters, not {len(text)}")
    return text


# One token, stage by stage


@dataclass(frozen=True)
class Frame:
    """A stage to draw. `drawn` is the random number and the token it fell on, in the last frame."""

    index: int
    stages: list[Tensor]
    params: SamplingParams
    drawn: tuple[float, int] | None = None


def frames(parts: Parts, scores: Scores, inputs: Mapping[str, Any], seed: int) -> Iterator[Frame]:
    params = params_of(inputs)
    scored = scores.after(inputs["prompt"], inputs["answer"])
    stages = stage_probs(parts, scored, params)
    for index in range(len(STAGES)):
        yield Frame(index, stages, params)
    number = parts.uniform(seed, len(scored.answer_ids))
    yield Frame(len(STAGES) - 1, stages, params, (number, parts.draw(stages[-1][None], [number])[0]))


def render_frame(scores: Scores, frame: Frame, shown: int = 10) -> Html:
    now, before = frame.stages[frame.index], frame.stages[max(frame.index - 1, 0)]
    left = f"{int((now > 0).sum()):,} of {len(now):,} tokens can be drawn."
    rows = frame.stages[0].argsort(descending=True, stable=True)[:shown].tolist()
    if frame.drawn:
        return _render_draw(scores, frame, [*rows, *({frame.drawn[1]} - set(rows))], left)
    name, words = STAGES[frame.index]
    value = "" if frame.index < 2 else f" = {getattr(frame.params, name):g}"
    cells = [[mono(scores.text(token)), percent(before[token]), bar(float(now[token]), percent(now[token])),
              cut_by(frame.stages[: frame.index + 1], token)] for token in rows]
    head = [tag("strong", f"{name}{value}: {left}"), note(words.replace("`", ""))]
    return join([tag("div", join(head), role="status"),
                 table(["token", "before", "after", "cut by"], cells, caption=LIKELIEST)])


def _render_draw(scores: Scores, frame: Frame, rows: list[int], left: str) -> Html:
    number, chosen = frame.drawn
    now = frame.stages[-1]
    ends = now.double().cumsum(-1) / now.double().sum()
    cells = []
    for token in rows:
        end = float(ends[token])
        share = f"{max(0.0, end - float(now[token])):.4f} to {end:.4f}" if now[token] > 0 else "–"
        cells.append([mono(scores.text(token)), token, percent(now[token]), share])
    head = f"The draw: {number:.4f} falls on {scores.text(chosen)}. {left}"
    words = "All tokens lie end to end in the order of their ids; each takes as much room as it is likely."
    return join([tag("div", join([tag("strong", head), note(words)]), role="status"),
                 table(["token", "id", "probability", "its place"], cells, lit=[rows.index(chosen)])])


def percent(share: float | Tensor) -> str:
    return f"{100 * float(share):.1f} %"


def token_stepper(scores: Scores, parts: Parts = ENGINE) -> Stepper:
    """Step one token through the order of operations; the seed belongs to the draw."""
    return Stepper(lambda inputs, seed: frames(parts, scores, inputs, seed),
                   lambda frame, index: render_frame(scores, frame), option_fields(5, 0.8, 0.15),
                   seed=3, title="One token through the sampler")


# The playground

APART = 200
TEXTBOOK, RACE = "textbook, one number a token", "exponential race"


def render_playground(parts: Parts, scores: Scores, inputs: Mapping[str, Any], shown: int = 12) -> Html:
    """Bars of the model's and of the reshaped distribution, draws beside theory, and the test."""
    stages = stage_probs(parts, scores.after(inputs["prompt"], inputs["answer"]), params_of(inputs))
    order = stages[0].argsort(descending=True, stable=True)
    model, now = (grouped(stage, order) for stage in (stages[0], stages[-1]))
    counts = draws(parts, now, inputs["draws"], inputs["method"], inputs["seed"])
    rows = [_playground_row(mono(scores.text(token)), slice(i, i + 1), model, now, counts,
                            cut_by(stages, token)) for i, token in enumerate(order[:shown].tolist())]
    rows.append(_playground_row("all others", slice(shown, None), model, now, counts, ""))
    left = f"{int((stages[-1] > 0).sum()):,} of {len(order):,} tokens can be drawn."
    head = ["token", "model", "now", "expected", "drawn", "cut by"]
    return join([tag("div", join([tag("strong", left), tag("div", verdict(counts, now))]), role="status"),
                 table(head, rows, caption=LIKELIEST),
                 note(f"Tokens after the {APART}th are drawn as one group.")])


def _playground_row(name: object, entries: slice, model: Tensor, now: Tensor, counts: Tensor,
                    left: str) -> list[object]:
    share, total = float(now[entries].sum()), int(counts.sum())
    return [name, percent(model[entries].sum()), bar(share, percent(share)), f"{share * total:.1f}",
            int(counts[entries].sum()), left]


def grouped(probs: Tensor, order: Tensor) -> Tensor:
    """The first APART tokens of `order` each, and all others as one: [APART + 1].

    Neither way of drawing can tell: a group takes as much room, and runs as fast, as its tokens together.
    """
    return torch.cat([probs[order[:APART]], probs[order[APART:]].sum()[None]])


def draws(parts: Parts, probs: Tensor, times: int, method: str, seed: int) -> Tensor:
    """How often each entry came in `times` draws."""
    rows = probs.expand(times, -1)
    if method == RACE:
        chosen = race(rows, torch.Generator().manual_seed(seed))
    else:
        chosen = torch.tensor(parts.draw(rows, [parts.uniform(seed, index) for index in range(times)]))
    return chosen.bincount(minlength=len(probs))


def verdict(counts: Tensor, probs: Tensor) -> Html:
    """The chi-square test in words."""
    fit = chi_square(counts.tolist(), probs.double().tolist())
    if fit is None:
        return tag("span", "Nothing to test: no two outcomes expect five draws each.", QUIET)
    words = "The draws fit the theory." if fit.p_value >= 0.001 else "The draws do not fit the theory."
    return tag("span", f"{words} {str(fit)[0].upper()}{str(fit)[1:]}.")


def playground(scores: Scores, parts: Parts = ENGINE) -> Explorer:
    """Sliders reshape the model's distribution; draws stand beside theory."""
    fields = [
        *option_fields(0, 0.9, 0.02),
        Slider("draws", "Draws", 1000, 100, 2000, 100),
        Choice("method", "Drawn by", TEXTBOOK, (TEXTBOOK, RACE)),
        Field("seed", "Seed", "0", whole(0, 2**31 - 1)),
    ]
    return Explorer(lambda inputs: render_playground(parts, scores, inputs), fields,
                    title="Sampling playground")
