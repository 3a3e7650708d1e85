"""A chapter's notebook file: its cells, its exercises, and the definitions that its shared cells name."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_LINE = re.compile(r"# shared/(\w+)\.py *")
DETAILS = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
CHECK_CALL = re.compile(r'^check\("(\d\d\.\w+)", (\w+)\)', re.MULTILINE)


class CourseError(Exception):
    """A cell that the tools cannot make sense of, in words."""


@dataclass(frozen=True)
class Definition:
    """A top-level function, class or constant; `text` is what a shared cell shows of it."""

    name: str
    text: str
    is_constant: bool


def read_definitions(source: str) -> dict[str, Definition]:
    """The definitions of a Python text by name, with decorators and the comment lines directly above."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        name = defined_name(node)
        if not name or name == "__all__":
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        while first > 0 and lines[first - 1].startswith("#") and not SHARED_LINE.fullmatch(lines[first - 1]):
            first -= 1
        text = "\n".join(lines[first : node.end_lineno])
        found[name] = Definition(name, text, isinstance(node, (ast.Assign, ast.AnnAssign)))
    return found


def defined_name(node: ast.stmt) -> str:
    """The name that a statement defines; "A, B" for a constant with two names; "" for any other statement."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return ""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return ", ".join(name.id for name in names if isinstance(name.ctx, ast.Store))


@dataclass(frozen=True)
class Exercise:
    """An exercise as its notebook states it.

    `solution` is the code in its details block, `output` what the stub's cell printed when it was run.
    """

    number: str
    function: str
    stub: str
    output: str
    solution: str
    hints: int
    has_heading: bool

    @property
    def is_numbered(self) -> bool:
        """False for the planted fault of "Break it", whose id ends in a letter or in 4."""
        return self.number[3:] in ("1", "2", "3")


class Notebook:
    """Cells are plain dicts as in the file, but for `source`, which is one string."""

    def __init__(self, path: Path):
        self.path, self.chapter = path, path.name[:2]
        self.content = json.loads(path.read_text(encoding="utf-8"))
        self.cells = self.content["cells"]
        for cell in self.cells:
            cell["source"] = "".join(cell["source"])
        self.code = [cell for cell in self.cells if cell["cell_type"] == "code"]
        self.markdown = [cell for cell in self.cells if cell["cell_type"] == "markdown"]

    def save(self) -> None:
        """Write as nbformat writes, whole or not at all."""
        cells = [{**cell, "source": cell["source"].splitlines(keepends=True)} for cell in self.cells]
        text = json.dumps({**self.content, "cells": cells}, indent=1, ensure_ascii=False, sort_keys=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(text + "\n", encoding="utf-8", newline="\n")
        os.replace(draft, self.path)

    def where(self, cell: dict) -> str:
        """`cell 7`, counted from 1 over all cells, as JupyterLab's status bar counts."""
        return f"cell {next(number for number, other in enumerate(self.cells, 1) if other is cell)}"

    def place(self, cell: dict) -> str:
        return f"{self.path.name}: {self.where(cell)}"

    def shared_cells(self) -> list[dict]:
        return [cell for cell in self.code if "shared" in tags(cell)]

    def exercises(self) -> Iterator[Exercise]:
        """Each code cell that calls `check("04.1", fn)`; the markdown below it holds hints and solution."""
        for index, cell in enumerate(self.cells):
            call = CHECK_CALL.search(cell["source"]) if cell["cell_type"] == "code" else None
            if call:
                above, below = _first_prose(self.cells[index::-1]), _first_prose(self.cells[index:])
                has_heading = f"Exercise {call[1]}" in above
                yield _exercise(call[1], call[2], cell, has_heading, DETAILS.findall(below))


def _first_prose(cells: list[dict]) -> str:
    return next((cell["source"] for cell in cells if cell["cell_type"] == "markdown"), "")


def _exercise(number: str, function: str, cell: dict, has_heading: bool, details: list) -> Exercise:
    solutions = [body for title, body in details if title == "Solution"]
    return Exercise(
        number=number,
        function=function,
        stub=cell["source"],
        output="".join(map(output_text, cell["outputs"])),
        solution="\n".join(code for body in solutions for _, code in FENCE.findall(body)),
        hints=sum(title.startswith("Hint") for title, _ in details),
        has_heading=has_heading,
    )


def tags(cell: dict) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


def output_text(output: dict) -> str:
    """All that an output says in text: stream, plain text, HTML, SVG, traceback."""
    data = output.get("data", {})
    parts = [output.get("text", ""), *output.get("traceback", ()), output.get("evalue", "")]
    parts += [data[kind] for kind in data if kind.startswith("text/") or kind == "image/svg+xml"]
    return "".join(text for part in parts for text in part)
