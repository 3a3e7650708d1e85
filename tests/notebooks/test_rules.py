"""Each rule of tools/rules.py, on a chapter that breaks this one rule and no other."""

from __future__ import annotations

import pytest

import rules
from notebooks import Notebook
from tests.notebooks.courses import DETAILS, chapter, code, markdown, printed, write_course


def find(cells: list[dict], text: str) -> int:
    return next(index for index, cell in enumerate(cells) if text in cell["source"])


def faults_of(tmp_path, cells: list[dict], **metadata) -> list[str]:
    return rules.faults(Notebook(write_course(tmp_path, cells, **metadata)))


def one_fault(tmp_path, cells: list[dict], **metadata) -> str:
    (fault,) = faults_of(tmp_path, cells, **metadata)
    return fault


def test_a_good_chapter_has_no_faults(tmp_path):
    assert faults_of(tmp_path, chapter()) == []


@pytest.mark.parametrize("count, words", [(None, "no run count"), (7, "run count 7, not 2")])
def test_run_counts_must_be_1_to_n(tmp_path, count, words):
    cells = chapter()
    cells[find(cells, "print(len")]["execution_count"] = count
    fault = one_fault(tmp_path, cells)
    assert fault.startswith("04_kv_cache.ipynb: cell 4") and words in fault


@pytest.mark.parametrize("source, words", [
    ("x = 1\nx;", "ends in ';'"),
    ("print(_)", "uses '_'"),
    ("print(_3)", "uses '_3'"),
    ("Out[3]", "uses 'Out'"),
    ("print(In)", "uses 'In'"),
    ("%%time\nx = 1", "not plain Python"),
    ("!ls", "not plain Python"),
    ("# NBVAL_IGNORE_OUTPUT\nx = 1", "steers nbval by a comment"),
    ("x = 1\n" * 61, "61 lines"),
])  # fmt: skip
def test_sources(tmp_path, source, words):
    cells = chapter()
    cells.insert(4, code(source))
    assert words in one_fault(tmp_path, cells)


@pytest.mark.parametrize("source", ["for _ in range(3):\n    print()", "x = 'a;'", "# 60\n" + "x = 1\n" * 59])
def test_sources_that_look_wrong_and_are_not(source):
    assert list(rules.source_faults(source)) == []


def test_unknown_tags(tmp_path):
    cells = chapter()
    cells.insert(4, code("x = 1", tags=("nbval-skip",)))
    assert "has the tag 'nbval-skip'" in one_fault(tmp_path, cells)


def test_a_shared_cell_needs_its_tag(tmp_path):
    cells = chapter()
    cells[find(cells, "SLOTS = 4")]["metadata"] = {}
    assert "lacks the tag" in one_fault(tmp_path, cells)


def test_at_most_15_percent_of_the_cells_go_uncompared(tmp_path):
    cells = chapter()  # 9 code cells
    cells[3]["metadata"] = {"tags": ["nbval-ignore-output"]}
    assert faults_of(tmp_path, cells) == []
    cells[6]["metadata"] = {"tags": ["nbval-ignore-output"]}
    assert "2 of 9 code cells are not compared" in one_fault(tmp_path, cells)


@pytest.mark.parametrize("text, what", [
    ("<Cache object at 0x7f3a12345678>", "an object address"),
    ("saved to /home/ada/model", "an absolute path"),
    ("saved to /root/.cache/model", "an absolute path"),
    ("/tmp/ipykernel_12/1.py:1: UserWarning", "an absolute path"),
    (r"saved to C:\Users\ada", "an absolute path"),
    ("  45%|####   | 9/20 [00:01<00:01, 8.1it/s]", "a progress bar"),
    ("10 of 20\r11 of 20", "a progress bar"),
])  # fmt: skip
def test_outputs(tmp_path, text, what):
    cells = chapter()
    cells[3]["outputs"] = [printed(text)]
    assert f"cell 4 prints {what}" in one_fault(tmp_path, cells)


