"""Answers to chapter 08's exercises that are wrong, each with a word of the message that should say so."""

from __future__ import annotations

from shared.lab.chapters.ch08 import equal_parts, lay_flat


def positions_of_the_run(scheduled, row_slots):
    _, slots, starts, indices = lay_flat(scheduled, row_slots)
    return list(range(starts[-1])), slots, starts, indices


def slots_from_the_start_of_the_row(scheduled, row_slots):
    positions, _, starts, indices = lay_flat(scheduled, row_slots)
    return positions, [row * row_slots + i for row, _, count, _ in scheduled for i in range(count)], starts, indices


def one_slot_too_far(scheduled, row_slots):
    positions, slots, starts, indices = lay_flat(scheduled, row_slots)
    return positions, [slot + 1 for slot in slots], starts, indices


def everybody_samples(scheduled, row_slots):
    positions, slots, starts, _ = lay_flat(scheduled, row_slots)
    return positions, slots, starts, [end - 1 for end in starts[1:]]


def indices_behind_the_end(scheduled, row_slots):
    positions, slots, starts, indices = lay_flat(scheduled, row_slots)
    return positions, slots, starts, [index + 1 for index in indices]


def no_entry_for_the_end(scheduled, row_slots):
    positions, slots, starts, indices = lay_flat(scheduled, row_slots)
    return positions, slots, starts[:-1], indices


def three_lists(scheduled, row_slots):
    return lay_flat(scheduled, row_slots)[:3]


def one_group(seq_lens, calls):
    return [list(range(len(seq_lens)))]


def one_for_each(seq_lens, calls):
    return [[index] for index in range(len(seq_lens))]


def groups_of_lengths(seq_lens, calls):
    return [[seq_lens[index] for index in group] for group in equal_parts(seq_lens, calls)]


def rows_shift_behind_a_chunk(scheduled, scores, banned):
    return {name: best(row, banned[name]) for (name, *_), row in zip(scheduled, scores)}


def bans_in_order_of_arrival(scheduled, scores, banned):
    names = [name for name, start, count, total in scheduled if start + count == total]
    return {name: best(row, ban) for name, row, ban in zip(names, scores, banned.values())}


def bans_forgotten(scheduled, scores, banned):
    names = [name for name, start, count, total in scheduled if start + count == total]
    return {name: best(row, ()) for name, row in zip(names, scores)}


def decodes_only(scheduled, scores, banned):
    names = [name for name, _, count, _ in scheduled if count == 1]
    return {name: best(row, banned[name]) for name, row in zip(names, scores)}


def names_of_the_batch(scheduled, scores, banned):
    return [name for name, *_ in scheduled]


def best(row, ban):
    return max((i for i in range(len(row)) if i not in ban), key=row.__getitem__)


WRONG_ANSWERS = {
    "08.1": [
        (positions_of_the_run, "They count within each request"), (slots_from_the_start_of_the_row, "the slots are"),
        (one_slot_too_far, "plus the position"), (everybody_samples, "that has caught up"),
        (indices_behind_the_end, "the places that are scored are [5]; expected [4]"),
        (no_entry_for_the_end, "the last entry is the end"), (three_lists, "expected four lists"),
    ],
    "08.2": [
        (one_group, "padded positions"), (one_for_each, "at most 1 are allowed"),
        (groups_of_lengths, "must occur once"), (equal_parts, "cutting into equal parts"),
    ],
    "08.b": [
        (rows_shift_behind_a_chunk, "B got token 2, and has run 4 of the 9 tokens"),
        (bans_in_order_of_arrival, "and B has banned [1]"), (bans_forgotten, "and B has banned [1]"),
        (decodes_only, "A has caught up and got no token"), (names_of_the_batch, "expected a dict"),
    ],
}  # fmt: skip
