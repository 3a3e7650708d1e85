"""Every instrument in a real notebook: what it stores is what a fresh kernel shows again, twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.lab import sample_notebook

ROOT = Path(__file__).resolve().parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Path:
    """The sample notebook, run and stored as the course's own are."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = sample_notebook.build()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder, "stored").items():
            patch.setenv(name, value)
        NotebookClient(notebook, timeout=120, coalesce_streams=True,
                       resources={"metadata": {"path": str(folder)}}).execute()
    notebook.metadata.pop("widgets", None)
    for output in (output for cell in notebook.cells for output in cell.outputs):
        output.get("data", {}).pop(WIDGET, None)
    path = folder / "sample.ipynb"
    nbformat.write(notebook, path)
    return path


def environment(folder: Path, name: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ZERO_TO_ENGINE_HOME": str(folder),
            "ZERO_TO_ENGINE_PROGRESS": str(folder / f"{name}.json")}


def nbval(path: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Strict nbval with a fresh progress file called `name`."""
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env",
               "-p", "no:cacheprovider", "--rootdir", str(path.parent), str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=path.parent,
                          env={**os.environ, **environment(path.parent, name)})


def outputs(path: Path) -> list:
    return [output for cell in nbformat.read(path, as_version=4).cells for output in cell.outputs]


def test_strict_nbval_passes_twice_in_a_row(executed):
    for name in ("first", "second"):
        done = nbval(executed, name)
        assert done.returncode == 0, done.stdout[-3000:]
        assert f"{len(sample_notebook.CELLS)} passed" in done.stdout


def test_nbval_would_see_a_difference(executed):
    """The comparison above is not empty: another number in the stored html fails."""
    notebook = nbformat.read(executed, as_version=4)
    explorer = notebook.cells[5].outputs[0].data
    explorer["text/html"] = explorer["text/html"].replace("23040", "23041")
    changed = executed.with_name("changed.ipynb")
    nbformat.write(notebook, changed)
    done = nbval(changed, "changed")
    assert done.returncode == 1 and "1 failed" in done.stdout


def test_stored_outputs_hold_no_address_and_every_figure_a_static_form(executed):
    found = outputs(executed)
    assert len(found) >= len(sample_notebook.CELLS) - 1
    for output in found:
        text = [value for kind, value in output.get("data", {}).items() if kind != "image/png"]
        assert not re.search(r"0x[0-9a-f]{6,}|<script|Traceback", str(text or output))
        if output.output_type == "display_data":
            assert {"text/html", "image/png"} & output.data.keys() and len(output.data["text/plain"]) < 500


def test_a_page_made_from_the_stored_notebook_shows_the_static_forms(executed):
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_filename(str(executed))
    for words in ("Three requests, four blocks", "What a token costs", "How many positions?",
                  "Run this cell to answer", "Lit: KV cache, attention."):
        assert words in page
