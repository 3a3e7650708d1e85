"""Known faults of inference engines: computed blocks that are used again."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.prefix_cache import PrefixCachingBlockManager, hash_block, hash_root
from shared.sampling_params import SamplingParams
from tests.known_bugs.helpers import ask, cached_engine, fixed, greedy, oracle, random_prompt, tiny
from tests.runtime.tiny import drain, run

BLOCK = 4
X, Y, Z, W = (random_prompt(BLOCK, seed) for seed in range(4))


def hits(engine) -> list[int]:
    """Tokens found in the cache at each admission, in order."""
    return [step.cache_hits.get(name, 0) for step in engine.trace.steps for name in step.admitted]


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("count", [2, 5])
def test_b44_equal_prompts_of_one_step_share_nothing_that_is_not_computed(length, count):
    engine = cached_engine(tiny())
    prompt = random_prompt(length)
    assert run(engine, [prompt] * count, greedy()) == [oracle(tiny(), prompt, greedy())] * count
    assert hits(engine) == [0] * count


@pytest.mark.parametrize("chunk", [2, 4, 5, 8])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_b44_a_request_that_comes_mid_prefill_finds_only_what_is_written(chunk, steps):
    engine = cached_engine(tiny(), max_num_seqs=2, max_num_batched_tokens=chunk)
    prompt = random_prompt(18)
    engine.add_request("first", prompt, greedy())
    for _ in range(steps):
        engine.step()
    written = min(chunk * steps, 18)
    engine.add_request("second", prompt, greedy())
    done = drain(engine)
    for name in ("first", "second"):
        assert done[name].outputs[0].token_ids == oracle(tiny(), prompt, greedy())
    second = next(step for step in engine.trace.steps if "second" in step.admitted)
    before = engine.trace.steps[second.step - 1].computed["first"]
    assert (
        done["second"].num_cached_tokens
        == min(before, 17) // BLOCK * BLOCK
        >= written // BLOCK * BLOCK - BLOCK
    )


@pytest.mark.parametrize("fill", [9, 16, 43])
def test_b45_a_block_that_was_taken_is_not_found(fill):
    engine = cached_engine(tiny(), num_blocks=12)
    prompt = random_prompt(10)
    expected = oracle(tiny(), prompt, greedy(5, ignore_eos=True))
    for turn in range(3):
        assert ask(engine, prompt, max_tokens=5, ignore_eos=True).ids == expected
        other = random_prompt(fill, turn + 1)
        assert ask(engine, other, max_tokens=5, ignore_eos=True).ids == oracle(
            tiny(), other, greedy(5, ignore_eos=True)
        )
    if fill == 43:  # it takes all blocks
        assert hits(engine)[::2] == [0, 0, 0]


def test_b45_a_block_that_is_used_by_two_is_taken_from_neither():
    engine = cached_engine(tiny(), num_blocks=12)
    prompt = X + Y + [5]
    engine.add_request("1", prompt, greedy(20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.add_request("2", prompt, greedy(3, ignore_eos=True))
    engine.add_request("3", random_prompt(15, 9), greedy(8, ignore_eos=True))
    done = drain(engine)
    expected = oracle(tiny(), prompt, greedy(20, ignore_eos=True))
    assert done["1"].outputs[0].token_ids == expected and done["2"].outputs[0].token_ids == expected[:3]
    assert done["2"].num_cached_tokens == 8


def test_b46_the_hash_is_collision_resistant():
    """The guard is BLAKE2 of 128 bits over parent and tokens: nobody can make two beginnings of one name.

    The root of the chain needs no secret then; it is the tenant's salt.
    """
    parent = hash_root("")
    assert (
        hash_block(parent, [1, 2])
        == hashlib.blake2b(
            (1).to_bytes(8, "little") + (2).to_bytes(8, "little"), digest_size=16, key=parent
        ).digest()
    )
    assert len(hash_block(parent, [1, 2])) * 8 == 128
    assert "collision" in hash_block.__doc__ or "nobody can construct" in hash_block.__doc__


chains = st.tuples(
    st.sampled_from(["", "a", "b"]), st.lists(st.lists(st.integers(0, 2**31), max_size=3), max_size=3)
)


@fixed
@given(first=chains, second=chains)
def test_b46_different_beginnings_have_different_names(first, second):
    def name(chain):
        parent = hash_root(chain[0])
        for block in chain[1]:
            parent = hash_block(parent, block)
        return parent

    assert (name(first) == name(second)) == (first == second)


@pytest.mark.parametrize(
    ("a", "b"), [([1, 256], [257, 0]), ([1, 2], [2, 1]), ([12, 3], [1, 23]), ([0], [0, 0])]
)
def test_b46_ids_are_neither_cut_nor_run_together(a, b):
    assert hash_block(hash_root(""), a) != hash_block(hash_root(""), b)


@pytest.mark.parametrize("second", [W + Y + Z[:1], Y + Z[:1], W + X + Y + Z[:1], X[::-1] + Y + Z[:1]])
def test_b47_a_block_after_another_beginning_is_not_shared(second):
    engine = cached_engine(tiny())
    ask(engine, X + Y + Z[:1])
    assert ask(engine, second).ids == oracle(tiny(), second, greedy(16))
    assert hits(engine) == [0, 0]


def test_b47_tenants_with_different_salts_share_nothing():
    engine = cached_engine(tiny())
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant"), ("d", "other")):
        engine.add_request(name, X + Y + [5], greedy(), cache_salt=salt)
        assert drain(engine)[name].outputs[0].token_ids == oracle(tiny(), X + Y + [5], greedy())
    assert hits(engine) == [0, 0, 8, 0]


@pytest.mark.parametrize("length", [5, 6, 7, 8, 9])
def test_b48_a_block_that_is_not_full_is_not_shared(length):
    """Two requests of one prompt go different ways; only full blocks before the last token are common."""
    engine = cached_engine(tiny())
    prompt = random_prompt(length)
    params = [SamplingParams(seed=seed, temperature=1.5, max_tokens=12, ignore_eos=True) for seed in (1, 2)]
    engine.add_request("0", prompt, params[0])
    engine.step()
    engine.add_request("1", prompt, params[1])
    done = drain(engine)
    answers = [done[name].outputs[0].token_ids for name in "01"]
    assert answers == [oracle(tiny(), prompt, p) for p in params] and answers[0] != answers[1]
    assert hits(engine) == [0, (length - 1) // BLOCK * BLOCK]
    tables = next(step.block_tables for step in engine.trace.steps if len(step.block_tables) == 2)
    shared = set(tables["0"]) & set(tables["1"])
    assert len(shared) == (length - 1) // BLOCK


def test_b48_n_answers_do_not_write_into_each_other():
    engine = cached_engine(tiny())
    params = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=12, ignore_eos=True)
    engine.add_request("a", random_prompt(6), params)
    answers = [answer.token_ids for answer in drain(engine)["a"].outputs]
    assert answers == [oracle(tiny(), random_prompt(6), params, seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("answer_length", range(1, 10))
@pytest.mark.parametrize("prompt_length", [3, 4, 6])
def test_b49_the_next_turn_finds_the_answer_but_not_its_last_token(prompt_length, answer_length):
    engine = cached_engine(tiny())
    prompt = random_prompt(prompt_length)
    answer = ask(engine, prompt, max_tokens=answer_length, ignore_eos=True).ids
    assert len(answer) == answer_length
    turn2 = prompt + answer + random_prompt(5, 7)
    assert ask(engine, turn2, max_tokens=8).ids == oracle(tiny(), turn2, greedy(8))
    assert hits(engine)[1] == (prompt_length + answer_length - 1) // BLOCK * BLOCK


def test_b49_a_prompt_that_is_cached_to_its_end_still_computes_its_last_token():
    engine = cached_engine(tiny())
    for _ in range(2):
        assert ask(engine, X + Y).ids == oracle(tiny(), X + Y, greedy(16))
    assert hits(engine) == [0, 4] and isinstance(engine.scheduler.allocator, PrefixCachingBlockManager)
