"""Known faults of inference engines: who owns which block. The long mixed workload is in test_soak.py."""

from __future__ import annotations

import pytest

from shared.block_manager import BlockManager
from shared.errors import InvalidRequestError
from shared.kv_cache import kv_bytes_per_token
from shared.llm import LLM
from shared.prefix_cache import PrefixCachingBlockManager
from tests.known_bugs.helpers import ask, cached_engine, free_blocks, greedy, oracle, random_prompt, tiny
from tests.runtime.tiny import drain, make_engine, run, save_hf, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tokenizer(save_hf("llama", tmp_path_factory.mktemp("llm"))))


def slots(llm: LLM) -> int:
    return llm.engine.runner.cache.num_slots


@pytest.mark.parametrize(
    ("block_size", "options", "longest"),
    [
        (1, dict(num_gpu_blocks_override=45), 45),
        (5, dict(num_gpu_blocks_override=9), 45),
        (45, dict(num_gpu_blocks_override=1), 45),
        (32, dict(num_gpu_blocks_override=1), 32),
        (
            32,
            dict(kv_cache_memory_bytes=45 * 2 * 2 * 2 * 16 * 4),
            32,
        ),  # memory of 45 slots is one block of 32
        (4, dict(kv_cache_memory_bytes=45 * 2 * 2 * 2 * 16 * 4), 44),
    ],
)
def test_b41_no_length_is_rounded_up_beyond_the_pool(folder, block_size, options, longest):
    llm = LLM(folder, block_size=block_size, enable_prefix_caching=False, **options)
    assert kv_bytes_per_token(llm.model.config, llm.model.lm_head.weight.dtype) == 2 * 2 * 2 * 16 * 4
    assert llm.engine.limits.max_model_len == slots(llm) == longest
    full = llm.generate([random_prompt(longest - 5)], greedy(5, ignore_eos=True))[0]
    assert len(full.prompt_token_ids) + len(full.outputs[0].token_ids) == longest
    cut = llm.generate([random_prompt(longest - 5)], greedy(9, ignore_eos=True))[0]
    assert cut.outputs[0].token_ids == full.outputs[0].token_ids and cut.outputs[0].finish_reason == "length"
    assert len(llm.generate([random_prompt(longest - 1)], greedy(9))[0].outputs[0].token_ids) == 1
    for length in (longest, longest + 1):
        with pytest.raises(InvalidRequestError, match="prompt"):
            llm.generate([random_prompt(length)], greedy(1))


def test_b41_a_longer_length_than_the_pool_is_refused(folder):
    with pytest.raises(InvalidRequestError, match="at most 45"):
        LLM(folder, block_size=5, num_gpu_blocks_override=9, max_model_len=46)


@pytest.mark.parametrize("how", ["clear", "reuse", "overwrite"])
def test_b42_the_cache_keeps_no_view_of_a_requests_table(how):
    manager = PrefixCachingBlockManager(16, 4)
    engine = make_engine(tiny(), allocator=manager)
    prompt = random_prompt(13)
    engine.add_request("P", prompt, greedy(2, ignore_eos=True))
    engine.step()
    request = engine.scheduler.running[0]
    cached = request.block_table[:3]
    table = request.block_table
    drain(engine)
    if how == "reuse":
        ask(engine, random_prompt(13, 1))
    elif how == "overwrite":
        table[:] = [15, 15, 15]  # the list that was the table of P
    engine.add_request("again", prompt, greedy(2, ignore_eos=True))
    engine.step()
    assert engine.scheduler.running[0].block_table[:3] == cached
    assert drain(engine)["again"].num_cached_tokens == 12
    assert ask(engine, prompt, max_tokens=6).ids == oracle(tiny(), prompt, greedy(6))


@pytest.mark.parametrize("manager", [BlockManager, PrefixCachingBlockManager])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("budget", [4, 64])
def test_b43_a_block_comes_exactly_when_it_is_needed(manager, block_size, budget):
    for length in range(1, 10):
        engine = make_engine(
            tiny(), allocator=manager(64, block_size), max_num_seqs=1, max_num_batched_tokens=budget
        )
        engine.add_request("r", random_prompt(length), greedy(10, ignore_eos=True))
        answer = drain(engine)["r"].outputs[0].token_ids
        assert answer == oracle(tiny(), random_prompt(length), greedy(10, ignore_eos=True))
        for step in engine.trace.steps[:-1]:
            assert len(step.block_tables["r"]) == -(-step.computed["r"] // block_size)
        assert step.computed["r"] == length + 8  # the last but one; the last step ends and frees all
        assert free_blocks(engine) == 64


def test_b40_abort_frees_at_once_in_every_state():
    engine = cached_engine(tiny(), num_blocks=12, max_num_seqs=3, max_num_batched_tokens=8)
    for i in range(4):
        engine.add_request(str(i), random_prompt(14, i), greedy(20, ignore_eos=True))
    engine.step()
    held = 12 - free_blocks(engine)
    assert held and engine.abort("0").finished and free_blocks(engine) == 12 - held + 2
    engine.scheduler.check()
    for name in ("3", "1", "2"):  # waiting, then whatever they are
        assert engine.abort(name).outputs[0].finish_reason == "abort"
        engine.scheduler.check()
    assert free_blocks(engine) == 12 and engine.abort("0") is None and engine.step() == []


@pytest.mark.parametrize("n", [2, 4])
def test_b40_all_answers_of_a_prompt_are_freed(n):
    engine = cached_engine(tiny(), num_blocks=40)
    params = greedy(6, n=n)
    engine.add_request("a", random_prompt(9), params)
    drain(engine)
    assert free_blocks(engine) == 40
    engine.add_request("b", random_prompt(9), params)
    engine.step()
    engine.abort("b")
    engine.scheduler.allocator.reset_prefix_cache()
    engine.scheduler.check()
    assert free_blocks(engine) == 40 and not engine.scheduler.allocator.block_of
    assert run(engine, [random_prompt(9)], greedy(6)) == [oracle(tiny(), random_prompt(9), greedy(6))]
