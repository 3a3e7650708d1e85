"""Chapter 06's times: how long the second caller waits, and what looking for stop strings costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.kv_cache import KVCache, cached_logits
from shared.lab.machine import Measurement
from shared.model import Transformer
from shared.output import OutputText
from shared.request import Request, RequestTimes
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

QUESTIONS = ("Write one sentence about the sea.", "What is the capital of France?")
LENGTHS = (10, 4)
STOPS = ("\n\n", "</answer>", "User:", "###")


def first_token_times(model: Transformer, tokenizer: Tokenizer, n: int = 5) -> list[Measurement]:
    """Milliseconds until the second caller's first token: after the first caller's end, and in turns."""
    results = []
    for name, in_turns in (("one after the other", False), ("taking turns", True)):
        times = [second_wait(model, tokenizer, in_turns) * 1e3 for _ in range(n + 1)]  # the first warms up
        results.append(Measurement.of(f"first token of the second caller, {name}", times[1:], "ms"))
    return results


def second_wait(model: Transformer, tokenizer: Tokenizer, in_turns: bool) -> float:
    """Two callers ask at the same moment; seconds until the second has a token. Each has its own cache."""
    arrival = time.perf_counter()
    requests, caches = [], []
    for name, question, length in zip("AB", QUESTIONS, LENGTHS):
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        requests.append(Request(name, ids, params, length, times=RequestTimes(arrival)))
        caches.append(KVCache(model.config, requests[-1].max_num_tokens, model.embed_tokens.weight.dtype))
    for i in turns() if in_turns else [i for i, length in enumerate(LENGTHS) for _ in range(length)]:
        run_one(model, requests[i], caches[i])
    return requests[1].times.first_token - arrival


def turns() -> list[int]:
    """Whose step it is: 0, 1, 0, 1, ... until each has had its length."""
    rounds = ([i for i, length in enumerate(LENGTHS) if done < length] for done in range(max(LENGTHS)))
    return [i for each in rounds for i in each]


def run_one(model: Transformer, request: Request, cache: KVCache) -> None:
    new_ids = request.all_token_ids[request.num_computed_tokens :]
    logits = cached_logits(model, cache, new_ids, request.num_computed_tokens)
    request.num_computed_tokens = request.num_tokens
    request.append(int(logits.argmax()))
    request.times.last_token = time.perf_counter()
    request.times.first_token = request.times.first_token or request.times.last_token


def text_times(tokenizer: Tokenizer, text: str, n: int = 9) -> list[Measurement]:
    """Microseconds a token, from ids to text that may be shown, with and without stop strings."""
    ids = tokenizer.encode(text)

    def push_all(stop: Sequence[str]) -> None:
        answer = OutputText(tokenizer.detokenizer(), stop)
        for token_id in ids:
            answer.push(token_id)

    return [Measurement.of(f"text of one token, {words}", timed(lambda stop=stop: push_all(stop), n, len(ids)), "µs")
            for words, stop in (("no stop string", ()), ("four stop strings", STOPS))]


def timed(work: Callable[[], object], n: int, per: int) -> list[float]:
    """Microseconds of n runs, divided by `per`, after one run to warm up."""
    work()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6 / per)
    return times


def save() -> Path:
    """Measure and save: `python -m shared.lab.chapters.ch06_measure`."""
    from shared.lab.evidence import save_evidence
    from shared.lab.texts import RIGHTS
    from shared.weights import load_model

    tokenizer, model = Tokenizer("smollm2-135m"), load_model("smollm2-135m")
    results = first_token_times(model, tokenizer) + text_times(tokenizer, RIGHTS["English"] * 8)
    what = "how long a second caller waits for its first token, and what looking for stop strings costs"
    return save_evidence("06_request_state", what, "python -m shared.lab.chapters.ch06_measure", results)


if __name__ == "__main__":
    print(save().name)
