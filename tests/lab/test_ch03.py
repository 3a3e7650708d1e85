"""Chapter 03's figure on a scripted loop: candidates, counts and the triangle."""

from __future__ import annotations

import pytest
import torch

from shared.lab.chapters import ch03, ch03_measure


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


def test_the_chart_has_a_point_for_each_step_of_the_loop():
    times = ch03_measure.loop_times(always_b(None, [0]), 5)
    assert len(times) == 5 and all(0 <= each < 5000 for each in times)
    assert ch03_measure.time_chart(3, times, 1.0).startswith(b"\x89PNG")


def test_a_prompt_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="30 tokens; this figure shows 1 to 24"):
        next(iter(ch03.decode_states(None, Letters(), always_b, "A" * 30, 2)))


def test_a_draft_is_judged_by_what_the_loop_would_write():
    assert ch03.draft_of([4, 8], 4, None)[:2] == ch03.draft_of([4, 8], 4, 2)[:2]
    for wrong_at in (0, 2):
        prompt, draft = [4, 8], ch03.draft_of([4, 8], 4, wrong_at)
        written = list(prompt)
        for _ in draft:
            written.append(ch03.after(written))
        agree = [a == b for a, b in zip(written[2:], draft)]
        assert agree.index(False) == wrong_at


def test_too_long_a_prompt_is_said_in_words_and_a_good_one_clears_them(stepper):
    stepper.fields["prompt"].value = "A" * 30
    assert "the prompt has 30 tokens; this figure shows 1 to 24" in stepper.fields.error.value
    stepper.fields["prompt"].value = "AB"
    assert "30 tokens" not in stepper.fields.error.value and "Nothing has run yet" in stepper.frame.value
