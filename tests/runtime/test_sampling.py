"""Each sampling option against a plain reference, draws against theory, logprobs against log_softmax."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.block_manager import BlockManager
from shared.errors import EngineError
from shared.prefix_cache import PrefixCachingBlockManager
from shared.sampling import Sampler, adjust, draw, is_plainly_greedy, probabilities, top_logprobs, uniform
from shared.sampling_params import SamplingParams
from tests.runtime.tiny import drain, make_engine

INF = float("inf")


@dataclass
class State:
    sampling_params: SamplingParams
    seed: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = ()


def state(prompt=(), output=(), stops=(), seed=0, **params) -> State:
    return State(SamplingParams(**{"max_tokens": None, **params}), seed, list(prompt), list(output), tuple(stops))


def distribution(logits, s: State) -> list[float]:
    """The probabilities from which the sampler draws."""
    return probabilities(adjust(torch.tensor([logits]), [s]), [s.sampling_params])[0].tolist()


def sample(logits, *states) -> list[int]:
    rows = torch.tensor([logits] * len(states) if not isinstance(logits[0], list) else logits)
    return [token.token_id for token in Sampler()(rows, states)]


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


# The reference: plain lists, one step after another, in the documented order


def reference(logits: list[float], s: State) -> tuple[list[float], float]:
    """Probabilities, and the distance of the nearest decision from its border (rounding may turn close ones)."""
    p, scores, margin = s.sampling_params, list(logits), INF
    for token in range(len(scores)):
        if token in s.stop_token_ids and len(s.output_token_ids) < p.min_tokens:
            scores[token] = -INF
        scores[token] += (p.logit_bias or {}).get(token, 0)
        if token in s.prompt_token_ids or token in s.output_token_ids:
            scores[token] *= 1 / p.repetition_penalty if scores[token] > 0 else p.repetition_penalty
        count = s.output_token_ids.count(token)
        scores[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    scores = [(score - max(scores)) / p.temperature for score in scores]
    if p.min_p:
        margin = min([margin] + [abs(score - math.log(p.min_p)) for score in scores])
        scores = [score if score >= math.log(p.min_p) else -INF for score in scores]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if p.top_k:
        kept = set(order[: p.top_k])
        scores = [score if token in kept else -INF for token, score in enumerate(scores)]
    if p.top_p < 1:
        probs, before, kept = softmax(scores), 0.0, set()
        for token in order:
            margin = min(margin, abs(before - p.top_p))
            if before < p.top_p or not kept:
                kept.add(token)
            before += probs[token]
        scores = [score if token in kept else -INF for token, score in enumerate(scores)]
    return softmax(scores), margin


SCORES = st.lists(st.sampled_from([-8.0, -2.0, -0.5, 0.0, 0.25, 1.0, 1.5, 4.0]), min_size=2, max_size=9)


@st.composite
def cases(draw_from):
    logits = draw_from(SCORES)
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=5)
    stops = draw_from(st.lists(st.integers(0, len(logits) - 1), max_size=len(logits) - 1, unique=True))
    options = dict(
        temperature=draw_from(st.sampled_from([0.3, 1.0, 1.7])),
        top_p=draw_from(st.sampled_from([1.0, 0.97, 0.8, 0.45, 0.01])),
        top_k=draw_from(st.sampled_from([0, 1, 2, 3, 100])),
        min_p=draw_from(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        presence_penalty=draw_from(st.sampled_from([0.0, 0.5, -0.7])),
        frequency_penalty=draw_from(st.sampled_from([0.0, 0.25, -0.3])),
        repetition_penalty=draw_from(st.sampled_from([1.0, 1.4, 0.6])),
        min_tokens=draw_from(st.integers(0, 6)),
        logit_bias=draw_from(st.dictionaries(st.integers(0, len(logits) - 1), st.sampled_from([-1.5, 0.5, 3.0]))),
    )
    return logits, state(draw_from(ids), draw_from(ids), stops, **options)


@given(cases())
def test_all_options_together_follow_the_reference(case):
    logits, s = case
    expected, margin = reference(logits, s)
    if margin > 1e-4 or s.sampling_params.min_p == 1.0 and s.sampling_params.top_p == 1:
        assert distribution(logits, s) == pytest.approx(expected, abs=1e-5)


@given(st.lists(cases(), min_size=1, max_size=5), st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(batch, seed):
    width = max(len(logits) for logits, _ in batch)
    rows = torch.full((len(batch), width), -50.0)
    states = []
    for i, (logits, s) in enumerate(batch):
        rows[i, : len(logits)] = torch.tensor(logits)
        wanted = (None, 0, 3)[i % 3]
        params = {**vars(s.sampling_params), "logprobs": wanted, "temperature": (i % 4) * 0.5}
        states.append(State(SamplingParams(**params), seed + i, s.prompt_token_ids, s.output_token_ids))
    together = Sampler()(rows, states)
    for i in range(len(batch)):
        assert together[i] == Sampler()(rows[i : i + 1], [states[i]])[0]
    turned = Sampler()(rows.flip(0), states[::-1])
    assert turned[::-1] == together


def test_logprobs_of_equal_tokens_do_not_depend_on_what_neighbours_want():
    """A half-precision model gives many exact ties; which of them are listed is this row's own affair."""
    row = torch.zeros(1, 5000)
    row[0, 1000:] = 1.0
    few, many = state(temperature=0, logprobs=3), state(temperature=0, logprobs=20)
    alone = Sampler()(row, [few])[0]
    assert Sampler()(row.expand(2, -1), [few, many])[0] == alone
    assert list(alone.logprobs) == [1000, 1001, 1002]


