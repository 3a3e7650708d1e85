"""What must be right on a GPU. A check returns what it saw, raises AssertionError, or Skipped with the reason."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shared.attention import TritonAttention, obstacle
from tests.gpu.setting import (
    TINY,
    Setting,
    Skipped,
    Stack,
    answer,
    build_engine,
    drain,
    greedy,
    random_model,
    random_prompts,
)
from tests.runtime.paged import Paged, Shape, assert_close, draw_shape, tolerance

EAGER = Stack("torch_sdpa")
STACKS = [Stack("triton"), Stack("triton", fused=True), Stack("triton", graphs=True), Stack("triton", True, True)]


def attention_kernels(setting: Setting) -> dict[str, Any]:
    """Store, decode and prefill against float64, in each data type, over a poisoned pool."""
    types = [torch.float32] if setting.dry else [torch.float32, torch.float16, torch.bfloat16]
    worst: dict[str, float] = {}
    for dtype in types:
        for seed in range(1 if setting.dry else 6):
            draw = random.Random(seed)
            shape = draw_shape(draw, decoding=3, prompts=2)
            heads = dict(group=2, head_dim=128) if seed % 2 else dict(group=3, head_dim=64)
            paged = Paged(Shape(**{**vars(shape), **heads, "dtype": dtype, "device": setting.device}), seed)
            attention = TritonAttention(paged.cache, paged.batch())
            out, expected = attention(0, paged.q, paged.new(paged.k), paged.new(paged.v)), paged.expected()
            assert_close(out, expected, dtype)
            error = (out.double() - expected).abs().max().item()
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
    return {"largest error": worst, "allowed": {str(dtype): tolerance(dtype) for dtype in types}}


def small_kernels(setting: Setting) -> dict[str, Any]:
    """Norm, rotary positions and SwiGLU against the modules of model.py, in each data type."""
    from shared import kernels
    from shared.model import RMSNorm, RotaryEmbedding, rotate

    types = [torch.float32] if setting.dry else [torch.float32, torch.float16, torch.bfloat16]
    for dtype in types:
        ulp = torch.finfo(dtype).eps * 8
        draw = torch.Generator(setting.device).manual_seed(0)

        def normal(*sizes: int, draw=draw, dtype=dtype) -> torch.Tensor:
            return torch.randn(*sizes, generator=draw, device=setting.device).to(dtype)

        norm = RMSNorm(96, 1e-6).to(setting.device, dtype).requires_grad_(False)
        norm.weight.copy_(normal(96))
        x, added = normal(7, 96), normal(7, 96)
        summed, normed = kernels.add_rms_norm(x, added, norm.weight, norm.eps)
        torch.testing.assert_close(summed, x + added, rtol=0, atol=0)
        torch.testing.assert_close(normed, norm(x + added), rtol=ulp, atol=ulp)
        torch.testing.assert_close(kernels.rms_norm(x, norm.weight, norm.eps), norm(x), rtol=ulp, atol=ulp)
        expected = torch.nn.functional.silu(x) * added
        torch.testing.assert_close(kernels.silu_and_mul(x, added), expected, rtol=ulp, atol=ulp)
        positions = torch.tensor([0, 5, 1857, 40000], device=setting.device)
        cos, sin = RotaryEmbedding(replace(TINY, head_dim=64))(positions)
        q, k = normal(4, 3, 64), normal(4, 1, 64)
        right = rotate(q, cos, sin), rotate(k, cos, sin)
        kernels.rotate_in_place(q, k, cos, sin)
        for turned, wanted in zip((q, k), right):
            torch.testing.assert_close(turned, wanted, rtol=ulp, atol=ulp)
    return {"types": [str(dtype) for dtype in types]}


def ladder(setting: Setting) -> dict[str, Any]:
    """Token for token in float32: transformers' generate = eager SDPA = each stack of ours, prompts in chunks."""
    import transformers

    config = setting.config
    torch.manual_seed(0)
    hf_config = transformers.Qwen3Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta), rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings, initializer_range=0.02 if not setting.dry else 0.2,
    )  # fmt: skip
    with torch.device(setting.device):
        hf = transformers.Qwen3ForCausalLM(hf_config).eval()
    model = random_model(setting, torch.float32)
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in hf.state_dict().items()})

    lengths, max_tokens = ([1, 5], 3) if setting.dry else ([1, 17, 64, 130], 24)
    prompts = random_prompts(lengths, config.vocab_size)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=setting.device)
        out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
                          min_new_tokens=max_tokens, pad_token_id=0, eos_token_id=None)  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    del hf
    for stack in [EAGER, *(STACKS[-1:] if setting.dry else STACKS)]:
        found = answer(build_engine(setting, model, stack), prompts, [max_tokens] * len(prompts))
        assert found == expected, f"{stack} differs from transformers: {found} is not {expected}"
    return {"prompts": lengths, "tokens each": max_tokens, "stacks": [str(stack) for stack in [EAGER, *STACKS]]}


