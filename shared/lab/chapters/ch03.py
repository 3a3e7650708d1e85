"""Chapter 03: a generation step by step with its candidates and what it recomputes, exercises and quiz."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shared.lab import Check, Field, Question, Score, Slider, Stepper, call, expect, fail
from shared.lab.form import some_text
from shared.lab.markup import Html, bar, join, mono, note, strong, table, tag, tokens, visible

LIMIT = 24  # tokens of a prompt in the stepper, so that the triangle stays on the screen
NEW, OLD = "■", "□"


@dataclass(frozen=True)
class Step:
    """The text so far, the candidates for its next token, and the positions that each step ran."""

    texts: tuple[str, ...]
    prompt_len: int
    candidates: tuple[tuple[str, float], ...]
    runs: tuple[int, ...]


def decode_states(model: Any, tokenizer: Any, steps: Callable, prompt: str, n: int) -> Iterator[Step]:
    """Run the notebook's `decode_steps` and yield what each step saw and chose."""
    ids = tokenizer.encode(prompt)
    if not 1 <= len(ids) <= LIMIT:
        raise ValueError(f"the prompt has {len(ids)} tokens; this figure shows 1 to {LIMIT}")
    prompt_len, runs = len(ids), ()
    yield Step(tuple(tokenizer.decode([i]) for i in ids), prompt_len, (), ())
    for _, (logits, token) in zip(range(n), steps(model, ids)):
        top = logits.softmax(-1).topk(5)
        pairs = zip(top.indices.tolist(), top.values.tolist())
        candidates = tuple((tokenizer.decode([i], skip_special_tokens=False), p) for i, p in pairs)
        runs += (len(ids),)
        ids = [*ids, token]
        texts = tuple(tokenizer.decode([i], skip_special_tokens=False) for i in ids)
        yield Step(texts, prompt_len, candidates, runs)


def triangle(runs: tuple[int, ...]) -> Html:
    """One line for each step, one square for each position that it ran."""
    lines = [NEW * count if i == 0 else OLD * (count - 1) + NEW for i, count in enumerate(runs)]
    return tag("pre", "\n".join(lines), "line-height:1.15;margin:4px 0;background:none;border:0")


def render_step(state: Step, index: int) -> Html:
    row = tokens(state.texts, lit=range(state.prompt_len, len(state.texts)))
    if not state.runs:
        return join([row, note("The prompt. Nothing has run yet.")])
    rows = [[mono(visible(text)), bar(share, f"{share:.0%}")] for text, share in state.candidates]
    total, again = sum(state.runs), sum(state.runs) - state.runs[-1]
    ran = f"{state.runs[-1]} position{'s' if state.runs[-1] > 1 else ''}"
    words = f"Step {index} ran {ran} to add one token. So far {total}, of which {again} again."
    return join([row, table(["candidate", "probability"], rows, lit=[0]), strong(words), triangle(state.runs),
                 note(f"A line for each step: {NEW} a position run for the first time, {OLD} one run again.")])


def decode_stepper(model: Any, tokenizer: Any, steps: Callable) -> Stepper:
    """The notebook's loop on the real model, one token at a time."""
    return Stepper(
        lambda inputs, seed: decode_states(model, tokenizer, steps, inputs["prompt"], inputs["n"]), render_step,
        [Field("prompt", "Prompt", "The capital of France is", some_text(200)), Slider("n", "New tokens", 8, 1, 16)],
        seed=None, title="A generation, step by step",
    )  # fmt: skip


def counted(tokens: int) -> str:
    return f"{tokens:,} token{'s' if tokens > 1 else ''}"


def judge_positions(fn: Any) -> Score | str | None:
    """Exercise 03.1: the closed form, checked where a loop would be too slow."""
    for prompt, new in ((20, 100), (1, 10), (20, 1), (7, 3), (1000, 2_000_000_000)):
        want = new * prompt + new * (new - 1) // 2
        mistakes = {
            "that runs the last new token as well": want + prompt + new,
            "that counts each list after its new token came, not before": want + new,
            "that forgets that the list grows": new * prompt,
            "that counts each position once, and the loop runs them again": prompt + new - 1,
            "that counts each position once, even one that never goes in": prompt + new,
        }
        expect(fn, (prompt, new), want, case=f"With {counted(prompt)} of prompt and {new:,} new:", mistakes=mistakes)
    return None


def after(ids: list[int]) -> int:
    """A stand-in for the model: what it would write next depends on every token before."""
    return sum((place + 1) * (token + 3) for place, token in enumerate(ids)) % 89


def draft_of(prompt: list[int], size: int, wrong_at: int | None) -> list[int]:
    """What the loop would write, but for one wrong token; after it, what the loop would write then."""
    ids = list(prompt)
    for place in range(size):
        ids.append(after(ids) + (place == wrong_at))
    return ids[len(prompt) :]