# Each option alone


def test_temperature_divides_each_row_by_its_own():
    rows = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    params = [SamplingParams(temperature=t) for t in (1, 2, 4)]
    for row, p in zip(probabilities(rows, params).tolist(), params):
        assert row == pytest.approx(softmax([0, 1 / p.temperature, 2 / p.temperature]), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0, 1e-4, 1e-5, 1e-38, 1e-40, 1e-300])
def test_tiny_temperatures_are_the_arg_max(temperature, dtype):
    rows = [[2.875, 2.9551, 11.0625, -2.4473], [1e4, -1e4, 0, 1.0], [-3e4, -3e4, -3e4, -2e4]]
    logits = torch.tensor(rows, dtype=dtype)
    for seed in range(20):
        states = [state(seed=seed, temperature=temperature) for _ in range(3)]
        assert [token.token_id for token in Sampler()(logits, states)] == [2, 0, 3]


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert sample([1.0, 3.0, 3.0, 3.0], state(temperature=0)) == [1]


@pytest.mark.parametrize("k", range(1, 9))
def test_exactly_k_tokens_stay_whatever_ties(k):
    logits = [1.0, 2.0, 2.0, 2.0, 0.0, 2.0, 1.0]
    probs = distribution(logits, state(top_k=k))
    assert sum(p > 0 for p in probs) == min(k, len(logits))
    order = [1, 2, 3, 5, 0, 6, 4]
    assert {i for i, p in enumerate(probs) if p > 0} == set(order[:k])


def test_top_p_renormalises_what_top_k_left():
    logits = [math.log(p) for p in (0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03)]
    for extra in ({}, {"min_p": 0.01}):
        kept = distribution(logits, state(top_k=4, top_p=0.82, **extra))
        assert [i for i, p in enumerate(kept) if p] == [0, 1, 2]
    assert sum(p > 0 for p in distribution(logits, state(top_p=0.82))) == 4


def test_min_p_looks_at_the_full_distribution_at_its_temperature():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert [p > 0 for p in distribution(logits, state(min_p=0.4))] == [True, True, False, False]
    assert [p > 0 for p in distribution(logits, state(min_p=0.4, top_k=3))] == [True, True, False, False]
    assert [p > 0 for p in distribution(logits, state(min_p=0.4, temperature=2))] == [True, True, True, False]
    assert [p > 0 for p in distribution(logits, state(min_p=0.4, top_k=1))] == [True, False, False, False]


