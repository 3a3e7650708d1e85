"""Known faults of inference engines: lengths. The server's answers to the same cases are tested with it."""

from __future__ import annotations

import math

import pytest

from shared.errors import InvalidRequestError
from shared.llm import LLM
from shared.request import RequestLimits
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import ask, forced, free_blocks, random_prompt, saying
from tests.runtime.tiny import ScriptedRunner, make_engine, save_hf, save_tokenizer


@pytest.mark.parametrize("limit", [2, 16, 64])
@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_b65_a_prompt_needs_room_for_one_token(limit, max_tokens):
    """The boundary is vLLM's: max_model_len counts prompt and output; a prompt that fills it is refused."""
    engine = make_engine(runner=forced(50), max_model_len=limit)
    for length in range(max(1, limit - 2), limit):
        asked = ask(engine, random_prompt(length), max_tokens=max_tokens)
        assert len(asked.ids) == limit - length and asked.why == "length" and asked.text
    for length in (limit, limit + 1):
        with pytest.raises(InvalidRequestError, match=f"max_model_len - 1 = {limit - 1}"):
            ask(engine, random_prompt(length), max_tokens=max_tokens)
    assert free_blocks(engine) == 64 and "max_model_len" in RequestLimits.check.__doc__


def test_b65_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="at least one token"):
        ask(saying("a"), prompt=[])


@pytest.mark.parametrize("field", ["max_tokens", "n"])
@pytest.mark.parametrize("value", [0, -1, 2.5, 1.0, True, "3", math.nan, math.inf, [3]])
def test_b66_only_whole_positive_counts(field, value):
    with pytest.raises(ValueError, match=field) as refused:
        SamplingParams(**{field: value})
    assert isinstance(refused.value, InvalidRequestError) and refused.value.field == field


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_b66_exactly_max_tokens(max_tokens):
    asked = ask(make_engine(runner=forced(50)), max_tokens=max_tokens)
    assert len(asked.ids) == len(asked.steps) == max_tokens and asked.why == "length"


@pytest.mark.parametrize("min_tokens", [-1, 1.5, 17])
def test_b66_min_tokens_is_checked_too(min_tokens):
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=min_tokens, max_tokens=16)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(str(save_tokenizer(save_hf("llama", tmp_path_factory.mktemp("llm")))), max_model_len=128)


class SureRunner(ScriptedRunner):
    """A script that is followed at any temperature."""

    def execute(self, scheduled, block_size):
        return super().execute(scheduled, block_size) * 100


def test_b67_a_chat_may_use_the_remaining_context(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "runner", SureRunner(random_prompt(40)))
    answer = llm.chat([{"role": "user", "content": "hi"}])[0].outputs[0]
    assert answer.token_ids[:-1] == random_prompt(40) and answer.finish_reason == "stop"
    monkeypatch.setattr(llm.engine, "runner", SureRunner([], after=50))
    output = llm.chat([{"role": "user", "content": "hi"}])[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 128
    assert output.outputs[0].finish_reason == "length"


def test_b67_options_of_a_chat_hold(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "runner", SureRunner([], after=50))
    answer = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=5))[0].outputs[0]
    assert len(answer.token_ids) == 5


def test_b72_answers_of_different_length_all_end():
    """The engine's half: the others go on when the first of n answers ends, and each ends once."""
    runner = forced(others=10.0)
    engine = make_engine(runner=runner, num_blocks=64)
    params = SamplingParams(n=5, seed=4, max_tokens=200, stop_token_ids=list(range(40, 70)))
    engine.add_request("a", [5], params)
    steps = []
    while engine.has_unfinished_requests():
        steps += engine.step()
    final = steps[-1].outputs
    lengths = [len(answer.token_ids) for answer in final]
    assert len(set(lengths)) > 1 and all(answer.finish_reason == "stop" for answer in final)
    for index, length in enumerate(lengths):
        reasons = [step.outputs[index].finish_reason for step in steps]
        assert reasons.index("stop") == length - 1  # none before its last token
        assert [len(step.outputs[index].token_ids) for step in steps[:length]] == list(range(1, length + 1))
        assert "".join(step.outputs[index].new_text for step in steps) == final[index].text
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
