"""Chapter 12 without a kernel: the tile stepper, the switchboard, the counts, the exercises' references."""

from __future__ import annotations

import math
import random
import shutil

import pytest

torch = pytest.importorskip("torch")

from shared.lab.chapters.ch12 import BATCHES, combined, fewest_padded, padded_rows, whole_speedup  # noqa: E402
from shared.lab.chapters.ch12_measure import (  # noqa: E402
    SETTINGS,
    SWITCHES,
    Operations,
    decode_batch,
    filled_cache,
    named,
    product_of_parts,
    runner_of,
    stack_times,
    sum_of_savings,
    switchboard,
)
from shared.lab.chapters.ch12_tiles import some_scores, tile_stepper  # noqa: E402
from shared.lab.machine import Measurement  # noqa: E402
from shared.model import ModelConfig, Transformer  # noqa: E402


def tiles(scores, values, tile):
    """As the notebook has it, with what came before kept as whole sums."""
    for end in range(tile, len(scores) + tile, tile):
        seen = scores[:end]
        peak = seen.max()
        weights = (seen - peak).exp() if peak > -torch.inf else torch.zeros_like(seen)
        yield peak, weights.sum(), weights @ values[:end]


def tiny(dtype=torch.float32) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(64, 32, 64, 2, 4, 2, 16, 1e-5, 1e4, None, 512, True)).to(dtype).eval()


# The tile stepper


def test_the_stepper_ends_at_the_softmax_over_all_keys():
    stepper = tile_stepper(tiles)
    stepper.end.click()
    assert len(stepper.frames) == 5  # four tiles of three keys, and the start
    want = torch.tensor(some_scores("1 0.5 2  3 -1 0  2.5 9 1  0 2 1"), dtype=torch.float64).softmax(0)
    mean = float(want @ torch.arange(12, dtype=torch.float64))
    assert stepper.frames[-1].count(f"{mean:.4f}") == 2  # by tiles, and at once


def test_a_huge_score_and_keys_that_may_not_be_seen_are_fine():
    stepper = tile_stepper(tiles)
    stepper.fields["scores"].value = "-inf -inf -inf 1 2 1000"
    stepper.step.click()
    assert "no key so far" in stepper.frame.value
    stepper.end.click()
    assert "5.0000" in stepper.frame.value and "nan" not in stepper.frame.value


@pytest.mark.parametrize("text, words", [
    ("", "1 to 24 numbers"), ("1 x", "numbers separated by spaces"), ("inf", "inf are none"), ("nan", "inf are none"),
    (" ".join("1" * 25), "not 25"),
])  # fmt: skip
def test_scores_that_are_none_are_named(text, words):
    with pytest.raises(ValueError, match=words):
        some_scores(text)
    stepper = tile_stepper(tiles)
    stepper.fields["scores"].value = text or " "
    assert words in stepper.fields.error.value


def test_drawn_scores_follow_the_seed():
    stepper = tile_stepper(tiles)
    stepper.fields["draw"].value = True
    first = stepper.frames[0]
    stepper.seed.value = 5
    assert stepper.frames[0] != first
    stepper.seed.value = 0
    assert stepper.frames[0] == first


def test_back_reset_and_the_static_form():
    stepper = tile_stepper(tiles)
    stepper.step.click()
    stepper.back.click()
    assert stepper.index == 0
    stepper.end.click()
    stepper.reset.click()
    assert stepper.index == 0 and "to come" in stepper.frame.value
    assert "Step 4 of 4" in str(stepper.static((0, -1)))


# Counts and times


def test_a_decode_batch_is_what_the_engine_would_build():
    batch = decode_batch(rows=3, context=20, block_size=8)
    assert batch.block_tables.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batch.slot_mapping.tolist() == [19, 43, 67] and batch.positions.tolist() == [19] * 3