def test_one_token_always_stays():
    for params in (dict(top_k=1, top_p=0.8), dict(top_p=1e-9), dict(min_p=1.0), dict(top_k=1, min_p=1, top_p=1e-6)):
        for temperature in (0.01, 1, 50):
            probs = distribution([0.3, 0.1, 0.2], state(temperature=temperature, **params))
            assert probs == pytest.approx([1, 0, 0])


def test_penalties_count_prompt_and_output_as_documented():
    logits = [0.0] * 10
    logits[5], logits[7], logits[9] = 2.0, -2.0, 1.0
    repeated = adjust(torch.tensor([logits]), [state([5, 5, 7], [9], repetition_penalty=2)])[0]
    assert repeated[[5, 7, 9]].tolist() == [1.0, -4.0, 0.5]
    counted = adjust(torch.tensor([logits]), [state([5, 5, 7], [9], presence_penalty=0.5, frequency_penalty=0.25)])[0]
    assert counted[[5, 7, 9]].tolist() == [2.0, -2.0, 0.25]
    twice = adjust(torch.tensor([logits]), [state([], [9, 9, 9], presence_penalty=0.5, frequency_penalty=0.25)])[0]
    assert twice[9] == 1 - 0.5 - 0.75


def test_a_bias_comes_before_penalties_and_reaches_greedy():
    assert sample([1.0, 0.0], state(temperature=0, logit_bias={1: 2})) == [1]
    adjusted = adjust(torch.tensor([[1.0, 0.0]]), [state([1], logit_bias={1: 3}, repetition_penalty=2)])[0]
    assert adjusted.tolist() == [1.0, 1.5]
    assert sample([5.0, 0.0], state(temperature=0, output=[0], frequency_penalty=10)) == [1]


def test_a_bias_on_every_token_costs_next_to_nothing():
    """All requests of a step wait for it. One token at a time it was a second."""
    biases = {token: (-1) ** token * token / 1000 for token in range(49152)}
    everything, logits = state(logit_bias=biases), torch.randn(2, 49152)
    started = time.perf_counter()
    adjusted = adjust(logits, [state(), everything])
    assert time.perf_counter() - started < 0.2
    assert torch.equal(adjusted[0], logits[0])
    assert torch.equal(adjusted[1], logits[1] + torch.tensor(list(biases.values())))


def test_end_tokens_wait_for_min_tokens():
    logits = [9.0, 8.0, 1.0]
    for count in range(4):
        s = state(output=[2] * count, stops=[0, 1], temperature=0, min_tokens=2)
        assert sample(logits, s) == [2 if count < 2 else 0]


def test_the_given_scores_are_not_changed():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    Sampler()(logits, [state(output=[2], frequency_penalty=5, logit_bias={0: 9}, top_k=1, min_tokens=4, stops=[1])])
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_scores_that_are_not_finite_are_an_error(bad):
    with pytest.raises(EngineError, match="NaN or infinity"):
        sample([[bad] * 3, [0.0, 1.0, 2.0]], state(), state())
    if bad != -INF:
        with pytest.raises(EngineError, match="NaN or infinity"):
            sample([0.0, bad, 1.0], state(temperature=0))
    else:
        assert sample([0.0, bad, 1.0], state(temperature=0)) == [2]


# Seeds and draws


def test_random_numbers_depend_on_seed_and_index_alone():
    numbers = {uniform(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(200)}
    assert len(numbers) == 1000 and all(0 <= number < 1 for number in numbers)
    assert uniform(7, 3) == uniform(7, 3)
    assert abs(sum(uniform(0, i) for i in range(10000)) / 10000 - 0.5) < 0.02


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_a_draw_lies_where_the_number_falls(weights, number):
    if sum(weights):
        probs = [w / sum(weights) for w in weights]
        (token,) = draw(torch.tensor([probs], dtype=torch.float64), [number])
        assert probs[token] > 0
        below = sum(probs[:token])
        assert below - 1e-9 <= number <= below + probs[token] + 1e-9


def test_the_extreme_numbers_draw_tokens_that_have_a_probability():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 2)
    assert draw(probs, [0.0, 1 - 2.0**-48]) == [1, 3]