def graphs_reuse_blocks(setting: Setting) -> dict[str, Any]:
    """B57, B58, B59: rows end, others take their blocks, five rows run padded to eight, one grows to the very end.

    The same schedule without graphs gives the same tokens, and leaves the same in every slot of the cache.
    """
    config = TINY if setting.dry else replace(TINY, vocab_size=512, num_hidden_layers=4, head_dim=64)
    model, caches, answers = random_model(setting, torch.float32, config), [], []
    first, later = ([3, 3, 2, 6, 6, 200, 2, 2], [3, 3]) if setting.dry else ([4, 4, 4, 30, 30, 200, 3, 3], [25, 25])
    longest = 16 if setting.dry else 64
    for graphs in (False, True):
        engine = build_engine(setting, model, Stack("triton", graphs=graphs), max_model_len=longest,
                              num_blocks=44, block_size=4)  # fmt: skip
        for kept in (engine.runner.cache.keys, engine.runner.cache.values):
            kept.fill_(7.5)
        for i, length in enumerate(first):
            engine.add_request(str(i), random_prompts([6], config.vocab_size, i)[0], greedy(length))
        for _ in range(5):
            engine.step()
        for i, length in enumerate(later):
            engine.add_request(f"later {i}", random_prompts([9], config.vocab_size, 50 + i)[0], greedy(length))
        answers.append(drain(engine))
        caches.append((engine.runner.cache.keys, engine.runner.cache.values))
    assert answers[0] == answers[1]
    assert len(answers[1]["5"]) == longest - 6, "not stopped at max_model_len"
    for eager, replayed in zip(*caches):
        torch.testing.assert_close(replayed, eager, rtol=1e-3, atol=1e-3)
    return {"requests": len(first) + len(later), "longest": longest, "cache": "the same in every slot"}


def default_model(setting: Setting) -> dict[str, Any]:
    """The real model through LLM with every default of this device answers as it does on a CPU."""
    from shared import LLM

    if setting.folder is None:
        raise Skipped("no folder of the default model: --model FOLDER")
    setting.need_cuda()
    llm = LLM(setting.folder)
    text = llm.chat([{"role": "user", "content": "What is the capital of France?"}])[0].outputs[0].text
    assert text.strip() == "The capital of France is Paris.", text
    return {"answer": text, "runner": type(llm.engine.runner).__name__}


def memory_comes_back(setting: Setting) -> dict[str, Any]:
    """B73: after del, the device holds what it held before, within 50 MB, graphs included; and another engine fits."""
    setting.need_cuda()

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def use() -> weakref.ref:
        model = random_model(setting, torch.bfloat16)
        engine = build_engine(setting, model, STACKS[-1], num_blocks=4096)
        answer(engine, random_prompts([20, 30], 1000), [8, 8])
        return weakref.ref(model)

    use()  # whatever a process makes once is made now: kernels, workspaces
    before, seen = held(), []
    for _ in range(2):
        gone = use()
        seen.append(held() - before)
        assert gone() is None, "the model is still there"
        assert abs(seen[-1]) <= 50e6, f"{seen[-1] / 1e6:.0f} MB stayed"
    return {"bytes more than before": seen}


def engines_share_a_gpu(setting: Setting) -> dict[str, Any]:
    """B74: two engines of gpu_memory_utilization=0.3, one in a process of its own, get caches of one size."""
    setting.need_cuda()
    from shared.engine_args import EngineArgs
    from shared.engine_args import build_engine as from_args
    from tests.runtime.tiny import save_hf, save_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tokenizer(save_hf("llama", Path(folder))))
        options = dict(device="cuda", dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=256, block_size=1024)
        counts = []
        first = from_args(EngineArgs(path, **options))
        counts.append(first.scheduler.allocator.num_blocks)
        program = (
            "from shared.engine_args import EngineArgs, build_engine\n"
            f"print(build_engine(EngineArgs({path!r}, **{options!r})).scheduler.allocator.num_blocks)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-1500:]
        counts.append(int(done.stdout.split()[-1]))
        second = from_args(EngineArgs(path, **options))  # beside the first
        counts.append(second.scheduler.allocator.num_blocks)
    assert max(counts) <= 1.05 * min(counts), counts
    return {"blocks": dict(zip(("alone", "in another process beside it", "in the same process beside it"), counts))}


def flash_attention(setting: Setting) -> dict[str, Any]:
    """flash-attn, if it is installed: float16 attention against float64, mixed and decoding batches."""
    from shared.attention import FlashAttention

    reason = obstacle("flash_attn", torch.device(setting.device), torch.float16, 128, 256)
    if reason:
        raise Skipped(reason)
    for lengths in ([(300, 1), (1, 1), (256, 1)], [(300, 1), (40, 40), (290, 7)]):
        paged = Paged(Shape(lengths, head_dim=128, block_size=256, dtype=torch.float16, device=setting.device), 1)
        for x in (paged.cache.keys, paged.cache.values):
            x.nan_to_num_(0.0)  # the library may read a whole page before it masks
        attention = FlashAttention(paged.cache, paged.batch())
        assert_close(attention(0, paged.q, paged.new(paged.k), paged.new(paged.v)), paged.expected(), torch.float16)
    return {"batches": 2}


CHECKS = [attention_kernels, small_kernels, ladder, graphs_reuse_blocks, flash_attention, default_model,
          memory_comes_back, engines_share_a_gpu]  # fmt: skip
