"""Chapter 05 without a kernel: the chi-square test, the two ways to draw, both figures, the quiz."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shared.errors import InvalidRequestError
from shared.lab.chapters import ch05
from shared.lab.chapters.ch05_figures import (
    APART,
    ENGINE,
    RACE,
    TEXTBOOK,
    Scores,
    chi_square,
    cut_by,
    draws,
    frames,
    grouped,
    params_of,
    playground,
    race,
    stage_probs,
    token_stepper,
    verdict,
)
from shared.sampling import Sampler, adjust, draw, probabilities, uniform
from shared.sampling_params import SamplingParams

VOCAB = 400
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
         "presence_penalty": 0.0, "frequency_penalty": 0.0, "prompt": "ab", "answer": ""}  # fmt: skip


class Letters:
    def encode(self, text):
        return [ord(char) for char in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))


@pytest.fixture
def scores():
    """A made-up model: scores that fall with the id, in steps of the last token's size. Counts its calls."""
    calls = []

    def next_token_logits(model, ids):
        calls.append(tuple(ids))
        return (6 - torch.arange(VOCAB) / 20) * (1 + ids[-1] % 7 / 10)

    made = Scores(next_token_logits, None, Letters())
    made.calls = calls
    return made


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


# The test of counts


def test_chi_square_has_the_p_values_of_the_textbooks():
    fit = chi_square([60, 40], [0.5, 0.5])
    assert fit.statistic == pytest.approx(4.0) and fit.bins == 2
    assert fit.p_value == pytest.approx(math.erfc(math.sqrt(4 / 2)), rel=1e-9)
    three = chi_square([30, 30, 40], [1 / 3] * 3)
    assert three.p_value == pytest.approx(math.exp(-three.statistic / 2), rel=1e-9)  # two degrees of freedom
    eleven = chi_square([100 + d for d in (18, -18, 15, -15, 12, -12, 9, -9, 0, 0, 0)], [1 / 11] * 11)
    half = eleven.statistic / 2  # ten degrees of freedom have a closed form too
    terms = sum(half**k / math.factorial(k) for k in range(5))
    assert eleven.p_value == pytest.approx(math.exp(-half) * terms)


def test_rare_outcomes_share_a_bin_and_impossible_ones_decide():
    assert chi_square([50, 44, 2, 2, 2], [0.5, 0.44, 0.02, 0.02, 0.02]).bins == 3
    assert chi_square([52, 46, 1, 1], [0.52, 0.46, 0.01, 0.01]).bins == 2
    assert chi_square([100, 0], [1.0, 0.0]) is None
    assert chi_square([50, 49, 1], [0.5, 0.5, 0.0]).p_value == 0.0


@pytest.mark.parametrize("method", [TEXTBOOK, RACE])
def test_both_ways_draw_from_the_distribution_and_not_from_another(method):
    probs = torch.tensor([0.4, 0.0, 0.25, 0.2, 0.1, 0.05])
    for seed in range(5):
        counts = draws(ENGINE, probs, 4000, method, seed)
        assert counts.sum() == 4000 and counts[1] == 0
        assert chi_square(counts.tolist(), probs.tolist()).p_value > 0.001
        assert chi_square(counts.tolist(), [1 / 6] * 6).p_value < 1e-9


def test_p_values_of_fair_draws_are_spread_evenly():
    probs = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1])
    counts = [draws(ENGINE, probs, 500, TEXTBOOK, seed).tolist() for seed in range(200)]
    found = [chi_square(each, probs.tolist()) for each in counts]
    assert 70 < sum(fit.p_value < 0.5 for fit in found) < 130


def test_a_race_over_parts_of_the_vocabulary_has_the_same_winner():
    probs, generator = torch.rand(50, 60), torch.Generator().manual_seed(1)
    numbers = torch.rand(probs.shape, generator=generator, dtype=torch.float64)
    quotients = probs / -torch.log1p(-numbers)
    halves = [part.max(-1) for part in quotients.split(30, dim=-1)]
    winner = torch.where(halves[0].values >= halves[1].values, halves[0].indices, 30 + halves[1].indices)
    assert torch.equal(winner, race(probs, torch.Generator().manual_seed(1)))


