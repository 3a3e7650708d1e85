"""Options are checked when they are made: a bad value names its field, itself and the limit."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from shared.errors import EngineError, InvalidRequestError
from shared.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # more than a float can hold
NOT_COUNTS = [1.5, 2.0, "3", True, [1], NAN]
NOT_NUMBERS = ["1", None, [0.5], True, NAN, INF, -INF, HUGE, -HUGE, 1j]

BAD = {
    "n": [0, -1, 129, None, *NOT_COUNTS],
    "temperature": [-0.1, 100.5, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.5, 1.01, *NOT_NUMBERS],
    "top_k": [-2, None, -1.0, *NOT_COUNTS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "presence_penalty": [-1001, 1001, *NOT_NUMBERS],
    "frequency_penalty": [-1001, 1001, *NOT_NUMBERS],
    "repetition_penalty": [0, 0.009, -1, 101, *NOT_NUMBERS],
    "seed": [2**63, -(2**63) - 1, 2**64, -1.0, *NOT_COUNTS],
    "stop": [5, [""], "", [5], [None], b"ab", [b"ab"], {"a": 1}, ["a"] * 65],
    "stop_token_ids": [5, "ab", [-1], [1.5], ["a"], [None], [True]],
    "ignore_eos": [0, 1, None, "yes"],
    "max_tokens": [0, -1, *NOT_COUNTS],
    "min_tokens": [-1, 17, None, *NOT_COUNTS],
    "logprobs": [-1, 21, *NOT_COUNTS],
    "prompt_logprobs": [-1, 21, *NOT_COUNTS],
    "logit_bias": [5, [1, 2], {"a": 1.0}, {-1: 1.0}, {1.5: 1.0}, {1: 101}, {1: NAN}, {1: "a"}, {1: None}, {1: HUGE}],
    "skip_special_tokens": [0, 1, None, "no"],
    "include_stop_str_in_output": [0, 1, None, "no"],
}
GOOD = {
    "n": [1, 128], "temperature": [0, 0.0, 1e-300, 1, 100.0], "top_p": [1e-9, 0.5, 1, 1.0], "top_k": [0, -1, 1, 10**9],
    "min_p": [0, 0.5, 1], "presence_penalty": [-2, 0, 1000.0], "frequency_penalty": [-2.0, 1000],
    "repetition_penalty": [0.01, 1, 100], "seed": [None, -1, 0, 2**63 - 1, -(2**63)],
    "stop": [None, "a", [], ["a", "b"], ("a",), {"a"}], "stop_token_ids": [None, [], [0, 5], (5,), {5}],
    "ignore_eos": [True, False], "max_tokens": [None, 1, 10**9], "min_tokens": [0, 16], "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20], "logit_bias": [None, {}, {0: -100, 5: 100.0}],
    "skip_special_tokens": [True, False], "include_stop_str_in_output": [True, False],
}  # fmt: skip


def test_every_field_is_listed_here():
    assert set(BAD) == set(GOOD) == {field.name for field in fields(SamplingParams)}


def cases(table):
    return [pytest.param(field, value, id=f"{field}={value!r:.12}") for field in table for value in table[field]]


@pytest.mark.parametrize("field, value", cases(BAD))
def test_a_bad_value_names_field_value_and_limit(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    error = caught.value
    assert error.field == field and isinstance(error.limit, str) and error.limit
    assert str(error).startswith(f"{field}: must be {error.limit}, got ") and len(str(error)) < 300
    offered = value if isinstance(value, (list, tuple, dict)) else [value]
    named = [*offered, *(offered.values() if isinstance(offered, dict) else ()), value]
    assert any(error.value is x or error.value == x for x in named)
    assert isinstance(error, ValueError) and isinstance(error, EngineError)


@pytest.mark.parametrize("field, value", cases(GOOD))
def test_a_good_value_is_taken(field, value):
    SamplingParams(**{field: value})


def test_one_form_for_each_meaning():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=None) == SamplingParams(stop=[]) == SamplingParams()
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=0).seed == 0
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=1e-9).greedy


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=3000, max_tokens=None).min_tokens == 3000
    with pytest.raises(InvalidRequestError, match="max_tokens=2"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_options_do_not_change_afterwards():
    params, stops = SamplingParams(), ["a"]
    with pytest.raises(FrozenInstanceError):
        params.n = 2
    other = SamplingParams(stop=stops)
    stops.append("b")
    assert other.stop == ("a",)


def test_options_and_errors_survive_the_way_from_another_process():
    params = SamplingParams(stop=["a"], logit_bias={3: 1.5}, seed=7)
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(top_p=2)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.field, again.value, again.limit) == ("top_p", 2, caught.value.limit)
    assert str(again) == str(caught.value)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("field", sorted(BAD))
def test_a_value_that_cannot_be_shown_is_refused_like_any_other(field):
    """Python writes no number of more than 4,300 digits; an array compares as several."""
    numpy = pytest.importorskip("numpy")
    for value in (-(10**5000), Unprintable(), numpy.array([1, 2]), [-(10**5000)]):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field and len(str(caught.value)) < 200


def test_what_the_caller_changes_later_changes_nothing():
    bias, stops, tokens = {5: 1.0}, ["a"], [7]
    params = SamplingParams(logit_bias=bias, stop=stops, stop_token_ids=tokens)
    bias[10**9], stops[:], tokens[:] = 5000.0, [""], [-1]
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({5: 1.0}, ("a",), (7,))
    assert pickle.loads(pickle.dumps(params)) == params
