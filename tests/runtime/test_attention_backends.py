"""Attention back ends: the choice among them, Triton's and flash-attn's against float64, and the ladder on them."""

from __future__ import annotations

import copy
import random
import sys
import types

import pytest
import torch

from shared import attention
from shared.attention import FlashAttention, TritonAttention, select_backend
from shared.batch import ModelRunner, RaggedAttention
from shared.block_manager import BlockManager
from shared.errors import InvalidRequestError
from shared.kv_cache import KVCache
from shared.model import SwiGLU
from shared.prefix_cache import PrefixCachingBlockManager
from tests.runtime.flash_stand_in import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.runtime.paged import Paged, Shape, assert_close, draw_shape
from tests.runtime.test_ladder import GREEDY, PROMPTS, num_chunks, num_hits, num_preempted, serve
from tests.runtime.tiny import make_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# The choice


@pytest.fixture
def a_gpu(monkeypatch):
    """As on a machine with a GPU of compute capability 9.0, Triton and flash-attn."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name)


def refusal(*arguments, **options) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        select_backend(*arguments, **options)
    assert refused.value.field == "attention_backend" and refused.value.value == arguments[0]
    return str(refused.value)


def test_auto_takes_the_fastest_that_is_there(a_gpu, monkeypatch):
    assert select_backend("auto", "cuda", torch.bfloat16, 64) is TritonAttention
    assert select_backend("auto", CUDA, torch.float32, 128) is TritonAttention
    assert select_backend("auto", CUDA, torch.bfloat16, 8) is RaggedAttention  # too small a head for the kernels
    assert select_backend("auto", "mps", torch.float32, 64) is RaggedAttention
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert select_backend("auto", CUDA, torch.float16, 64) is RaggedAttention
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    assert select_backend("auto", CUDA, torch.bfloat16, 64) is RaggedAttention


def test_auto_on_a_cpu_is_the_compiled_back_end_or_the_plain_one(monkeypatch):
    """Never interpreted kernels. cpu_paged needs a compiler and a type that it knows."""
    from shared import cpu_ops

    assert select_backend("auto", CPU, torch.float16, 64) is RaggedAttention
    assert "the compiled operations have" in refusal("cpu_paged", CPU, torch.float16, 64)
    assert "not 512" in refusal("cpu_paged", CPU, torch.float32, 512)

    def no_compiler(name, dtype):
        raise cpu_ops.KernelsUnavailable("no C++ compiler found")

    monkeypatch.setattr(cpu_ops, "operation", no_compiler)
    assert select_backend("auto", CPU, torch.float32, 64) is RaggedAttention
    assert "no C++ compiler found" in refusal("cpu_paged", CPU, torch.float32, 64)
    monkeypatch.setattr(cpu_ops, "operation", lambda name, dtype: None)
    assert select_backend("auto", CPU, torch.float32, 64).__name__ == "CPUPagedAttention"
    assert select_backend("cpu_paged", "cpu", torch.bfloat16, 64).__name__ == "CPUPagedAttention"


def test_named_back_ends(a_gpu):
    assert select_backend("torch_sdpa", CPU, torch.float32, 64) is RaggedAttention
    assert select_backend("triton", CUDA, torch.float16, 128) is TritonAttention
    assert select_backend("flash_attn", CUDA, torch.bfloat16, 64, block_size=256) is FlashAttention
    assert select_backend("flash_attn", CUDA, torch.bfloat16, 64, block_size=512) is FlashAttention


def test_a_class_goes_through_unchanged():
    class Mine:
        pass

    assert select_backend(Mine, CPU, torch.float32, 64) is Mine


def test_triton_can_be_interpreted_on_a_cpu(monkeypatch):
    pytest.importorskip("triton")
    assert select_backend("triton", CPU, torch.float32, 64) is TritonAttention
    assert "bfloat16" in refusal("triton", CPU, torch.bfloat16, 64)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "needs a CUDA device, or TRITON_INTERPRET=1" in refusal("triton", CPU, torch.float32, 64)


def test_refusals_say_why(a_gpu, monkeypatch):
    assert "one of ['cpu_paged', 'flash_attn', 'torch_sdpa', 'triton']" in refusal("xformers", CUDA, torch.float16, 64)
    assert "attention_backend" in refusal(None, CUDA, torch.float16, 64)
    assert "runs on cpu, not on cuda" in refusal("cpu_paged", CUDA, torch.float32, 64)
    assert "from 16 to 256, not 8" in refusal("triton", CUDA, torch.float16, 8)
    assert "float16 and bfloat16, not torch.float32" in refusal("flash_attn", CUDA, torch.float32, 64, 256)
    assert "multiple of 256 tokens: set block_size=256, it is 16" in refusal("flash_attn", CUDA, torch.float16, 64)
    assert "that 8 divides, not 36" in refusal("flash_attn", CUDA, torch.float16, 36, 256)
    assert "CUDA device, and the device is cpu" in refusal("flash_attn", CPU, torch.float16, 64, 256)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    for name in ("triton", "flash_attn"):
        assert "needs compute capability 8.0, this GPU has (7, 5)" in refusal(name, CUDA, torch.float16, 64, 256)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in refusal("triton", CUDA, torch.float16, 64)
    assert "flash-attn is not installed" in refusal("flash_attn", CUDA, torch.float16, 64, 256)


# Against float64, on batches of decoding requests, whole prompts and pieces of prompts


@pytest.fixture
def flash_attn(monkeypatch):
    """A module with flash-attn's two functions, which checks what they are given."""
    pytest.importorskip("triton")  # the store
    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func
    stand_in.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)


