from __future__ import annotations

import pytest

from shared.lab import predict, progress, reveal
from shared.lab.predict import Prediction

OPTIONS = ["100", "119", "2000", "6950"]


def test_a_choice_is_stored_and_compared(capsys):
    asked = Prediction("04.positions", OPTIONS)
    asked.choice.value = "119"
    assert "You predict 119" in asked.message.value
    reveal("04.positions", 119)
    assert capsys.readouterr().out == "The answer: 119\nYou predicted 119: right.\n"


def test_a_wrong_guess_is_said_plainly(capsys):
    Prediction("04.positions", OPTIONS).choice.value = "6950"
    reveal("04.positions", 119)
    assert "You predicted 6950: not this time." in capsys.readouterr().out


def test_without_a_guess_the_notebook_runs_on(capsys):
    predict("04.positions", OPTIONS)
    reveal("04.positions", "1,234")
    assert capsys.readouterr().out.endswith("The answer: 1,234\nYou made no prediction.\n")


def test_numbers_compare_whatever_their_commas(capsys):
    progress.record_prediction("k", "1,234")
    reveal("k", 1234)
    assert "right." in capsys.readouterr().out


def test_an_earlier_guess_is_chosen_again_and_a_vanished_option_is_not():
    Prediction("k", OPTIONS).choice.value = "100"
    assert Prediction("k", OPTIONS).choice.value == "100"
    assert Prediction("k", ["a", "b"]).choice.value is None


def test_nothing_is_chosen_at_first_and_nothing_stored():
    asked = Prediction("k", OPTIONS)
    assert asked.choice.value is None and progress.prediction("k") is None


def test_a_guess_that_cannot_be_saved_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO_TO_ENGINE_PROGRESS", str(tmp_path / "file" / "p.json"))
    asked = Prediction("k", OPTIONS)
    asked.choice.value = "100"
    assert "could not be saved" in asked.message.value


def test_options_are_escaped_in_the_static_form():
    drawn = Prediction("k", ["<script>", "b"], question="<img onerror=x>").static()
    assert "<script>" not in drawn and "<img" not in drawn and "<li>b</li>" in drawn


@pytest.mark.parametrize("options", [[], ["one"], ["same", "same"], ["a", "b", "b"]])
def test_options_must_differ(options):
    with pytest.raises(ValueError, match="two or more different options"):
        predict("k", options)
