"""Answers to chapter 09's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations


def one_block_too_many(num_tokens, window, block_size):
    return -(-max(0, num_tokens - window) // block_size)


def forgets_itself(num_tokens, window, block_size):
    return max(0, num_tokens - window + 1) // block_size


def window_in_blocks(num_tokens, window, block_size):
    return max(0, -(-num_tokens // block_size) - window // block_size)


def below_zero(num_tokens, window, block_size):
    return (num_tokens - window) // block_size


def keeps_all(num_tokens, window, block_size):
    return 0


def last_first(tokens, needed, block_size):
    chosen, freed = [], 0
    for i in reversed(range(len(tokens))):
        if freed >= needed:
            break
        chosen.append(i)
        freed += -(-tokens[i] // block_size)
    return chosen


def smallest_of_all(tokens, needed, block_size):
    chosen, freed = [], 0
    for i in sorted(range(len(tokens)), key=lambda i: tokens[i]):
        if freed >= needed:
            break
        chosen.append(i)
        freed += -(-tokens[i] // block_size)
    return chosen


def rounds_down(tokens, needed, block_size):
    chosen, freed = [], 0
    for i in range(1, len(tokens)):
        if freed < needed:
            chosen.append(i)
            freed += tokens[i] // block_size + 1
    return chosen


def one_victim_only(tokens, needed, block_size):
    return [min(range(1, len(tokens)), key=lambda i: tokens[i])]


def everybody(tokens, needed, block_size):
    return list(range(1, len(tokens)))


class EarlyPool:
    """A block comes a token too early."""

    def __init__(self, num_blocks, block_size):
        self.block_size, self.free, self.tables = block_size, list(range(num_blocks)), {}

    def wanted(self, num_tokens):
        return num_tokens // self.block_size + 1

    def allocate(self, name, num_tokens):
        missing = self.wanted(num_tokens) - len(self.tables.get(name, []))
        if missing > len(self.free):
            return False
        self.tables.setdefault(name, []).extend(self.free.pop() for _ in range(missing))
        return True

    def release(self, name):
        self.free.extend(self.tables.pop(name, []))


class LatePool(EarlyPool):
    def wanted(self, num_tokens):
        return max(1, num_tokens // self.block_size)


class GreedyPool(EarlyPool):
    """What it took before it failed stays taken."""

    def allocate(self, name, num_tokens):
        table = self.tables.setdefault(name, [])
        while len(table) * self.block_size < num_tokens:
            if not self.free:
                return False
            table.append(self.free.pop())
        return True


class RightSize(EarlyPool):
    def wanted(self, num_tokens):
        return -(-num_tokens // self.block_size)


class FreesTwice(RightSize):
    """The table stays after a release, so the next release gives the same blocks back again."""

    def release(self, name):
        self.free.extend(self.tables.get(name, []))


class CopiesTheTable(RightSize):
    """Forgets the blocks of a release instead of giving them back."""

    def release(self, name):
        self.tables.pop(name, [])


class NoRelease:
    def __init__(self, num_blocks, block_size):
        self.tables = {}

    def allocate(self, name, num_tokens):
        return False


class StrictRelease(RightSize):
    def release(self, name):
        self.free.extend(self.tables.pop(name))


def begins_anew(request, free):
    free.extend(request["blocks"])
    request.update(blocks=[], computed=0, output=[])
    return request["prompt"]


def runs_the_prompt_only(request, free):
    free.extend(request["blocks"])
    request.update(blocks=[], computed=0)
    return request["prompt"]


def trusts_the_old_keys(request, free):
    free.extend(request["blocks"])
    request["blocks"] = []
    return (request["prompt"] + request["output"])[request["computed"] :]


def keeps_its_blocks(request, free):
    request["computed"] = 0
    return request["prompt"] + request["output"]


def answer_becomes_prompt(request, free):
    free.extend(request["blocks"])
    request.update(blocks=[], computed=0, prompt=request["prompt"] + request["output"])
    return request["prompt"]


def gives_blocks_and_keeps_them(request, free):
    free.extend(request["blocks"])
    request["computed"] = 0
    return request["prompt"] + request["output"]


WRONG_ANSWERS = {
    "09.1": [
        (one_block_too_many, "is still needed"), (forgets_itself, "is still needed"),
        (window_in_blocks, "gives back 1 block, with the tokens 0 to 3"), (below_zero, "from 0 to"),
        (keeps_all, "as without a window"),
    ],
    "09.2": [
        (last_first, "taking the last ones costs"), (smallest_of_all, "the first request would lose"),
        (rounds_down, "and 3 must get free"), (one_victim_only, "hold 2 blocks in all"), (everybody, "lose"),
    ],
    "09.b": [
        (EarlyPool, "they fill 1"), (LatePool, "they fill"), (GreedyPool, "it should have"),
        (FreesTwice, "it should have 0"), (CopiesTheTable, "expected True"), (StrictRelease, "KeyError"),
        (NoRelease, "without release"),
    ],
    "09.c": [
        (begins_anew, "the caller has read"), (runs_the_prompt_only, "all of [5, 6, 7, 8, 9] must"),
        (trusts_the_old_keys, "no key or value of it is left"), (keeps_its_blocks, "free blocks are [7]"),
        (gives_blocks_and_keeps_them, "its own are [3, 1]"), (answer_becomes_prompt, "would run twice"),
    ],
}  # fmt: skip
