"""Load for an engine: which requests, when they arrive, and when each of their tokens came back."""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from shared.errors import EngineError, InvalidRequestError
from shared.sampling_params import SamplingParams, check_integer

if TYPE_CHECKING:
    from shared.async_engine import AsyncEngine


@dataclass(frozen=True)
class SampleRequest:
    """A prompt and exactly how many tokens to generate: greedy, the end token ignored."""

    prompt_token_ids: list[int]
    max_tokens: int

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)


Client = Callable[[SampleRequest], AsyncIterator[int]]  # yields how many tokens came, each time some came


def random_requests(
    num_prompts: int, input_len: int, output_len: int, range_ratio: float = 0.0, seed: int = 0,
    vocab_size: int = 10_000,
) -> list[SampleRequest]:
    """Random token ids; lengths uniform from (1 - range_ratio) to (1 + range_ratio) times the given ones."""
    for name, value in (("num_prompts", num_prompts), ("input_len", input_len), ("output_len", output_len)):
        check_integer(name, value, 1)
    if not 0 <= range_ratio < 1:
        raise InvalidRequestError("range_ratio", range_ratio, "a number from 0 up to, not including, 1")
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))))

    prompts = ([draw.randrange(3, vocab_size) for _ in range(length(input_len))] for _ in range(num_prompts))
    return [SampleRequest(prompt, length(output_len)) for prompt in prompts]


def arrival_times(num_requests: int, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start at which requests arrive, at `request_rate` a second on average.

    Gaps follow a gamma distribution, as in vLLM: burstiness 1 is a Poisson process, less is burstier, more is
    steadier. An infinite rate sends all at once.
    """
    if not request_rate > 0:
        raise InvalidRequestError("request_rate", request_rate, "requests a second, above 0, or inf")
    if not burstiness > 0:
        raise InvalidRequestError("burstiness", burstiness, "a number above 0")
    if request_rate == float("inf"):
        return [0.0] * num_requests
    draw = random.Random(seed)
    gaps = [draw.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in range(num_requests)]
    return list(itertools.accumulate(gaps))


@dataclass
class RequestRecord:
    """What one client saw, in seconds on one clock. Waiting counts from `due`, so a late client hides nothing."""

    prompt_len: int
    due: float  # when the schedule wanted the request to be sent
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when tokens came, and how many
    finished: float | None = None
    error: str | None = None

    @property
    def output_len(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None below two tokens."""
        if self.output_len < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.output_len - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between what came."""
        times = [when for when, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.finished - self.due


async def send(client: Client, request: SampleRequest, due: float, clock: Callable[[], float]) -> RequestRecord:
    """One request, from its due time to its last token or its error."""
    record = RequestRecord(len(request.prompt_token_ids), due)
    try:
        async for count in client(request):
            record.arrivals.append((clock(), count))
    except (EngineError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    else:
        record.finished = clock()
    return record


async def open_loop(
    client: Client, requests: Sequence[SampleRequest], arrivals: Sequence[float], max_concurrency: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RequestRecord]:
    """Requests come when their time comes, whether or not earlier ones are done: independent users.

    Those above max_concurrency wait on this side, and their waiting counts.
    """
    gate = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    started = clock()

    async def one(request: SampleRequest, arrival: float) -> RequestRecord:
        await asyncio.sleep(started + arrival - clock())
        async with gate:
            return await send(client, request, started + arrival, clock)

    return await asyncio.gather(*map(one, requests, arrivals))


async def closed_loop(
    client: Client, requests: Iterable[SampleRequest], concurrency: int, clock: Callable[[], float] = time.perf_counter
) -> list[RequestRecord]:
    """`concurrency` users who each send the next request when the last one is answered.

    A slow server gets less load, and the requests it kept from being sent are in no record: this is
    coordinated omission (Tene).
    """
    queue, records = iter(requests), []

    async def user() -> None:
        for request in queue:
            records.append(await send(client, request, clock(), clock))

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return records


def engine_client(engine: AsyncEngine) -> Client:
    """Talks to an AsyncEngine in this process."""

    async def client(request: SampleRequest) -> AsyncIterator[int]:
        seen, name = 0, uuid.uuid4().hex
        outputs = await engine.add_request(name, request.prompt_token_ids, request.sampling_params)
        with contextlib.closing(outputs):
            async for output in outputs:
                answer = output.outputs[0]
                if answer.error is not None:
                    raise EngineError(answer.error)
                if answer.num_tokens > seen:
                    yield answer.num_tokens - seen
                    seen = answer.num_tokens

    return client


class HTTPClient:
    """Talks to any OpenAI-compatible server: streams /v1/completions. A chunk is one token, until `usage` corrects."""

    def __init__(self, base_url: str, model: str, api_key: str | None = None):
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None)  # a client that queues would hide the server's queue
        self.connection = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None, limits=limits)
        self.model = model

    async def __call__(self, request: SampleRequest) -> AsyncIterator[int]:
        body = {"model": self.model, "prompt": request.prompt_token_ids, "max_tokens": request.max_tokens,
                "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self.connection.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise EngineError(f"HTTP {response.status_code}: {text}")
                async for count in counts(response.aiter_lines()):
                    yield count
        except httpx.HTTPError as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        await self.connection.aclose()


async def counts(lines: AsyncIterator[str]) -> AsyncIterator[int]:
    """Tokens that each event of a stream brings; raises what the server reports instead."""
    seen = 0
    async for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise EngineError(str(event["error"]))
        usage = event.get("usage")
        count = usage["completion_tokens"] - seen if usage else int(bool(event["choices"]))
        if count > 0:
            yield count
            seen += count
