"""Tensor parallelism: token for token what one process gives, and what happens when a rank fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import pytest
import torch

from shared import LLM, SamplingParams
from shared.errors import EngineError, InvalidRequestError, ModelLoadError
from shared.kv_cache import KVCache, kv_bytes_per_token
from shared.model import CausalAttention, ModelConfig
from shared.parallel import Shard, connect, load_shard, split, split_heads
from shared.weights import load_model, read_config
from shared.workers import launch, plain_runner
from tests.runtime.ranks import ROOT, group_of, rank_processes, save_model, together
from tests.runtime.test_ladder import GREEDY, PROMPTS, RUNGS, SAMPLED, naive
from tests.runtime.tiny import make_engine, run, save_tokenizer

NUM_SLOTS = 512
ONE_KV_HEAD, ODD = dict(num_key_value_heads=1), dict(vocab_size=131, intermediate_size=97, attention_bias=True)
MODELS = {  # name: family, what differs from tiny.SHAPE
    "llama": ("Llama", {}),
    "llama, one key-value head": ("Llama", ONE_KV_HEAD),
    "llama, biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, nothing divisible": ("Llama", {**ODD, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2.5, tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
}
GREEDY_FEW, FEW = GREEDY[:3], PROMPTS[:3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(root / name.replace(' ', '-'), MODELS[name][0], **MODELS[name][1]) for name in MODELS}


def config_of(**changes) -> ModelConfig:
    shape = dict(vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, architectures=["LlamaForCausalLM"], head_dim=16)  # fmt: skip
    return ModelConfig.from_dict({**shape, **changes})


# Who holds what


@pytest.mark.parametrize("total", [4, 5, 9, 131])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_disjoint_complete_and_even(total, size):
    parts = [split("vocab_size", total, rank, size) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1 and sorted(parts, key=len, reverse=True) == parts


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [
    (4, 2, 2), (4, 2, 4), (4, 1, 4), (4, 1, 3), (9, 3, 2), (9, 3, 3), (9, 3, 6), (9, 3, 9), (32, 8, 3), (14, 2, 4),
])  # fmt: skip
def test_every_query_head_meets_the_key_value_head_it_reads(heads, kv_heads, size):
    config, group = config_of(num_attention_heads=heads, num_key_value_heads=kv_heads), heads // kv_heads
    seen = []
    for rank in range(size):
        own, own_kv = split_heads(config, rank, size)
        seen += own
        local = len(own) // len(own_kv)  # how attention groups them on this rank
        assert len(own) % len(own_kv) == 0
        assert [own_kv[i // local] for i in range(len(own))] == [head // group for head in own]
    assert seen == list(range(heads))


@pytest.mark.parametrize(("changes", "size", "limit"), [
    (dict(num_key_value_heads=3, num_attention_heads=9), 4, "num_key_value_heads=3, or a multiple"),
    (dict(num_key_value_heads=2), 8, "num_attention_heads=4"),
    (dict(num_key_value_heads=2), 3, "num_key_value_heads=2"),
    (dict(intermediate_size=3), 4, "at most intermediate_size=3"),
    (dict(vocab_size=3), 4, "at most vocab_size=3"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(changes, size, limit):
    with pytest.raises(InvalidRequestError, match=limit) as refused:
        Shard.of(config_of(**changes), 0, size)
    assert (refused.value.field, refused.value.value) == ("tensor_parallel_size", size)


def test_a_model_that_cannot_be_cut_is_refused_before_any_process_starts(folders):
    with pytest.raises(InvalidRequestError, match="num_key_value_heads=2"):
        launch(folders["llama"], 3, num_slots=NUM_SLOTS)


def test_a_rank_reads_its_slices_and_nothing_else(folders):
    """All weights are read once, norms and biases of sums on every rank; a rank's cache holds its own heads."""
    path = folders["llama, nothing divisible"]
    whole = load_model(path)
    everywhere = sum(p.numel() for name, p in whole.named_parameters() if "norm" in name or "o_proj.bias" in name)
    shards = [load_shard(path, rank, 4) for rank in range(4)]
    sizes = [sum(p.numel() for p in model.parameters()) for model, _ in shards]
    assert sum(sizes) == sum(p.numel() for p in whole.parameters()) + 3 * everywhere
    for model, shard in shards:
        assert model.lm_head.weight is model.embed_tokens.weight
        rows = slice(shard.vocab.start, shard.vocab.stop)
        assert torch.equal(model.embed_tokens.weight, whole.embed_tokens.weight[rows])
        columns = slice(16 * shard.heads.start, 16 * shard.heads.stop)
        assert torch.equal(model.layers[1].self_attn.o_proj.weight, whole.layers[1].self_attn.o_proj.weight[:, columns])
        assert KVCache(model.config, 1, torch.float32).keys.shape[2] == 1
        assert kv_bytes_per_token(model.config, torch.float32) * 4 == kv_bytes_per_token(whole.config, torch.float32)


