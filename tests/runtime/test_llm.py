"""`LLM`: every form of prompt, every bad option, streams and chats, on a tiny model with a real tokenizer."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared import LLM, GenerationError, InvalidRequestError, ModelLoadError, SamplingParams, Trace
from tests.runtime.tiny import EOS, VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = dict(num_gpu_blocks_override=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture
def llm(tiny_folder) -> LLM:
    return LLM(tiny_folder, trace=Trace(), **SMALL)


def is_whole(llm: LLM) -> bool:
    """Nothing is left behind, and the next call is served."""
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert not llm.engine.has_unfinished_requests() and not scheduler.waiting and not scheduler.running
    assert scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks
    return len(llm.generate("ok", GREEDY)[0].outputs[0].token_ids) == 6


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# Prompts


def test_the_quick_start():
    code = "from shared import LLM, SamplingParams; print(LLM.__name__, SamplingParams().n)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "LLM 1\n", result.stderr


def test_every_public_name_is_there():
    import shared

    assert {"LLM", "SamplingParams", "RequestOutput", "Trace", "EngineError"} <= set(shared.__all__)
    assert all(getattr(shared, name).__name__ == name for name in shared.__all__)
    with pytest.raises(AttributeError, match="nothing_here"):
        shared.nothing_here  # noqa: B018


def test_importing_the_package_needs_no_torch():
    code = "import sys, shared; from shared import SamplingParams, Trace; print({'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


def test_forms_of_one_prompt_give_one_answer(llm):
    ids = llm.tokenizer.encode("abc")
    forms = ["abc", ["abc"], ("abc",), ids, [ids], tuple(ids), {"prompt": "abc"}, {"prompt_token_ids": ids},
             [{"prompt": "abc", "cache_salt": "x"}]]  # fmt: skip
    outputs = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert len({tuple(output[0].outputs[0].token_ids) for output in outputs}) == 1
    assert all(output[0].prompt_token_ids == ids for output in outputs)
    assert outputs[0][0].prompt == "abc" and outputs[3][0].prompt is None and is_whole(llm)


def test_answers_come_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 4, 7, 2, 8)]
    prompts = ["a", "bb", [5, 6], {"prompt": "ccc"}, "d", "e"]
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 4, 7, 2, 8]
    expected = [llm.tokenizer.encode("a"), llm.tokenizer.encode("bb"), [5, 6], llm.tokenizer.encode("ccc")]
    assert [output.prompt_token_ids for output in outputs[:4]] == expected
    alone = [llm.generate(prompt, p)[0].outputs[0].token_ids for prompt, p in zip(prompts, params)]
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_more_prompts_than_fit_at_once(llm):
    outputs = llm.generate([f"prompt number {i}" for i in range(30)], GREEDY)
    assert len(outputs) == 30 and all(output.finished for output in outputs) and is_whole(llm)


def test_no_prompts_are_no_work(llm):
    assert llm.generate([], GREEDY) == [] and llm.engine.trace.steps == []


def test_without_options_the_defaults_apply(llm):
    (output,) = llm.generate("abc")
    assert 1 <= len(output.outputs[0].token_ids) <= SamplingParams().max_tokens


BAD_PROMPTS = [
    (None, "prompts"), (5, "prompts"), (b"ab", "prompts"), ({"a", "b"}, "prompts"),
    ("", "prompt"), ([""], "prompt"), (["ok", ""], "prompt"), ([None], "prompt"), ([5.0], "prompt"),
    ([5, "a"], "prompt_token_ids"), ([[5], [VOCAB]], "prompt_token_ids"), (["ok", "x" * 64], "prompt"),
    ({}, "prompt"), ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"), ({"text": "a"}, "prompt"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt"), ({"prompt": "a", "salt": "b"}, "prompt"), ("\ud800", "prompt"),
]  # fmt: skip


@pytest.mark.parametrize("prompts, field", BAD_PROMPTS)
def test_bad_prompts_are_refused_before_anything_runs(prompts, field, llm):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.field == field and llm.engine.trace.steps == [] and is_whole(llm)


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, [], {"n": 1}, 5, [GREEDY, None, 3], ["a", "b"]])
def test_bad_options_are_refused_before_anything_runs(params, llm):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["a", "b"], params)
    assert caught.value.field == "sampling_params" and llm.engine.trace.steps == [] and is_whole(llm)


# Chat


def test_chat_is_generate_on_the_template(llm):
    talk = [{"role": "user", "content": "hi"}]
    ids = llm.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    (output,) = llm.chat(talk, GREEDY)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    several = llm.chat([talk, [*talk, {"role": "assistant", "content": "a"}, *talk]], GREEDY)
    assert several[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(several[1].prompt_token_ids) > len(ids)


def test_chat_goes_on_to_the_end_of_the_model(llm):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], None)
    (answer,) = output.outputs
    room = llm.engine.limits.max_model_len - len(output.prompt_token_ids)
    assert len(answer.token_ids) == room or answer.token_ids[-1] == EOS


@pytest.mark.parametrize(
    "messages",
    [None, [], 5, "hi", {"role": "user", "content": "hi"}, [5], [{"role": "user"}], [{"role": "king", "content": "hi"}],
     [{"content": "hi"}], [[]], [{"role": "user", "content": None}]],
)  # fmt: skip
def test_bad_messages_are_refused(messages, llm):
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(messages)
    assert caught.value.field.startswith("messages") and is_whole(llm)


def test_the_next_turn_finds_the_last_one_in_the_cache(llm):
    first = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(first, SamplingParams(temperature=0, max_tokens=1))
    ids = output.prompt_token_ids + output.outputs[0].token_ids + [9, 9]
    (again,) = llm.generate(ids, GREEDY)
    assert again.num_cached_tokens == (len(output.prompt_token_ids)) // 4 * 4
    fresh = LLM(llm.tokenizer.folder, **SMALL, enable_prefix_caching=False)
    (expected,) = fresh.generate(ids, GREEDY)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids and expected.num_cached_tokens == 0


# Streams


def test_a_stream_joins_to_what_generate_returns(llm):
    prompts = ["abc", "d", "efgh ijkl"]
    joined, last = {}, {}
    for output in llm.stream(prompts, GREEDY):
        joined[output.request_id] = joined.get(output.request_id, "") + output.outputs[0].new_text
        last[output.request_id] = output
        assert output.outputs[0].text == joined[output.request_id]
    assert list(joined.values()) == texts(llm.generate(prompts, GREEDY))
    assert all(output.finished for output in last.values()) and is_whole(llm)


def test_closing_a_stream_aborts_what_is_unfinished(llm):
    stream = llm.stream(["abc", "def", "g"], GREEDY)
    next(stream)
    assert llm.engine.has_unfinished_requests()
    stream.close()
    assert is_whole(llm)
    for _ in llm.stream("abc", GREEDY):
        break
    gc.collect()
    assert is_whole(llm)


def test_a_stream_ends_when_its_request_is_aborted_on_the_engine(llm):
    stream = llm.stream("abc", GREEDY)
    name = next(stream).request_id
    assert llm.engine.abort(name).outputs[0].finish_reason == "abort"
    assert list(stream) == [] and is_whole(llm)


def test_an_error_in_the_loop_of_the_caller_aborts_as_well(llm):
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream(["abc", "def"], GREEDY):
            raise ZeroDivisionError
    gc.collect()
    assert is_whole(llm)


def test_two_streams_and_a_call_between_get_their_own_outputs(llm):
    expected = texts(llm.generate(["abc", "defg", "xyz"], GREEDY))
    one, other = llm.stream("abc", GREEDY), llm.stream("defg", GREEDY)
    seen = {"one": "", "other": ""}
    for step in range(30):
        for name, stream in (("one", one), ("other", other)):
            output = next(stream, None)
            seen[name] += output.outputs[0].new_text if output else ""
        if step == 1:
            assert texts(llm.generate("xyz", GREEDY)) == expected[2:]
    assert [seen["one"], seen["other"]] == expected[:2] and is_whole(llm)


def test_two_llms_on_one_engine_get_their_own_outputs(llm):
    expected = texts(llm.generate(["abc", "defg", "xyz"], GREEDY))
    other = LLM.from_engine(llm.engine)
    stream = llm.stream(["abc", "defg"], GREEDY)
    first = [next(stream)]
    assert texts(other.generate("xyz", GREEDY)) == expected[2:]
    finished = [output for output in [*first, *stream] if output.finished]
    assert texts(finished) == expected[:2] and is_whole(llm) and is_whole(other)


def test_a_call_with_thousands_of_prompts_costs_each_step_the_same(llm):
    """The names that wait are not looked at again at every step."""
    groups, looks = llm.engine.outputs.groups, []

    class Counted(dict):
        def __contains__(self, name):
            looks.append(name)
            return super().__contains__(name)

    llm.engine.outputs.groups = Counted(groups)
    outputs = llm.generate([[5]] * 500, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert len(outputs) == 500 and len(looks) < 10 * 500
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs) and is_whole(llm)


def test_a_name_that_is_in_use_on_the_engine_itself_is_passed_over(llm):
    llm.engine.add_request("1", "abc", GREEDY)
    assert len(llm.generate(["abc", "defg", "xyz"], GREEDY)) == 3
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert is_whole(llm)


def test_threads_that_generate_at_once_get_their_own_outputs(llm):
    prompts = ["abc", "defg", "xyz", "a longer one", "abc"]
    expected = texts(llm.generate(prompts, GREEDY))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places in the middle of everything

    def ask(number: int) -> list[str]:
        return [texts(llm.generate(prompts[number:], GREEDY)) for _ in range(6)]

    try:
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(ask, range(5)))
    finally:
        sys.setswitchinterval(interval)
    assert answers == [[expected[number:]] * 6 for number in range(5)] and is_whole(llm)


# Failures on the way


def test_a_failure_keeps_the_answers_of_the_others(llm):
    good = llm.engine.runner
    calls = []

    class Fails:
        def execute(self, scheduled, block_size):
            calls.append(len(scheduled))
            if len(calls) == 8:
                raise RuntimeError("device lost")
            return good.execute(scheduled, block_size)

    llm.engine.runner = Fails()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 20)]
    with pytest.raises(GenerationError, match="1 of 2 requests failed.*device lost") as caught:
        llm.generate(["abc", "abd"], params)
    short, long = (output.outputs[0] for output in caught.value.outputs)
    assert (short.finish_reason, long.finish_reason) == ("length", "error")
    assert len(short.token_ids) == 3 and len(long.token_ids) == 7 and "device lost" in long.error
    llm.engine.runner = good
    assert is_whole(llm)


# Options

BAD_OPTIONS = {
    "dtype": ["float8", 16, None, "torch.float32"],
    "device": ["nowhere", "cuda:99", 5, 1.5],
    "max_model_len": [0, -1, 1.5, "64", 513, True],
    "max_num_seqs": [0, -1, 1.5, None],
    "max_num_batched_tokens": [0, 31, 2.5, None],
    "block_size": [0, -4, 1.5, None],
    "num_gpu_blocks_override": [0, -1, 1.5],
    "kv_cache_memory_bytes": [0, 100, -1, 1.5],
    "enable_prefix_caching": [1, None, "yes"],
    "enable_chunked_prefill": [0, None],
    "scheduling_policy": ["lifo", 5, None],
    "attention_backend": ["flash", 5, None],
    "seed": ["a", 1.5, None, [1]],
}


@pytest.mark.parametrize("field, value", [(field, value) for field in BAD_OPTIONS for value in BAD_OPTIONS[field]])
def test_a_bad_option_names_itself(field, value, tiny_folder):
    with pytest.raises(InvalidRequestError) as caught:
        LLM(tiny_folder, **{field: value})
    named = {"scheduling_policy": {"scheduling_policy", "policy"}}.get(field, {field})
    assert caught.value.field in named and caught.value.value == value and caught.value.limit


def test_an_unknown_option_names_itself_and_the_known(tiny_folder):
    with pytest.raises(InvalidRequestError, match="max_num_seqs") as caught:
        LLM(tiny_folder, gpu_memory_utilisation=0.9)
    assert caught.value.value == "gpu_memory_utilisation"


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/folder", 5, None])
def test_a_model_that_is_not_there(model):
    with pytest.raises((ModelLoadError, InvalidRequestError)):
        LLM(model)


def test_the_length_is_that_of_model_cache_or_step_whichever_is_shortest(tiny_folder):
    def length(**options):
        return LLM(tiny_folder, block_size=4, max_num_seqs=2, **options).engine.limits.max_model_len

    assert length() == 512 and length(max_model_len=100) == 100
    assert length(num_gpu_blocks_override=10) == 40
    assert length(enable_chunked_prefill=False, max_num_batched_tokens=64) == 64
    for options in (dict(num_gpu_blocks_override=10), dict(enable_chunked_prefill=False, max_num_batched_tokens=40)):
        with pytest.raises(InvalidRequestError, match="at most 40") as caught:
            length(max_model_len=41, **options)
        assert caught.value.field == "max_model_len"


def test_the_cache_fills_the_memory_that_it_is_given(tiny_folder):
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head_dim, bytes
    llm = LLM(tiny_folder, block_size=4, kv_cache_memory_bytes=per_token * 4 * 10 + 100, max_num_seqs=2)
    cache = llm.engine.runner.cache
    assert llm.engine.scheduler.allocator.num_blocks == 10 and cache.num_slots == 40
    assert cache.keys.nbytes + cache.values.nbytes == per_token * 40


def test_a_sequence_may_fill_the_whole_cache(tiny_folder):
    llm = LLM(tiny_folder, block_size=3, num_gpu_blocks_override=15, max_num_seqs=2)
    (output,) = llm.generate([5] * 20, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 25
    with pytest.raises(InvalidRequestError):
        llm.generate([5] * 45)
    assert len(llm.generate([5] * 44, SamplingParams(max_tokens=None))[0].outputs[0].token_ids) == 1


def test_parts_of_the_reader_run_in_the_engine(tiny_folder):
    from shared.batch import RaggedAttention

    calls = []

    class Counting(RaggedAttention):
        def __call__(self, layer, q, k, v):
            calls.append(layer)
            return super().__call__(layer, q, k, v)

    options = {**SMALL, "attention_backend": Counting, "scheduling_policy": lambda request: -request.arrival_order}
    llm = LLM(tiny_folder, trace=Trace(), **options)
    llm.generate(["a", "b"], GREEDY)
    assert set(calls) == {0, 1} and len(calls) == 2 * len(llm.engine.trace.steps)
    assert list(llm.engine.trace.steps[1].scheduled) == ["1", "0"]


def test_half_precision_runs(tiny_folder):
    llm = LLM(tiny_folder, dtype="bfloat16", **SMALL)
    assert str(llm.engine.runner.cache.keys.dtype) == "torch.bfloat16" == str(llm.model.lm_head.weight.dtype)
    assert is_whole(llm)


def test_nothing_holds_a_model_that_is_no_longer_used(tiny_folder):
    llm = LLM(tiny_folder, **SMALL)
    llm.generate("abc", GREEDY)
    list(llm.stream("abc", GREEDY))
    model = weakref.ref(llm.model)
    del llm
    gc.collect()
    assert model() is None


def test_the_real_model_answers(real_llm):
    (output,) = real_llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                              SamplingParams(temperature=0, max_tokens=30))  # fmt: skip
    assert output.outputs[0].text == "The capital of France is Paris." and output.outputs[0].finish_reason == "stop"
