"""Chapter 13's times: the same answers from the engine in this process, and over HTTP from a server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shared.lab.chapters.ch13_load import QUESTIONS, read_stream
from shared.lab.machine import Measurement
from shared.llm import LLM
from shared.openai_response import ChatDelta, Choice, GenerationResponse
from shared.sampling_params import SamplingParams

MODEL = "smollm2-135m"
PROMPTS = [[{"role": "user", "content": question}] for question in QUESTIONS[:4]]
MAX_TOKENS = 8


def direct_times(llm: LLM, n: int = 5) -> Measurement:
    """Tokens a second of four conversations, generated in this process."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return rate("engine alone", lambda: llm.chat(PROMPTS, params), n)


def http_times(address: str, n: int = 5) -> list[Measurement]:
    """Tokens a second of the same conversations as four streams over HTTP, and the wait for a first token."""
    waits: list[float] = []
    result = rate("over HTTP, four streams", lambda: stream_all(address, waits), n)
    return [result, Measurement.of("first token over HTTP", waits[len(PROMPTS) :], "ms")]


def rate(what: str, work, n: int) -> Measurement:
    """Of n runs, after one to warm up."""
    rates = []
    for _ in range(n + 1):
        started = time.perf_counter()
        work()
        rates.append(len(PROMPTS) * MAX_TOKENS / (time.perf_counter() - started))
    return Measurement.of(what, rates[1:], "tokens/s")


def stream_all(address: str, waits: list[float]) -> None:
    threads = [threading.Thread(target=stream_one, args=(address, messages, waits)) for messages in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stream_one(address: str, messages: Sequence[dict], waits: list[float]) -> None:
    body = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    for count, _ in enumerate(read_stream(address, body)):
        if count == 0:
            waits.append((time.perf_counter() - started) * 1e3)


def chunk_times(n: int = 200) -> Measurement:
    """Microseconds to write one chunk of a stream as JSON."""
    times = []
    for _ in range(n):
        started = time.perf_counter()
        delta = ChatDelta(index=0, delta={"content": " word"}, logprobs=None, finish_reason=None)
        choices: list[Choice] = [delta]
        chunk = GenerationResponse(id="x", object="chat.completion.chunk", created=0, model=MODEL, choices=choices)
        json.loads(chunk.model_dump_json())
        times.append((time.perf_counter() - started) * 1e6)
    return Measurement.of("writing and reading one chunk", times, "µs")


def save() -> Path:
    """Measure and save: `python -m shared.lab.chapters.ch13_measure`."""
    from shared.engine_args import EngineArgs, build_engine
    from shared.lab.evidence import save_evidence
    from shared.server import Server, create_app

    engine = build_engine(EngineArgs(max_model_len=512, enforce_eager=True, attention_backend="torch_sdpa"))
    server = Server(create_app(engine, MODEL), port=0)
    results = [*http_times(server.start()), chunk_times()]
    server.stop()
    results.insert(0, direct_times(LLM.from_engine(engine)))
    what = "four conversations of 8 tokens each: from the engine in one process, and over HTTP from the server"
    return save_evidence("13_serving_engine", what, "python -m shared.lab.chapters.ch13_measure", results)


if __name__ == "__main__":
    print(save().name)