def test_copies_out_of_the_cache_are_counted_to_the_byte():
    model, batch = tiny(), decode_batch(rows=3, context=20)
    with torch.inference_mode(), Operations() as seen:
        runner_of(frozenset(), model, filled_cache(model, batch)).forward(batch)
    assert seen.bytes_written["index_select"] == 2 * 2 * 3 * 20 * 2 * 16 * 4  # K and V, layers, rows, tokens, heads
    assert seen.counts["linear"] == 2 * 7 + 1


def test_the_settings_are_all_eight_and_give_the_same_hidden_states():
    assert len(SETTINGS) == 8 and {named(setting) for setting in SETTINGS} > {"plain", "fused operations"}
    batch, results = decode_batch(rows=3, context=20), []
    for setting in SETTINGS:
        model = tiny()
        with torch.inference_mode():
            results.append(runner_of(setting, model, filled_cache(model, batch)).forward(batch))
    assert all(torch.allclose(result, results[0], atol=1e-4) for result in results)


def test_every_setting_is_timed():
    times = stack_times(tiny, rows=2, context=20, n=2)
    assert list(times) == SETTINGS and all(each.n == 2 and each.median > 0 for each in times.values())


def made_up_times() -> dict:
    saved = {"attention": 20.0, "fuse": 30.0, "prepack": 10.0}
    left = {setting: 100 - sum(saved[switch] for switch in setting) for setting in SETTINGS}
    return {setting: Measurement(named(setting), median, 1, 2, 5, "ms") for setting, median in left.items()}


def test_the_switchboard_shows_that_speedups_do_not_multiply():
    board = switchboard(made_up_times())
    assert "2.50 times as fast as plain" in board.frame.value
    product = (100 / 80) * (100 / 70) * (100 / 90)
    assert f"multiply to {product:.2f}" in board.frame.value
    assert product_of_parts(made_up_times(), frozenset(SWITCHES)) == pytest.approx(product)
    assert sum_of_savings(made_up_times(), frozenset(SWITCHES)) == pytest.approx(100 - 20 - 30 - 10)
    assert f"a step of {100 / product:.1f} ms" in board.frame.value and "a step of 40.0 ms" in board.frame.value
    for switch in SWITCHES[1:]:
        board.fields[switch].value = False
    assert "attention in place: 1.25 times" in board.frame.value and "multiply" not in board.frame.value


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="FlexAttention needs a C++ compiler")
def test_three_ways_to_attend_agree_before_they_are_timed():
    from shared.lab.chapters.ch12_flex import WAYS, times

    assert [each.what for each in times(torch.float32, 1)] == [f"float32, {name}" for name in WAYS]


# The exercises' references


def test_joined_spans_are_the_softmax_over_all_keys():
    draw = random.Random(0)
    scores = torch.tensor([draw.gauss(0, 3) for _ in range(12)], dtype=torch.float64)
    values = torch.tensor([[draw.random(), draw.random()] for _ in range(12)], dtype=torch.float64)
    parts = []
    for span in (slice(0, 5), slice(5, 6), slice(6, 12)):
        parts.append((float(scores[span].logsumexp(0)), (scores[span].softmax(0) @ values[span]).tolist()))
    assert combined(parts) == pytest.approx((scores.softmax(0) @ values).tolist())
    assert combined([(-math.inf, [5.0])]) == [0.0]


@pytest.mark.parametrize("case", BATCHES)
def test_no_choice_of_sizes_pads_less(case):
    counts, most = BATCHES[case]
    draw, largest = random.Random(1), max(counts)
    for _ in range(200):
        sizes = [largest, *(draw.randint(1, largest) for _ in range(most - 1))]
        assert padded_rows("", sizes, counts, most) >= fewest_padded(counts, most)


def test_amdahl():
    assert whole_speedup([(1.0, 4)]) == 4 and whole_speedup([]) == 1
    assert whole_speedup([(0.5, 1e12)]) == pytest.approx(2)