@pytest.mark.parametrize("text", [
    "POST /v1/chat/completions", "50% of the blocks", "0xff", "and/or", "https://example.org/home/x",
    "look at ./tmp/x", "a\r\nb", "1 | 2",
])  # fmt: skip
def test_outputs_that_look_wrong_and_are_not(tmp_path, text):
    cells = chapter()
    cells[3]["outputs"] = [printed(text)]
    assert faults_of(tmp_path, cells) == []


@pytest.mark.parametrize("output", [
    {"output_type": "display_data", "metadata": {}, "data": {"text/html": ["<i>at 0x7f3a", "12345678</i>"]}},
    {"output_type": "error", "ename": "E", "evalue": "", "traceback": ["at 0x7f3a12345678"]},
    {"output_type": "stream", "name": "stderr", "text": ["x\n", "at 0x7f3a12345678"]},
])  # fmt: skip
def test_every_kind_of_output_is_read(tmp_path, output):
    cells = chapter()
    cells[3]["outputs"] = [output]
    assert "an object address" in one_fault(tmp_path, cells)


def test_widgets_need_a_static_form_and_keep_no_ids(tmp_path):
    plain = {"text/plain": "VBox(children=(IntSlider(value=0),))"}
    bare = {"output_type": "display_data", "metadata": {}, "data": plain}
    cells = chapter()
    cells[3]["outputs"] = [bare]
    assert "a widget without a static form" in one_fault(tmp_path, cells)
    data = {rules.WIDGET_VIEW: {"model_id": "abc"}, "text/html": "<b>0</b>"}
    cells[3]["outputs"] = [{**bare, "data": data}]
    assert "stores a widget's model id" in one_fault(tmp_path, cells)
    cells[3]["outputs"] = []
    assert "metadata.widgets" in one_fault(tmp_path, cells, widgets={"state": {}})


def test_ids_and_kernel(tmp_path):
    assert "kernel" in one_fault(tmp_path, chapter(), kernelspec={"name": "my-env"})
    cells = chapter()
    cells[0]["id"] = cells[1]["id"] = "same"
    assert "ids" in one_fault(tmp_path, cells)


def test_prose_that_repeats_a_code_cell(tmp_path):
    cells = chapter()
    cells.insert(4, code("total = 0\nfor n in range(3):\n    total += n"))
    cells.insert(5, markdown("So:\n\n```python\nfor n in range(3):\n    total += n\n```\n"))
    assert "cell 6 repeats a code cell: 'for n in range(3):'" in one_fault(tmp_path, cells)
    cells[5]["source"] = "So `total += n`:\n\n```\nfor n in range(4):\n    total += n\n```\n"
    assert faults_of(tmp_path, cells) == []


@pytest.mark.parametrize("count, is_right", [(27, True), (45, True), (46, False)])
def test_number_of_cells(tmp_path, count, is_right):
    cells = chapter()
    padded = cells[:4] + [markdown("More.") for _ in range(count - len(cells))] + cells[4:]
    assert faults_of(tmp_path, padded) == ([] if is_right else [f"04_kv_cache.ipynb: has {count} cells; "
                                                                 "a chapter has 25 to 45"])


def test_too_few_cells(tmp_path):
    cells = [cell for cell in chapter() if cell["source"] != "## Predict"]
    assert len(cells) == 25 and faults_of(tmp_path, cells) == []
    assert "has 24 cells" in one_fault(tmp_path, [cell for cell in cells if cell["source"] != "## Quiz"])


def test_too_many_words(tmp_path):
    cells = chapter()
    cells[2]["source"] += " word" * 2000
    assert "words of prose" in one_fault(tmp_path, cells)


def test_words_are_what_is_read():
    prose = "Two *words*, [a link](https://example.org/a/b)."
    assert rules.count_words(f"{prose}\n\n```python\nx = 1\n```\n<details class='x'>It's 3.5</details>") == 6


def test_too_large_a_file(tmp_path):
    cells = chapter()
    picture = {"image/png": "A" * 500_000}
    cells[3]["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": picture}]
    assert "bytes long" in one_fault(tmp_path, cells)


