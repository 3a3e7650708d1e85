"""Our engine and transformers' `generate` on the common workload, in one run.

    python tools/compare_peers.py [--model smollm2-135m] [--dtype bfloat16] [--repeats 3] [--save evidence/peers.json]

32 requests of random token ids (seed 0), prompts and outputs of 16 to 256 tokens, greedy, end token ignored.
Throughput is output tokens over the seconds of one call that serves them all. transformers gets the requests
as one left-padded batch and runs until the longest is done; only the tokens asked for are counted.
"""
from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def workload(n: int = 32, low: int = 16, high: int = 256, vocab: int = 10000, seed: int = 0) -> list[dict]:
    """Prompts of token ids and the number of tokens wanted."""
    draw = random.Random(seed)
    return [
        {
            "prompt": [draw.randint(3, vocab) for _ in range(draw.randint(low, high))],
            "max_tokens": draw.randint(low, high),
        }
        for _ in range(n)
    ]


def ours(model: str, dtype: str, requests: list[dict]):
    """A function that serves the workload on our engine."""
    from shared import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, enable_prefix_caching=False, num_gpu_blocks_override=1024)
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]

    def serve() -> int:
        outputs = llm.generate([r["prompt"] for r in requests], params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve


def transformers_generate(model: str, dtype: str, requests: list[dict]):
    """A function that serves the workload with one padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    from shared.weights import resolve

    hf = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=getattr(torch, dtype)).eval()
    longest, most = max(len(r["prompt"]) for r in requests), max(r["max_tokens"] for r in requests)
    ids = torch.zeros((len(requests), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request["prompt"]) :] = torch.tensor(request["prompt"])
        mask[row, longest - len(request["prompt"]) :] = 1

    @torch.inference_mode()
    def serve() -> int:
        hf.generate(ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0)
        return sum(r["max_tokens"] for r in requests)

    return serve


def tokens_per_second(serve) -> float:
    started = time.perf_counter()
    return serve() / (time.perf_counter() - started)


def versions() -> dict[str, str]:
    import torch
    import transformers

    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), "") \
        if Path("/proc/cpuinfo").exists() else platform.processor()
    return {
        "cpu": cpu, "threads": str(torch.get_num_threads()), "python": platform.python_version(),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()

    requests = workload()
    engines = {"zero-to-engine": ours, "transformers generate": transformers_generate}
    serve = {name: build(args.model, args.dtype, requests) for name, build in engines.items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.repeats):  # in turn, so that a slow minute of the machine hits both
        for name in engines:
            rates[name].append(tokens_per_second(serve[name]))
            print(f"{name:24} {rates[name][-1]:7.1f} tokens/s", flush=True)
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    print(f"ratio, median of {args.repeats}: {statistics.median(ratios):.2f}")
    if args.save:
        record = {
            "what": "common workload, 32 requests", "dtype": args.dtype, "command": " ".join(sys.argv),
            "date": datetime.date.today().isoformat(), "machine": versions(),
            "tokens_per_second": {name: [round(x, 1) for x in xs] for name, xs in rates.items()},
            "ratio": [round(x, 2) for x in ratios],
        }
        args.save.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
