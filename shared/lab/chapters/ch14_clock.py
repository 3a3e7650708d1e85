"""Chapter 14's clock: the real load generator on an event loop where seconds are exact and cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared.load import Client, SampleRequest

Clock = Callable[[], float]


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to its next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, select = 0.0, self._selector.select

        def jump(timeout: float | None) -> list:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self.now


def on_virtual_time(make: Callable[[Clock], Awaitable[Any]]) -> Any:
    """The result of `make(clock)`, in a thread of its own, so that it works inside a running loop too."""

    def run() -> Any:
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(make(loop.time))
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def stalling_server(clock: Clock, service: float = 0.1, stall_at: float = 8.0, stall: float = 5.0) -> Client:
    """Answers one request after another in `service` seconds, and stands still once, from `stall_at` on."""
    turn, stalls = asyncio.Lock(), [stall]

    async def client(request: SampleRequest) -> AsyncIterator[int]:
        async with turn:
            if stalls and clock() > stall_at - service / 2:
                await asyncio.sleep(stalls.pop())
            await asyncio.sleep(service)
            yield 1

    return client
