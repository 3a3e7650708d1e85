"""Blocks that outlive their request: a later request with the same beginning uses them again. Pure Python.

A block is known by a hash of its tokens and of everything before it, as in vLLM's automatic prefix
caching. Free blocks keep their content until they are needed, least recently used first.
"""
from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from shared.block_manager import BlockManager
from shared.request import Request


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name a full block by its content and its prefix.

    BLAKE2 with 128 bits: nobody can construct two prefixes of the same name, which a fast hash would allow,
    so a hit needs no second look at the tokens.
    """
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def hash_root(cache_salt: str) -> bytes:
    """The parent of every first block: tenants with different salts never share."""
    return hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class BlockPool(BlockManager):
    """Blocks with users and names: what nobody uses keeps its content, and can be found, until it is taken."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self.ref_counts = [0] * num_blocks
        self.hash_of: dict[int, bytes] = {}  # published blocks, in use or free
        self.block_of: dict[bytes, int] = {}

    def take(self) -> int:
        """The least recently used free block; what it held is forgotten."""
        block, _ = self.free_blocks.popitem(last=False)
        if block in self.hash_of:
            del self.block_of[self.hash_of.pop(block)]
            self.evicted.append(block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more user; a free block leaves the free ones."""
        if self.ref_counts[block] == 0:
            del self.free_blocks[block]
        self.ref_counts[block] += 1

    def give_back(self, block: int) -> None:
        """One user less; without any the block is free, the last to be taken."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_blocks[block] = None

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others find a computed block; the first block of a content keeps the name."""
        if block not in self.hash_of and block_hash not in self.block_of:
            self.hash_of[block], self.block_of[block_hash] = block_hash, block

    def reset_prefix_cache(self) -> None:
        """Forget every published block. Requests that run keep theirs."""
        self.hash_of.clear()
        self.block_of.clear()

    def check(self, requests: Iterable[Request]) -> None:
        users = [0] * self.num_blocks
        for request in requests:
            assert len(set(request.block_table)) == len(request.block_table), "a request holds a block twice"
            for block in request.block_table:
                users[block] += 1
        assert users == self.ref_counts, "a reference count is wrong"
        assert sorted(self.free_blocks) == [b for b, count in enumerate(users) if count == 0], "the free list is wrong"
        assert {b: h for h, b in self.block_of.items()} == self.hash_of, "the two maps disagree"


class PrefixCachingBlockManager(BlockPool):
    """Finds the beginning of a request among the blocks that are computed already."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.num_queried_tokens = self.num_hit_tokens = 0

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest run of published blocks from the start; the last token is always left to compute."""
        if request.sampling_params.prompt_logprobs is not None:
            return []  # the scores of every prompt position are wanted, so every position must run
        found = []
        num_full = (request.num_tokens - 1) // self.block_size
        for block_hash in self.hashes(request, num_full)[:num_full]:
            if block_hash not in self.block_of:
                break
            found.append(self.block_of[block_hash])
        return found

    def cache_blocks(self, request: Request, start: int) -> None:
        """Publish the blocks that have become full and computed."""
        num_full = request.num_computed_tokens // self.block_size
        for index in range(start // self.block_size, num_full):
            self.publish(request.block_table[index], self.hashes(request, num_full)[index])

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hashes of the request's full blocks, at least the first num_blocks; each is computed once."""
        known, size = request.block_hashes, self.block_size
        while len(known) < num_blocks:
            parent = known[-1] if known else hash_root(request.cache_salt)
            start = len(known) * size
            known.append(hash_block(parent, request.all_token_ids[start : start + size]))
        return known

    def num_new_blocks(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> int:
        """Shared blocks that nobody uses are free ones too, until this request takes them."""
        revived = sum(self.ref_counts[block] == 0 for block in computed)
        return super().num_new_blocks(request, num_tokens, computed) + revived

    def allocate_slots(self, request: Request, num_tokens: int, computed: Sequence[int] = ()) -> bool:
        admitted = not request.block_table
        allocated = super().allocate_slots(request, num_tokens, computed)
        if allocated and admitted:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += len(computed) * self.block_size
        return allocated
