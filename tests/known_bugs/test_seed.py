"""Known faults of inference engines: seeds, and answers that depend on who else is served."""

from __future__ import annotations

import pytest
import torch

from shared.errors import InvalidRequestError
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import ask, cached_engine, forced, oracle, random_prompt, saying, tiny
from tests.runtime.tiny import drain, make_engine, run


def sampled(seed, max_tokens: int = 20, temperature: float = 0.8, **options) -> SamplingParams:
    return SamplingParams(
        seed=seed, temperature=temperature, max_tokens=max_tokens, ignore_eos=True, **options
    )  # fmt: skip


@pytest.mark.parametrize("a_first", [True, False])
def test_b25_a_seed_holds_whoever_is_beside_it(a_first):
    engine = cached_engine(tiny(), seed=77)
    alone = oracle(tiny(), random_prompt(6), sampled(42))
    unseeded = []
    for seed in (None, None, None, None, 7):
        prompts, params = [random_prompt(6), random_prompt(6)], [sampled(42), sampled(seed)]
        answers = run(engine, prompts, params) if a_first else run(engine, prompts, params[::-1])[::-1]
        assert answers[0] == alone
        unseeded.append(tuple(answers[1]))
    assert len(set(unseeded)) == 5  # without a seed, each call draws anew


def test_b25_a_seed_does_not_depend_on_when_the_request_joins():
    engine = cached_engine(tiny())
    engine.add_request("B", random_prompt(9), sampled(None))
    for _ in range(5):
        engine.step()
    engine.add_request("A", random_prompt(6), sampled(42))
    assert drain(engine)["A"].outputs[0].token_ids == oracle(tiny(), random_prompt(6), sampled(42))


def test_b25_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = run(cached_engine(tiny()), [random_prompt(6)], sampled(None))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert run(cached_engine(tiny()), [random_prompt(6)], sampled(None)) == first  # the engine's seed decides


@pytest.mark.parametrize("make", [make_engine, cached_engine])
@pytest.mark.parametrize("num_blocks", [9, 10, 12, 64])
def test_b26_preemption_does_not_disturb_a_seed(make, num_blocks):
    """The draw is a function of the seed and of how many tokens there are: nothing to replay or reset."""
    engine = make(tiny(), num_blocks=num_blocks)
    prompts = [random_prompt(6, i) for i in range(3)]
    params = [sampled(seed, 30, 1.0) for seed in (5, 1, 2)]
    assert run(engine, prompts, params) == [oracle(tiny(), prompt, p) for prompt, p in zip(prompts, params)]
    preempted = {name for step in engine.trace.steps for name in step.preempted}
    assert preempted if num_blocks < 64 else not preempted


@pytest.mark.parametrize("seed", [3, 2**63 - 2, -(2**63)])
def test_b27_n_answers_of_one_seed_differ_and_come_again(seed):
    """Answer i of a seeded request has the seed `seed + i`, as in vLLM."""
    params = SamplingParams(n=4, seed=seed, temperature=1.5, max_tokens=20)

    def answers():
        engine = make_engine(runner=forced(others=10.0))
        engine.add_request("a", [5], params)
        return [answer.token_ids for answer in drain(engine)["a"].outputs]

    first = answers()
    assert len({tuple(ids) for ids in first}) == 4 and answers() == first


def test_b27_unseeded_answers_differ_too():
    engine = make_engine(runner=forced(others=10.0))
    engine.add_request("a", [5], SamplingParams(n=4, temperature=1.5, max_tokens=20))
    assert len({tuple(answer.token_ids) for answer in drain(engine)["a"].outputs}) == 4


@pytest.mark.parametrize(
    "seed", [0, -1, None, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**63) - 1, 1.5, "1", True]
)
def test_b28_extreme_seeds(seed):
    """0 is a seed, -1 means none (as in vLLM), and what does not fit in 64 bits is refused."""
    engine = make_engine(runner=forced(others=10.0))
    options = dict(seed=seed, temperature=1.0, max_tokens=12)
    if seed in (None, -1):
        assert ask(engine, **options).ids != ask(engine, **options).ids
    elif type(seed) is int and -(2**63) <= seed < 2**63:
        assert ask(engine, **options).ids == ask(engine, **options).ids
    else:
        with pytest.raises(InvalidRequestError, match="seed"):
            ask(engine, **options)
    assert ask(saying("a", "b")).text == "ab"


def test_b28_neighbouring_seeds_are_unrelated():
    engine = make_engine(runner=forced(others=10.0))
    answers = [tuple(ask(engine, seed=seed, temperature=1.0, max_tokens=12).ids) for seed in range(-20, 20)]
    assert len(set(answers)) == len(answers)