def test_a_seed_gives_the_same_tokens_and_different_seeds_different_ones():
    flat = [[0.0] * 100]
    def tokens(seed):
        return [sample(flat, state(output=[1] * i, seed=seed))[0] for i in range(20)]
    assert tokens(5) == tokens(5) and len({tuple(tokens(seed)) for seed in range(10)}) == 10
    assert len(set(tokens(5))) > 10


def chi_square(counts: Counter, probs: list[float], total: int) -> tuple[float, float]:
    """The statistic, and a border five standard deviations above its mean."""
    assert all(probs[token] > 0 for token in counts), "a token was drawn that has no probability"
    expected = [p * total for p in probs if p > 0]
    observed = [counts[token] for token, p in enumerate(probs) if p > 0]
    freedom = len(expected) - 1
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected)), freedom + 5 * math.sqrt(2 * max(freedom, 1))


LOGITS = [2.0, 1.5, 1.5, 0.3, -0.2, -1.0, -2.5, 0.9]
OPTIONS = [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05}, {"logit_bias": {6: 4.0}, "repetition_penalty": 1.5},
]  # fmt: skip
NUM_DRAWS = 4000


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("by", ["seed", "index"])
def test_draws_follow_the_theory(options, by):
    """Draws of many requests with seeds of their own, and the tokens of one request, one after another."""
    shared = dict(prompt=[1, 3])
    if by == "seed":
        states = [state(seed=i, **shared, **options) for i in range(NUM_DRAWS)]
        drawn = sample(LOGITS, *states)
    else:
        s = state(**shared, **options)
        probs = probabilities(adjust(torch.tensor([LOGITS]), [s]), [s.sampling_params])
        drawn = draw(probs.expand(NUM_DRAWS, -1), [uniform(99, i) for i in range(NUM_DRAWS)])
    expected, _ = reference(LOGITS, state(**shared, **options))
    statistic, border = chi_square(Counter(drawn), expected, NUM_DRAWS)
    assert statistic < border
    wrong = softmax([score * 1.15 for score in LOGITS])  # the test can tell a slightly wrong temperature
    if not options:
        statistic, border = chi_square(Counter(drawn), wrong, NUM_DRAWS)
        assert statistic > border


# Logprobs


def test_logprobs_are_of_the_untouched_scores_with_ranks():
    torch.manual_seed(1)
    rows = torch.randn(6, 50) * 3
    states = [
        state(seed=i, temperature=(0, 0.7, 3)[i % 3], logprobs=i, top_k=40, logit_bias={3: 5}, output=[4, 4],
              frequency_penalty=1.0)
        for i in range(6)
    ]  # fmt: skip
    expected = rows.log_softmax(-1)
    for i, token in enumerate(Sampler()(rows, states)):
        order = expected[i].argsort(descending=True).tolist()
        assert list(token.logprobs)[0] == token.token_id
        assert set(token.logprobs) == {token.token_id, *order[:i]}
        for other, entry in token.logprobs.items():
            assert entry.logprob == pytest.approx(expected[i, other].item(), abs=1e-5)
            assert entry.rank == order.index(other) + 1


def test_no_logprobs_unless_wanted():
    results = Sampler()(torch.randn(3, 9), [state(logprobs=None), state(logprobs=0), state(logprobs=20)])
    assert results[0].logprobs is None and len(results[1].logprobs) == 1 and len(results[2].logprobs) == 9


def test_equal_tokens_have_one_rank_as_the_chosen_one():
    rows = torch.zeros(1, 4)
    for token in range(4):
        (found,) = top_logprobs(rows, [token], [0])
        assert found[token].rank == 1