def test_a_tensor_of_the_wrong_size_is_found_though_only_a_part_is_read(folders):
    full = ModelConfig.from_dict(read_config(folders["llama"]))
    with pytest.raises(ModelLoadError, match=r"q_proj.weight has shape \[80, 48\]; dimension 0 must be 64"):
        Shard.of(full, 0, 2).part("model.layers.0.self_attn.q_proj.weight", (80, 48))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_of_all_ranks_are_those_of_the_whole_model(folders, name, size):
    ids, positions = torch.tensor(PROMPTS[2]), torch.arange(len(PROMPTS[2]))

    @torch.inference_mode()
    def work(rank, store):
        model, shard = load_shard(folders[name], rank, size)
        connect(model, shard, group_of(rank, size, store))
        return model.logits(model(ids, positions, CausalAttention()))

    with torch.inference_mode():
        whole = load_model(folders[name])
        expected = whole.logits(whole(ids, positions, CausalAttention()))
    for logits in together(size, work):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_too(folders, dtype):
    def work(rank, store):
        return group_of(rank, 2, store).all_reduce(torch.full((3,), rank + 1, dtype=dtype))

    assert all(total.tolist() == [3, 3, 3] for total in together(2, work))


# Processes


@pytest.fixture(scope="module")
def expected(folders):
    return {name: [naive(load_model(folders[name]), PROMPTS, params) for params in (GREEDY, SAMPLED)]
            for name in MODELS}  # fmt: skip


def check_ladder(runner, folder, expected) -> None:
    """Sampled and greedy requests together, with preemption and a prefix cache."""
    mixed = [SAMPLED[i] if i % 2 else GREEDY[i] for i in range(len(PROMPTS))]
    answers = [expected[i % 2][i] for i in range(len(PROMPTS))]
    assert RUNGS["prefix-cached, preempted"](load_model(folder), PROMPTS, mixed, runner=runner) == answers


@pytest.mark.parametrize(("size", "names"), [(2, list(MODELS)), (4, ["llama, one key-value head", *list(MODELS)[4:]])])
def test_processes_give_the_tokens_of_one(folders, expected, size, names):
    """As torchrun starts them; the same processes serve one engine after another."""
    with rank_processes(size, len(names)) as processes:
        for name in names:
            runner = launch(folders[name], size, num_slots=NUM_SLOTS, timeout=60.0)
            check_ladder(runner, folders[name], expected[name])
            runner.shutdown()
        assert [process.wait(20) for process in processes] == [0] * (size - 1)


def test_under_torchrun_the_size_is_given(folders, monkeypatch):
    for key, value in {"WORLD_SIZE": "3", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InvalidRequestError, match="torchrun started, 3"):
        launch(folders["llama"], 2, num_slots=NUM_SLOTS)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(EngineError, match="rank 1.*serve_worker"):
        launch(folders["llama"], 3, num_slots=NUM_SLOTS)


def pids(runner) -> list[int]:
    return [process.pid for process in runner.ranks.workers.processes.values()]


