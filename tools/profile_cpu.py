"""Where a step's time goes on the CPU runner: seconds of each part on the common workload, and on one request.

    python tools/profile_cpu.py [--dtype bfloat16] [--save evidence/cpu_profile.json]

Each part is timed from outside, so that the compiled operations, which torch's profiler does not see, count too.
For that the layers are kept apart; the seconds of the engine as it is, all layers in one call, stand beside.
"""
from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared import LLM, SamplingParams, runner  # noqa: E402
from shared.batch import ForwardBatch  # noqa: E402
from shared.cpu_layers import FusedRMSNorm  # noqa: E402
from tools.compare_peers import machine, said, workload  # noqa: E402


class Stopwatch:
    """Adds up the seconds and calls of functions by name."""

    def __init__(self):
        self.seconds: Counter = Counter()
        self.calls: Counter = Counter()

    def around(self, name: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - started
            self.calls[name] += 1
            return result

        return timed


def watch(llm: LLM, stopwatch: Stopwatch) -> None:
    """Put the stopwatch around each part of the engine."""
    own: runner.CPURunner = llm.engine.runner
    for layer in own.model.layers:
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            part = getattr(layer, name)
            part.forward = stopwatch.around(name, part.forward)
        layer.rotate = stopwatch.around("rotary", layer.rotate)
        layer.swiglu = stopwatch.around("swiglu", layer.swiglu)
    for module in own.model.modules():
        if isinstance(module, FusedRMSNorm):
            module.forward = stopwatch.around("norm", module.forward)
    own.model.lm_head.forward = stopwatch.around("lm_head", own.model.lm_head.forward)
    backend = own.attention_backend
    own.attention_backend = lambda cache, batch: stopwatch.around("attention", backend(cache, batch))
    ForwardBatch.build = stopwatch.around("batch", ForwardBatch.build)
    own.forward = stopwatch.around("forward", own.forward)
    llm.engine.sampler = stopwatch.around("sampler", llm.engine.sampler)
    llm.engine.step = stopwatch.around("step", llm.engine.step)


def answer(llm: LLM, requests: list[dict]) -> float:
    """Seconds to answer these requests."""
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
    started = time.perf_counter()
    llm.generate([r["prompt"] for r in requests], params)
    return time.perf_counter() - started


def profile(llm: LLM, stopwatch: Stopwatch, requests: list[dict]) -> dict:
    """Seconds by part; `other` is what no part accounts for: the loop, modules, small tensors."""
    stopwatch.seconds.clear()
    stopwatch.calls.clear()
    answer(llm, requests)
    whole, forward = stopwatch.seconds.pop("step"), stopwatch.seconds.pop("forward")
    outside = sum(stopwatch.seconds[name] for name in ("batch", "sampler"))
    parts = {name: round(seconds, 3) for name, seconds in stopwatch.seconds.most_common()}
    parts["other in the forward pass"] = round(forward - sum(stopwatch.seconds.values()) + outside, 3)
    parts["scheduling and bookkeeping"] = round(whole - forward - outside, 3)
    tokens = sum(r["max_tokens"] for r in requests)
    return {"seconds": round(whole, 3), "steps": stopwatch.calls["step"], "tokens": tokens, "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    options = dict(enable_prefix_caching=False, num_gpu_blocks_override=1024, max_num_batched_tokens=2048)
    requests = workload()
    works = {"workload": requests, "one request": [{**requests[0], "max_tokens": 64}]}
    warm_up = [{**request, "max_tokens": 4} for request in requests[:4]]
    llm = LLM(args.model, dtype=args.dtype, **options)
    answer(llm, warm_up)
    whole = {name: round(answer(llm, work), 3) for name, work in works.items()}

    runner.compile_layers = lambda model: None
    llm, stopwatch = LLM(args.model, dtype=args.dtype, **options), Stopwatch()
    watch(llm, stopwatch)
    profile(llm, stopwatch, warm_up)
    record = {
        "what": "seconds of each part on the CPU runner, layers apart", "dtype": args.dtype,
        "command": said(sys.argv), "date": datetime.date.today().isoformat(), "machine": machine(),
        "seconds_in_one_call": whole, **{name: profile(llm, stopwatch, work) for name, work in works.items()},
    }
    print(json.dumps(record, indent=2))
    if args.save:
        args.save.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
