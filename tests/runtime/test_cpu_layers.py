"""Linear layers over panels, attention, all layers in one call: on this CPU, and built as for one that has less."""
from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shared import cpu_ops
from shared.cpu_attention import CPUPagedAttention
from shared.cpu_layers import CompiledLayers
from shared.cpu_linear import PackedLinear, PanelLinear, packed, prepack_linears
from shared.cpu_ops import KernelsUnavailable
from shared.kv_cache import KVCache
from shared.model import ModelConfig, Transformer
from shared.runner import fuse_layers, no_prepacking
from tests.runtime.test_cpu_attention import BATCHES as ATTENTION_BATCHES
from tests.runtime.test_cpu_attention import compare, filled_cache, ragged_batch

ROWS = (1, 2, 9, 15, 16, 17, 31, 32, 33, 70, 300)
SIZES = ((32, 16), (64, 48), (576, 960), (96, 16))  # inputs, outputs
FLAGS = {  # of COMPILE: GCC's and clang's words for a CPU without its newest instructions
    "this CPU": ("-march=native",),
    "no tiles": ("-march=native", "-mno-amx-bf16", "-mno-amx-tile"),
    "AVX2 alone": ("-march=x86-64-v3",),
}


@pytest.fixture(scope="module", params=FLAGS)
def kernels(request, tmp_path_factory):
    """The operations, built for this CPU or as for a lesser one."""
    patch = pytest.MonkeyPatch()
    if request.param != "this CPU":
        if not any("avx512_bf16" in feature for feature in cpu_features()):
            pytest.skip("this CPU has no newer instructions to leave out")
        patch.setenv("ZERO_TO_ENGINE_HOME", str(tmp_path_factory.mktemp("kernels")))
        patch.setattr(cpu_ops, "COMPILE", ("-O1", "-std=c++17", "-fPIC"))
        patch.setattr(cpu_ops, "ATTEMPTS", (((*FLAGS[request.param], "-fopenmp"), ()),))
    cpu_ops.kernels.cache_clear()
    yield request.param
    patch.undo()
    cpu_ops.kernels.cache_clear()


def cpu_features() -> list[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split() for line in lines if line.startswith("flags")), [])
    except OSError:
        return []


def panels(linear: nn.Linear) -> PanelLinear:
    try:
        return PanelLinear(linear)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def test_what_has_no_panels_is_packed_by_onednn():
    for linear in (nn.Linear(48, 16), nn.Linear(32, 24)):
        with pytest.raises(KernelsUnavailable):
            PanelLinear(linear.bfloat16())
    with pytest.raises(KernelsUnavailable, match="float32"):
        PanelLinear(nn.Linear(32, 16))
    if no_prepacking(torch.float32) is None:
        assert isinstance(packed(nn.Linear(32, 16).requires_grad_(False)), PackedLinear)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs, outputs", SIZES)
def test_panels_give_the_products(kernels, inputs, outputs, bias):
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias).bfloat16().requires_grad_(False)
    own, exact = panels(linear), copy.deepcopy(linear).double()
    for rows in ROWS:
        x = torch.randn(rows, inputs).bfloat16()
        wanted = exact(x.double())
        error = (own(x).double() - wanted).abs() - 2**-8 * wanted.abs()  # half a step of bfloat16, and the sum's own
        assert error.max() < 1e-4, (rows, error.max())


def test_rows_beyond_the_last_are_neither_read_nor_written(kernels):
    linear = nn.Linear(64, 32, bias=False).bfloat16().requires_grad_(False)
    own, x = panels(linear), torch.full((40, 64), torch.nan).bfloat16()
    x[:19] = 1
    y = torch.full((40, 32), 7.0).bfloat16()
    own.run(x.data_ptr(), own.weight.data_ptr(), None, y.data_ptr(), 19, 64, 32)
    assert y[:19].isfinite().all() and (y[19:] == 7).all()


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("heads, kv_heads", [(9, 3), (4, 4), (14, 2)])
def test_attention_in_bfloat16_equals_the_plain_back_end(kernels, heads, kv_heads, head_dim):
    for name in ("mixed", "decodes"):
        compare(ragged_batch(ATTENTION_BATCHES[name], 16), torch.bfloat16, heads, kv_heads, head_dim)


CONFIGS = {
    "llama": {},
    "qwen2.5": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "biases everywhere": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
}
BATCHES = {
    "decodes": [(1, 1), (1, 40), (1, 200)],
    "mixed": [(33, 33), (1, 70), (7, 90)],
    "many": [(1, 20 + i) for i in range(40)],
}


def random_model(**changes) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(128, 64, 96, 3, 4, 2, 32, 1e-5, 1e4, None, 512, True, **changes)
    model = Transformer(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.bfloat16()


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("config", CONFIGS)
def test_all_layers_in_one_call_equal_one_after_another(kernels, config, name):
    """The same loops in the same order: not one bit may differ."""
    model, batch = random_model(**CONFIGS[config]), ragged_batch(BATCHES[name], 16)
    fuse_layers(model)
    prepack_linears(model)
    if not all(isinstance(layer.qkv_proj, PanelLinear) for layer in model.layers):
        pytest.skip("this CPU multiplies no bfloat16")
    x = torch.randn(len(batch.input_ids), 64).bfloat16()
    cos, sin = model.rotary(batch.positions)
    cache = filled_cache(batch, torch.bfloat16, 2, 32)
    caches = [KVCache(SimpleNamespace(num_hidden_layers=3, num_key_value_heads=2, head_dim=32), cache.num_slots,
                      torch.bfloat16) for _ in range(2)]
    for own in caches:
        for stored, filled in ((own.keys, cache.keys), (own.values, cache.values)):
            stored.copy_(filled[[0, 1, 0]])
    expected = x.clone()
    for layer in model.layers:
        expected = layer(expected, cos, sin, CPUPagedAttention(caches[0], batch))
    got = CompiledLayers(model.layers)(x.clone(), cos, sin, CPUPagedAttention(caches[1], batch))
    assert torch.equal(got, expected)
    assert torch.equal(caches[0].keys.nan_to_num(9.0), caches[1].keys.nan_to_num(9.0))
