"""tools/course.py on small courses: one source, order of the chapters, running; and on the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import course
import rules
from notebooks import CourseError, Notebook, read_definitions
from tests.notebooks.courses import KV_CACHE, chapter, code, markdown, write, write_course

SHARED = ("shared",)


def faults_of(root: Path) -> list[str]:
    return course.Course(root).check()


def cell_with(cells: list[dict], text: str) -> dict:
    return next(cell for cell in cells if text in cell["source"])


def test_the_repository_itself_has_no_faults():
    start = time.perf_counter()
    assert faults_of(course.ROOT) == []
    assert time.perf_counter() - start < 5


def test_a_good_course_has_no_faults(tmp_path):
    write_course(tmp_path, chapter())
    assert faults_of(tmp_path) == []


def test_definitions_are_functions_classes_and_constants():
    found = read_definitions(KV_CACHE)
    assert list(found) == ["SLOTS", "BLOCKS", "KVCache", "size"]
    assert found["KVCache"].text.startswith("# what one token costs\n@dataclass\nclass KVCache:")
    assert found["size"].text.endswith("2))")
    assert found["BLOCKS"].is_constant and not found["size"].is_constant


def test_what_is_no_definition():
    source = "import a\nfrom b import c\n__all__ = ['d']\nif a:\n    e = 1\nf()\nx.y = 2\n"
    source += "# far away\n\nG, H = 1, 2\n"
    found = read_definitions(source)
    assert list(found) == ["G, H"] and found["G, H"].text == "G, H = 1, 2"


def test_sync_fills_cells_from_a_mere_name_and_says_so(tmp_path):
    cells = chapter()
    good = [cell["source"] for cell in cells]
    cell_with(cells, "class KVCache")["source"] = "# shared/kv_cache.py\nclass KVCache: ...\ndef size(): ..."
    cell_with(cells, "SLOTS = 4")["source"] = "# shared/kv_cache.py\nSLOTS = 5\n\n\nBLOCKS = 0"
    path = write_course(tmp_path, cells)
    found = faults_of(tmp_path)
    assert len(found) == 2 and "cell 10 differs from shared/kv_cache.py: run sync" in found[0]
    small = course.Course(tmp_path)
    assert small.sync(small.notebooks) == ["04_kv_cache.ipynb"]
    assert [cell["source"] for cell in Notebook(path).cells] == good
    assert faults_of(tmp_path) == []
    again = course.Course(tmp_path)
    assert again.sync(again.notebooks) == []


def test_sync_keeps_ids_counts_and_outputs(tmp_path):
    cells = chapter()
    path = write_course(tmp_path, cells)
    before = json.loads(path.read_text(encoding="utf-8"))
    cell_with(cells, "SLOTS = 4")["source"] = "# shared/kv_cache.py\nSLOTS = 0\nBLOCKS = 0"
    write_course(tmp_path, cells)
    assert course.main(["sync", "04"], root=tmp_path) == 0
    after = json.loads(path.read_text(encoding="utf-8"))
    for cell in after["cells"]:
        cell["source"] = "".join(cell["source"])
    assert after == before


@pytest.mark.parametrize("source, words", [
    ("# shared/kv_cache.py\ndef gone(): ...", "shared/kv_cache.py does not define gone"),
    ("# shared/kv_cache.py\nimport math", "does not define what this cell holds"),
    ("# shared/nothing.py\nx = 1", "starts with '# shared/<file>.py'"),
    ("x = 1", "starts with '# shared/<file>.py'"),
])  # fmt: skip
def test_shared_cells_that_name_nothing(tmp_path, source, words):
    cells = chapter()
    cells.insert(5, code(source, tags=SHARED))
    write_course(tmp_path, cells)
    assert any("04_kv_cache.ipynb: cell 6" in fault and words in fault for fault in faults_of(tmp_path))
    small = course.Course(tmp_path)
    with pytest.raises(CourseError, match="cell 6"):
        small.sync(small.notebooks)


def test_a_definition_that_no_chapter_introduces_or_two_cells_do(tmp_path):
    write_course(tmp_path, chapter())
    write(tmp_path, "shared/kv_cache.py", KV_CACHE + "\n\ndef forgotten():\n    pass\n")
    (fault,) = faults_of(tmp_path)
    assert fault == "shared/kv_cache.py: forgotten is introduced by no chapter, not once by 04"
    cells = chapter()
    cells.insert(5, code("# shared/kv_cache.py\nSLOTS = 4", tags=SHARED))
    write_course(tmp_path, cells)
    assert faults_of(tmp_path) == ["shared/kv_cache.py: SLOTS is introduced by 04 and 04, not once by 04"]


def test_a_definition_in_the_wrong_chapter(tmp_path):
    cells = chapter()
    cells.insert(5, code("# shared/decode.py\nloop = 1", tags=SHARED))
    write_course(tmp_path, cells)
    write(tmp_path, "shared/decode.py", "loop = 1\n")
    assert faults_of(tmp_path) == []  # chapter 03 is not written yet
    write_course(tmp_path, [markdown("# 03")], name="beginner/03_decode.ipynb")
    assert "shared/decode.py: loop is introduced by 04, not once by 03" in faults_of(tmp_path)


def test_modules_of_chapters_that_do_not_exist_yet_are_listed(tmp_path, capsys):
    write_course(tmp_path, chapter())
    write(tmp_path, "shared/scheduler.py", "class Scheduler: ...\n")
    write(tmp_path, "shared/selfcheck.py", "def main(): ...\n")
    assert course.main(["check"], root=tmp_path) == 0
    assert capsys.readouterr().out == "1 notebooks, no faults.\nNot yet taught: 07 scheduler.\n"


def test_a_module_of_no_chapter(tmp_path):
    write_course(tmp_path, chapter())
    write(tmp_path, "shared/surprise.py", "x = 1\n")
    assert faults_of(tmp_path) == ["shared/surprise.py belongs to no chapter: add it to CHAPTER_OF_MODULE"]


@pytest.mark.parametrize("source", [
    "from shared.scheduler import Scheduler", "import shared.scheduler", "from shared import Scheduler",
    "from shared import scheduler", "def f():\n    from shared.scheduler import Scheduler",
])  # fmt: skip
def test_a_notebook_imports_nothing_from_later_chapters(tmp_path, source):
    cells = chapter()
    cells.insert(5, code(source))
    write_course(tmp_path, cells)
    write(tmp_path, "shared/scheduler.py", "class Scheduler: ...\n")
    assert faults_of(tmp_path) == ["04_kv_cache.ipynb: cell 6 imports scheduler, of chapter 07"]


def test_imports_from_earlier_chapters_and_on_the_start_page(tmp_path):
    cells = chapter()
    imports = ["from shared.decode import loop", "import shared.lab.views", "from shared import errors"]
    cells.insert(5, code("\n".join(imports)))
    write_course(tmp_path, cells)
    start = [markdown("# Start"), code("from shared.kv_cache import KVCache")]
    write_course(tmp_path, start, name="beginner/00_start_here.ipynb")
    write(tmp_path, "shared/decode.py", "loop = 1\n")
    assert faults_of(tmp_path) == []


def test_a_module_imports_nothing_from_later_chapters(tmp_path):
    write_course(tmp_path, chapter())
    write(tmp_path, "shared/scheduler.py", "from shared.kv_cache import KVCache\n")
    late = "from typing import TYPE_CHECKING\n\nfrom shared.kv_cache import KVCache\n\nif TYPE_CHECKING:\n"
    write(tmp_path, "shared/decode.py", late + "    from shared.scheduler import x\n")
    assert faults_of(tmp_path) == ["shared/decode.py imports kv_cache, of chapter 04"]


@pytest.mark.parametrize("quiz", ["QUIZ = [1, 2]\n", "QUIZ = make()\n", "x = 1\n"])
def test_three_questions(tmp_path, quiz):
    write_course(tmp_path, chapter())
    write(tmp_path, "shared/lab/chapters/ch04.py", quiz)
    assert faults_of(tmp_path) == ["shared/lab/chapters/ch04.py: QUIZ is not a list of three questions"]


def test_outputs_do_not_name_the_folder_of_the_course(tmp_path):
    cells = chapter()
    cells[3]["outputs"][0]["text"] = [f"{tmp_path}/x"]
    write_course(tmp_path, cells)
    assert any("cell 4 prints the path of this folder" in fault for fault in faults_of(tmp_path))


def test_check_says_what_is_wrong_and_fails(tmp_path, capsys):
    write_course(tmp_path, chapter(), kernelspec={"name": "other"})
    assert course.main(["check"], root=tmp_path) == 1
    assert "04_kv_cache.ipynb: the kernel is not python3" in capsys.readouterr().out


def test_a_chapter_that_does_not_exist_cannot_be_run(tmp_path, capsys):
    write_course(tmp_path, chapter())
    with pytest.raises(SystemExit):
        course.main(["run", "05"], root=tmp_path)
    assert "no notebook of chapter 05" in capsys.readouterr().err


WIDGET = """
import ipywidgets as widgets
from IPython.display import display

