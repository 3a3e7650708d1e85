"""The ladder: every stage of the course gives the same tokens for the same prompts, in float32.

naive = cached = batched = continuous = chunked = paged = preempted = prefix-cached = transformers' generate.
Each rung also shows, from the trace, that it did what its name says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from shared.allocator import RowAllocator
from shared.block_manager import BlockManager
from shared.decode import generate_naive
from shared.engine import Engine
from shared.kv_cache import generate_cached
from shared.model import Transformer
from shared.prefix_cache import PrefixCachingBlockManager
from shared.sampling import Sampler
from shared.sampling_params import SamplingParams
from tests.runtime.tiny import EOS, VARIANTS, VOCAB, drain, make_engine

NAN = float("nan")
MAX_TOKENS = 12
draw = torch.Generator().manual_seed(11)
SHARED = torch.randint(3, VOCAB, (21,), generator=draw).tolist()
PROMPTS = [
    torch.randint(3, VOCAB, (1,), generator=draw).tolist(),
    SHARED,
    SHARED[:17] + torch.randint(3, VOCAB, (25,), generator=draw).tolist(),
    torch.randint(3, VOCAB, (16,), generator=draw).tolist(),
    torch.randint(3, VOCAB, (7,), generator=draw).tolist(),
    SHARED + torch.randint(3, VOCAB, (2,), generator=draw).tolist(),
]
GREEDY = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS)] * len(PROMPTS)
SAMPLED = [
    SamplingParams(seed=1, temperature=0.8, max_tokens=MAX_TOKENS),
    SamplingParams(seed=2, temperature=1.3, top_p=0.9, max_tokens=MAX_TOKENS),
    SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=MAX_TOKENS),
    SamplingParams(seed=4, top_k=20, top_p=0.8, frequency_penalty=0.5, max_tokens=MAX_TOKENS, min_tokens=5),
    SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=MAX_TOKENS),
    SamplingParams(seed=-5, min_p=0.05, logit_bias={7: 3.0, EOS: 2.0}, max_tokens=MAX_TOKENS),
]
SAMPLED_ON = ["llama", "llama3-rope", "qwen2.5-tied", "qwen3"]


# The first two rungs are loops, without an engine


@dataclass
class State:
    """What the sampler must know of a request, without an engine."""

    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    eos_token_ids: tuple[int, ...]
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return self.sampling_params.seed or 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.eos_token_ids

    def choose(self, logits: torch.Tensor) -> int:
        self.output_token_ids.append(Sampler()(logits[None], [self])[0].token_id)
        return self.output_token_ids[-1]


def loop(generate: Callable, model: Transformer, prompts, params, eos=(EOS,)) -> list[list[int]]:
    return [
        generate(model, prompt, p.max_tokens, eos, State(p, prompt, eos).choose).new_ids
        for prompt, p in zip(prompts, params)
    ]


def naive(model, prompts, params, eos=(EOS,)):
    return loop(generate_naive, model, prompts, params, eos)


def transformers_generate(hf, prompts, max_tokens, eos=EOS):
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
                          eos_token_id=eos, pad_token_id=0, repetition_penalty=1.0)  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


# The other rungs are one engine, in different hands


def serve(engine: Engine, prompts, params, every: int = 0, rounds: int = 1) -> list[list[int]]:
    """Answers of the last round; with `every`, a prompt arrives only each so many steps."""
    for turn in range(rounds):
        done = {}
        for i, (prompt, p) in enumerate(zip(prompts, params)):
            engine.add_request(f"{turn}.{i}", prompt, p)
            for _ in range(every):
                done |= {output.request_id: output for output in engine.step() if output.finished}
                engine.scheduler.check()
        done |= drain(engine)
    return [done[f"{rounds - 1}.{i}"].outputs[0].token_ids for i in range(len(prompts))]


@dataclass(frozen=True)
class Rung:
    """An engine of certain parts, how prompts come to it, and what the trace must show."""

    build: Callable[..., Engine]  # of the model and the most tokens that a request can have
    proof: Callable[[Engine], bool]
    every: int = 0
    rounds: int = 1

    def __call__(self, model: Transformer, prompts, params, **parts) -> list[list[int]]:
        engine = self.build(model, max(len(p) + q.max_tokens for p, q in zip(prompts, params)), **parts)
        answers = serve(engine, prompts, params, self.every, self.rounds)
        assert self.proof(engine), "the rung did not do what its name says"
        return answers


def rows(model, longest, num_rows=8, **parts):
    return make_engine(model, allocator=RowAllocator(num_rows, longest), max_num_batched_tokens=512, **parts)


def chunked(budget: int) -> Rung:
    def build(model, longest, **parts):
        return make_engine(model, num_blocks=256, max_num_seqs=min(budget, 4), max_num_batched_tokens=budget, **parts)

    return Rung(build, lambda engine: largest_step(engine) <= budget and num_chunks(engine) > 0)


def paged(size: int) -> Rung:
    def build(model, longest, **parts):
        return make_engine(model, num_blocks=-(-longest // size) * 6, block_size=size, poison=NAN, **parts)

    return Rung(build, lambda engine: {step.block_size for step in engine.trace.steps} == {size})


def small(manager, size: int = 4, spare: int = 1) -> Callable[..., Engine]:
    """A pool that holds the longest request and hardly more."""

    def build(model, longest, **parts):
        return make_engine(model, allocator=manager(-(-longest // size) + spare, size), poison=NAN, **parts)

    return build


def prefix_cached(size: int) -> Callable[..., Engine]:
    def build(model, longest, **parts):
        manager = PrefixCachingBlockManager(-(-longest // size) * 12, size)
        return make_engine(model, allocator=manager, poison=NAN, **parts)

    return build


def largest_step(engine: Engine) -> int:
    return max(step.num_batched_tokens for step in engine.trace.steps)


def num_chunks(engine: Engine) -> int:
    """Steps of a request that computed a part of its prompt and gave no token."""
    return sum(name not in step.new_tokens for step in engine.trace.steps for name in step.scheduled)


def num_preempted(engine: Engine) -> int:
    return sum(len(step.preempted) for step in engine.trace.steps)


def num_hits(engine: Engine) -> int:
    return sum(sum(step.cache_hits.values()) for step in engine.trace.steps)


def all_at_once(engine: Engine) -> bool:
    return len(engine.trace.steps[0].admitted) == len(PROMPTS)


def joined_a_running_one(engine: Engine) -> bool:
    return any(step.admitted and len(step.scheduled) > len(step.admitted) for step in engine.trace.steps)


RUNGS: dict[str, Rung] = {
    "batched": Rung(rows, all_at_once),
    "continuous": Rung(lambda model, longest, **parts: rows(model, longest, 3, **parts), joined_a_running_one, 2),
    **{f"chunked {budget}": chunked(budget) for budget in (1, 4, 7, 16)},
    **{f"paged {size}": paged(size) for size in (1, 2, 3, 4, 16, 64)},
    "preempted": Rung(small(BlockManager), num_preempted),
    "preempted 1": Rung(small(BlockManager, 1, 12), num_preempted),
    "prefix-cached": Rung(prefix_cached(4), num_hits, rounds=2),
    "prefix-cached 1": Rung(prefix_cached(1), num_hits, rounds=2),
    "prefix-cached in one round": Rung(prefix_cached(4), num_hits, every=2),
    "prefix-cached, preempted": Rung(
        small(PrefixCachingBlockManager, 4, 3), lambda engine: num_hits(engine) and num_preempted(engine), 1, 2
    ),
    "prefix-cached, preempted, chunked": Rung(
        lambda model, longest, **parts: small(PrefixCachingBlockManager, 2, 4)(
            model, longest, max_num_batched_tokens=9, **parts
        ),
        lambda engine: num_hits(engine) and num_preempted(engine) and num_chunks(engine), 1, 2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(family) -> Callable[[str, str], list[list[int]]]:
    """What the naive loop says, once for each family and choice of options."""
    known = {}

    def of(variant: str, kind: str) -> list[list[int]]:
        if (variant, kind) not in known:
            known[variant, kind] = naive(family(variant).model, PROMPTS, GREEDY if kind == "greedy" else SAMPLED)
        return known[variant, kind]

    return of


@pytest.mark.parametrize("variant", VARIANTS)
def test_naive_equals_transformers(variant, family, answers):
    expected = transformers_generate(family(variant).hf, PROMPTS, MAX_TOKENS)
    assert answers(variant, "greedy") == expected
    assert len({tuple(answer) for answer in expected}) > 3  # the prompts do not all end alike


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_equals_naive(variant, family, answers):
    assert loop(generate_cached, family(variant).model, PROMPTS, GREEDY) == answers(variant, "greedy")


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_naive(variant, rung, family, answers):
    assert RUNGS[rung](family(variant).model, PROMPTS, GREEDY) == answers(variant, "greedy")


@pytest.mark.parametrize("variant", SAMPLED_ON)
def test_cached_sampling_equals_naive(variant, family, answers):
    assert loop(generate_cached, family(variant).model, PROMPTS, SAMPLED) == answers(variant, "sampled")


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("variant", SAMPLED_ON)
def test_seeded_sampling_equals_naive(variant, rung, family, answers):
    assert RUNGS[rung](family(variant).model, PROMPTS, SAMPLED) == answers(variant, "sampled")


def test_some_answers_end_early_and_most_are_long(answers):
    """The ladder would prove little on answers of a token or two, or without an end token."""
    lengths = [len(a) for variant in VARIANTS for a in answers(variant, "greedy")]
    lengths += [len(a) for variant in SAMPLED_ON for a in answers(variant, "sampled")]
    assert min(lengths) < MAX_TOKENS and sum(lengths) > 0.8 * MAX_TOKENS * len(lengths)


def test_what_the_loops_computed(family):
    """The naive loop runs every position again and again, the cached one each position once."""
    model, eos = family("llama").model, ()
    slow = generate_naive(model, PROMPTS[1], 5, eos)
    fast = generate_cached(model, PROMPTS[1], 5, eos)
    assert slow.new_ids == fast.new_ids
    assert slow.positions_per_step == [21, 22, 23, 24, 25] and fast.positions_per_step == [21, 1, 1, 1, 1]
    assert slow.positions_recomputed == 115 - 25 and fast.positions_recomputed == 0


@pytest.mark.parametrize("generate", [generate_naive, generate_cached])
def test_no_tokens_cost_no_positions(family, generate):
    trace = generate(family("llama").model, PROMPTS[1], max_tokens=0)
    assert trace.new_ids == [] and trace.positions_processed == trace.positions_recomputed == 0


def test_only_wanted_rows_are_scored(family):
    """The head sees one row for each request that samples, not one for each prompt position."""
    model, seen = family("llama").model, []
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    try:
        serve(make_engine(model, num_blocks=256, max_num_batched_tokens=20), PROMPTS, GREEDY)
    finally:
        hook.remove()
    engine = make_engine(model, num_blocks=256, max_num_batched_tokens=20)
    serve(engine, PROMPTS, GREEDY)
    assert seen == [len(step.new_tokens) for step in engine.trace.steps]


# The real model


@pytest.fixture(scope="module")
def real(real_llm) -> tuple[list[list[int]], tuple[int, ...]]:
    tokenizer = real_llm.tokenizer
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    questions = ["What is the capital of France?", "Name three colours."]
    prompts = [
        tokenizer.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": question}])
        for question in questions
    ]
    return [*prompts, tokenizer.encode("def fibonacci(n):")], tokenizer.eos_token_ids


REAL_RUNGS = ["batched", "chunked 16", "paged 16", "prefix-cached, preempted"]


@pytest.fixture(scope="module")
def real_answers(real, real_llm) -> list[list[int]]:
    prompts, eos = real
    return loop(generate_cached, real_llm.model, prompts, real_params(len(prompts)), eos)


def real_params(count: int, max_tokens: int = 24) -> Sequence[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=max_tokens)] * count


def test_the_real_model_equals_transformers(real, real_llm, real_answers):
    import transformers

    prompts, eos = real
    hf = transformers.AutoModelForCausalLM.from_pretrained(real_llm.tokenizer.folder, dtype=torch.float32).eval()
    assert real_answers == transformers_generate(hf, prompts, 24, list(eos))
    assert real_llm.tokenizer.decode(real_answers[0]) == "The capital of France is Paris."


def test_the_real_model_naive_equals_cached(real, real_llm, real_answers):
    prompts, eos = real
    params = real_params(len(prompts), 6)
    assert naive(real_llm.model, prompts, params, eos) == [answer[:6] for answer in real_answers]


@pytest.mark.parametrize("rung", REAL_RUNGS)
def test_the_real_model_on_each_rung(rung, real, real_llm, real_answers):
    prompts, _ = real
    chosen = RUNGS[rung]
    if rung == "batched":
        chosen = replace(chosen, proof=lambda engine: len(engine.trace.steps[0].admitted) == len(prompts))
    parts = dict(tokenizer=real_llm.tokenizer)
    assert chosen(real_llm.model, prompts, real_params(len(prompts)), **parts) == real_answers
