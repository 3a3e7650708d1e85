"""What a chapter's notebook must be, as far as a machine can judge. Each rule yields its faults in words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from notebooks import DETAILS, FENCE, Exercise, Notebook, output_text, tags

TAGS = {"shared", "nbval-ignore-output", "raises-exception", "gpu"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MIN_CELLS, MAX_CELLS, MAX_WORDS, MAX_CELL_LINES, MAX_BYTES = 25, 45, 2000, 60, 500_000
MAX_IGNORED = 0.15  # share of the code cells whose output nbval does not compare
PARTS = (  # of a chapter, in this order: name, kind of cell, what shows it
    ("1 promise", "markdown", r"\A# .+"),
    ("2 map", "code", r"\bengine_map\("),
    ("3 problem", "markdown", r"^## .*\bproblem"),
    ("4 aims", "markdown", r"^## You will be able to"),
    ("5 predict", "code", r"\bpredict\("),
    ("6 build", "markdown", r"^## Build it"),
    ("7 look inside", "markdown", r"^## Look inside"),
    ("8 proof", "markdown", r"^## Prove it"),
    ("9 exercises", "markdown", r"^## Exercises"),
    ("10 break it", "markdown", r"^## Break it"),
    ("11 measure", "markdown", r"^## Measure"),
    ("12 quiz", "code", r"\bquiz\("),
    ("13 what people get wrong", "markdown", r"^## What people get wrong"),
    ("13 what you now have", "markdown", r"^## What you now have"),
    ("13 what is still bad", "markdown", r"^## .*still bad"),
)
BAD_OUTPUT = {
    "an object address": r"\bat 0x[0-9a-fA-F]{6,}",
    "an absolute path": r"(?<![\w.:/<~-])/(?:home|Users|root|tmp|private|var|opt|mnt)/[\w.]|\b[A-Z]:\\\w",
    "a progress bar": r"\r(?!\n)|\d%\||\d ?(?:it|B)/s\b|FloatProgress",
    "a widget without a static form": r"\A[A-Z]\w+\((?:children=|.*\blayout=Layout)",
}


def kernel_and_ids(notebook: Notebook) -> Iterator[str]:
    content = notebook.content
    if content["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "the kernel is not python3"
    ids = [cell.get("id") for cell in notebook.cells]
    if (content["nbformat"], content["nbformat_minor"]) < (4, 5) or None in ids or len(set(ids)) < len(ids):
        yield "cells need ids, each its own (notebook format 4.5)"


def run_counts(notebook: Notebook) -> Iterator[str]:
    for expected, cell in enumerate(notebook.code, 1):
        count = cell.get("execution_count")
        if count != expected:
            found = "has no run count" if count is None else f"has run count {count}, not {expected}"
            yield f"{notebook.where(cell)} {found}: run the notebook with tools/course.py"
            return


def sources(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        yield from (f"{notebook.where(cell)} {fault}" for fault in source_faults(cell["source"]))


def source_faults(source: str) -> Iterator[str]:
    """What is wrong with the code of one cell."""
    lines = source.splitlines()
    if len(lines) > MAX_CELL_LINES:
        yield f"has {len(lines)} lines; the limit is {MAX_CELL_LINES}"
    if source.rstrip().endswith(";"):
        yield "ends in ';', which hides its output"
    if re.search(r"^\s*#\s*(?:NBVAL|PYTEST_VALIDATE)_", source, re.MULTILINE):
        yield "steers nbval by a comment; use a tag"
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"is not plain Python (line {error.lineno}); magics are not allowed either"
        return
    for node in ast.walk(tree):
        loaded = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if loaded and re.fullmatch(r"_+|_i?\d+|_i+|In|Out", node.id):
            yield f"uses {node.id!r}, which depends on what was run before"


def cell_tags(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        unknown = sorted(tags(cell) - TAGS)
        if unknown:
            yield f"{notebook.where(cell)} has the tag {unknown[0]!r}; allowed are {', '.join(sorted(TAGS))}"
        if cell["source"].startswith("# shared/") and "shared" not in tags(cell):
            yield f"{notebook.where(cell)} starts like a shared cell but lacks the tag"
    ignored = sum("nbval-ignore-output" in tags(cell) for cell in notebook.code)
    if ignored > MAX_IGNORED * len(notebook.code):
        yield f"{ignored} of {len(notebook.code)} code cells are not compared; the limit is {MAX_IGNORED:.0%}"


def outputs(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        for output in cell["outputs"]:
            text = output_text(output)
            found = [what for what, pattern in BAD_OUTPUT.items() if re.search(pattern, text)]
            yield from (f"{notebook.where(cell)} prints {what}" for what in found)


def widget_state(notebook: Notebook) -> Iterator[str]:
    if "widgets" in notebook.content["metadata"]:
        yield "metadata.widgets is stored: run the notebook with tools/course.py"
    for cell in notebook.code:
        if any(WIDGET_VIEW in output.get("data", {}) for output in cell["outputs"]):
            yield f"{notebook.where(cell)} stores a widget's model id: run the notebook with tools/course.py"


def repeated_code(notebook: Notebook) -> Iterator[str]:
    """Fenced code in the prose, outside of hints and solutions, that a code cell holds already."""
    held = ["\n".join(_stripped(cell["source"])) for cell in notebook.code]
    for cell in notebook.markdown:
        for _, code in FENCE.findall(DETAILS.sub("", cell["source"])):
            lines = _stripped(code)
            if len(lines) > 1 and any("\n".join(lines) in text for text in held):
                yield f"{notebook.where(cell)} repeats a code cell: {lines[0]!r}"


def _stripped(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines() if line.strip()]


def limits(notebook: Notebook) -> Iterator[str]:
    cells, words = len(notebook.cells), sum(map(count_words, (cell["source"] for cell in notebook.markdown)))
    size = notebook.path.stat().st_size
    if cells > MAX_CELLS or (cells < MIN_CELLS and notebook.chapter != "00"):
        yield f"has {cells} cells; a chapter has {MIN_CELLS} to {MAX_CELLS}"
    if words > MAX_WORDS:
        yield f"has {words} words of prose; the limit is {MAX_WORDS}"
    if size > MAX_BYTES:
        yield f"is {size:,} bytes long; the limit is {MAX_BYTES:,}"


def count_words(markdown: str) -> int:
    """Words that are read: no code blocks, tags or link targets; hints count."""
    prose = re.sub(r"<[^>]+>|\]\([^)]*\)", " ", FENCE.sub(" ", markdown))
    return len(re.findall(r"[^\W_]+(?:['’.,-][^\W_]+)*", prose))


def parts(notebook: Notebook) -> Iterator[str]:
    """The parts of a chapter, present and in order. The start page has an order of its own."""
    if notebook.chapter == "00":
        return
    places = {name: _place(notebook, kind, pattern) for name, kind, pattern in PARTS}
    yield from (f"part {name!r} is missing" for name, place in places.items() if place is None)
    found = [(place, name) for name, place in places.items() if place is not None]
    yield from (f"part {late!r} comes before part {name!r}"
                for (place, name), (next_place, late) in zip(found, found[1:]) if next_place < place)
    if places["1 promise"] not in (None, (0, 0)):
        yield "the first cell does not begin with the title"


def _place(notebook: Notebook, kind: str, pattern: str) -> tuple[int, int] | None:
    """Cell and character where a part begins."""
    for index, cell in enumerate(notebook.cells):
        match = re.search(pattern, cell["source"], re.MULTILINE) if cell["cell_type"] == kind else None
        if match:
            return index, match.start()
    return None


def exercises(notebook: Notebook) -> Iterator[str]:
    found = list(notebook.exercises())
    numbered = [exercise for exercise in found if exercise.is_numbered]
    numbers = [exercise.number for exercise in numbered]
    if notebook.chapter != "00" and len(numbered) not in (2, 3):
        yield f"has {len(numbered)} exercises; a chapter has two or three"
    if numbers != [f"{notebook.chapter}.{place}" for place in range(1, len(numbers) + 1)]:
        yield f"its exercises are {', '.join(numbers)}; they count from {notebook.chapter}.1"
    yield from (f"exercise {each.number} {fault}" for each in found for fault in _exercise_faults(each))


def _exercise_faults(exercise: Exercise) -> Iterator[str]:
    if not exercise.solution.strip():
        yield "has no solution in a details block below its cell"
    if not exercise.is_numbered:
        return
    if not exercise.has_heading:
        yield f"has no heading '### Exercise {exercise.number}' above its cell"
    if exercise.hints != 2:
        yield f"has {exercise.hints} hints, not two"
    if "raise NotImplementedError" not in exercise.stub:
        yield "has no stub that raises NotImplementedError"


def links(notebook: Notebook) -> Iterator[str]:
    """Relative links lead to files that exist; a link to a chapter may wait for it."""
    for cell in notebook.markdown:
        for target in re.findall(r"\]\((?!https?:|#|mailto:|attachment:)([^)\s#]+)", cell["source"]):
            later = re.search(r"(?:^|/)\d\d_\w+\.ipynb$", target)
            if not later and not (notebook.path.parent / target).exists():
                yield f"{notebook.where(cell)} links to {target}, which does not exist"


RULES = (kernel_and_ids, run_counts, sources, cell_tags, outputs, widget_state, repeated_code, limits, parts,
         exercises, links)


def faults(notebook: Notebook) -> list[str]:
    """The faults that all rules find, each with the file's name."""
    return [f"{notebook.path.name}: {fault}" for rule in RULES for fault in rule(notebook)]
