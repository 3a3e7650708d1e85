"""Benchmarks with vLLM's names: `python -m shared.bench throughput|latency|serve --help`."""
from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shared.async_engine import AsyncEngine
from shared.engine_args import add_engine_arguments, build_engine, engine_args
from shared.errors import EngineError
from shared.llm import LLM
from shared.load import (
    Client,
    HTTPClient,
    RequestRecord,
    SampleRequest,
    arrival_times,
    closed_loop,
    engine_client,
    open_loop,
    random_requests,
)
from shared.summary import TIMES, Estimate, percentile, repeat, summarize, table


def serve_offline(llm: LLM, requests: Sequence[SampleRequest]) -> dict[str, float]:
    """All requests in one call: throughput, and no latency that any single user would see."""
    started = time.perf_counter()
    outputs = llm.generate([r.prompt_token_ids for r in requests], [r.sampling_params for r in requests])
    seconds = time.perf_counter() - started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    total = tokens + sum(len(r.prompt_token_ids) for r in requests)
    return {
        "duration": seconds, "request_throughput": len(requests) / seconds, "output_throughput": tokens / seconds,
        "total_token_throughput": total / seconds,
    }


async def warm_up(client: Client, requests: Sequence[SampleRequest]) -> None:
    """The first requests pay for what is set up only once; they are in no result. Raises if one fails."""
    for record in await closed_loop(client, requests, 1):
        if record.error is not None:
            raise EngineError(f"a request of the warm-up failed: {record.error}")


def bench_throughput(args: argparse.Namespace) -> dict[str, Any]:
    with LLM.from_engine(build_engine(engine_args(args))) as llm:
        serve_offline(llm, sample(args, -1))
        return repeat(lambda index: serve_offline(llm, sample(args, index)), args.num_repeats)


def bench_latency(args: argparse.Namespace) -> dict[str, Any]:
    """One batch at a time: how long the caller of `generate` waits."""
    with LLM.from_engine(build_engine(engine_args(args))) as llm:

        def run(index: int) -> float:
            lengths = args.input_len, args.output_len
            requests = random_requests(args.batch_size, *lengths, 0.0, args.seed + index, args.vocab_size)
            return serve_offline(llm, requests)["duration"]

        for index in range(args.num_iters_warmup):
            run(-1 - index)
        runs = [run(index) for index in range(args.num_iters)]
    result = {f"p{p:g}_latency_ms": 1e3 * percentile(runs, p) for p in args.metric_percentiles}
    return {"latency_ms": Estimate.of([1e3 * run for run in runs]), **result}


def bench_serve(args: argparse.Namespace) -> dict[str, Any]:
    """Open loop at --request-rate, or closed loop with --max-concurrency users if no rate is given."""
    engine = None if args.base_url else AsyncEngine(build_engine(engine_args(args)), max_waiting=args.num_prompts)

    async def run(index: int) -> dict[str, Any]:
        client = engine_client(engine) if engine else HTTPClient(args.base_url, str(args.model), args.api_key)
        await warm_up(client, sample(args, -1)[: args.num_warmups])
        records = await offer(client, sample(args, index), args, args.seed + index)
        if not engine:
            await client.aclose()
        return summarize(records, args.metric_percentiles, dict(args.goodput))

    try:
        return repeat(lambda index: asyncio.run(run(index)), args.num_repeats)
    finally:
        if engine:
            engine.shutdown()


async def offer(
    client: Client, requests: Sequence[SampleRequest], args: argparse.Namespace, seed: int
) -> list[RequestRecord]:
    if args.max_concurrency and args.request_rate == float("inf"):
        return await closed_loop(client, requests, args.max_concurrency)
    arrivals = arrival_times(len(requests), args.request_rate, args.burstiness, seed)
    return await open_loop(client, requests, arrivals, args.max_concurrency)


def sample(args: argparse.Namespace, index: int) -> list[SampleRequest]:
    """The requests of repetition `index`; -1 is the warm-up."""
    lengths = args.random_input_len, args.random_output_len, args.random_range_ratio
    return random_requests(args.num_prompts, *lengths, args.seed + index, args.vocab_size)


def goodput_limits(text: str) -> tuple[str, float]:
    """ttft:500, in milliseconds."""
    name, _, limit = text.partition(":")
    if name not in TIMES:
        raise argparse.ArgumentTypeError(f"{text!r}: one of {', '.join(TIMES)}, a colon, milliseconds")
    return name, float(limit)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags: vLLM's, and those of the engine, which are the fields of EngineArgs."""
    parser = argparse.ArgumentParser(prog="python -m shared.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    throughput = commands.add_parser("throughput", help="one call with all requests", description=serve_offline.__doc__)
    latency = commands.add_parser("latency", help="one batch at a time", description=bench_latency.__doc__)
    serve = commands.add_parser("serve", help="users who come one by one", description=bench_serve.__doc__)
    for command, run in ((throughput, bench_throughput), (latency, bench_latency), (serve, bench_serve)):
        command.set_defaults(run=run)
        command.add_argument("--metric-percentiles", type=float, nargs="+", default=[50, 90, 99], metavar="P")
        command.add_argument("--output-json", type=Path, help="write arguments and results to this file")
        command.add_argument("--vocab-size", type=int, default=10_000, help="token ids are drawn below this")
        add_engine_arguments(command)
    for command in (throughput, serve):
        command.add_argument("--num-prompts", type=int, default=32)
        command.add_argument("--random-input-len", type=int, default=128)
        command.add_argument("--random-output-len", type=int, default=64)
        command.add_argument("--random-range-ratio", type=float, default=0.0)
        command.add_argument("--num-warmups", type=int, default=2)
        command.add_argument("--num-repeats", type=int, default=3, help="runs of the whole; results are their means")
    latency.add_argument("--batch-size", type=int, default=8)
    latency.add_argument("--input-len", type=int, default=32)
    latency.add_argument("--output-len", type=int, default=128)
    latency.add_argument("--num-iters-warmup", type=int, default=1)
    latency.add_argument("--num-iters", type=int, default=5)
    serve.add_argument("--base-url", help="a server, such as http://127.0.0.1:8000; default: an engine in this process")
    serve.add_argument("--api-key")
    serve.add_argument("--request-rate", type=float, default=float("inf"), help="requests a second")
    serve.add_argument("--burstiness", type=float, default=1.0)
    serve.add_argument("--max-concurrency", type=int)
    serve.add_argument("--goodput", type=goodput_limits, nargs="+", default=[], metavar="NAME:MS")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    try:
        results = args.run(args)
    except EngineError as error:
        print(f"The benchmark cannot run. {error}", file=sys.stderr)
        return 1
    print(table(results))
    if args.output_json:
        given = {name: str(value) for name, value in vars(args).items() if name not in ("run", "output_json")}
        report = {"arguments": given, "machine": machine(), "results": {k: plain(v) for k, v in results.items()}}
        args.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def plain(value: Estimate | float) -> Any:
    return asdict(value) if isinstance(value, Estimate) else value


def machine() -> dict[str, str]:
    """What the numbers were measured on; without it they mean nothing."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "system": platform.platform(terse=True), "processor": processor_name(), "threads": str(torch.get_num_threads()),
        "device": device, "python": platform.python_version(), "torch": torch.__version__,
    }


def processor_name() -> str:
    """The processor as Linux names it, or what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