@pytest.mark.parametrize("name, kind, text", [
    ("1 promise", "markdown", "# 04"), ("2 map", "code", "engine_map("),
    ("3 problem", "markdown", "## The problem"), ("4 aims", "markdown", "## You will"),
    ("5 predict", "code", "predict("), ("6 build", "markdown", "## Build"),
    ("7 look inside", "markdown", "## Look"), ("8 proof", "markdown", "## Prove"),
    ("9 exercises", "markdown", "## Exercises"), ("10 break it", "markdown", "## Break"),
    ("11 measure", "markdown", "## Measure"), ("12 quiz", "code", "quiz("),
    ("13 what people get wrong", "markdown", "## What people"),
    ("13 what you now have", "markdown", "## What you now have"),
    ("13 what is still bad", "markdown", "still bad"),
])  # fmt: skip
def test_each_part_of_a_chapter_is_missed(tmp_path, name, kind, text):
    cells = chapter()
    for cell in cells:
        if cell["cell_type"] == kind:
            cell["source"] = cell["source"].replace(text, "## Other").replace("## ## Other", "## Other")
    assert f"04_kv_cache.ipynb: part '{name}' is missing" in faults_of(tmp_path, cells)


def test_the_parts_come_in_order(tmp_path):
    cells = chapter()
    look, prove = find(cells, "## Look inside"), find(cells, "## Prove it")
    cells[look], cells[prove] = cells[prove], cells[look]
    assert "part '8 proof' comes before part '7 look inside'" in one_fault(tmp_path, cells)


def test_the_start_page_has_an_order_of_its_own(tmp_path):
    path = write_course(tmp_path, [markdown("# Start here")], name="beginner/00_start_here.ipynb")
    assert rules.faults(Notebook(path)) == []


def test_exercises(tmp_path):
    cells = chapter()
    second = find(cells, 'check("04.2"')
    cells[second + 1]["source"] = DETAILS.replace("Hint 2", "More")
    assert "exercise 04.2 has 1 hints, not two" in one_fault(tmp_path, cells)
    cells[second + 1]["source"] = DETAILS.replace("Solution", "Answer")
    assert "exercise 04.2 has no solution" in one_fault(tmp_path, cells)
    cells[second + 1]["source"] = DETAILS
    cells[second - 1]["source"] = "### Another one"
    assert "exercise 04.2 has no heading" in one_fault(tmp_path, cells)
    cells[second - 1]["source"] = "### Exercise 04.2"
    cells[second]["source"] = cells[second]["source"].replace("raise NotImplementedError", "return x // 2")
    assert "exercise 04.2 has no stub" in one_fault(tmp_path, cells)
    cells[second]["source"] = "x = 1"
    assert "has 1 exercises" in one_fault(tmp_path, cells)


def test_exercises_count_from_one(tmp_path):
    cells = chapter()
    for cell in cells:
        cell["source"] = cell["source"].replace("04.2", "04.3")
    assert "its exercises are 04.1, 04.3" in one_fault(tmp_path, cells)


def test_a_planted_fault_needs_a_solution_but_no_stub(tmp_path):
    cells = chapter()
    place = find(cells, "## Break it") + 1
    cells.insert(place, code('def halve(x):\n    return x / 2\n\n\ncheck("04.B", halve)'))
    cells.insert(place + 1, markdown(DETAILS))
    assert faults_of(tmp_path, cells) == []
    cells[place + 1]["source"] = "Well."
    assert "exercise 04.B has no solution" in one_fault(tmp_path, cells)


def test_links_lead_somewhere(tmp_path):
    cells = chapter()
    cells[2]["source"] += " [the file](../shared/kv_cache.py), [later](../intermediate/07_scheduling.ipynb)"
    cells[2]["source"] += " [web](https://example.org/x) [here](#quiz)"
    assert faults_of(tmp_path, cells) == []
    cells[2]["source"] += " [gone](../shared/gone.py#L3)"
    assert "cell 3 links to ../shared/gone.py" in one_fault(tmp_path, cells)
