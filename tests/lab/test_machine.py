from __future__ import annotations

import pytest

pytest.importorskip("torch")

from shared.lab.machine import environment, environment_report, measured_bandwidth, measured_flops  # noqa: E402


def test_the_environment_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ZERO_TO_ENGINE_HOME", str(tmp_path))
    facts = environment()
    assert {"python", "torch", "processor", "memory", "device", "model"} <= set(facts)
    assert "not here yet" in facts["model"] and "GB" in facts["memory"]


@pytest.mark.parametrize("measure", [lambda: measured_bandwidth(8, n=3), lambda: measured_flops(64, n=3)])
def test_a_measurement_has_its_spread_and_count(measure):
    found = measure()
    assert 0 < found.low <= found.median <= found.high and found.n == 3
    assert f"(median of 3, {found.low:.1f} to {found.high:.1f})" in str(found) and found.unit in str(found)


def test_more_work_does_not_look_faster_than_the_machine():
    small, large = measured_bandwidth(16, n=5), measured_bandwidth(128, n=5)
    assert large.median < 20 * small.median and small.median < 5000


def test_a_report_without_measurements_is_quick_and_complete():
    report = environment_report(measure=False)
    assert "python" in report and "GB/s" not in report
