"""Chapter 13's load: threads of clients that ask a server and sometimes leave, and a look at its /metrics."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PERIOD = 0.5  # seconds between two looks at /metrics
PATIENCE = 3.0  # seconds that clients and their answers get to end
QUESTIONS = ("List three primary colors.", "What is the capital of France?", "Write one sentence about the sea.",
             "Name a fruit.", "Is fire hot?")  # fmt: skip


# What the server says


@dataclass(frozen=True)
class Sample:
    """One look at /metrics: counts since the server started, except those that say `now`."""

    seconds: float
    running_now: int
    waiting_now: int
    free_blocks_now: int
    num_blocks: int
    tokens: int
    ended: int  # answers that ended by themselves
    aborted: int
    first_tokens: int
    first_token_seconds: float  # the sum over all of them
    gaps: int
    gap_seconds: float


def parse_sample(text: str, seconds: float) -> Sample:
    """A Sample of what /metrics answered."""
    found = {sample.name.removeprefix("zte:") + "".join(sample.labels.get("finished_reason", "")): sample.value
             for family in text_string_to_metric_families(text) for sample in family.samples
             if "le" not in sample.labels}  # fmt: skip
    ended = {name: value for name, value in found.items() if name.startswith("request_success_total")}
    aborted = ended.pop("request_success_totalabort", 0)
    counts = [found[name] for name in ("num_requests_running", "num_requests_waiting", "num_free_blocks", "num_blocks",
                                       "generation_tokens_total")]  # fmt: skip
    first, gap = "time_to_first_token_seconds", "inter_token_latency_seconds"
    return Sample(seconds, *map(int, counts), int(sum(ended.values())), int(aborted), int(found[f"{first}_count"]),
                  found[f"{first}_sum"], int(found[f"{gap}_count"]), found[f"{gap}_sum"])  # fmt: skip


# The load


class RefusedError(Exception):
    """The server answered with an error: its status and words."""


def read_stream(address: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one streamed chat; RefusedError if there are none. Closing the iterator closes the connection."""
    client = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    try:
        client.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}),
                       {"Content-Type": "application/json"})  # fmt: skip
        response = client.getresponse()
        if response.status != 200:
            raise RefusedError(f"{response.status}: {json.loads(response.read())['error']['message']}")
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        client.close()


class Load:
    """Clients that ask, read, sometimes leave, and ask again; each in a thread, until `stop`.

    `refused` is what the server said last instead of an answer.
    """

    def __init__(self, address: str, model: str, clients: int, max_tokens: int, leave_percent: int, seed: int = 0):
        self.address, self.model, self.max_tokens, self.leave_percent = address, model, max_tokens, leave_percent
        self.over, self.refused = threading.Event(), ""
        self.threads = [threading.Thread(target=self._ask_on, args=(random.Random(seed * 1000 + i),), daemon=True)
                        for i in range(clients)]  # fmt: skip
        for thread in self.threads:
            thread.start()

    def _ask_on(self, draw: random.Random) -> None:
        while not self.over.is_set():
            try:
                self._ask(draw)
            except RefusedError as refused:
                self.refused = str(refused)
            except (OSError, http.client.HTTPException):
                pass  # who watches says so
            self.over.wait(draw.uniform(0.0, 0.3))

    def _ask(self, draw: random.Random) -> None:
        message = {"role": "user", "content": draw.choice(QUESTIONS)}
        body = {"model": self.model, "messages": [message], "max_tokens": self.max_tokens}
        leaves = draw.randint(1, self.max_tokens) if draw.random() * 100 < self.leave_percent else None
        for count, _ in enumerate(read_stream(self.address, body), 1):
            if self.over.is_set() or count == leaves:
                return

    def stop(self) -> None:
        """Nobody asks any more. A client that still waits after PATIENCE seconds is left alone."""
        self.over.set()
        deadline = time.monotonic() + PATIENCE
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class Watch:
    """Looks at /metrics every half second and tells `on_sample`; if nothing is there, tells `on_silence` and ends.

    Its clock goes on from `since` seconds.
    """

    def __init__(self, address: str, on_sample: Callable[[Sample], None],
                 on_silence: Callable[[str], None] = lambda words: None, since: float = 0.0):
        self.address, self.on_sample, self.on_silence = address, on_sample, on_silence
        self.over, self.started = threading.Event(), time.perf_counter() - since
        self.thread = threading.Thread(target=self._look_on, daemon=True)
        self.thread.start()

    def _look_on(self) -> None:
        while not self.over.wait(PERIOD):
            try:
                self.on_sample(self.look())
            except (OSError, http.client.HTTPException):
                self.on_silence(f"The server at {self.address} does not answer any more. Start begins anew.")
                return

    def look(self) -> Sample:
        return parse_sample(self._metrics(), time.perf_counter() - self.started)

    def _metrics(self) -> str:
        client = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=5)
        try:
            client.request("GET", "/metrics")
            return client.getresponse().read().decode()
        finally:
            client.close()

    def stop(self) -> None:
        self.over.set()
        self.thread.join()

    def look_until_quiet(self) -> None:
        """One sample more, taken when no answer runs or waits; clients that leave are noticed between two steps."""
        deadline = time.monotonic() + PATIENCE
        with suppress(OSError, http.client.HTTPException):
            while (sample := self.look()).running_now + sample.waiting_now and time.monotonic() < deadline:
                time.sleep(PERIOD / 5)
            self.on_sample(sample)
