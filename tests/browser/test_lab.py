"""Three notebooks in a real JupyterLab, as a reader meets them: all cells run, keys move the simulator.

Skipped, with the reason, where there is no browser. ZERO_TO_ENGINE_BROWSER names one; pictures go to
ZERO_TO_ENGINE_PICTURES, or to a temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
         "--disable-component-update"]  # fmt: skip
NOTEBOOKS = {  # and the title of the simulator that is operated
    "beginner/04_kv_cache.ipynb": "The cache, slot by slot",
    "intermediate/07_scheduling.ipynb": "A scheduler, and why it decides as it does",
    "advanced/11_tensor_parallelism.ipynb": "One layer on several ranks",
}
RUN_ALL = """async () => {
  const app = window.jupyterapp; await app.restored;
  const panel = app.shell.currentWidget; await panel.context.ready; await panel.sessionContext.ready;
  app.shell.collapseLeft();
  await app.commands.execute('notebook:run-all-cells');
}"""
CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter(cell => cell.model.type === 'code' && cell.model.sharedModel.source.trim())
  .map(cell => ({
    run: cell.model.executionCount !== null,
    errors: cell.model.outputs.toJSON().filter(output => output.output_type === 'error').map(output => output.evalue),
  }))"""
SHOW_CELL = """async (title) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  const index = notebook.widgets.findIndex(cell => cell.model.type === 'code'
    && JSON.stringify(cell.model.outputs.toJSON()).includes(title));
  await notebook.scrollToItem(index, 'start');
}"""


def browser_path() -> str | None:
    named = os.environ.get("ZERO_TO_ENGINE_BROWSER")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser found: none of {', '.join(BROWSERS)} is installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab on copies of the notebooks, with settings and progress of its own."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("course")
    for track in ("beginner", "intermediate", "advanced"):
        shutil.copytree(ROOT / track, folder / track)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "ZERO_TO_ENGINE_PROGRESS": str(home / "progress.json"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--expose-app-in-browser",
               "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
               f"--ServerApp.root_dir={folder}"]  # fmt: skip
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/api"), 60, "JupyterLab did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def answers(address: str) -> bool:
    with suppress(OSError):
        return urllib.request.urlopen(address, timeout=5).status == 200
    return False


def wait_until(is_so, seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(complaint)
        time.sleep(0.25)


def step_shown(simulator: sync_api.Locator) -> int:
    return int(re.search(r"Step (\d+)", simulator.locator("[role=status]").first.inner_text())[1])


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_reader_runs_all_cells_and_moves_the_simulator_by_keys(notebook, browser, lab, tmp_path):
    page = browser.new_page(viewport={"width": 1180, "height": 1000})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"{lab}/lab/tree/{notebook}?reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
    page.evaluate(RUN_ALL)
    wait_until(lambda: all(cell["run"] for cell in page.evaluate(CELLS)), 180, "not every cell has run")
    assert [error for cell in page.evaluate(CELLS) for error in cell["errors"]] == []

    title = NOTEBOOKS[notebook]
    page.evaluate(SHOW_CELL, title)
    simulator = page.locator(".z2e", has_text=title).first
    simulator.wait_for(timeout=20_000)
    assert step_shown(simulator) == 0
    step = simulator.get_by_role("button", name="Step ▸")
    for wanted in (1, 2):
        step.press("Enter")
        wait_until(lambda: step_shown(simulator) == wanted, 20, f"the simulator did not reach step {wanted}")  # noqa: B023
    label = page.locator("label", has_text=re.compile("^Step$"))
    simulator.locator(".widget-slider", has=label).locator(".noUi-handle").press("ArrowLeft")
    wait_until(lambda: step_shown(simulator) == 1, 20, "the slider did not move the simulator back")

    simulator.get_by_role("button", name="Run to end ▸▸").press("Space")
    wait_until(lambda: step_shown(simulator) > 2, 60, "the simulator did not run to its end")
    picture = Path(os.environ.get("ZERO_TO_ENGINE_PICTURES", tmp_path)) / f"{Path(notebook).stem}.png"
    simulator.screenshot(path=picture)
    assert picture.stat().st_size > 10_000 and faults == []
    page.close()
