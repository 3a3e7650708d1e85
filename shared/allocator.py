"""Who owns which slot of the cache: the contract, and the plainest way to keep it. Pure Python."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shared.request import Request


class Allocator(Protocol):
    """Who owns which slot: token i of a request has `block_table[i // block_size] * block_size + i % block_size`."""

    block_size: int
    num_blocks: int
    evicted: list[int]  # cached blocks overwritten since the scheduler last cleared this

    @property
    def num_free_blocks(self) -> int: ...

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks that already hold the beginning of this request."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of num_tokens needs in all."""

    def num_new_blocks(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> int:
        """Free blocks that allocate_slots would use up."""

    def allocate_slots(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> bool:
        """Give the request slots for its first num_tokens tokens; False, and nothing changed, if it can't."""

    def cache_blocks(self, request: Request, start: int) -> None:
        """Called when the request's tokens from `start` to `num_computed_tokens` have been computed."""

    def free(self, request: Request) -> None: ...

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that every block is accounted for, given the requests that may hold some."""


class RowAllocator:
    """Reserve the maximum: each request owns one row of max_model_len slots, however few it uses."""

    def __init__(self, num_rows: int, max_model_len: int):
        self.num_blocks, self.block_size = num_rows, max_model_len
        self.free_rows = list(range(num_rows))
        self.evicted: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_rows)

    def get_computed_blocks(self, request: Request) -> list[int]:
        return []

    def blocks_for(self, num_tokens: int) -> int:
        """One row; more than there are if the tokens are more than a row holds, since nobody gets a second."""
        return 1 if num_tokens <= self.block_size else self.num_blocks + 1

    def num_new_blocks(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> int:
        return 1 - len(request.block_table)

    def allocate_slots(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> bool:
        if not request.block_table and self.free_rows:
            request.block_table.append(self.free_rows.pop(0))
        return bool(request.block_table)

    def cache_blocks(self, request: Request, start: int) -> None:
        """A row is never shared."""

    def free(self, request: Request) -> None:
        self.free_rows.extend(request.block_table)
        request.block_table.clear()

    def check(self, requests: Iterable[Request]) -> None:
        held = [row for request in requests for row in request.block_table]
        assert sorted(held + self.free_rows) == list(range(self.num_blocks)), "a row is lost or owned twice"


def reserved_blocks(request: Request, running: Sequence[Request], allocator: Allocator, budget: int) -> int:
    """Free blocks that running requests will ask for soon, and that `request` must leave to them.

    A new request counts what they need for the tokens they have. One that was preempted also counts
    their growth while it catches up and a while after, twice as long each time, so that two requests
    that don't fit together can't throw each other out for ever.
    """
    horizon = 0
    if request.num_preemptions:
        catch_up = request.num_tokens // max(1, budget - len(running)) + 1
        horizon = catch_up + allocator.block_size * 2**request.num_preemptions
    wanted = (min(other.num_tokens + horizon, other.max_num_tokens) for other in running)
    return sum(
        max(0, allocator.blocks_for(tokens) - len(other.block_table))
        for tokens, other in zip(wanted, running)
    )
