"""Servers over tiny models, started and stopped for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.served import Served


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """`serve(engine, api_key=...)`: the address and everything behind it, until the test has ended."""
    started: list[Served] = []

    def start(engine, **options) -> Served:
        started.append(Served(engine, **options))
        return started[-1]

    yield start
    for served in started:
        served.server.stop()
        assert not served.engine.scheduler.running and not served.engine.scheduler.waiting
        served.engine.scheduler.check()
