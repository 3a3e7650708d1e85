"""Where the checks run (a GPU, or a CPU that pretends with a tiny model), and the engines that they build."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shared.attention import select_backend
from shared.batch import ModelRunner
from shared.block_manager import BlockManager
from shared.cuda_graph import CUDAGraph, CUDAGraphRunner
from shared.engine import Engine
from shared.kernels import fuse_for_cuda
from shared.kv_cache import KVCache
from shared.model import ModelConfig, Transformer
from shared.request import RequestLimits
from shared.sampling_params import SamplingParams
from shared.scheduler import Scheduler

QWEN3_06B = ModelConfig(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None,
    max_position_embeddings=40960, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
TINY = replace(
    QWEN3_06B, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
)  # fmt: skip


class Skipped(Exception):
    """A check that cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """A GPU and Qwen3-0.6B's shape; or, in a dry run, the CPU, Triton's interpreter and a tiny shape."""

    device: str
    config: ModelConfig
    new_graph: Callable[[], Any]
    dry: bool
    folder: str | None = None  # of the default model

    @classmethod
    def here(cls, dry: bool, folder: str | None) -> Setting:
        if not dry:
            return cls("cuda", QWEN3_06B, CUDAGraph, False, folder)
        from shared.lab.graph_recorder import RecordedGraph

        return cls("cpu", TINY, RecordedGraph, True, folder)

    def need_cuda(self) -> None:
        if self.dry:
            raise Skipped("dry run: there is no CUDA device to ask")

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Stack:
    """Which parts of the optimisation stack are on."""

    backend: str = "torch_sdpa"
    fused: bool = False
    graphs: bool = False

    def __str__(self) -> str:
        return " + ".join([self.backend, *["fused"] * self.fused, *["graphs"] * self.graphs])


def random_model(setting: Setting, dtype: torch.dtype, config: ModelConfig | None = None, seed: int = 0) -> Transformer:
    """Weights as a fresh model has them: normal with deviation 0.02 for matrices, near 1 for norms."""
    with torch.device("meta"):
        model = Transformer(config or setting.config)
    model = model.to(dtype).to_empty(device=setting.device).eval().requires_grad_(False)
    model.rotary = type(model.rotary)(model.config)  # not a parameter, so made anew
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    draw = torch.Generator(setting.device).manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02, generator=draw)
        parameter.add_(parameter.ndim == 1)
    return model


def build_engine(
    setting: Setting, model: Transformer, stack: Stack, *, max_num_seqs: int = 8, max_model_len: int = 256,
    max_num_batched_tokens: int = 64, num_blocks: int = 128, block_size: int = 16,
) -> Engine:  # fmt: skip
    """An engine of this stack around a model, whose weights it shares."""
    if stack.fused:
        shared_weights = {id(parameter): parameter for parameter in model.parameters()}
        model = fuse_for_cuda(copy.deepcopy(model, shared_weights))
    dtype = model.embed_tokens.weight.dtype
    block_size = 256 if stack.backend == "flash_attn" else block_size
    cache = KVCache(model.config, num_blocks * block_size, dtype, setting.device)
    backend = select_backend(stack.backend, setting.device, dtype, model.config.head_dim, block_size)
    if stack.graphs:
        runner: ModelRunner = CUDAGraphRunner(
            model, cache, backend, max_num_seqs, max_model_len, block_size, setting.new_graph
        )
    else:
        runner = ModelRunner(model, cache, backend)
    scheduler = Scheduler(BlockManager(num_blocks, block_size), max_num_seqs, max_num_batched_tokens)
    return Engine(runner, scheduler, NoText(), RequestLimits(model.config.vocab_size, max_model_len))


class NoText:
    """A tokenizer of a model that says nothing: ids go in and out, and no id ends a request."""

    eos_token_ids = ()

    def encode(self, text: str) -> list[int]:
        raise TypeError("only token ids")

    def detokenizer(self, skip_special_tokens: bool) -> NoText:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=draw).tolist() for length in lengths]


def drain(engine: Engine) -> dict[str, list[int]]:
    """Step to the end; the tokens of each request. A request that failed is an error here."""
    answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = output.outputs[0]
            assert answer.finish_reason != "error", f"request {output.request_id}: {answer.error}"
            if output.finished:
                answers[output.request_id] = answer.token_ids
    return answers


def answer(engine: Engine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Greedy answers of these lengths, all prompts at once."""
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        engine.add_request(str(i), list(prompt), greedy(length))
    answers = drain(engine)
    return [answers[str(i)] for i in range(len(prompts))]
