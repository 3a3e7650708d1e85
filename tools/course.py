"""The course's notebooks: `run` executes them, `sync` fills their shared cells, `check` finds what is wrong.

    python tools/course.py run [04 ...]   sync, execute from a fresh kernel, store outputs; of all or some
    python tools/course.py sync [04 ...]  rewrite the code cells tagged `shared` from the files of shared/
    python tools/course.py check          every rule that a machine can judge; no kernel, no torch, seconds

A shared cell starts with the line `# shared/<file>.py`; the rest is the exact text of one or more top-level
definitions of that file: functions, classes, constants. The cell names them by containing them, so for a new
one `class KVCache: ...` is enough. Decorators belong to a definition, and comment lines directly above it.
Imports are no definitions: an ordinary cell imports what the shared cells need. rules.py has the other rules.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import rules
from notebooks import (
    SHARED_LINE,
    CourseError,
    Definition,
    Notebook,
    defined_name,
    output_text,
    read_definitions,
)

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = ("beginner", "intermediate", "advanced")
CHAPTER_OF_MODULE = {
    "errors": "01", "bpe": "01", "tokenizer": "01",
    "model": "02", "weights": "02",
    "decode": "03",
    "kv_cache": "04",
    "sampling_params": "05", "sampling": "05",
    "request": "06", "output": "06",
    "allocator": "07", "scheduler": "07", "trace": "07",
    "batch": "08", "processor": "08", "engine": "08", "llm": "08",
    "block_manager": "09",
    "prefix_cache": "10",
    "parallel": "11", "group": "11",
    "attention": "12", "cpu_attention": "12", "kernels": "12", "kernels_attention": "12",
    "cpu_linear": "12", "cpu_layers": "12", "runner": "12", "cuda_graph": "12",
    "engine_args": "13", "async_engine": "13", "openai_api": "13", "openai_response": "13", "metrics": "13",
    "serving": "13", "server": "13",
    "load": "14", "summary": "14", "roofline": "14", "bench": "14",
}  # fmt: skip
PLUMBING = ("__init__", "selfcheck", "default_model", "workers", "cpu_ops")  # no stages of the engine: printed nowhere
ASSEMBLY = ("llm", "engine_args")  # put the parts of all chapters together: they may import from later ones
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_SECONDS, NOTEBOOK_SECONDS = 120, 60


class Course:
    """All notebooks and the files of shared/ below one folder."""

    def __init__(self, root: Path):
        self.root = root

    @cached_property
    def notebooks(self) -> list[Notebook]:
        found = (path for folder in FOLDERS for path in (self.root / folder).glob("[0-9][0-9]_*.ipynb"))
        return [Notebook(path) for path in sorted(found, key=lambda path: path.name)]

    @cached_property
    def sources(self) -> dict[str, str]:
        """The text of each file of the runtime that is taught."""
        paths = sorted((self.root / "shared").glob("*.py"))
        return {path.stem: path.read_text(encoding="utf-8") for path in paths if path.stem not in PLUMBING}

    @cached_property
    def definitions(self) -> dict[str, dict[str, Definition]]:
        return {module: read_definitions(source) for module, source in self.sources.items()}

    @cached_property
    def chapters(self) -> set[str]:
        return {notebook.chapter for notebook in self.notebooks}

    def shared_cell(self, source: str) -> tuple[str, list[str], str]:
        """Module, names and right text of a shared cell: constants stand close together, the rest apart."""
        first, _, body = source.partition("\n")
        line = SHARED_LINE.fullmatch(first)
        known = self.definitions.get(line[1]) if line else None
        if known is None:
            raise CourseError(f"a shared cell starts with '# shared/<file>.py', not with {first!r}")
        names = list(read_definitions(body))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            missing = unknown[0] if unknown else "what this cell holds"
            raise CourseError(f"shared/{line[1]}.py does not define {missing}")
        text = first.rstrip() + "\n" + known[names[0]].text
        for before, name in zip(names, names[1:]):
            both_constants = known[before].is_constant and known[name].is_constant
            text += ("\n" if both_constants else "\n\n\n") + known[name].text
        return line[1], names, text

    def _shared_cells(self, notebooks: list[Notebook]) -> Iterator[tuple]:
        """Notebook, cell, module, names, right text."""
        for notebook in notebooks:
            for cell in notebook.shared_cells():
                try:
                    yield notebook, cell, *self.shared_cell(cell["source"])
                except (CourseError, SyntaxError) as error:
                    raise CourseError(f"{notebook.place(cell)}: {error}") from error

    def sync(self, notebooks: list[Notebook]) -> list[str]:
        """Rewrite each shared cell that differs from shared/; the names of the notebooks that changed."""
        changed = {}
        for notebook, cell, _, _, text in self._shared_cells(notebooks):
            if cell["source"] != text:
                cell["source"] = text
                changed[notebook.path.name] = notebook
        for notebook in changed.values():
            notebook.save()
        return list(changed)

    def check(self) -> list[str]:
        """Every fault of every notebook, in words."""
        found = [fault for notebook in self.notebooks for fault in rules.faults(notebook)]
        for check in (self._one_source, self._order, self._quizzes, self._own_paths):
            try:
                found += check()
            except CourseError as error:
                found.append(str(error))
        return found

    def _one_source(self) -> Iterator[str]:
        """Shared cells equal shared/, and each definition stands in one cell, of its own chapter."""
        homes = defaultdict(list)
        for notebook, cell, module, names, text in self._shared_cells(self.notebooks):
            if cell["source"] != text:
                yield f"{notebook.place(cell)} differs from shared/{module}.py: run sync"
            for name in names:
                homes[module, name].append(notebook.chapter)
        for module, known in self.definitions.items():
            chapter = CHAPTER_OF_MODULE.get(module)
            if chapter is None:
                yield f"shared/{module}.py belongs to no chapter: add it to CHAPTER_OF_MODULE"
            for name in known if chapter in self.chapters else ():
                if homes[module, name] != [chapter]:
                    where = " and ".join(homes[module, name]) or "no chapter"
                    yield f"shared/{module}.py: {name} is introduced by {where}, not once by {chapter}"

    def _order(self) -> Iterator[str]:
        """Nobody imports from a later chapter: neither a notebook (but for the start page) nor a module."""
        for notebook in self.notebooks:
            for cell in notebook.code if notebook.chapter != "00" else ():
                for module in self._imported(ast.walk(_parsed(cell["source"]))):
                    if (chapter := first_chapter(module)) > notebook.chapter:
                        yield f"{notebook.place(cell)} imports {module}, of chapter {chapter}"
        for name, source in self.sources.items():
            for module in self._imported(ast.parse(source).body if name not in ASSEMBLY else ()):
                if CHAPTER_OF_MODULE[module] > CHAPTER_OF_MODULE.get(name, "99"):
                    yield f"shared/{name}.py imports {module}, of chapter {CHAPTER_OF_MODULE[module]}"

    def _imported(self, nodes) -> Iterator[str]:
        """The taught modules that these statements import, `from shared import LLM` included."""
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias.name.removeprefix("shared.") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "shared":
                names = [self._home(alias.name) for alias in node.names]
            else:
                names = [(getattr(node, "module", None) or "").removeprefix("shared.")]
            yield from (name for name in names if name in self.sources and name in CHAPTER_OF_MODULE)

    def _home(self, name: str) -> str:
        return next((module for module, known in self.definitions.items() if name in known), name)

    def _quizzes(self) -> Iterator[str]:
        for chapter in sorted(self.chapters - {"00"}):
            path = self.root / "shared" / "lab" / "chapters" / f"ch{chapter}.py"
            tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
            values = [node.value for node in tree.body if defined_name(node) == "QUIZ"]
            if len(values) != 1 or len(getattr(values[0], "elts", ())) != 3:
                yield f"shared/lab/chapters/ch{chapter}.py: QUIZ is not a list of three questions"

    def _own_paths(self) -> Iterator[str]:
        for notebook in self.notebooks:
            for cell in notebook.code:
                if any(str(self.root) in output_text(output) for output in cell["outputs"]):
                    yield f"{notebook.place(cell)} prints the path of this folder"

    def not_yet_taught(self) -> list[str]:
        """The modules of chapters whose notebook does not exist yet."""
        return sorted(f"{CHAPTER_OF_MODULE[module]} {module}" for module in self.sources
                      if CHAPTER_OF_MODULE.get(module, "00") not in {*self.chapters, "00"})


def first_chapter(module: str) -> str:
    """The chapter from which notebooks may import it: its own, or that of `llm` for what `llm` is built by."""
    return min(CHAPTER_OF_MODULE[module], CHAPTER_OF_MODULE["llm"]) if module in ASSEMBLY else CHAPTER_OF_MODULE[module]


def _parsed(source: str) -> ast.Module:
    """The cell's syntax tree; an empty one for a cell that rules.py complains about."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def run_notebook(path: Path) -> float:
    """Execute a notebook from a fresh kernel in its folder and store its outputs; the seconds it took."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    client = NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": path.parent}},
                            timeout=CELL_SECONDS, record_timing=False, coalesce_streams=True)
    start = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - start
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells, 1):
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            make_portable(output, f"{path.name}: cell {number}")
    nbformat.validate(notebook)
    nbformat.write(notebook, draft := path.with_suffix(".draft"))
    os.replace(draft, path)
    return seconds


def make_portable(output: dict, where: str) -> None:
    """Take out what only the kernel that has ended could use: widget ids and the paths of a traceback."""
    data = output.get("data", {})
    if data.pop(rules.WIDGET_VIEW, None) and not {"text/html", "image/png"} & data.keys():
        raise CourseError(f"{where}: the widget has no static form; show it with shared.lab.show")
    if output["output_type"] == "error":
        output["traceback"] = [f"{output['ename']}: {output['evalue']}"]


def run(paths: list[Path]) -> int:
    """Run notebooks one after another; 1 if any fails, which is then left as it was."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    failed = 0
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ZERO_TO_ENGINE_PROGRESS"] = str(Path(folder) / "progress.json")
            try:
                seconds = run_notebook(path)
                slow = f"  over the limit of {NOTEBOOK_SECONDS} s" if seconds > NOTEBOOK_SECONDS else ""
                print(f"{path.name}: {seconds:.1f} s{slow}", flush=True)
            except (CellExecutionError, CellTimeoutError, DeadKernelError, CourseError) as error:
                failed = 1
                print(f"{path.name}: failed, left as it was\n{error}", file=sys.stderr, flush=True)
    return failed


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "sync", "check"))
    parser.add_argument("notebooks", nargs="*", help="for run and sync: numbers or paths; none means all")
    args = parser.parse_args(arguments)
    course = Course(root)
    if args.command == "check":
        found = course.check()
        print("\n".join(found) or f"{len(course.notebooks)} notebooks, no faults.")
        print(f"Not yet taught: {', '.join(course.not_yet_taught()) or 'nothing'}.")
        return min(len(found), 1)
    wanted = {Path(name).name[:2] for name in args.notebooks} or course.chapters
    if wanted - course.chapters:
        parser.error(f"there is no notebook of chapter {min(wanted - course.chapters)}")
    chosen = [notebook for notebook in course.notebooks if notebook.chapter in wanted]
    try:
        changed = [f"{name}: shared cells rewritten" for name in course.sync(chosen)]
    except CourseError as error:
        parser.exit(1, f"{error}\n")
    print("\n".join(changed) or "Shared cells are up to date.")
    return run([notebook.path for notebook in chosen]) if args.command == "run" else 0


if __name__ == "__main__":
    sys.exit(main())
