"""Known faults of inference engines: several ranks. Ranks are threads here, with real groups between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.group import DistributedGroup
from shared.parallel import RowParallelLinear, VocabParallelHead
from shared.prefix_cache import PrefixCachingBlockManager
from shared.sampling_params import SamplingParams
from shared.weights import load_model
from shared.workers import plain_runner
from tests.known_bugs.helpers import greedy, oracle, random_prompt
from tests.runtime.ranks import group_of, rank_threads, save_model, together
from tests.runtime.tiny import make_engine, run

LONG = greedy(24, ignore_eos=True)


class Watched:
    """A runner that keeps what it was asked to compute, by rank."""

    seen: dict[int, list]

    def __new__(cls, seen):
        def make(model, agree, num_slots):
            runner = plain_runner(model, agree, num_slots)
            rank, forward = model.embed_tokens.group.rank, runner.forward
            seen[rank] = []

            def watched(batch):
                seen[rank].append(batch)
                return forward(batch)

            runner.forward = watched
            return runner

        return make


def same(batch, other) -> bool:
    names = ("input_ids", "positions", "slot_mapping", "block_tables", "seq_lens", "query_start_loc")
    return all(torch.equal(getattr(batch, name), getattr(other, name)) for name in names) and (
        batch.query_lens == other.query_lens and batch.block_size == other.block_size
    )


@pytest.mark.parametrize("size", [2, 4])
def test_b29_ranks_hold_the_same_tokens_after_every_step(tmp_path, size):
    """Only rank 0 draws; the others learn each token as the next step's input."""
    folder, seen = save_model(tmp_path, "Llama"), {}
    params = SamplingParams(temperature=1, max_tokens=50, ignore_eos=True)  # no seed
    with rank_threads(folder, size, Watched(seen)) as runner:
        prompts = [random_prompt(5), random_prompt(9)]
        answers = run(make_engine(runner=runner, seed=3), prompts, params)
    assert all(len(answer) == 50 for answer in answers)
    for rank in range(size):
        fed = [batch.input_ids.tolist() for batch in seen[rank]]
        assert fed == [batch.input_ids.tolist() for batch in seen[0]]
        assert [row for step in fed[1:] for row in step[:1]] == answers[0][:-1]


@pytest.mark.parametrize("manager", [None, PrefixCachingBlockManager])
def test_b37_ranks_get_all_tokens_of_a_resumed_request(tmp_path, manager):
    folder, seen = save_model(tmp_path, "Llama"), {}
    model, prompts = load_model(folder), [random_prompt(6, i) for i in range(4)]
    with rank_threads(folder, 2, Watched(seen)) as runner:
        parts = {"allocator": manager(12, 4)} if manager else {"num_blocks": 12}
        engine = make_engine(runner=runner, max_num_seqs=4, **parts)
        answers = run(engine, prompts, LONG)
    assert any(step.preempted for step in engine.trace.steps)
    assert answers == [oracle(model, prompt, LONG) for prompt in prompts]
    assert len(seen[0]) == len(seen[1]) and all(same(*pair) for pair in zip(seen[0], seen[1]))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(("vocab", "sizes"), [(6, [3, 3]), (7, [4, 3]), (7, [3, 2, 2])])
def test_b60_the_gathered_vocabulary_is_in_order(rows, vocab, sizes):
    whole = torch.arange(rows * vocab, dtype=torch.float32).reshape(rows, vocab)

    def work(rank, store):
        start = sum(sizes[:rank])
        part = nn.Identity()
        head = VocabParallelHead(part, sizes, group_of(rank, len(sizes), store))
        return head(whole[:, start : start + sizes[rank]])

    for logits in together(len(sizes), work):
        assert logits.tolist() == whole.tolist()


def test_b61_the_result_of_a_collective_arrives(tmp_path, monkeypatch):
    """Fresh buffers hold NaN, so that a result left in a temporary shows."""
    folder = save_model(tmp_path, "Llama")
    model, prompt = load_model(folder), random_prompt(9)
    fresh = torch.empty_like
    monkeypatch.setattr("shared.group.torch.empty_like", lambda x: fresh(x).fill_(float("nan")))
    with rank_threads(folder, 2) as runner:
        assert run(make_engine(runner=runner), [prompt], LONG) == [oracle(model, prompt, LONG)]

    def reduce(rank, store):
        x = torch.full((2, 3), rank + 1.0)
        assert group_of(rank, 2, store).all_reduce(x) is x
        return x

    assert all(x.tolist() == [[3.0] * 3] * 2 for x in together(2, reduce))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_b62_fewer_key_value_heads_than_ranks(tmp_path, family, kv_heads):
    folder = save_model(tmp_path, family, num_key_value_heads=kv_heads)
    model, prompts = load_model(folder), [random_prompt(9), random_prompt(4)]
    with rank_threads(folder, 4) as runner:
        assert runner.cache.keys.shape[2] == 1  # replicated, not divided
        assert run(make_engine(runner=runner), prompts, LONG) == [oracle(model, prompt, LONG) for prompt in prompts]


@pytest.mark.parametrize("size", [2, 4])
def test_b63_the_bias_of_a_sum_is_added_once(tmp_path, size):
    folder = save_model(tmp_path, "Llama", attention_bias=True, mlp_bias=True)
    model, prompt = load_model(folder), random_prompt(9)
    assert model.layers[0].self_attn.o_proj.bias.abs().max() > 0.1
    with rank_threads(folder, size) as runner:
        assert run(make_engine(runner=runner), [prompt], LONG) == [oracle(model, prompt, LONG)]


def test_b63_one_layer_alone():
    whole, x = nn.Linear(8, 3), torch.randn(5, 8)

    def work(rank, store):
        part = nn.Linear(4, 3)
        part.weight, part.bias = nn.Parameter(whole.weight[:, 4 * rank : 4 * rank + 4]), whole.bias
        group: DistributedGroup = group_of(rank, 2, store)
        with torch.inference_mode():
            return RowParallelLinear(part, group)(x[:, 4 * rank : 4 * rank + 4])

    for result in together(2, work):
        torch.testing.assert_close(result, whole(x).detach())
