"""The options of an engine, and the one place where its parts are put together."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from shared.attention import select_backend
from shared.batch import AttentionBackend, ModelRunner
from shared.block_manager import BlockManager
from shared.cuda_graph import CUDAGraphRunner
from shared.engine import Engine
from shared.errors import InvalidRequestError
from shared.group import TensorParallelRunner
from shared.kv_cache import KVCache, kv_bytes_per_token
from shared.model import ModelConfig, Transformer
from shared.prefix_cache import PrefixCachingBlockManager
from shared.request import RequestLimits
from shared.runner import CPURunner
from shared.sampling_params import check_integer
from shared.scheduler import Policy, Scheduler
from shared.tokenizer import Tokenizer
from shared.trace import Trace
from shared.weights import DEFAULT_MODEL, load_model, resolve
from shared.workers import launch

CPU_CACHE_BYTES = 256 * 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANK_OPTIONS = (  # what every rank must know to build its runner
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_chunked_prefill", "enforce_eager", "attention_backend",
)  # fmt: skip


@dataclass(frozen=True)
class EngineArgs:
    """The options of an engine, by vLLM's names; checked here and, against the model, in build_engine.

    dtype "auto" is bfloat16 on CUDA and float32 on CPU. The cache has num_gpu_blocks_override blocks, or as
    many as fit in kv_cache_memory_bytes; without either, 256 MiB on CPU, and on CUDA the share
    gpu_memory_utilization of all memory less what weights and one full step take. max_model_len None is the
    model's length, or the cache's or the step's if that is shorter. enforce_eager runs the model as it is
    written, without what chapter 12 adds. tensor_parallel_size ranks share the model, and each caches its own heads.
    """

    model: str | Path = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str | Policy = "fcfs"
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    attention_backend: str | AttentionBackend = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, Path)):
            raise InvalidRequestError("model", self.model, "the name of a model or the path of its folder")
        for field in ("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size"):
            check_integer(field, getattr(self, field), 1)
        for field in ("max_model_len", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if getattr(self, field) is not None:
                check_integer(field, getattr(self, field), 1)
        for field in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequestError(field, getattr(self, field), "True or False")
        check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise InvalidRequestError("gpu_memory_utilization", share, "a number above 0, at most 1")
        if not (callable(self.attention_backend) or isinstance(self.attention_backend, str)):
            limit = "a name, or a class like RaggedAttention"
            raise InvalidRequestError("attention_backend", self.attention_backend, limit)
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidRequestError("dtype", self.dtype, f"auto or one of {sorted(DTYPES)}")


def build_engine(args: EngineArgs, trace: Trace | None = None) -> Engine:
    """Load the model and put control plane and data plane together.

    Raises ModelLoadError, or InvalidRequestError for an option that this model or machine can't have.
    """
    tokenizer = Tokenizer(resolve(args.model))
    runner = start_runner(args)
    config, num_blocks = runner.model.config, runner.cache.num_slots // args.block_size
    limits = RequestLimits(config.vocab_size, longest_request(args, config, num_blocks))
    manager = PrefixCachingBlockManager if args.enable_prefix_caching else BlockManager
    scheduler = Scheduler(
        manager(num_blocks, args.block_size), args.max_num_seqs, args.max_num_batched_tokens,
        args.enable_chunked_prefill, args.scheduling_policy,
    )
    return Engine(runner, scheduler, tokenizer, limits, trace=trace, seed=args.seed)


def start_runner(args: EngineArgs) -> ModelRunner | TensorParallelRunner:
    """The model and its cache, ready to run: in this process, or cut over several."""
    device = torch_device(args.device)
    dtype = torch_dtype(args.dtype, device)
    if args.tensor_parallel_size == 1:
        return build_runner(args, load_model(args.model, dtype, device))
    options = {name: getattr(args, name) for name in RANK_OPTIONS}
    return launch(
        args.model, args.tensor_parallel_size, dtype=dtype, device=device.type, make_runner=rank_runner, **options
    )


def rank_runner(model: Transformer, agree: Callable[[int], int], **options: Any) -> ModelRunner:
    """What each rank of tensor parallelism builds."""
    return build_runner(EngineArgs(**options), model, agree)


def build_runner(args: EngineArgs, model: Transformer, agree: Callable[[int], int] = int) -> ModelRunner:
    """A cache, and the fastest way to run the model on its device, or the plain one.

    `agree` gives the smallest of all ranks' numbers: the scheduler counts blocks that every rank must have.
    """
    weight = model.embed_tokens.weight
    num_blocks = agree(args.num_gpu_blocks_override or num_cache_blocks(args, model))
    max_model_len = longest_request(args, model.config, num_blocks)
    cache = KVCache(model.config, num_blocks * args.block_size, weight.dtype, weight.device)
    backend = select_backend(
        args.attention_backend, weight.device, weight.dtype, model.config.head_dim, args.block_size
    )
    if args.enforce_eager or weight.device.type not in ("cpu", "cuda"):
        return ModelRunner(model, cache, backend)
    if weight.device.type == "cpu":
        return CPURunner(model, cache, backend)
    if not getattr(backend, "can_be_captured", False):  # torch_sdpa, or a class of one's own
        return ModelRunner(model, cache, backend)
    from shared.kernels import fuse_for_cuda  # needs Triton, which only a CUDA machine must have

    return CUDAGraphRunner(fuse_for_cuda(model), cache, backend, args.max_num_seqs, max_model_len, args.block_size)


def torch_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidRequestError("device", name, "a device that torch has here, such as cpu") from error


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def num_cache_blocks(args: EngineArgs, model: Transformer) -> int:
    """Blocks that fit in the memory of the cache; raises if it does not hold one."""
    weight = model.embed_tokens.weight
    block_bytes = args.block_size * kv_bytes_per_token(model.config, weight.dtype)
    if args.kv_cache_memory_bytes is not None:
        field, budget = "kv_cache_memory_bytes", args.kv_cache_memory_bytes
    elif weight.device.type == "cuda":
        field, budget = "gpu_memory_utilization", cuda_cache_bytes(args, model)
    else:
        field, budget = "kv_cache_memory_bytes", CPU_CACHE_BYTES
    if budget < block_bytes:
        raise InvalidRequestError(field, getattr(args, field), f"room for one block, {block_bytes} bytes; got {budget}")
    return budget // block_bytes


def cuda_cache_bytes(args: EngineArgs, model: Transformer) -> int:
    """This engine's share of the device, less what weights and a full step take; other processes don't count.

    Has not run on a GPU yet.
    """
    device = model.embed_tokens.weight.device
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_full_step(model, args.max_num_batched_tokens, args.max_num_seqs)
    activations = torch.cuda.max_memory_allocated(device) - before
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budget = int(args.gpu_memory_utilization * total) - weights - activations
    if budget > free - activations:
        limit = f"at most what is free: {free} of {total} bytes, of which one step needs {activations}"
        raise InvalidRequestError("gpu_memory_utilization", args.gpu_memory_utilization, limit)
    return budget


@torch.inference_mode()
def run_full_step(model: Transformer, num_tokens: int, num_rows: int) -> None:
    """As many tokens and rows as a step may have, to see how much memory that takes."""
    tokens = torch.zeros(num_tokens, dtype=torch.long, device=model.embed_tokens.weight.device)
    hidden = model(tokens, tokens, lambda layer, q, k, v: q)
    model.logits(hidden[:num_rows]).float()


def longest_request(args: EngineArgs, config: ModelConfig, num_blocks: int) -> int:
    """Tokens of the longest request; raises if more is asked for than model, cache or step can hold."""
    bounds = {"the model's positions": config.max_position_embeddings, "the cache": num_blocks * args.block_size}
    if not args.enable_chunked_prefill:
        bounds["one step without chunked prefill"] = args.max_num_batched_tokens
    name, longest = min(bounds.items(), key=lambda item: item[1])
    if args.max_model_len is not None and args.max_model_len > longest:
        raise InvalidRequestError("max_model_len", args.max_model_len, f"at most {longest}, the limit of {name}")
    return args.max_model_len or longest


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each field: --max-num-seqs for max_num_seqs, --enable-... and --no-enable-... for yes and no."""
    for field in fields(EngineArgs):
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = next((kind for kind in (int, float) if kind.__name__ in field.type), str)
            parser.add_argument(flag, type=kind, default=field.default)


def engine_args(namespace: argparse.Namespace) -> EngineArgs:
    """The options that these flags set."""
    return EngineArgs(**{field.name: getattr(namespace, field.name) for field in fields(EngineArgs)})