def is_alive(pid: int) -> bool:
    """Whether a process exists; a zombie does too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_engines_at_once_and_the_death_of_one(folders, expected):
    threads = torch.get_num_threads()
    first = launch(folders["llama"], 2, num_slots=NUM_SLOTS)
    second = launch(folders["qwen3"], 2, num_slots=NUM_SLOTS)
    assert first.cache.num_slots == NUM_SLOTS and first.model.config.num_attention_heads == 2
    parts = dict(num_blocks=100, max_num_batched_tokens=16)
    engines = {"llama": make_engine(runner=first, **parts), "qwen3": make_engine(runner=second, **parts)}
    done = {name: {} for name in engines}
    for engine in engines.values():
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY[i])
    while any(engine.has_unfinished_requests() for engine in engines.values()):
        for name, engine in engines.items():  # step by step in turn
            done[name] |= {output.request_id: output for output in engine.step() if output.finished}
    for name, outputs in done.items():
        assert [outputs[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))] == expected[name][0]

    victims, others = pids(first), pids(second)
    os.kill(victims[0], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 ended with code -9"):
        first.execute(scheduled(), 4)
    assert time.monotonic() - started < 5 and not is_alive(victims[0])
    with pytest.raises(EngineError, match="rank 1 ended with code -9"):  # and it stays so
        first.execute(scheduled(), 4)
    engine = make_engine(runner=first, max_num_seqs=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY[i])
    outputs = engine.step()  # all end at once, those that wait as well
    assert len(outputs) == len(PROMPTS) and not engine.has_unfinished_requests()
    assert all("rank 1 ended" in output.outputs[0].error for output in outputs)

    assert run(make_engine(runner=second), FEW, GREEDY_FEW) == expected["qwen3"][0][:3]  # the other one goes on
    watched = weakref.ref(second.model)
    del second, engines, engine
    gc.collect()
    assert watched() is None and not any(map(is_alive, others))  # nobody held it, so its process ended
    assert torch.get_num_threads() == threads


def scheduled():
    from shared.request import Request
    from shared.scheduler import ScheduledRequest

    request = Request("r", [5, 6, 7], SamplingParams(), 1, block_table=[0])
    return [ScheduledRequest.of(request, 3)]


def test_a_rank_may_idle_beyond_the_timeout_but_not_stand_still_in_a_step(folders):
    runner = launch(folders["llama"], 2, num_slots=NUM_SLOTS, timeout=4.0)
    pid = pids(runner)[0]
    runner.execute(scheduled(), 4)
    time.sleep(5.0)
    runner.execute(scheduled(), 4)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(EngineError, match="tensor parallelism: rank 0: RuntimeError"):
        for _ in range(3):
            runner.execute(scheduled(), 4)
    assert time.monotonic() - started < 12 and not is_alive(pid)


def runner_that_fails_on_rank_1(model, agree, num_slots):
    if not model.embed_tokens.vocab.start:
        return plain_runner(model, agree, num_slots)
    raise MemoryError("no room on this rank")


def test_what_a_rank_says_before_it_fails_is_told(folders):
    started = time.monotonic()
    with pytest.raises(EngineError, match="tensor parallelism: rank 1: MemoryError: no room on this rank"):
        launch(folders["llama"], 2, make_runner=runner_that_fails_on_rank_1, num_slots=NUM_SLOTS)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("make_runner", [lambda model, agree: None, type("Local", (), {"__module__": "__main__"})])
def test_a_runner_that_other_processes_cannot_find_is_refused(folders, make_runner):
    with pytest.raises(InvalidRequestError, match="make_runner: must be at the top of a module"):
        launch(folders["llama"], 2, make_runner=make_runner)


def test_llm_on_two_ranks_in_a_script_without_a_guard(served, tmp_path):
    """No `if __name__ == "__main__"`, no shutdown: the answer is right and no process stays."""
    folder, expected = served
    output = program(tmp_path, f"""
        from shared import LLM, SamplingParams
        llm = LLM({str(folder)!r}, tensor_parallel_size=2)
        print(llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
        print(*[process.pid for process in llm.engine.runner.ranks.workers.processes.values()])
    """)
    assert output[0] == expected and not is_alive(int(output[1]))


def test_llm_under_torchrun(served, tmp_path):
    folder, expected = served
    output = program(tmp_path, f"""
        import os
        from shared import LLM, SamplingParams
        from shared.workers import serve_worker
        if os.environ["RANK"] == "0":
            with LLM({str(folder)!r}, tensor_parallel_size=int(os.environ["WORLD_SIZE"])) as llm:
                print(llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
        else:
            serve_worker()
    """, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")  # fmt: skip
    assert output == [expected]


TEXT = "Split me"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> tuple[Path, str]:
    """A model with a tokenizer, and what it says in one process."""
    folder = save_tokenizer(save_model(tmp_path_factory.mktemp("served"), "Llama"))
    llm = LLM(folder, enforce_eager=True)
    return folder, llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text


def program(folder: Path, text: str, *arguments: str) -> list[str]:
    """The lines that a program prints in its own process."""
    script = folder / "program.py"
    script.write_text(f"TEXT = {TEXT!r}\n{textwrap.dedent(text)}")
    ran = subprocess.run([sys.executable, *arguments, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)},
                         cwd=folder, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_size_that_is_no_count_is_refused(served, value):
    with pytest.raises(InvalidRequestError, match="tensor_parallel_size"):
        LLM(served[0], tensor_parallel_size=value)


def test_a_back_end_of_this_program_alone_is_refused(served):
    class Mine:
        """Other processes can't import it."""

    with pytest.raises(InvalidRequestError, match="attention_backend: must be at the top of a module"):
        LLM(served[0], tensor_parallel_size=2, attention_backend=Mine)