def attend(backend, paged: Paged) -> torch.Tensor:
    """The whole call of a layer: new keys and values go to the cache, then the tokens attend."""
    return backend(paged.cache, paged.batch())(0, paged.q, paged.new(paged.k), paged.new(paged.v))


@pytest.mark.parametrize("seed", range(200, 208))
def test_triton_equals_float64_on_mixed_batches(seed):
    pytest.importorskip("triton")
    draw = random.Random(seed)
    paged = Paged(draw_shape(draw, decoding=draw.randint(0, 3), prompts=draw.randint(1, 2)), seed)
    assert_close(attend(TritonAttention, paged), paged.expected(), paged.shape.dtype)


@pytest.mark.parametrize("lengths", [[(300, 1), (1, 1), (256, 1)], [(300, 1), (40, 40), (290, 7)], [(257, 257)]])
def test_flash_attn_is_called_as_it_wants(lengths, flash_attn):
    paged = Paged(Shape(lengths, group=3, head_dim=64, block_size=256, dtype=torch.float16), 1)
    assert_close(attend(FlashAttention, paged), paged.expected(), torch.float16)


@pytest.mark.parametrize("seed", range(300, 304))
def test_torch_sdpa_equals_float64_on_mixed_batches(seed):
    """The reference back end is held to the same."""
    shape = draw_shape(random.Random(seed), decoding=2, prompts=2)
    paged = Paged(Shape(**{**vars(shape), "dtype": torch.float32}), seed)
    assert_close(attend(RaggedAttention, paged), paged.expected(), torch.float32)


# The ladder: the same tokens as the reference, on the same prompts


def runner_of(model, num_slots: int, backend) -> ModelRunner:
    cache = KVCache(model.config, num_slots, torch.float32)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    return ModelRunner(model, cache, backend)


@pytest.fixture(scope="module")
def reference(family):
    known = {}

    def of(variant: str) -> list[list[int]]:
        if variant not in known:
            known[variant] = serve(make_engine(family(variant).model, num_blocks=256), PROMPTS, GREEDY)
        return known[variant]

    return of


PLACES = {  # allocator, tokens of a step, rounds; and what must have happened
    "paged": (lambda: BlockManager(96, 4), 64, 1, lambda engine: engine.trace.steps[0].admitted),
    "chunked": (lambda: BlockManager(96, 4), 9, 1, num_chunks),
    "preempted, prefix-cached": (
        lambda: PrefixCachingBlockManager(17, 4), 64, 2, lambda engine: num_preempted(engine) and num_hits(engine)
    ),
}  # fmt: skip


ON = [("qwen3", "paged"), ("llama", "chunked"), ("llama3-rope", "preempted, prefix-cached")]


@pytest.mark.parametrize("variant, place", ON)
def test_triton_on_the_ladder(variant, place, family, reference):
    pytest.importorskip("triton")
    make, budget, rounds, proof = PLACES[place]
    allocator, model = make(), family(variant).model
    runner = runner_of(model, allocator.num_blocks * allocator.block_size, TritonAttention)
    engine = make_engine(model, runner=runner, allocator=allocator, max_num_batched_tokens=budget)
    assert serve(engine, PROMPTS, GREEDY, rounds=rounds) == reference(variant)
    assert proof(engine)


# The fused modules


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3"])
def test_a_fused_model_says_the_same(variant, family):
    """Every module is swapped, every weight keeps its name, and the tokens agree."""
    kernels = pytest.importorskip("shared.kernels", reason="needs triton", exc_type=ImportError)

    plain = family(variant).model
    fused = kernels.fuse_for_cuda(copy.deepcopy(plain))
    kinds = [type(module) for module in fused.modules()]
    assert not set(kernels.FUSED) & set(kinds) and set(kernels.FUSED.values()) <= set(kinds)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in plain.named_modules()]
    outputs = []
    for model in (plain, fused):
        paged = runner_of(model, 96 * 4, RaggedAttention)
        engine = make_engine(model, runner=paged, allocator=BlockManager(96, 4))
        outputs.append(serve(engine, PROMPTS, GREEDY))
    assert outputs[0] == outputs[1]


def test_a_fused_model_keeps_modules_that_someone_else_swapped(family):
    """Fusion touches the classes of model.py alone, and shares the weights: nothing is copied."""
    kernels = pytest.importorskip("shared.kernels", reason="needs triton", exc_type=ImportError)

    class Mine(SwiGLU):
        pass

    plain = copy.deepcopy(family("llama").model)
    plain.layers[1].mlp.__class__ = Mine
    weights = {name: weight.data_ptr() for name, weight in plain.named_parameters()}
    fused = kernels.fuse_for_cuda(plain)
    assert type(fused.layers[1].mlp) is Mine and type(fused.layers[0].mlp) is kernels.FusedSwiGLU
    assert {name: weight.data_ptr() for name, weight in fused.named_parameters()} == weights
