"""Known faults of inference engines: from scores to a token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.sampling import Sampler, adjust, probabilities
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import (
    Solo,
    ask,
    cached_engine,
    fixed,
    forced,
    greedy,
    oracle,
    random_prompt,
    tiny,
)
from tests.runtime.tiny import drain, make_engine

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FILTERED = [0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03]


def log(probs) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float64).log().float()


def kept(probs, **options) -> set[int]:
    """The tokens that can be drawn."""
    row = probabilities(log(probs), [SamplingParams(**options)])[0]
    assert torch.isfinite(row).all() and abs(float(row.sum()) - 1) < 1e-5
    return set(row.nonzero().flatten().tolist())


def drawn(
    probs, count: int = 400, dtype=torch.float32, beside: SamplingParams | None = None, **options
) -> set[int]:
    """The tokens that the whole sampler draws, alone or beside another request's row."""
    params, found = SamplingParams(**options), set()
    for seed in range(0, count, 50):
        states = [Solo(params, [0], seed=s) for s in range(seed, seed + 50)] + [Solo(beside or params, [0])]
        logits = log(probs).to(dtype).repeat(len(states), 1)
        found |= {token.token_id for token in Sampler()(logits, states)[:-1]}
    return found


# B15: the order of top_k and top_p is vLLM's: top_p counts the probability that top_k left


@pytest.mark.parametrize("min_p", [0.0, 0.01])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "beside", [None, SamplingParams(temperature=0), SamplingParams(top_k=2), SamplingParams()]
)
def test_b15_top_p_counts_what_top_k_left_on_every_path(min_p, dtype, beside):
    options = dict(top_k=4, top_p=0.82, min_p=min_p)
    assert kept(FILTERED, **options) == {0, 1, 2}
    assert drawn(FILTERED, dtype=dtype, beside=beside, **options) == {0, 1, 2}