slider = widgets.IntSlider(value=3)
bundle = dict(slider._repr_mimebundle_())
bundle |= {"text/html": f"<b>{slider.value}</b>", "text/plain": "A slider."}
display(bundle, raw=True)
"""


def cells_to_run() -> list[dict]:
    ask = "import os, pathlib\nprint(os.environ['HF_HUB_OFFLINE'], pathlib.Path.cwd().name)"
    fail = code("raise ValueError('no')", tags=("raises-exception",))
    count = "for n in range(3):\n    print(n, flush=True)\nn"
    return [markdown("# Start"), code(ask), code(count), code(WIDGET), fail]


@pytest.fixture
def ran(tmp_path) -> Path:
    path = write_course(tmp_path, cells_to_run(), name="beginner/00_start_here.ipynb")
    assert course.main(["run"], root=tmp_path) == 0
    return path


def test_run_stores_what_nbval_and_a_code_host_need(ran, tmp_path, capsys):
    notebook = Notebook(ran)
    assert rules.faults(notebook) == []
    assert notebook.content["metadata"] == {"kernelspec": course.KERNEL, "language_info": {"name": "python"}}
    assert [cell["id"] for cell in notebook.cells] == [f"cell-{n}" for n in range(5)]
    asked, counted, widget, failed = ([*cell["outputs"]] for cell in notebook.code)
    assert asked[0]["text"] == ["1 beginner\n"]
    assert [output["output_type"] for output in counted] == ["stream", "execute_result"]
    assert widget[0]["data"] == {"text/html": ["<b>3</b>"], "text/plain": ["A slider."]}
    assert failed[0]["traceback"] == ["ValueError: no"]
    first = ran.read_bytes()
    assert course.main(["run", "00"], root=tmp_path) == 0
    assert ran.read_bytes() == first


def strict_nbval(path: Path) -> str:
    """The closing line of strict nbval on one notebook."""
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    sanitize = ["--nbval-sanitize-with", str(course.ROOT / "tests" / "nbval_sanitize.cfg")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *sanitize, str(path)], cwd=path.parent, env=environment,
                          capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()[-1]


def test_strict_nbval_passes_twice_on_a_widget_and_fails_on_a_change(ran):
    for _ in range(2):
        assert "4 passed" in strict_nbval(ran)
    ran.write_text(ran.read_text(encoding="utf-8").replace("<b>3</b>", "<b>4</b>"), encoding="utf-8")
    assert "1 failed, 3 passed" in strict_nbval(ran)


def test_nbval_ignores_durations_on_lines_of_their_own_and_nothing_else(tmp_path):
    lines = ["measured: {} tokens/s", "{} ms"]
    source = "import time\n" + "\n".join(f"print({line!r}.format(time.time()))" for line in lines)
    path = write_course(tmp_path, [code(source)], name="beginner/00_start_here.ipynb")
    assert course.main(["run"], root=tmp_path) == 0
    assert "1 passed" in strict_nbval(path)
    path.write_text(path.read_text(encoding="utf-8").replace("ms\\n", "ms in 3 steps\\n"), encoding="utf-8")
    assert "1 failed" in strict_nbval(path)


def test_run_leaves_a_notebook_that_fails_as_it_was(tmp_path, capsys):
    path = write_course(tmp_path, [code("1 / 0")], name="beginner/00_start_here.ipynb")
    before = path.read_bytes()
    assert course.main(["run"], root=tmp_path) == 1
    assert path.read_bytes() == before
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_run_refuses_a_widget_without_a_static_form(tmp_path, capsys):
    source = "import ipywidgets\nipywidgets.IntSlider()"
    write_course(tmp_path, [code(source)], name="beginner/00_start_here.ipynb")
    assert course.main(["run"], root=tmp_path) == 1
    assert "cell 1: the widget has no static form" in capsys.readouterr().err
