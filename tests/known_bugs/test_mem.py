"""Known faults of inference engines: memory, several engines in one process, versions."""

from __future__ import annotations

import ast
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from shared.llm import LLM
from tests.known_bugs.helpers import cached_engine, greedy, oracle, random_prompt, tiny
from tests.runtime.tiny import save_hf, save_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tokenizer(save_hf("llama", tmp_path_factory.mktemp("llm"))))


def build(folder: str, **options) -> LLM:
    return LLM(folder, max_model_len=64, num_gpu_blocks_override=32, block_size=4, **options)


def left_alone(llm: LLM) -> None:
    pass


def after_an_answer(llm: LLM) -> None:
    llm.generate(["a", "b"], greedy(4))


def in_the_middle(llm: LLM) -> None:
    llm.engine.add_request("a", "some prompt", greedy(30))
    llm.engine.step()


def with_an_open_stream(llm: LLM) -> None:
    next(llm.stream("a", greedy(30)))


def after_an_error(llm: LLM) -> None:
    with pytest.raises(ValueError):
        llm.generate([[10**9]], greedy(4))


STATES = [left_alone, after_an_answer, in_the_middle, with_an_open_stream, after_an_error]


@pytest.mark.parametrize("use", STATES)
@pytest.mark.parametrize("what", ["model", "cache", "weights"])
def test_b73_an_engine_that_is_deleted_leaves_nothing(folder, use, what):
    llm = build(folder)
    use(llm)
    parts = dict(model=llm.model, cache=llm.engine.runner.cache, weights=llm.model.embed_tokens.weight)
    ref = weakref.ref(parts.pop(what))
    parts.clear()
    second = build(folder)  # another one may be built beside it
    del llm
    gc.collect()
    assert ref() is None
    assert len(second.generate("a", greedy(4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_b73_no_thread_and_no_tensor_stays(folder):
    import threading

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    build(folder).generate("a", greedy(4))  # whatever is made once is made now
    before, threads = tensors(), threading.active_count()
    for _ in range(3):
        build(folder).generate("a", greedy(4))
    assert tensors() <= before and threading.active_count() == threads


# Two engines in one process


def test_two_engines_take_turns_without_influence():
    """Different models, sizes, tokens and options, one step each in turn."""
    models = tiny(), tiny(qk_norm=True, seed=5)
    engines = (
        cached_engine(models[0], num_blocks=14, max_num_batched_tokens=8, seed=1),
        cached_engine(models[1], num_blocks=20, block_size=3, max_num_batched_tokens=16, seed=1),
    )
    params = greedy(14, ignore_eos=True, repetition_penalty=1.2)
    for engine in engines:
        for i in range(4):  # the same prompts and names in both
            engine.add_request(str(i), random_prompt(9, i), params)
    done: tuple[dict, dict] = {}, {}
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, finished in zip(engines, done):
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            engine.scheduler.check()
    for model, finished in zip(models, done):
        for i in range(4):
            expected = oracle(model, random_prompt(9, i), params)
            assert finished[str(i)].outputs[0].token_ids == expected
    assert done[0]["0"].outputs[0].token_ids != done[1]["0"].outputs[0].token_ids


def test_an_engine_that_fails_or_ends_does_not_touch_the_other():
    first, second = cached_engine(tiny()), cached_engine(tiny())
    for engine in (first, second):
        engine.add_request("r", random_prompt(9), greedy(10, ignore_eos=True))
        engine.step()
    first.runner.execute = None  # its next step fails
    assert first.step()[0].outputs[0].finish_reason == "error"
    del first
    gc.collect()
    outputs = [output for _ in range(9) for output in second.step()]
    assert outputs[-1].outputs[0].token_ids == oracle(tiny(), random_prompt(9), greedy(10, ignore_eos=True))


def test_two_engines_of_one_model_share_only_the_model(folder):
    first, second = build(folder, seed=3), build(folder, seed=3)
    for part in ("engine", "model", "tokenizer"):
        assert getattr(first, part) is not getattr(second, part)
    assert first.engine.runner.cache.keys.data_ptr() != second.engine.runner.cache.keys.data_ptr()
    assert first.engine.scheduler.allocator is not second.engine.scheduler.allocator
    answers = [llm.generate(["a", "b"])[1].outputs[0].token_ids for llm in (first, second)]
    assert answers[0] == answers[1]  # the same seeds were drawn, for the two draw apart


# B75: declared versions and what the code uses. The lowest versions are not installed here; this is what
# can be told from the text. That every import is declared is tested in tests/repository.

SINCE = {  # what shared/ uses of torch that is younger than torch 2.0, and the version that brought it
    "enable_gqa": "2.5",  # of scaled_dot_product_attention
    "itemsize": "2.1",  # of a dtype
}


def floors() -> dict[str, tuple[int, ...]]:
    text = (ROOT / "pyproject.toml").read_text()
    return {name: version_of(low) for name, low in re.findall(r'"([a-z0-9-]+)>=([\d.]+)', text)}


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def runtime_files() -> list[Path]:
    return sorted((ROOT / "shared").glob("*.py"))


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_b75_the_runtime_needs_no_newer_torch_than_declared():
    text = "\n".join(file.read_text() for file in runtime_files())
    floor = floors()["torch"]
    for name, since in SINCE.items():
        assert name in text, f"{name} is no longer used: take it off the list"
        assert version_of(since) <= floor


def test_b75_keywords_given_to_torch_are_ones_it_has():
    """enable_gqa is the youngest; a torch without it would fail here, not in the middle of a model."""
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert out.shape == q.shape and torch.bfloat16.itemsize == 2


def test_b75_old_and_new_keys_of_a_config_are_both_read():
    """transformers 4 wrote torch_dtype and rope_scaling, transformers 5 writes dtype and rope_parameters."""
    text = (ROOT / "shared" / "model.py").read_text()
    assert "transformers" not in imported(ROOT / "shared" / "model.py")
    assert "rope_parameters" in text and "rope_scaling" in text and "torch_dtype" not in text