# The stages


def test_stages_are_the_samplers_own_and_each_token_says_where_it_left(scores):
    inputs = {**PLAIN, "min_p": 0.3, "top_k": 12, "top_p": 0.6}
    stages = stage_probs(ENGINE, scores.after("ab", ""), params_of(inputs))
    assert all(float(stage.sum()) == pytest.approx(1.0, abs=1e-5) for stage in stages)
    sizes = [int((stage > 0).sum()) for stage in stages]
    assert sizes[:3] == [VOCAB] * 3 and sizes[3] > sizes[4] == 12 > sizes[5] >= 1
    assert [cut_by(stages, token) for token in (0, 11, 12, sizes[3])] == ["", "top_p", "top_k", "min_p"]
    wanted = probabilities(scores.after("ab", "").logits[None], [params_of(inputs)])[0]
    assert torch.equal(stages[-1], wanted)


def test_greedy_is_all_on_the_best_token_after_the_penalties(scores):
    stages = stage_probs(ENGINE, scores.after("ab", "\x00"), params_of(
        {**PLAIN, "temperature": 0.0, "presence_penalty": 2.0}))
    assert stages[-1].nonzero().flatten().tolist() == [1]


def test_a_group_is_drawn_as_often_as_its_tokens():
    probs = torch.rand(APART + 300).softmax(-1)
    order = probs.argsort(descending=True)
    together = grouped(probs, order)
    assert len(together) == APART + 1
    assert float(together[-1]) == pytest.approx(float(probs[order[APART:]].sum()))
    assert float(grouped(probs[:50], order[order < 50])[-1]) == 0.0


def test_the_last_frame_shows_what_the_sampler_draws(scores):
    inputs = {**PLAIN, "top_p": 0.7}
    for seed in range(6):
        last = list(frames(ENGINE, scores, inputs, seed))[-1]
        state = SimpleNamespace(sampling_params=params_of(inputs), seed=seed, prompt_token_ids=[97, 98],
                                output_token_ids=[], stop_token_ids=())
        chosen = Sampler()(scores.after("ab", "").logits[None], [state])[0].token_id
        assert last.drawn == (uniform(seed, 0), chosen)


# The figures


def test_stepper_steps_back_and_forth_and_explains_bad_input(scores):
    stepper = token_stepper(scores)
    assert "raw scores" in stepper.frame.value
    stepper.end.click()
    assert stepper.index == 6 and "The draw" in stepper.frame.value and stepper.step.disabled
    stepper.back.click()
    assert "top_p = 0.8" in stepper.frame.value
    drawn = set()
    for seed in range(8):
        stepper.seed.value = seed
        stepper.end.click()
        drawn.add(words(stepper.frame.value).split(" falls on ")[1].split()[0])
    assert len(drawn) > 1
    stepper.fields["prompt"].value = ""
    assert "Prompt: give 1 to 300 characters" in stepper.fields.error.value
    stepper.fields["prompt"].value = "x"
    assert stepper.fields.error.value == "" and stepper.index == 0
    stepper.end.click()
    stepper.reset.click()
    assert stepper.index == 0


def test_every_control_of_the_playground_changes_what_it_should(scores):
    figure = playground(scores)
    before = figure.frame.value
    for name, value in (("seed", "5"), ("method", RACE), ("prompt", "other"), ("draws", 200),
                        ("temperature", 0.5), ("min_p", 0.2), ("top_k", 3), ("top_p", 0.3)):
        figure.fields[name].value = value
        assert figure.frame.value != before and figure.fields.error.value == "", name
        before = figure.frame.value
    for name, value in (("seed", "x"), ("seed", "-1"), ("prompt", "y" * 301), ("answer", "y" * 301)):
        good = figure.fields[name].value
        figure.fields[name].value = value
        assert figure.fields.error.value and figure.frame.value == before, name
        figure.fields[name].value = good
    assert figure.fields.error.value == ""


def test_penalties_of_the_playground_look_at_the_answer(scores):
    figure = playground(scores)
    figure.fields["answer"].value = "\x01\x01"
    free = figure.frame.value
    figure.fields["frequency_penalty"].value = 2.0
    assert figure.frame.value != free


