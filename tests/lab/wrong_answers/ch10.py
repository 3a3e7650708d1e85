"""Answers to chapter 10's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

from shared.prefix_cache import PrefixCachingBlockManager


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def parts_of_blocks(turns, prompt, block_size):
    return max((min(common([*p, *a][:-1], prompt), len(prompt) - 1) for p, a in turns), default=0)


def the_whole_prompt(turns, prompt, block_size):
    return max((common([*p, *a][:-1], prompt) // block_size * block_size for p, a in turns), default=0)


def the_prompts_only(turns, prompt, block_size):
    limit = len(prompt) - 1
    return max((min(common(p, prompt), limit) // block_size * block_size for p, a in turns), default=0)


def the_answers_last_token_too(turns, prompt, block_size):
    limit = len(prompt) - 1
    return max((min(common([*p, *a], prompt), limit) // block_size * block_size for p, a in turns), default=0)


def blocks_by_content(turns, prompt, block_size):
    def blocks(ids):
        return [tuple(ids[i : i + block_size]) for i in range(0, len(ids) - block_size + 1, block_size)]
    known = {block for p, a in turns for block in blocks([*p, *a][:-1])}
    return sum(block in known for block in blocks(prompt[:-1])) * block_size


def the_last_conversation(turns, prompt, block_size):
    return the_prompts_only(turns[-1:], prompt, block_size) if turns else 0


def the_last_turn(turns, prompt, block_size):
    limit = len(prompt) - 1
    return max((min(common([*p, *a][:-1], prompt), limit) // block_size * block_size for p, a in turns[-1:]), default=0)


def as_given(requests):
    return list(requests[0])


def by_name(requests):
    return sorted(requests[0])


def longest_first(requests):
    return sorted(requests[0], key=lambda part: -len(requests[0][part]))


def most_different_first(requests):
    return sorted(requests[0], key=lambda part: -len({tuple(each[part]) for each in requests}))


def names_made_up(requests):
    return ["rules", "question"]


def dict_of_blocks(num_blocks, block_size):
    return {}


class NothingPublished(PrefixCachingBlockManager):
    def cache_blocks(self, request, start):
        pass


class AllThatAreHeld(PrefixCachingBlockManager):
    def cache_blocks(self, request, start):
        names = self.hashes(request, request.num_tokens // self.block_size)
        for block, name in zip(request.block_table, names):
            self.publish(block, name)


class AsSoonAsAllocated(PrefixCachingBlockManager):
    def allocate_slots(self, request, num_tokens, computed=()):
        allocated = super().allocate_slots(request, num_tokens, computed)
        if allocated:
            AllThatAreHeld.cache_blocks(self, request, 0)
        return allocated


class StaysFree(PrefixCachingBlockManager):
    def share(self, block):
        self.ref_counts[block] += 1


class StaysNamed(PrefixCachingBlockManager):
    def take(self):
        block, _ = self.free_blocks.popitem(last=False)
        self.ref_counts[block] = 1
        return block


class ForgottenWhenFreed(PrefixCachingBlockManager):
    def give_back(self, block):
        super().give_back(block)
        if self.ref_counts[block] == 0 and block in self.hash_of:
            del self.block_of[self.hash_of.pop(block)]


class OneUserEnough(PrefixCachingBlockManager):
    def give_back(self, block):
        self.ref_counts[block] = 0
        self.free_blocks[block] = None


WRONG_ANSWERS = {
    "10.1": [
        (parts_of_blocks, "only if all of it is equal"), (the_whole_prompt, "is always left to compute"),
        (the_prompts_only, "the tokens of the answers went"), (the_answers_last_token_too, "last token of an answer"),
        (blocks_by_content, "another beginning"), (the_last_conversation, "the next turn"),
        (the_last_turn, "any of the turns"),
    ],
    "10.2": [(as_given, "are enough"), (by_name, "are enough"), (longest_first, "are enough"),
             (most_different_first, "are enough"), (names_made_up, "in some order")],
    "10.b": [(AllThatAreHeld, "nobody has written"), (AsSoonAsAllocated, "nobody has written"),
             (NothingPublished, "too much is not found"), (dict_of_blocks, "made a dict; expected a block manager")],
    "10.c": [(StaysFree, "a freed beginning is found"), (StaysNamed, "another beginning"),
             (ForgottenWhenFreed, "too much is not found"), (OneUserEnough, "one of two ends")],
}  # fmt: skip
