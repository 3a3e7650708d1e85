"""How often the fast bfloat16 path and the plain one choose the same token, given the same tokens before it.

    python tools/bf16_agreement.py [--tokens 64] [--save evidence/12_bf16_agreement.json]

Plain bfloat16 answers each prompt greedily. The fast path, and float32 as the judge, are fed the same tokens
step by step, prompts as one piece and then one token at a time, and each names the token it would have chosen.
Sums in another order round otherwise: where two choices differ, the scores of the two tokens should be
neighbours. The margin says so: the plain path's best score less its score of the other's choice, in units of
the distance between bfloat16 numbers of that size.
"""
from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from shared.batch import ModelRunner  # noqa: E402
from shared.kv_cache import KVCache  # noqa: E402
from shared.model import Transformer  # noqa: E402
from shared.request import Request  # noqa: E402
from shared.runner import CPURunner  # noqa: E402
from shared.sampling_params import SamplingParams  # noqa: E402
from shared.scheduler import ScheduledRequest  # noqa: E402

BLOCK_SIZE = 16
PROMPTS = (
    "The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at", "In 1969,",
    "The three primary colours are", "import numpy as np\n", "To make bread, you need", "The largest planet is",
    "Dear Sir or Madam,", "A short poem about the sea:\n", "SELECT name FROM", "The theory of evolution says",
    "1, 1, 2, 3, 5, 8,", "Question: Why is the sky blue?\nAnswer:", "She opened the door and", "Photosynthesis is",
    "The French Revolution began", "for i in range(10):", "My favourite season is", "An algorithm is",
    "The heart pumps", "Translate to German: Good morning.", "There are seven days in a week:",
)  # fmt: skip


def agreement(model: Transformer, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict:
    """Compare the paths on num_tokens positions of each prompt. `model` is in float32 and stays as it is."""
    requests = laid_out(prompts, num_tokens)
    slots = BLOCK_SIZE * sum(len(request.block_table) for request in requests)
    plain, fast = copy.deepcopy(model).to(torch.bfloat16), copy.deepcopy(model).to(torch.bfloat16)
    runners = {
        "plain": ModelRunner(plain, KVCache(model.config, slots, torch.bfloat16)),
        "fast": CPURunner(fast, KVCache(model.config, slots, torch.bfloat16)),
        "float32": ModelRunner(model, KVCache(model.config, slots, torch.float32)),
    }
    equal, differences = dict.fromkeys(("plain and fast", "plain and float32", "fast and float32"), 0), []
    for position in range(num_tokens):
        scores = {name: next_scores(runner, requests, position) for name, runner in runners.items()}
        chosen = {name: rows.argmax(-1) for name, rows in scores.items()}
        for pair in equal:
            first, second = pair.split(" and ")
            equal[pair] += int((chosen[first] == chosen[second]).sum())
        differences += disagreements(position, scores["plain"], chosen["plain"], chosen["fast"])
        for request, token in zip(requests, chosen["plain"].tolist()):
            request.append(token)
    compared = num_tokens * len(requests)
    margins = [found["margin_in_bf16_steps"] for found in differences]
    firsts = {found["prompt"]: found for found in reversed(differences)}
    return {
        "prompts": len(requests), "positions": compared, "missing": runners["fast"].missing,
        "share_equal": {pair: round(count / compared, 4) for pair, count in equal.items()},
        "largest_margin_in_bf16_steps": max(margins, default=0), "first_difference_of_each_prompt":
        [firsts[prompt] for prompt in sorted(firsts)],
    }


def laid_out(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    """A request for each prompt, which owns all the blocks that it will need."""
    requests, taken = [], 0
    for number, prompt in enumerate(prompts):
        blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
        request = Request(str(number), list(prompt), SamplingParams(temperature=0), num_tokens + 1)
        request.block_table = list(range(taken, taken + blocks))
        requests.append(request)
        taken += blocks
    return requests


def next_scores(runner: ModelRunner, requests: Sequence[Request], position: int) -> Tensor:
    """Scores after the tokens known so far: [requests, vocab]. At position 0 the whole prompt runs."""
    starts = [request.num_tokens - 1 if position else 0 for request in requests]
    scheduled = [
        ScheduledRequest(request, start, request.num_tokens - start, request.num_tokens)
        for request, start in zip(requests, starts)
    ]
    return runner.execute(scheduled, BLOCK_SIZE)


def disagreements(position: int, scores: Tensor, plain: Tensor, fast: Tensor) -> list[dict]:
    """Rows in which the two chose differently, and how close the plain path found the two tokens."""
    found = []
    for row in (plain != fast).nonzero().flatten().tolist():
        best, other = float(scores[row, plain[row]]), float(scores[row, fast[row]])
        step = 2.0 ** (math.floor(math.log2(abs(best) or 1)) - 7)
        found.append({
            "prompt": row, "position": position, "score": best, "margin": best - other,
            "margin_in_bf16_steps": round((best - other) / step, 2),
        })
    return found


def main() -> None:
    from shared.tokenizer import Tokenizer
    from shared.weights import load_model, resolve
    from tools.compare_peers import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer(resolve(args.model))
    record = {
        "what": "tokens that the fast and the plain bfloat16 path choose, given the same tokens before",
        "command": "python " + " ".join(sys.argv), "date": datetime.date.today().isoformat(), "machine": machine(),
        "model": args.model, **agreement(load_model(args.model), [tokenizer.encode(p) for p in PROMPTS], args.tokens),
    }
    print(json.dumps(record, indent=2))
    if args.save:
        args.save.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