class CountedRuns:
    """`run(ids)`: the best token after each position. Counts the runs and the positions."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    @property
    def runs(self) -> list[int]:
        return [len(ids) for ids in self.seen]

    def __call__(self, ids: Any) -> list[int]:
        ids = list(ids)
        self.seen.append(ids)
        return [after(ids[: place + 1]) for place in range(len(ids))]


def late(prompt: list[int], draft: list[int]) -> int:
    """The answer of a comparison that is one place late: each token with the guess for the next place."""
    rows = CountedRuns()([*prompt, *draft])[len(prompt) :]
    return next((place for place, pair in enumerate(zip(rows, draft)) if pair[0] != pair[1]), len(draft))


def judge_agreed(fn: Any) -> Score | str | None:
    """Exercise 03.2: how much of a draft the loop would have written, found in one run."""
    cost = best = 0
    for prompt, size, wrong_at in (([4, 8, 15], 5, None), ([16, 23], 6, 3), ([42, 7, 7, 1], 4, 0), ([9], 1, None)):
        draft = draft_of(prompt, size, wrong_at)
        want = size if wrong_at is None else wrong_at
        place = "all of it" if wrong_at is None else f"token {wrong_at + 1} is the first wrong one"
        case = f"With {counted(len(prompt))} of prompt and a draft of {size} ({place}),"
        run = CountedRuns()
        got = call(fn, run, list(prompt), list(draft), case=f"{case[:-1]}:")
        if run.seen and any(ids[: len(prompt)] != prompt for ids in run.seen):
            fail(f"{case} your function ran {run.seen[0]} without the prompt {prompt}, which the draft answers.")
        if got == late(prompt, draft) != want:
            fail(f"{case} your function returned {got}; each token was compared with the guess for the place after "
                 f"it. Expected {want}.")
        if wrong_at is not None and got == size - 1:
            fail(f"{case} your function returned {got}; after a wrong token, nothing counts: the loop would never "
                 f"have been there. Expected {want}.")
        if got != want:
            fail(f"{case} your function returned {got!r}; expected {want}.")
        if len(run.runs) > 1:
            fail(f"{case} your answer is right, but it took {len(run.runs)} runs of the model. One is enough.")
        cost, best = cost + sum(run.runs), best + len(prompt) + size - 1
    return Score("positions run", cost, best)


def scripted(answers: list[int], case: str) -> Callable[[list[int]], int]:
    """A stand-in for the model: the next token depends on how many new ones there are."""
    start: list[int] = []

    def next_token(ids: list[int]) -> int:
        if not start:
            start.append(len(ids))
        place = len(ids) - start[0]
        if not 0 <= place < len(answers):
            fail(f"{case}, your function asked for token {place + 1}, after the answer had ended.")
        return answers[place]

    return next_token


def judge_generate(fn: Any) -> Score | str | None:
    """Exercise 03.b: every token of the answer, without the end token, and the right reason."""
    cases = (
        ("the model ends at its third token", [8, 9, 2], 10, {2}, "stop"),
        ("the length ends it", [8, 9, 7], 3, {2}, "length"),
        ("the end token is also the last that is allowed", [8, 9, 2], 3, {2}, "stop"),
        ("the model has two end tokens", [8, 5], 10, {2, 5}, "stop"),
        ("one token is wanted", [8], 1, {2}, "length"),
        ("the answer is empty", [2], 10, {2}, "stop"),
    )
    for words, answers, max_tokens, eos, reason in cases:
        case, want = f"When {words}", [token for token in answers if token not in eos]
        prompt = [1, 2, 3]
        got = call(fn, scripted(answers, case), prompt, max_tokens, frozenset(eos), case=case)
        if not isinstance(got, tuple) or len(got) != 2:
            fail(f"{case}, your function returned {got!r}; expected a pair: the new ids, the reason.")
        if list(got[0]) == [*prompt, *want]:
            fail(f"{case}, your function returned the prompt as well; expected the new ids {want}.")
        if list(got[0]) != want:
            fail(f"{case}, the model wrote {answers} and your function kept {list(got[0])}; expected {want}.")
        if got[1] != reason:
            fail(f"{case}, the reason was {got[1]!r}; expected {reason!r}.")
        if prompt != [1, 2, 3]:
            fail(f"{case}, your function changed the caller's prompt to {prompt}.")
    return None


CHECKS = {"03.1": Check(judge_positions), "03.2": Check(judge_agreed), "03.b": Check(judge_generate)}

QUIZ = [
    Question(
        "A prompt of 50 tokens and 10 new ones, by this chapter's loop. How many positions does the model process?",
        {
            "500": "Ten runs of fifty: but the list grows by one token with each run.",
            "545": "50 + 51 + … + 59.",
            "555": "51 + 52 + … + 60 would run the list after each new token instead of before it.",
            "60": "That is each position once, which takes the cache of the next chapter.",
        },
        compute=lambda: sum(range(50, 60)),
    ),
    Question(
        "`max_tokens` is 3, and the third token is the end token. Why did the answer end?",
        {
            "It ended by itself: reason `stop`.":
                "The model said that it was done. That the limit was reached in the same step does not matter.",
            "It was cut off: reason `length`.":
                "A caller would ask for the rest of an answer that is complete.",
            "Both, so the reason is left open.":
                "A reason must be given, since callers decide by it whether to ask for more.",
        },
        answer="It ended by itself: reason `stop`.",
    ),
    Question(
        "Say each weight takes 4 bytes, and each position two operations for each weight. How many operations are "
        "there for each byte read, when 256 positions run together?",
        {
            "0.5": "That is one position alone: two operations for four bytes.",
            "128": "The weights are read once and serve all 256 positions: 2 × 256 / 4.",
            "512": "That counts the operations for one weight, which has four bytes.",
            "1,024": "Two operations divided by four bytes; multiplying them goes the wrong way.",
        },
        compute=lambda: 2 * 256 // 4,
    ),
]
