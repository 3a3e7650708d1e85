"""Chapter 03's figure on a scripted loop: candidates, counts and the triangle."""

from __future__ import annotations

import pytest
import torch

from shared.lab.chapters import ch03


class Letters:
    def encode(self, text):
        return [ord(c) - 65 for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(65 + i) for i in ids)


def always_b(model, ids):
    logits = torch.zeros(26)
    logits[1] = 10.0
    while True:
        yield logits, 1


@pytest.fixture
def stepper():
    made = ch03.decode_stepper(None, Letters(), always_b)
    made.fields["prompt"].value = "AAA"
    return made


def test_each_step_shows_candidates_and_what_ran_again(stepper):
    assert "Nothing has run yet" in stepper.frame.value
    stepper.step.click()
    assert "Step 1 ran 3 positions" in stepper.frame.value and "So far 3, of which 0 again" in stepper.frame.value
    stepper.step.click()
    assert "So far 7, of which 3 again" in stepper.frame.value
    assert "■■■\n□□□■" in stepper.frame.value


def test_back_and_run_to_the_end(stepper):
    stepper.end.click()
    assert "Step 8 ran 10 positions" in stepper.frame.value
    stepper.back.click()
    assert "Step 7 ran 9 positions" in stepper.frame.value


def test_the_triangle_counts_what_the_sum_says():
    drawn = ch03.triangle((3, 4, 5))
    assert drawn.count("■") == 5 and drawn.count("□") == 7


def test_a_prompt_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="30 tokens; this figure shows 1 to 24"):
        next(iter(ch03.decode_states(None, Letters(), always_b, "A" * 30, 2)))