@pytest.mark.parametrize("manager", ["roomy", "tiny pool", "prefix cache", "prefix cache, tiny pool"])
@pytest.mark.parametrize("budget", [4, 9, 64])
def test_prompt_logprobs_equal_a_direct_computation(manager, budget, family):
    tiny = family("qwen3")
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 128, (13,), generator=generator).tolist()
    prompts = [shared + torch.randint(3, 128, (n,), generator=generator).tolist() for n in (1, 5, 11)] + [[7]]
    kind = PrefixCachingBlockManager if "prefix" in manager else BlockManager
    allocator = kind(13 if "tiny" in manager else 64, 3)
    engine = make_engine(tiny.model, allocator=allocator, max_num_seqs=4, max_num_batched_tokens=budget)
    for turn in range(2):  # the second time the prefixes are cached
        for i, prompt in enumerate(prompts):
            wanted = [2, 0, 20, 3][i]
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=wanted, logprobs=1)
            engine.add_request(f"{turn}.{i}", prompt, params)
            engine.add_request(f"{turn}.plain{i}", prompt, SamplingParams(max_tokens=2))
        done = drain(engine)
        for i, prompt in enumerate(prompts):
            check_prompt_logprobs(tiny.hf, prompt, [2, 0, 20, 3][i], done[f"{turn}.{i}"])
            assert done[f"{turn}.plain{i}"].prompt_logprobs is None
    assert ("tiny" in manager) == any(step.preempted for step in engine.trace.steps)
    assert ("prefix" in manager) == any(step.cache_hits for step in engine.trace.steps)


def check_prompt_logprobs(hf, prompt, wanted, output):
    with torch.inference_mode():
        ids = torch.tensor([prompt + output.outputs[0].token_ids])
        expected = hf(ids).logits[0].float().log_softmax(-1)
    rows = output.prompt_logprobs
    assert len(rows) == len(prompt) and rows[0] is None
    answers = output.outputs[0].logprobs
    assert len(answers) == len(output.outputs[0].token_ids)
    for position, row in enumerate([*rows[1:], *answers]):
        token, scores = ids[0, position + 1].item(), expected[position]
        count = wanted if position + 1 < len(prompt) else 1
        assert next(iter(row)) == token
        assert set(row) == {token, *scores.topk(count).indices.tolist()}
        for other, entry in row.items():
            assert entry.logprob == pytest.approx(scores[other].item(), abs=1e-4)
            assert entry.rank == int((scores > scores[other]).sum()) + 1
    total = sum(row[token].logprob for row, token in zip(answers, output.outputs[0].token_ids))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


# The short way of rows that only want their arg-max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_short_way_chooses_what_the_long_way_does(dtype):
    """Few different scores, so that most rows have several maxima: the lowest id wins on both ways."""
    logits = torch.randint(-3, 3, (40, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    short, long = [state(temperature=0)] * 40, [state(temperature=0)] * 39 + [state(temperature=0, logprobs=1)]
    chosen = [token.token_id for token in Sampler()(logits, short)]
    assert chosen == [token.token_id for token in Sampler()(logits, long)]
    assert chosen == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("bad", [[0.0, math.nan], [math.nan, 0.0], [INF, 0.0], [-INF, -INF]])
def test_the_short_way_refuses_what_is_no_score(bad):
    with pytest.raises(EngineError, match="NaN or infinity"):
        Sampler()(torch.tensor([[1.0, 2.0], bad]), [state(temperature=0)] * 2)


@pytest.mark.parametrize("option", [
    dict(logprobs=0), dict(logit_bias={0: 100.0}), dict(repetition_penalty=2.0), dict(presence_penalty=2.0),
    dict(frequency_penalty=2.0), dict(min_tokens=3), dict(temperature=1.0),
])
def test_every_option_that_needs_more_takes_the_long_way(option):
    wanted = state(**{"temperature": 0, **option}, prompt=[1], output=[1, 1], stops=[1])
    assert not is_plainly_greedy(wanted.sampling_params)
    if not {"logprobs", "temperature"} & set(option):
        assert sample([0.9, 1.0, 0.0], wanted) == [0]
