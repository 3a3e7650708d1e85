"""Chapter 00: where the time of one token goes, the map of the files, the first quiz and exercise."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.lab import Check, Choice, Explorer, Question, Score, Slider, call, expect, fail, same
from shared.lab.markup import Html, bar, join, mono, note, rich, table

RUNTIME = Path(__file__).parents[2]
CHAPTERS = {
    "bpe": "01", "tokenizer": "01", "errors": "01", "model": "02", "weights": "02", "decode": "03", "kv_cache": "04",
    "sampling_params": "05", "sampling": "05", "request": "06", "output": "06", "allocator": "07", "scheduler": "07",
    "trace": "07", "batch": "08", "processor": "08", "engine": "08", "llm": "08", "block_manager": "09",
    "prefix_cache": "10", "parallel": "11", "group": "11", "attention": "12", "cpu_attention": "12",
    "cpu_linear": "12", "cpu_layers": "12", "kernels": "12", "kernels_attention": "12", "runner": "12",
    "cuda_graph": "12", "engine_args": "13", "async_engine": "13", "openai_api": "13",
    "openai_response": "13", "metrics": "13", "serving": "13", "server": "13",
    "load": "14", "summary": "14", "roofline": "14", "bench": "14",
}  # fmt: skip
CONTROL_PLANE = {
    "errors", "sampling_params", "request", "output", "processor", "allocator", "scheduler", "trace", "block_manager",
    "prefix_cache", "engine_args", "async_engine", "openai_api", "openai_response", "metrics",
    "serving", "server",
}  # fmt: skip


def map_of_files() -> Html:
    """Every file of the runtime that is there: its plane, its chapter, and the first line of its docstring."""
    rows = []
    for name, chapter in CHAPTERS.items():
        path = RUNTIME / f"{name}.py"
        if path.exists():
            plane = "control" if name in CONTROL_PLANE else "data"
            rows.append([mono(f"{name}.py"), plane, chapter, rich(first_line(path))])
    return join([table(["file", "plane", "chapter", "what it is"], rows)])


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.splitlines()[0]


@dataclass(frozen=True)
class Machine:
    """How fast a machine can read memory and do arithmetic."""

    label: str
    gigabytes_per_second: float
    gigaflops: float
    source: str


MACHINES = {
    "a laptop with two cores": Machine("a laptop", 30, 400, "round numbers; put yours beside them"),
    "one H100 (HBM3, bfloat16)": Machine("one H100", 3350, 989_000, "NVIDIA's data sheet, SXM, without sparsity"),
}


def seconds_per_step(parameters: float, bytes_each: float, rows: int, machine: Machine) -> tuple[float, float]:
    """A model of one step for `rows` tokens of as many requests: seconds to read every weight once, and
    seconds for two operations per weight and row."""
    reading = parameters * bytes_each / (machine.gigabytes_per_second * 1e9)
    arithmetic = 2 * parameters * rows / (machine.gigaflops * 1e9)
    return reading, arithmetic


def render_step(inputs: Mapping[str, Any]) -> Html:
    machine = MACHINES[inputs["machine"]]
    size = {"float32 (4 bytes)": 4, "bfloat16 (2 bytes)": 2, "4 bits (half a byte)": 0.5}[inputs["weights"]]
    parameters = inputs["parameters"] * 1e6
    reading, arithmetic = seconds_per_step(parameters, size, inputs["rows"], machine)
    slower = max(reading, arithmetic)
    limit = "memory" if reading >= arithmetic else "arithmetic"
    needs = {"memory": ("read every weight once", reading), "arithmetic": ("do the arithmetic", arithmetic)}
    rows = [
        [what, f"{seconds * 1e3:.2f} ms", bar(seconds / slower, "the limit" if name == limit else "")]
        for name, (what, seconds) in needs.items()
    ]
    words = (f"At best {inputs['rows'] / slower:,.0f} tokens a second for {inputs['rows']} "
             f"{'request' if inputs['rows'] == 1 else 'requests'} at once: {limit} is the limit.")
    return join([table(["one step needs to", "time", ""], rows), words,
                 note(f"A model, not a measurement: {machine.gigabytes_per_second:,.0f} GB/s and "
                      f"{machine.gigaflops:,.0f} GFLOP/s ({machine.source}).")])


def step_explorer() -> Explorer:
    """Which of memory and arithmetic limits one step, for a model, a batch and a machine of your choice."""
    return Explorer(render_step, [
        Slider("parameters", "Million weights", 135, 50, 8000, 5),
        Choice("weights", "Each weight", "float32 (4 bytes)",
               ["float32 (4 bytes)", "bfloat16 (2 bytes)", "4 bits (half a byte)"]),
        Slider("rows", "Requests at once", 1, 1, 256, 1),
        Choice("machine", "Machine", "a laptop with two cores", list(MACHINES)),
    ], title="What limits one step")  # fmt: skip


def judge_tokens_per_second(fn: Any) -> Score | str | None:
    """Exercise 00.1: the highest speed that the memory of a machine allows."""
    for parameters, size, bandwidth in ((1_000_000, 4, 10.0), (135_000_000, 2, 33.0), (8_000_000_000, 0.5, 3350.0)):
        case = f"for {parameters:,} weights of {size} bytes at {bandwidth} GB/s"
        want = bandwidth * 1e9 / (parameters * size)
        if same(call(fn, parameters, size, bandwidth, case=case) * want, 1.0, 1e-3):
            fail(f"{case[0].upper()}{case[1:]}, your function returned seconds for a token, not tokens for a second.")
        expect(fn, (parameters, size, bandwidth), want, case=case, tolerance=1e-3)
    return None


CHECKS = {"00.1": Check(judge_tokens_per_second)}

QUIZ = [
    Question(
        "A prompt has 20 tokens and the model writes 100. How often does the plain loop run the model?",
        {
            "once": "One run gives scores for one next token, not for a whole answer.",
            "20 times": "The prompt goes in as a whole: all its tokens are in the first run.",
            "100 times": "One run for each token that is written. The first run also takes in the whole prompt.",
            "120 times": "Prompt tokens need no runs of their own: all are known, so they share the first.",
        },
        compute=lambda: f"{len(range(100))} times",
    ),
    Question(
        "A model has 135 million weights of 4 bytes, and the machine reads 27 GB/s. At least how many milliseconds "
        "does one token for one request take?",
        {
            "5": "That is 135 million times one byte. Each weight has four.",
            "20": "540 million bytes at 27 billion bytes a second.",
            "40": "Two operations per weight are arithmetic. The bytes are read once.",
            "80": "That would be 16 bytes for each weight.",
        },
        compute=lambda: round(135e6 * 4 / 27e9 * 1e3),
    ),
    Question(
        "What changes inside the model while it answers you?",
        {
            "Its weights adapt a little to the conversation.":
                "We compared every weight before and after: not a single bit differs.",
            "Nothing. The same frozen weights see a longer list of ids.":
                "All memory of the conversation is the list of ids that goes in.",
            "It notes which of your tokens were important, for the next prompt.":
                "An engine may keep intermediate results, but they are results of the ids and belong to no model.",
        },
        answer="Nothing. The same frozen weights see a longer list of ids.",
    ),
]
