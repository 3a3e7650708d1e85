"""`LLM`: one object that loads a model, builds the engine around it, and generates."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.batch import AttentionBackend, ModelRunner, RaggedAttention
from shared.block_manager import BlockManager
from shared.engine import Engine
from shared.errors import EngineError, InvalidRequestError
from shared.kv_cache import KVCache, kv_bytes_per_token
from shared.model import ModelConfig
from shared.output import RequestOutput
from shared.prefix_cache import PrefixCachingBlockManager
from shared.request import RequestLimits
from shared.sampling_params import SamplingParams, check_integer
from shared.scheduler import Policy, Scheduler
from shared.tokenizer import Tokenizer
from shared.trace import Trace
from shared.weights import DEFAULT_MODEL, load_model, resolve

CPU_CACHE_BYTES = 256 * 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class GenerationError(EngineError):
    """Some requests ended with an error; `outputs` holds those of all requests, finished ones included."""

    def __init__(self, outputs: list[RequestOutput]):
        self.outputs = outputs
        failed = {o.request_id: c.error for o in outputs for c in o.outputs if c.finish_reason == "error"}
        super().__init__(f"{len(failed)} of {len(outputs)} requests failed: {failed}")


@dataclass(frozen=True)
class EngineArgs:
    """The options of an engine, by vLLM's names; every value is checked against the model in `LLM`.

    dtype "auto" is bfloat16 on CUDA and float32 on CPU. The cache has num_gpu_blocks_override blocks, or as
    many as fit in kv_cache_memory_bytes (256 MiB on CPU; on CUDA four fifths of the memory that the model
    leaves). max_model_len None is the model's length, or the cache's or the step's if that is shorter.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str | Policy = "fcfs"
    attention_backend: AttentionBackend = RaggedAttention
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_integer(field, getattr(self, field), 1)
        for field in ("max_model_len", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if getattr(self, field) is not None:
                check_integer(field, getattr(self, field), 1)
        for field in ("enable_prefix_caching", "enable_chunked_prefill"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequestError(field, getattr(self, field), "True or False")
        check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if not callable(self.attention_backend):
            raise InvalidRequestError("attention_backend", self.attention_backend, "a class like RaggedAttention")
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidRequestError("dtype", self.dtype, f"auto or one of {sorted(DTYPES)}")

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise InvalidRequestError("device", self.device, "a device that torch has here, such as cpu") from error

    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device().type == "cuda" else torch.float32
        return DTYPES[self.dtype]

    def num_blocks(self, config: ModelConfig) -> int:
        """Blocks of the cache; raises if the memory does not hold one."""
        if self.num_gpu_blocks_override is not None:
            return self.num_gpu_blocks_override
        block_bytes = self.block_size * kv_bytes_per_token(config, self.torch_dtype())
        budget = self.kv_cache_memory_bytes
        if budget is None:
            cuda = self.torch_device().type == "cuda"
            budget = torch.cuda.mem_get_info(self.torch_device())[0] * 4 // 5 if cuda else CPU_CACHE_BYTES
        if budget < block_bytes:
            raise InvalidRequestError("kv_cache_memory_bytes", budget, f"at least one block, {block_bytes} bytes")
        return budget // block_bytes

    def model_len(self, config: ModelConfig, num_blocks: int) -> int:
        """The longest request; raises if more is asked for than model, cache or step can hold."""
        bounds = {"the model's positions": config.max_position_embeddings, "the cache": num_blocks * self.block_size}
        if not self.enable_chunked_prefill:
            bounds["one step without chunked prefill"] = self.max_num_batched_tokens
        name, longest = min(bounds.items(), key=lambda item: item[1])
        if self.max_model_len is not None and self.max_model_len > longest:
            raise InvalidRequestError("max_model_len", self.max_model_len, f"at most {longest}, the limit of {name}")
        return self.max_model_len or longest


class LLM:
    """`LLM("smollm2-135m").generate("Once upon a time")`; options are those of EngineArgs."""

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, trace: Trace | None = None, **options: Any):
        unknown = sorted(set(options) - set(EngineArgs.__dataclass_fields__))
        if unknown:
            raise InvalidRequestError("option", unknown[0], f"one of {sorted(EngineArgs.__dataclass_fields__)}")
        if not isinstance(model, (str, Path)):
            raise InvalidRequestError("model", model, "the name of a model or the path of its folder")
        args = EngineArgs(**options)
        folder = resolve(model)
        self.tokenizer = Tokenizer(folder)
        self.model = load_model(folder, args.torch_dtype(), args.torch_device())
        config = self.model.config
        num_blocks = args.num_blocks(config)
        limits = RequestLimits(config.vocab_size, args.model_len(config, num_blocks))
        manager = PrefixCachingBlockManager if args.enable_prefix_caching else BlockManager
        scheduler = Scheduler(
            manager(num_blocks, args.block_size), args.max_num_seqs, args.max_num_batched_tokens,
            args.enable_chunked_prefill, args.scheduling_policy,
        )
        cache = KVCache(config, num_blocks * args.block_size, args.torch_dtype(), args.torch_device())
        runner = ModelRunner(self.model, cache, args.attention_backend)
        self.engine = Engine(runner, scheduler, self.tokenizer, limits, trace=trace, seed=args.seed)
        self._requests = 0
        self._ready: dict[str, list[RequestOutput]] = {}  # outputs that their stream has not taken yet

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts (text or token ids, one or a list), in their order.

        Raises InvalidRequestError before anything runs if one is refused, and GenerationError, which holds
        all outputs, if a request failed on the way.
        """
        results: dict[str, RequestOutput] = {}
        for output in self.stream(prompts, sampling_params):
            if output.finished:
                results[output.request_id] = output
        outputs = [results[name] for name in sorted(results, key=int)]
        if any(answer.finish_reason == "error" for output in outputs for answer in output.outputs):
            raise GenerationError(outputs)
        return outputs

    def stream(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yield each request's output whenever it grows; closing the iterator aborts what is unfinished."""
        prompts = prompt_list(prompts)
        names: list[str] = []
        try:
            for prompt, params in zip(prompts, params_list(sampling_params, len(prompts))):
                name, self._requests = str(self._requests), self._requests + 1
                self.engine.add_request(name, prompt["prompt"], params, cache_salt=prompt["cache_salt"])
                names.append(name)
                self._ready[name] = []
            while self._is_expecting(names):
                for output in self._take_outputs(names):
                    if output.finished:
                        names.remove(output.request_id)
                    yield output
        finally:
            for name in names:
                self.engine.abort(name)
                self._ready.pop(name, None)

    def _is_expecting(self, names: Sequence[str]) -> bool:
        """Whether one of these requests may still report; not if it was aborted on the engine itself."""
        return any(name in self.engine.groups or self._ready[name] for name in names)

    def _take_outputs(self, names: Sequence[str]) -> list[RequestOutput]:
        """Step until one of these requests has something to report; what others report waits for their stream."""
        while self._is_expecting(names) and not any(self._ready[name] for name in names):
            for output in self.engine.step():
                if output.request_id in self._ready:
                    self._ready[output.request_id].append(output)
        taken = [output for name in names for output in self._ready[name]]
        for output in taken:
            if output.finished:
                del self._ready[output.request_id]
            else:
                self._ready[output.request_id].clear()
        return taken

    def chat(self, messages: Any, sampling_params: SamplingParams | None = None) -> list[RequestOutput]:
        """Answer one conversation or a list of them; without options, up to the model's length."""
        several = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple))
        conversations = messages if several else [messages]
        prompts = [self.tokenizer.encode_chat(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params or SamplingParams(max_tokens=None))


def prompt_list(prompts: Any) -> list[dict[str, Any]]:
    """One prompt or several, as strings, token ids or vLLM's dicts, all as {"prompt": text or ids, ...}."""
    is_list = isinstance(prompts, (list, tuple))
    if isinstance(prompts, (str, Mapping)) or (is_list and prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError("prompts", prompts, "a string, a list of token ids, or a list of those")
    return [prompt_dict(prompt if isinstance(prompt, Mapping) else {"prompt": prompt}) for prompt in prompts]


def prompt_dict(prompt: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        limit = "a dict with prompt or prompt_token_ids, and maybe cache_salt"
        raise InvalidRequestError("prompt", dict(prompt), limit)
    text_or_ids = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    return {"prompt": text_or_ids, "cache_salt": prompt.get("cache_salt", "")}


def params_list(params: Any, count: int) -> list[SamplingParams | None]:
    """The same options for all, or one for each."""
    if not isinstance(params, (list, tuple)):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError("sampling_params", f"{len(params)} of them", f"one, or {count}: one for each prompt")
    return list(params)
