"""The script of the GPU checks: on a CPU as a dry run, on a GPU in full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONLY_ON_A_GPU = {"flash_attention", "default_model", "memory_comes_back", "engines_share_a_gpu"}


def run_script(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess, dict, dict]:
    command = [sys.executable, "-m", "tests.gpu.run_gpu_checks", "--save", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=dict(os.environ))
    files = [folder / f"{name}.json" for name in ("gpu_checks", "gpu_measurements")]
    return done, *(json.loads(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files)


def test_a_dry_run_goes_through_every_line_that_a_cpu_can_run(tmp_path):
    pytest.importorskip("triton")
    done, checks, measured = run_script(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    statuses = {record["name"]: record["status"] for record in checks["results"]}
    assert {name for name, status in statuses.items() if status == "skipped"} == ONLY_ON_A_GPU
    assert all(status == "ok" for name, status in statuses.items() if name not in ONLY_ON_A_GPU)
    assert all(record["reason"] for record in checks["results"] if record["status"] == "skipped")
    assert {record["name"]: record["status"] for record in measured["results"]} == dict.fromkeys(
        ("bandwidth", "one_request", "workload"), "ok"
    )
    for record in (checks, measured):
        assert record["dry_run"] and record["machine"]["device"] == "CPU only" and record["machine"]["triton"]


def test_a_check_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    from tests.gpu import checks, measures, run_gpu_checks

    def wrong(setting):
        raise AssertionError("2 is not 3")

    def right(setting):
        return {"seen": 1}

    monkeypatch.setattr(checks, "CHECKS", [wrong, right])
    monkeypatch.setattr(measures, "MEASURES", [])
    arguments = ["--dry-run", "--save", str(tmp_path)]
    assert run_gpu_checks.main(arguments) == 1
    said = capsys.readouterr().out
    assert "failed  wrong" in said and "2 is not 3" in said and "ok      right" in said
    assert run_gpu_checks.main([*arguments, "--only", "right"]) == 0
    assert run_gpu_checks.main([*arguments, "--only", "nothing"]) == 1
    assert run_gpu_checks.main([*arguments, "--budget", "-1", "--only", "right"]) == 0
    assert "skipped right" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_called_checked(tmp_path, monkeypatch):
    import torch

    if torch.cuda.is_available():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done, checks, _ = run_script(tmp_path)
    assert done.returncode == 1 and "no CUDA device: nothing was checked" in done.stderr and not checks


@pytest.mark.gpu
def test_everything_on_a_gpu(tmp_path):
    done, checks, measured = run_script(tmp_path)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    skipped = {record["name"] for record in checks["results"] if record["status"] == "skipped"}
    assert skipped <= {"flash_attention", "default_model"}
