"""How the Makefile finds a Python, and what it says where there is none. No package is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "rm", "head", "touch", "mkdir", "sed", "uname", "id", "chmod", "cat")
IN_RANGE, OUT_OF_RANGE, NO_VENV = "in range", "out of range", "no venv"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

# A pretended interpreter: it knows whether its version will do, and its environments log what pip is asked.
FAKE = """#!/bin/sh
case "$1" in
  --version) echo "Python {name}" ;;
  -c) case "$2" in *sys.version_info*) {answer} ;; *secrets*) echo token ;; *resolve*) echo resolve >> log ;; esac ;;
  -m) shift
    case "$1" in
      venv) {venv}; mkdir -p .venv/bin; cat "$0" > .venv/bin/python; chmod +x .venv/bin/python ;;
      *) echo "$*" >> log ;;
    esac ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "path").mkdir()
    for name in TOOLS:
        (tmp_path / "path" / name).symlink_to(shutil.which(name))
    return tmp_path


def add_python(project: Path, command: str, kind: str) -> None:
    answer = "exit 1" if kind == OUT_OF_RANGE else "exit 0"
    venv = "echo ensurepip is not available; exit 1" if kind == NO_VENV else ":"
    path = project / "path" / command
    path.write_text(FAKE.format(name=command, answer=answer, venv=venv), encoding="utf-8")
    path.chmod(0o755)


def make(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {"PATH": str(project / "path"), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([shutil.which("make"), *arguments], cwd=project, env=environment,
                          capture_output=True, text=True, timeout=60)


def test_python3_is_taken_if_its_version_will_do(project):
    add_python(project, "python3", IN_RANGE)
    add_python(project, "python3.13", IN_RANGE)
    done = make(project, "environment", "PIP_FLAGS=--no-index")
    assert done.returncode == 0 and "Making .venv with Python python3." in done.stdout
    log = (project / "log").read_text(encoding="utf-8")
    assert 'pip install --no-index -c constraints.txt -e .[serve,dev]' in log


def test_another_python_is_found_where_python3_is_too_old_or_too_new(project):
    add_python(project, "python3", OUT_OF_RANGE)
    add_python(project, "python3.12", IN_RANGE)
    assert "Making .venv with Python python3.12." in make(project, "environment").stdout


def test_without_a_python_it_says_what_it_needs(project):
    add_python(project, "python3", OUT_OF_RANGE)
    done = make(project, "environment")
    assert done.returncode != 0
    assert "needs Python 3.10, 3.11, 3.12 or 3.13. Found: Python python3." in done.stderr
    assert not (project / ".venv").exists()


def test_a_python_without_venv_is_explained_and_leaves_nothing_behind(project):
    add_python(project, "python3", NO_VENV)
    done = make(project, "environment")
    assert done.returncode != 0 and "apt install python3-venv" in done.stderr
    assert not (project / ".venv").exists()


def test_the_environment_is_made_once_and_again_when_the_versions_change(project):
    add_python(project, "python3", IN_RANGE)
    assert make(project, "environment").returncode == 0
    first = (project / "log").read_text(encoding="utf-8")
    assert "Nothing to be done" in make(project, "environment").stdout
    assert (project / "log").read_text(encoding="utf-8") == first
    later = (project / ".venv" / ".installed").stat().st_mtime + 5
    os.utime(project / "constraints.txt", (later, later))
    done = make(project, "environment")
    assert "Making .venv" not in done.stdout
    assert (project / "log").read_text(encoding="utf-8") == first * 2


@pytest.mark.parametrize("headless", ["1", "0", ""])
def test_lab_stops_after_the_self_check_where_nobody_looks(project, headless):
    add_python(project, "python3", IN_RANGE)
    done = make(project, "lab", f"HEADLESS={headless}", "PORT=9001")
    assert done.returncode == 0, done.stderr
    calls = [line.split()[0] for line in (project / "log").read_text(encoding="utf-8").splitlines()]
    started = ["jupyterlab"] if headless != "1" else []
    assert calls == ["pip", "pip", "jupyter", "shared.default_model", "shared.selfcheck", *started]
    address = "http://127.0.0.1:9001/lab/tree/beginner/00_start_here.ipynb?token="
    assert (address in done.stdout) == bool(started)


def test_jupyterlab_has_every_option_that_the_makefile_gives():
    command = [sys.executable, "-m", "jupyterlab", "--help-all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for option in ("ServerApp.port_retries", "ServerApp.root_dir", "LabApp.default_url", "allow-root"):
        assert f"--{option}" in makefile
        assert option in done.stdout
