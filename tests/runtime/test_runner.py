"""The CPU runner: each switch alone and all together give the tokens of the plain runner."""
from __future__ import annotations

import copy

import pytest
import torch

from shared import cpu_ops
from shared.batch import ModelRunner, RaggedAttention
from shared.cpu_attention import HEAD_DIMS, CPUPagedAttention
from shared.cpu_layers import CompiledLayers, FusedLayer, FusedRMSNorm
from shared.cpu_linear import PackedLinear
from shared.cpu_ops import KernelsUnavailable
from shared.kv_cache import KVCache
from shared.model import DecoderLayer, ModelConfig, Transformer
from shared.runner import CPURunner
from tests.runtime.test_cpu_attention import ragged_batch
from tests.runtime.test_ladder import GREEDY, PROMPTS, SAMPLED, real_params, serve
from tests.runtime.tiny import VARIANTS, make_engine

SWITCHES = {
    "attention": dict(prepack=False, fuse=False),
    "prepack": dict(attention_backend=RaggedAttention, fuse=False),
    "fuse": dict(attention_backend=RaggedAttention, prepack=False),
    "all": {},
}


def answers(model, params, switches=None, num_blocks=256, prompts=PROMPTS, dtype=torch.float32, **parts):
    """What an engine says whose cache was full of NaN."""
    cache = KVCache(model.config, num_blocks * 4, dtype)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    if switches is None:
        runner = ModelRunner(model, cache)
    else:
        runner = CPURunner(copy.deepcopy(model), cache, **switches)
        assert set(runner.missing) <= ({"attention"} if model.config.head_dim not in HEAD_DIMS else set())
    return serve(make_engine(model, runner=runner, num_blocks=num_blocks, **parts), prompts, params)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_tokens(variant, switches, family):
    model = family(variant).model
    assert answers(model, GREEDY, SWITCHES[switches]) == answers(model, GREEDY)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_the_same_tokens_sampled_chunked_and_preempted(variant, family):
    model = family(variant).model
    assert answers(model, SAMPLED, {}) == answers(model, SAMPLED)
    cramped = dict(num_blocks=16, max_num_batched_tokens=9)
    assert answers(model, GREEDY, {}, **cramped) == answers(model, GREEDY)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_layer_equals_the_plain_one(variant, dtype, family):
    """In bfloat16 a sum in another order may round otherwise, by one step of 1/128."""
    model = copy.deepcopy(family(variant).model).to(dtype)
    x, (cos, sin) = torch.randn(37, model.config.hidden_size).to(dtype), model.rotary(torch.arange(37))

    def attention(layer, q, k, v):
        return q * 0.5 + k.mean() + v.mean()

    with torch.inference_mode():
        expected = model.layers[1](x, cos, sin, attention)
        got = FusedLayer(model.layers[1])(x.clone(), cos, sin, attention)
    tolerance = dict(atol=2e-5, rtol=2e-5) if dtype == torch.float32 else dict(atol=0.25, rtol=0.03)
    torch.testing.assert_close(got, expected, **tolerance)


def test_each_switch_swaps_what_it_names(family):
    def kinds(**switches):
        model = copy.deepcopy(family("llama").model)
        runner = CPURunner(model, KVCache(model.config, 4, torch.float32), **switches)
        modules = [type(module) for module in model.modules()]
        return runner.attention_backend, PackedLinear in modules, FusedLayer in modules, FusedRMSNorm in modules

    assert kinds(**SWITCHES["attention"]) == (CPUPagedAttention, False, False, False)
    assert kinds(**SWITCHES["prepack"]) == (RaggedAttention, True, False, False)
    assert kinds(**SWITCHES["fuse"]) == (RaggedAttention, False, True, True)
    assert kinds() == (CPUPagedAttention, True, True, True)


def test_the_plain_weights_are_gone(family):
    """Packed weights replace the plain ones: only embedding and norms are still parameters."""
    model = copy.deepcopy(family("llama-tied").model)
    CPURunner(model, KVCache(model.config, 4, torch.float32))
    assert not [name for name, _ in model.named_parameters() if "proj" in name or "lm_head" in name]
    assert model.embed_tokens.weight.numel()


def test_without_a_compiler_the_rest_still_works(family, monkeypatch):
    monkeypatch.setenv("PATH", "")
    cpu_ops.kernels.cache_clear()
    model = copy.deepcopy(family("llama").model)
    runner = CPURunner(model, KVCache(model.config, 256 * 4, torch.float32))
    cpu_ops.kernels.cache_clear()
    assert "compiler" in runner.missing["fuse"] and runner.attention_backend is RaggedAttention
    got = serve(make_engine(runner=runner, num_blocks=256), PROMPTS, GREEDY)
    assert got == answers(family("llama").model, GREEDY)


def test_the_runner_takes_one_call_where_everything_is_compiled():
    try:
        cpu_ops.operation("decoder_layers", torch.bfloat16)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    config = ModelConfig(128, 64, 96, 3, 4, 2, 32, 1e-5, 1e4, None, 512, True)

    def layers_of(dtype=torch.bfloat16, **switches):
        model = Transformer(config).requires_grad_(False).to(dtype)
        return [type(x) for x in CPURunner(model, KVCache(config, 64, dtype), **switches).model.layers]

    assert layers_of() == [CompiledLayers]
    assert layers_of(torch.float32) == [FusedLayer] * 3
    assert layers_of(prepack=False) == [FusedLayer] * 3
    assert layers_of(fuse=False) == [DecoderLayer] * 3
    assert layers_of(attention_backend=RaggedAttention) == [FusedLayer] * 3


def test_gates_that_fill_no_panels_stay_layers():
    torch.manual_seed(0)
    config = ModelConfig(128, 64, 40, 2, 4, 2, 32, 1e-5, 1e4, None, 512, True)  # 40 gates and 40 ups: five panels
    model = Transformer(config).eval().requires_grad_(False).bfloat16()
    runner = CPURunner(copy.deepcopy(model), KVCache(config, 128, torch.bfloat16))
    batch = ragged_batch([(1, 1), (5, 5)], 16)
    with torch.inference_mode():
        got = runner.forward(batch)
        wanted = ModelRunner(model, KVCache(config, 128, torch.bfloat16)).forward(batch)
    assert all(isinstance(layer, FusedLayer) for layer in runner.model.layers)
    torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.05)


def test_the_real_model_says_the_same(real_model):
    tokenizer, model = real_model
    prompts = [tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}]),
               tokenizer.encode("def fibonacci(n):")]
    given = dict(prompts=prompts, params=real_params(2, 16), tokenizer=tokenizer)
    assert answers(model, switches={}, **given) == answers(model, **given)


@pytest.fixture(scope="module")
def real_model():
    from shared.tokenizer import Tokenizer
    from shared.weights import load_model, resolve

    return Tokenizer(resolve("smollm2-135m")), load_model()
