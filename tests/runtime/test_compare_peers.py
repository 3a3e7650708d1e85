"""The comparison with other engines survives those that end or hang, and counts what the others did."""
from __future__ import annotations

import argparse
import sys

import pytest

from tools.compare_peers import KINDS, OURS, Comparison, PeerError, ratios, workload
from tools.peer_bound import interpolated

ANSWERS = """#!{python}
import sys
print("loading", flush=True)
print('{{"version": "1"}}', flush=True)
for line in sys.stdin:
    {then}
"""
GOOD = "print('{\"rate\": 50.0}', flush=True)"


@pytest.fixture
def engine(tmp_path):
    """A program in the place of an interpreter, that does something with each line it gets."""
    def make(name: str, then: str) -> str:
        path = tmp_path / name
        path.write_text(ANSWERS.format(python=sys.executable, then=then))
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.setattr("tools.compare_peers.PAUSE_SECONDS", 0)
    made = Comparison(argparse.Namespace(model="m", gguf=None, dtype="float32", limit=10.0, requests=3, longest=8))
    yield made
    for peer in made.peers.values():
        peer.close()


def bound(requests):
    return {"workload": 100.0, "one request": 200.0, "own": {"workload": 200.0, "one request": 250.0}}


def test_peers_that_end_or_hang_are_left_out(engine, comparison):
    comparison.load({
        OURS: engine("ours", GOOD), "good": engine("good", GOOD), "ends": engine("ends", "sys.exit('out of memory')"),
    })
    assert list(comparison.peers) == [OURS, "good"] and "out of memory" in comparison.failed["ends"]
    comparison.round(bound)
    comparison.peers["good"].limit = 0.0  # from now on it is too slow
    comparison.round(bound)
    record = comparison.record(True)
    assert record["tokens_per_second"]["workload"] == {OURS: [50.0, 50.0], "good": [50.0]}
    assert record["times_the_peer"] == {kind: {"good": 1.0} for kind in KINDS}
    assert record["share_of_bound"] == {"workload": 0.5, "one request": 0.25}
    assert record["share_of_that_bound"] == {"workload": 0.25, "one request": 0.2}
    assert "within" in record["left_out"]["good"]


def test_without_our_own_engine_there_is_nothing_to_compare(engine, comparison):
    with pytest.raises(PeerError, match="broken"):
        comparison.load({OURS: engine("ours", "sys.exit('broken')")})
    assert not comparison.peers


def test_ratios_belong_to_one_round():
    rates = {"workload": {OURS: [10.0, 40.0, 30.0], "peer": [5.0, 10.0, 15.0]}}
    assert ratios(rates) == {"workload": {"peer": 2.0}}


def test_the_workload_is_the_common_one():
    requests = workload()
    assert sum(len(r["prompt"]) for r in requests) == 5268 and sum(r["max_tokens"] for r in requests) == 4191


def test_times_between_two_measured_ones():
    assert [interpolated({1: 1.0, 3: 5.0}, rows) for rows in (1, 2, 3, 9)] == [1.0, 3.0, 5.0, 5.0]


def test_a_peer_that_never_ends_is_ended(engine, comparison, monkeypatch):
    monkeypatch.setattr("tools.compare_peers.PATIENCE_SECONDS", 0.2)
    comparison.load({OURS: engine("ours", GOOD + "\n\nimport time\ntime.sleep(600)")})
    process = comparison.peers[OURS].process
    comparison.peers[OURS].close()
    assert process.returncode < 0