def textbook(probs: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters written out for one row, one token at a time; among equals the lower id comes first."""
    weights = [p ** (1 / temperature) for p in probs]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= min_p * weights[order[0]]]
    order = order[: top_k or None]
    total, before, found = math.fsum(weights[i] for i in order), 0.0, set()
    for i in order:
        if found and before >= top_p * total:
            break
        found.add(i)
        before += weights[i]
    return found


@fixed
@given(
    order=st.permutations([40, 23, 13, 11, 7, 5, 2]), temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 9), top_p=st.sampled_from([0.11, 0.31, 0.515, 0.735, 0.925, 1.0]),
    min_p=st.sampled_from([0.0, 0.033, 0.21, 0.555]),
)  # fmt: skip
def test_b15_b16_b20_filters_equal_the_textbook(order, temperature, top_k, top_p, min_p):
    probs = [weight / 101 for weight in order]
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept(probs, **options) == textbook(probs, **options)


# B16, B17: ties, and filters that leave one token


def test_b16_top_k_keeps_exactly_k_on_ties():
    row = probabilities(log([0.4, 0.3, 0.3, 0.0]), [SamplingParams(top_k=2)])[0]
    assert row.nonzero().flatten().tolist() == [0, 1]
    assert torch.allclose(row[:2], torch.tensor([4 / 7, 3 / 7]))  # of a mass of 0.7


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 60])
def test_b16_any_k_on_equal_scores(k):
    assert kept([0.2] * 5, top_k=k) == set(range(min(k, 5)))
    assert kept([0.1, 0.3, 0.3, 0.3], top_k=k) == set([1, 2, 3, 0][:k])


def test_b16_rows_of_different_k_do_not_mix():
    params = [SamplingParams(top_k=k) for k in (1, 0, 3, -1, 2)]
    rows = probabilities(log([0.2] * 5).repeat(5, 1), params)
    assert (rows > 0).sum(-1).tolist() == [1, 5, 3, 5, 2]


ONE_LEFT = [
    dict(top_k=1, top_p=0.8), dict(top_k=1, top_p=1e-300), dict(top_p=1e-300), dict(top_k=1, min_p=1.0),
    dict(min_p=1.0), dict(top_p=0.1, min_p=1.0),
]  # fmt: skip


@pytest.mark.parametrize("options", ONE_LEFT)
@pytest.mark.parametrize("temperature", [0.01, 1, 100])
def test_b17_the_likeliest_token_always_stays(options, temperature):
    probs = [0.1, 0.6, 0.3]
    assert kept(probs, temperature=temperature, **options) == {1}
    assert drawn(probs, 50, temperature=temperature, **options) == {1}


# B18, B19: temperature


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-10, 1e-38, 1e-40, 5e-324, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_b18_a_tiny_temperature_is_the_arg_max(temperature, dtype):
    logits = torch.tensor([[2.875, 2.9551, 11.0625, -2.4473]], dtype=dtype)
    for scale in (1, -1, 1000):
        best = int((logits * scale).argmax())
        states = [Solo(SamplingParams(temperature=temperature), [0], seed=seed) for seed in range(20)]
        assert {t.token_id for t in Sampler()((logits * scale).repeat(20, 1), states)} == {best}
        if scale == 1:
            assert best == 2


@pytest.mark.parametrize("temperature", [1e-5, 1e-40])
def test_b18_a_hundred_tokens_are_a_hundred_tokens(temperature):
    prompt = random_prompt(5)
    asked = ask(
        cached_engine(tiny()), prompt, temperature=temperature, seed=3, max_tokens=100, ignore_eos=True
    )
    assert asked.ids == oracle(tiny(), prompt, greedy(100, ignore_eos=True)) and len(asked.ids) == 100


@pytest.mark.parametrize("temperatures", [[1, 2, 4], [4, 1, 2], [0.5], [100, 0.01]])
def test_b19_each_row_has_its_own_temperature(temperatures):
    size = len(temperatures)  # as many rows as tokens, so that the wrong axis would fit
    logits = torch.arange(float(size)).repeat(size, 1)
    probs = probabilities(logits, [SamplingParams(temperature=t) for t in temperatures])
    for row, temperature in zip(probs, temperatures):
        assert torch.allclose(row, (torch.arange(float(size)) / temperature).softmax(-1))
    flat = probabilities(torch.ones(size, size), [SamplingParams(temperature=t) for t in temperatures])
    assert torch.allclose(flat, torch.full((size, size), 1 / size))


# B20: min_p measures the whole distribution after temperature


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1}),
        ({"top_p": 0.55}, {0}),  # top_p counts what min_p left, as in vLLM: 0.5 of 0.8
        ({"temperature": 2.0}, {0, 1, 2}),  # square roots: .71 .55 .39 .22 against .4 * .71
        ({"temperature": 2.0, "top_k": 2}, {0, 1}),
        ({"temperature": 0.5}, {0}),  # squares: .25 .09 against .4 * .25 = .1
    ],
)
def test_b20_min_p_measures_the_tempered_distribution(options, expected):
    assert kept([0.5, 0.3, 0.15, 0.05], min_p=0.4, **options) == expected


# B21, B22, B23: penalties


def penalised(history=([5, 5, 7], [9]), **options) -> torch.Tensor:
    logits = torch.zeros(1, 12)
    logits[0, 5], logits[0, 7], logits[0, 9] = 2, -2, 1
    state = Solo(SamplingParams(**options), history[0], output_token_ids=history[1])
    return adjust(logits, [state])[0]


def expected_row(**changes) -> torch.Tensor:
    row = torch.zeros(12)
    row[5], row[7], row[9] = 2, -2, 1
    for name, value in changes.items():
        row[int(name[1:])] = value
    return row


def test_b21_repetition_counts_prompt_and_output():
    assert torch.equal(penalised(repetition_penalty=2), expected_row(l5=1, l7=-4, l9=0.5))


def test_b21_presence_and_frequency_count_the_output_only():
    both = penalised(presence_penalty=0.5, frequency_penalty=0.25)
    assert torch.equal(both, expected_row(l9=0.25))
    twice = penalised(([5, 5, 7], [9, 9, 5]), presence_penalty=0.5, frequency_penalty=0.25)
    assert torch.equal(twice, expected_row(l9=0.0, l5=1.25))


def test_b21_nothing_is_penalised_before_the_first_token():
    assert torch.equal(penalised(([5, 5, 7], []), presence_penalty=2, frequency_penalty=2), expected_row())


MIXED = {
    "R1": dict(temperature=0, repetition_penalty=2.0),
    "R2": dict(temperature=0.9, top_k=1, seed=1),
    "R3": dict(temperature=0, frequency_penalty=1.5, presence_penalty=1.0),
    "R4": dict(temperature=0, logit_bias={7: 4.0}),
    "R5": dict(temperature=1.0, seed=9, repetition_penalty=1.3, min_tokens=4),
}


ORDERS = [*itertools.permutations(["R1", "R2"]), *itertools.permutations(["R2", "R3", "R5"])]


@pytest.mark.parametrize("order", [*ORDERS, list(MIXED), list(MIXED)[::-1]])
def test_b22_options_stay_with_their_request_in_any_order(order):
    params = {name: SamplingParams(max_tokens=12, **MIXED[name]) for name in order}
    engine = cached_engine(tiny())
    for name in order:
        engine.add_request(name, random_prompt(6), params[name])
    done = drain(engine)
    for name in order:
        assert done[name].outputs[0].token_ids == oracle(tiny(), random_prompt(6), params[name])


def test_b22_options_stay_with_their_request_when_others_leave():
    """A row moves up when an earlier request ends."""
    engine = cached_engine(tiny())
    for i in range(4):
        engine.add_request(
            str(i), random_prompt(6, i), greedy(3 + 3 * i, repetition_penalty=1 + i, ignore_eos=True)
        )
    done = drain(engine)
    for i in range(4):
        params = greedy(3 + 3 * i, repetition_penalty=1 + i, ignore_eos=True)
        assert done[str(i)].outputs[0].token_ids == oracle(tiny(), random_prompt(6, i), params)


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 100}, {"presence_penalty": 100}])
def test_b23_a_penalty_sees_the_token_of_the_step_before(penalty):
    engine = make_engine(runner=forced(50, 60, 70))
    asked = ask(engine, max_tokens=120, ignore_eos=True, **penalty)
    assert asked.ids[:3] == [50, 60, 70]
    assert len(set(asked.ids)) == 120  # never the same twice while others are left


# B24: logprobs without alternatives


@pytest.mark.parametrize("logprobs", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_b24_every_token_has_its_logprob_and_the_alternatives_asked_for(logprobs, temperature):
    """The engine's half: 0 alternatives is not the same as no logprobs. The server's is tested with it."""
    asked = ask(cached_engine(tiny()), random_prompt(5), logprobs=logprobs, temperature=temperature, seed=4)
    assert len(asked.last.logprobs) == len(asked.ids)
    for token, row in zip(asked.ids, asked.last.logprobs):
        assert token in row and len(row) in (logprobs, logprobs + 1) and row[token].logprob <= 0
    assert ask(cached_engine(tiny()), random_prompt(5)).last.logprobs is None
