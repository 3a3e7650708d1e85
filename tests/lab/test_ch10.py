"""Chapter 10's simulator, driven without a kernel, and what its checks and measurements promise."""

from __future__ import annotations

import random
import re

import pytest

from shared.block_manager import BlockManager
from shared.engine import Engine
from shared.lab.chapters import ch10, ch10_cache, ch10_measure
from shared.lab.chapters.ch10_run import Call, serve
from shared.lab.evidence import evidence
from shared.lab.judging import Wrong
from shared.lab.machine import Measurement
from shared.prefix_cache import PrefixCachingBlockManager, hash_block, hash_root
from shared.request import RequestLimits
from shared.scheduler import Scheduler
from tests.lab.stepping import assert_explains, assert_goes_back_and_resets, frames
from tests.lab.wrong_answers.ch10 import AllThatAreHeld, StaysFree, StaysNamed
from tests.runtime.tiny import ScriptedRunner, ToyTokenizer, make_engine

LETTERS = [ord(letter) for letter in "abcdefghij"]
WORDS = "A 0 3 one two three\nB 1 3 one two four\nC 6 2 one two three\nD/s 6 2 one two three\nE 9 3 something else here"


def build(manager, budget):
    return make_engine(runner=ScriptedRunner(LETTERS), allocator=manager, max_num_batched_tokens=budget)


def stepper(arrivals: str = WORDS, **inputs):
    made = ch10_cache.prefix_stepper(PrefixCachingBlockManager, build, ToyTokenizer())
    for name, value in {"arrivals": arrivals, **inputs}.items():
        made.fields[name].value = value
    return made


def kinds(made) -> list[list[str]]:
    made.end.click()
    return [re.findall(f"<strong>({'|'.join(ch10_cache.KINDS)})</strong>", frame) for frame in made.frames]


# The simulator


def test_every_kind_of_event_is_reached():
    seen = {kind for step in kinds(stepper(num_blocks="10")) for kind in step}
    assert seen == set(ch10_cache.KINDS) - {"copy"}


def test_equal_prompts_of_one_step_are_computed_twice_and_named_once():
    told = kinds(stepper("A 0 2 one two three\nB 0 2 one two three"))
    assert told[1].count("miss") == 2 and told[1].count("published") == told[1].count("copy") == 3


def test_users_are_counted_and_freed_blocks_are_found_again():
    told = frames(stepper("A 0 4 one two three\nB 1 2 one two three\nC 8 2 one two three"))
    assert "block 0 (" in told[2] and "is in use, and has 2 users now" in told[2] and "A + B · 2 users" in told[2]
    assert "◇ free" in told[8] and "was free and still held its content" in told[-2]
    assert "C – 8 finished 13 12 2 ab" in told[-1]


def test_a_salt_separates_and_a_full_pool_evicts():
    told = frames(stepper())
    last = told[-1].split("answer", 1)[1]
    assert "C – 6 finished 13 12" in last and "D s 6 finished 13 0" in last
    assert "0 blocks forgotten" in told[-1]
    small = stepper(num_blocks="10")
    assert "was free the longest" in " ".join(frames(small)) and "0 blocks forgotten" not in frames(small)[-1]


def test_the_totals_are_those_of_the_trace():
    told = frames(stepper("A 0 1 one two three\nB 2 1 one two three"))
    assert "So far 14 tokens computed, 12 found, 0 blocks forgotten" in told[-1]


def test_the_default_trace_reaches_every_kind_with_words_as_tokens():
    class Words(ToyTokenizer):
        """One token a word or full stop, as the real tokenizer has it for these prompts."""
        def encode(self, text):
            return [3 + sum(map(ord, word)) % 120 for word in re.findall(r"\w+|[^\w ]", text)]

        def decode(self, ids, skip_special_tokens=True):
            return " ".join(str(token) for token in ids)

    def words_engine(manager, budget):
        return make_engine(runner=ScriptedRunner(LETTERS), allocator=manager, tokenizer=Words())
    made = ch10_cache.prefix_stepper(PrefixCachingBlockManager, words_engine, Words())
    assert {kind for step in kinds(made) for kind in step} == set(ch10_cache.KINDS)


def test_the_seed_draws_other_prompts_and_nothing_else():
    made = stepper(source=ch10_cache.DRAWN, num_blocks="64")
    first = frames(made)
    made.seed.value = 1
    assert frames(made) != first
    made.seed.value = 0
    assert frames(made) == first


def test_steps_go_back():
    assert_goes_back_and_resets(stepper())


def test_prompts_are_shown_as_text_and_never_as_markup():
    made = stepper("A 0 2 <b>bold</b> & so on")
    made.end.click()
    assert all("<b>" not in frame for frame in made.frames) and "&lt;b&gt;" in made.frames[1]


@pytest.mark.parametrize("name, value, words", [
    ("arrivals", "A 0 4", "line 1: write a name"), ("arrivals", "A 0 4 x\nA 1 4 y", "two requests are called"),
    ("arrivals", "/s 0 4 x", "before the /"), ("arrivals", "A x 2 y", "is not a whole number"),
    ("num_blocks", "0", "is not between"), ("num_blocks", "2", "A would be refused: request: must"),
    ("budget", "2", "between 8"),
])  # fmt: skip
def test_bad_input_is_explained(name, value, words):
    made = stepper(**{name: value})
    assert_explains(made, name, words, good={"num_blocks": "15", "budget": "64"}.get(name, WORDS))


# Simulated execution