def test_counts_add_up_and_the_model_runs_once_for_each_text(scores):
    figure = playground(scores)
    for temperature in (0.0, 0.05, 2.0):
        figure.fields["temperature"].value = temperature
        cell = r"<td[^>]*>(\d+)</td><td[^>]*>(?:min_p|top_k|top_p)?</td></tr>"
        drawn = re.findall(cell, figure.frame.value)
        assert sum(map(int, drawn)) == 1000
    assert len(scores.calls) == 1
    figure.fields["prompt"].value = "abc"
    assert len(scores.calls) == 2


def test_words_say_whether_the_draws_fit():
    probs = torch.tensor([0.5, 0.5])
    assert "fit the theory" in verdict(torch.tensor([510, 490]), probs)
    assert "do not fit" in verdict(torch.tensor([700, 300]), probs)
    assert "Nothing to test" in verdict(torch.tensor([1000, 0]), torch.tensor([1.0, 0.0]))


def test_static_forms_carry_the_figures(scores):
    static = words(token_stepper(scores).static((3, 4, 5, -1)))
    assert all(f"Step {step} of 6" in static for step in (3, 4, 5, 6)) and "falls on" in static
    static = words(playground(scores).static())
    assert "Chi-square" in static and "all others" in static and "temperature: 1.0" in static


def test_hostile_text_stays_text(scores):
    scores.tokenizer.decode = lambda ids, skip_special_tokens=True: "<script>"
    assert "<script>" not in playground(scores).frame.value


# The sampler, where one request could harm another


def test_a_ban_on_every_token_is_no_ban():
    params = SamplingParams(min_tokens=1)
    state = SimpleNamespace(sampling_params=params, seed=1, prompt_token_ids=[0], output_token_ids=[],
                            stop_token_ids=range(5))
    logits = torch.randn(1, 5)
    assert torch.equal(adjust(logits, [state]), logits)
    assert Sampler()(logits, [state])[0].token_id in range(5)
    state.stop_token_ids = range(4)
    assert Sampler()(logits, [state])[0].token_id == 4


def test_a_repetition_penalty_that_overflows_is_refused():
    with pytest.raises(InvalidRequestError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-38)
    params = SamplingParams(repetition_penalty=0.01)
    state = SimpleNamespace(sampling_params=params, seed=1, output_token_ids=[], prompt_token_ids=[0, 1],
                            stop_token_ids=())
    assert Sampler()(torch.tensor([[900.0, -900.0, 1.0]]), [state])[0].token_id == 0


def test_draw_never_takes_a_token_without_a_chance():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    largest = 1 - 2**-48
    assert [draw(probs, [number])[0] for number in (0.0, 0.4999, 0.5, largest)] == [1, 1, 3, 3]


# The quiz and the exercises


def test_quiz_answers_are_computed():
    assert ch05.chance_of_first() == 0.625 and ch05.tokens_kept_of_tied() == 2
    assert [question.right() for question in ch05.QUIZ[:2]] == ["0.625", "2"]


def test_the_survivors_exercise_tells_orders_of_operations_apart():
    joint = {"top_k, then top_p of what it left": [0, 1, 2, 3],
             "min_p, then top_p of what it left": [0, 1, 2]}
    for case, kept in joint.items():
        assert ch05.survivors(*ch05.OPTIONS[case]) == kept[:-1]


def test_reading_each_weight_once_is_the_best_score():
    def twice(shards, noise):
        total = sum(sum(shard) for shard in shards)
        weights = [weight / total for shard in shards for weight in shard]
        return max(range(len(weights)), key=lambda token: weights[token] / noise(token))

    once, double = ch05.judge_shards(ch05.winner), ch05.judge_shards(twice)
    assert once.value == once.best and double.value == 2 * double.best


def test_params_of_the_figures_are_checked_like_a_request():
    with pytest.raises(InvalidRequestError):
        params_of({**PLAIN, "top_p": 0.0})
    assert replace(params_of(PLAIN), top_k=-1) == SamplingParams()
