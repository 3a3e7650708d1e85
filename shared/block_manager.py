"""Fixed-size blocks instead of whole rows: a request holds the blocks its tokens fill. Pure Python.

The idea is PagedAttention's (Kwon et al., 2023): a block table maps a request's tokens to blocks anywhere
in the cache, so nothing is reserved in advance and no free block is ever too small.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shared.request import Request


class BlockManager:
    """Hands out the blocks of the cache, one table a request; see `Allocator` for the contract."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = deque(range(num_blocks))
        self.evicted: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[int]:
        return []

    def num_new_blocks(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> int:
        return max(0, self.blocks_for(num_tokens) - len(request.block_table) - len(computed))

    def allocate_slots(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> bool:
        if num_tokens <= len(request.block_table) * self.block_size:
            return True  # the last block has room: so it is in most steps
        if self.num_new_blocks(request, num_tokens, computed) > self.num_free_blocks:
            return False
        for block in computed:
            self.share(block)
        request.block_table.extend(computed)
        while len(request.block_table) < self.blocks_for(num_tokens):
            request.block_table.append(self.take())
        return True

    def free(self, request: Request) -> None:
        """Return the blocks, the last first, so that the beginning of a request is overwritten latest."""
        while request.block_table:
            self.give_back(request.block_table.pop())

    def take(self) -> int:
        """The free block that has been free the longest."""
        return self.free_blocks.popleft()

    def give_back(self, block: int) -> None:
        self.free_blocks.append(block)

    def share(self, block: int) -> None:
        raise NotImplementedError("only a prefix cache has blocks that are computed already")

    def cache_blocks(self, request: Request, start: int) -> None:
        """Nothing is shared here."""

    def check(self, requests: Iterable[Request]) -> None:
        held = [block for request in requests for block in request.block_table]
        assert sorted(held + list(self.free_blocks)) == list(range(self.num_blocks)), "a block is lost or owned twice"