def test_the_runtime_serves_every_hidden_trace_rightly_and_saves_tokens():
    for num_blocks, calls, budget in [*ch10.HANG_UPS.values(), *ch10.OWNERS.values()]:
        cached = serve(PrefixCachingBlockManager(num_blocks, ch10.SIZE), calls, budget)
        assert cached <= serve(BlockManager(num_blocks, ch10.SIZE), calls, budget)


def test_the_price_is_counted_in_tokens():
    calls = [Call("A", range(17), answer=3), Call("B", range(17), step=5, answer=3)]
    assert serve(BlockManager(16, 4), calls) == 2 * 19
    assert serve(PrefixCachingBlockManager(16, 4), calls) == 19 + 3


@pytest.mark.parametrize("manager, cases", [
    (AllThatAreHeld, ch10.HANG_UPS), (StaysFree, ch10.OWNERS), (StaysNamed, ch10.OWNERS)])
def test_a_fault_shows_in_some_trace_and_not_in_the_plain_one(manager, cases):
    wrong = []
    for case, (num_blocks, calls, budget) in cases.items():
        try:
            serve(manager(num_blocks, ch10.SIZE), calls, budget)
        except Wrong:
            wrong.append(case)
    assert wrong and "a prompt is served twice" not in wrong


def test_a_prompt_that_is_found_to_its_end_cannot_run():
    class FindsAll(PrefixCachingBlockManager):
        def get_computed_blocks(self, request):
            names = self.hashes(request, request.num_tokens // self.block_size)
            return [self.block_of[name] for name in names if name in self.block_of]
    with pytest.raises(Wrong, match="B cannot run"):
        serve(FindsAll(16, 4), [Call("A", range(8)), Call("B", range(8), step=6)])


# Exercises


def test_what_is_found_follows_from_the_longest_common_beginning():
    draw = random.Random(2)
    for _ in range(50):
        turns = [([draw.randint(0, 1) for _ in range(6)], [draw.randint(0, 1) for _ in range(4)]) for _ in range(3)]
        prompt, size = [draw.randint(0, 1) for _ in range(draw.randint(1, 12))], draw.randint(1, 4)
        longest = 0
        for asked, answer in turns:
            run = [*asked, *answer][:-1]
            while run[: longest + 1] == prompt[: longest + 1] and longest < min(len(run), len(prompt) - 1):
                longest += 1
        assert ch10.found(turns, prompt, size) == longest // size * size


def test_a_mistake_that_makes_no_difference_is_not_named():
    for turns, prompt, size in ch10.HISTORIES.values():
        right, words = ch10.found(turns, prompt, size), ch10.mistakes(turns, prompt, size)
        assert all(value % size == 0 or value != right for value in words.values()) and len(words) == 5
    named = [words for words, value in ch10.mistakes(*ch10.HISTORIES["the same prompt again"]).items() if value == 4]
    assert named == ["the last token of the prompt is always left to compute"]


def test_the_order_of_parts_matters_in_every_trace():
    for requests in ch10.part_traces().values():
        by_variety = sorted(requests[0], key=lambda part: len({tuple(each[part]) for each in requests}))
        worst = ch10.part_cost(by_variety[::-1], requests)
        assert ch10.part_cost(by_variety, requests) < 0.6 * worst


def test_a_repair_that_finds_less_is_scored_worse():
    class OnlyWholePrompts(PrefixCachingBlockManager):
        def cache_blocks(self, request, start):
            if request.num_computed_tokens >= request.num_prompt_tokens:
                super().cache_blocks(request, 0)
    best, late = (ch10.judge_hang_ups(kind) for kind in (PrefixCachingBlockManager, OnlyWholePrompts))
    assert best.value == best.best < late.value


# Measurements


def test_positions_are_counted_and_times_have_a_spread():
    scheduler = Scheduler(PrefixCachingBlockManager(64, 16), 8, 256)
    engine = Engine(ScriptedRunner(LETTERS, 50_000), scheduler, ToyTokenizer(), RequestLimits(50_000, 256))
    results = ch10_measure.first_token_times(lambda: engine, lengths=(64,), n=3)
    assert [(each.length, each.cached, each.positions) for each in results] == [
        (0, False, 16), (64, False, 80), (64, True, 16)]
    assert all(each.time.n == 3 and 0 < each.time.low <= each.time.median <= each.time.high for each in results)
    assert ch10_measure.first_token_chart(results)[:4] == b"\x89PNG"


def test_expected_times_follow_from_the_positions():
    def result(length, cached, positions, ms):
        return ch10_measure.FirstToken(length, cached, positions, Measurement.of("", [ms, ms + 7, ms + 70], "ms"))

    results = [result(0, False, 16, 20.0), result(64, False, 80, 1.0), result(64, True, 16, 1.0),
               result(512, False, 528, 532.0)]
    assert ch10_measure.expected(results) == [20.0, 84.0, 20.0, 532.0]
    assert ch10_measure.lines(results)[1].endswith("expected 84.0 ms")


def test_naming_is_timed():
    result = ch10_measure.name_times(hash_block, hash_root(""), n=3)
    assert result.n == 3 and 0 < result.low <= result.median and result.unit == "µs"


def test_the_saved_evidence_of_this_chapter_is_complete():
    record = evidence("10_prefix_caching")
    assert record["command"] == "python -m shared.lab.chapters.ch10_measure" and len(record["results"]) == 8
    assert all(result["low"] <= result["median"] <= result["high"] for result in record["results"])
